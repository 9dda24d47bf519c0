"""Runs a forward with another function in the place of its convolution, where Flax has no attribute for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jqinject.program.jaxpr import Body, Equation

ARGUMENTS = (
    "window_strides",
    "padding",
    "lhs_dilation",
    "rhs_dilation",
    "dimension_numbers",
    "feature_group_count",
    "batch_group_count",
    "preferred_element_type",
)


def with_convolution(
    convolve: Callable[..., jax.Array], forward: Callable[..., jax.Array], *arrays: Any
) -> jax.Array:
    """`forward(*arrays)`, convolving by `convolve`.

    Args:
        convolve: called as `lax.conv_general_dilated`.
        forward: a function of arrays that convolves, itself or in functions that it calls.
        arrays: its arguments; None stays None.

    Raises:
        ValueError: it does not convolve, or where no other function can take its place.
    """
    body = Body.of(jax.make_jaxpr(forward)(*arrays))
    if not _convolves(body):
        raise ValueError(
            "a convolution in low bits was to take the place of the layer's own, and none is in the open or in a "
            "jax.jit function.\n  cure: a forward that calls jax.lax.conv_general_dilated or conv_transpose"
        )
    (out,) = _evaluated(body, jax.tree.leaves(arrays), convolve)
    return out


def _evaluated(body: Body, inputs: Sequence[Any], convolve: Callable[..., jax.Array]) -> list[Any]:
    def step(eqn: Equation, values: list[Any]) -> list[Any]:
        if eqn.name == "conv_general_dilated":
            return [convolve(*values, **{name: eqn.params[name] for name in ARGUMENTS})]
        if eqn.name == "jit" and _convolves(eqn.bodies[0]):
            return _evaluated(eqn.bodies[0], values, convolve)
        return eqn.bind(values)

    return body.run(inputs, step, lambda value: value)


def _convolves(body: Body) -> bool:
    return any(
        eqn.name == "conv_general_dilated" or (eqn.name == "jit" and _convolves(eqn.bodies[0]))
        for eqn in body.equations
    )
