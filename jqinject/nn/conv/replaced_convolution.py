"""Runs a forward with another function in the place of its convolution, where Flax has no attribute for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

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
INLINED = ("jit", "pjit")


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
    program = jax.make_jaxpr(forward)(*arrays)
    if not _convolves(program.jaxpr):
        raise ValueError(
            "a convolution in low bits was to take the place of the layer's own, and none is in the open or in a "
            "jax.jit function.\n  cure: a forward that calls jax.lax.conv_general_dilated or conv_transpose"
        )
    (out,) = _evaluated(program.jaxpr, program.consts, jax.tree.leaves(arrays), convolve)
    return out


def _evaluated(
    jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], convolve: Callable[..., jax.Array]
) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, inputs, strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, core.Literal) else env[var]

    for eqn in jaxpr.eqns:
        values = [read(var) for var in eqn.invars]
        if eqn.primitive.name == "conv_general_dilated":
            outputs = [convolve(*values, **{name: eqn.params[name] for name in ARGUMENTS})]
        elif eqn.primitive.name in INLINED and _convolves(eqn.params["jaxpr"].jaxpr):
            inner = eqn.params["jaxpr"]
            outputs = _evaluated(inner.jaxpr, inner.consts, values, convolve)
        else:
            bound = eqn.primitive.get_bind_params(eqn.params)
            functions, parameters = bound if isinstance(bound, tuple) else ((), bound)
            outputs = eqn.primitive.bind(*functions, *values, **parameters)
            outputs = outputs if eqn.primitive.multiple_results else [outputs]
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _convolves(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name == "conv_general_dilated"
        or (eqn.primitive.name in INLINED and _convolves(eqn.params["jaxpr"].jaxpr))
        for eqn in jaxpr.eqns
    )
