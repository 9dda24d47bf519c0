"""Where the numbers of a cache leave a program, whatever name and structure they have there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core

# What these make are no rows of a cache any more, even if it has as many of them.
_ENDS = frozenset(
    {"dot_general", "ragged_dot_general", "conv_general_dilated", "sort", "top_k", "argmax", "argmin"}
)
# What these make holds the rows of a cache, of whatever shape it is.
_MOVES = frozenset(
    {
        *("reshape", "transpose", "squeeze", "broadcast_in_dim", "slice", "dynamic_slice", "gather", "rev"),
        *("split", "stack", "unstack", "tile", "concatenate", "pad", "select_n", "dynamic_update_slice"),
        *("scatter", "convert_element_type", "sharding_constraint", "reshard", "optimization_barrier"),
        *("copy", "copy_p", "name"),
    }
)
_INLINED = ("jit", "pjit", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint")


def outputs_with_rows(jaxpr: Any, held: int) -> list[int]:
    """The outputs of a program that hold numbers of an input: moved, or replaced in part.

    An operation with programs in it, and arithmetic, are taken to hold them if their output has the input's shape.

    Args:
        jaxpr: the program.
        held: the number of the input.
    """
    return _followed(jaxpr, [place == held for place in range(len(jaxpr.invars))])


def _followed(jaxpr: Any, inputs: Sequence[bool]) -> list[int]:
    known = {var for var, holds in zip(jaxpr.invars, inputs, strict=True) if holds}
    for eqn in jaxpr.eqns:
        holding = [not isinstance(var, core.Literal) and var in known for var in eqn.invars]
        if any(holding):
            known |= {eqn.outvars[place] for place in _outputs(eqn, holding)}
    return [
        place for place, var in enumerate(jaxpr.outvars) if not isinstance(var, core.Literal) and var in known
    ]


def _outputs(eqn: Any, holding: Sequence[bool]) -> Sequence[int]:
    name = eqn.primitive.name
    if name in _INLINED:
        found = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        inner = getattr(found, "jaxpr", found)
        if inner is not None and len(inner.invars) == len(holding):
            return _followed(inner, holding)
    if name in _MOVES:
        return range(len(eqn.outvars))
    if name in _ENDS:
        return ()
    shapes = {var.aval.shape for var, holds in zip(eqn.invars, holding, strict=True) if holds}
    return [place for place, var in enumerate(eqn.outvars) if var.aval.shape in shapes]
