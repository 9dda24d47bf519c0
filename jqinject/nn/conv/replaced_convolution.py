"""Runs a forward with another function in the place of its convolution, where Flax has no attribute for that."""

from __future__ import annotations

from collections.abc import Callable
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


def with_convolution(
    convolve: Callable[..., jax.Array], forward: Callable[..., jax.Array], *arrays: Any
) -> jax.Array:
    """`forward(*arrays)`, convolving by `convolve`.

    Args:
        convolve: called as `lax.conv_general_dilated`.
        forward: a function of arrays that convolves once, in the open.
        arrays: its arguments; None stays None.
    """
    program = jax.make_jaxpr(forward)(*arrays)
    jaxpr = program.jaxpr
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
    env.update(zip(jaxpr.invars, jax.tree.leaves(arrays), strict=True))
    for eqn in jaxpr.eqns:
        values = [var.val if isinstance(var, core.Literal) else env[var] for var in eqn.invars]
        if eqn.primitive.name == "conv_general_dilated":
            found = [convolve(*values, **{name: eqn.params[name] for name in ARGUMENTS})]
        else:
            bound = eqn.primitive.get_bind_params(eqn.params)
            functions, parameters = bound if isinstance(bound, tuple) else ((), bound)
            outputs = eqn.primitive.bind(*functions, *values, **parameters)
            found = outputs if eqn.primitive.multiple_results else [outputs]
        env.update(zip(eqn.outvars, found, strict=True))
    (out,) = jaxpr.outvars
    return env[out]
