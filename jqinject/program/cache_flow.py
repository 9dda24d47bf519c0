"""Where the numbers of a cache leave a program, whatever name and structure they have there."""

from __future__ import annotations

from collections.abc import Sequence

from jqinject.program.jaxpr import Body, Equation

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
        *("copy", "name"),
    }
)


def outputs_with_rows(body: Body, held: int) -> list[int]:
    """The outputs of a program that hold numbers of an input: moved, or replaced in part.

    An operation with programs in it, and arithmetic, are taken to hold them if their output has the input's shape.

    Args:
        body: the program.
        held: the number of the input.
    """
    holding = _run(body, [place == held for place in range(len(body.inputs))])
    return [place for place, holds in enumerate(holding) if holds]


def _run(body: Body, inputs: Sequence[bool]) -> list[bool]:
    return body.run(inputs, _holding, lambda value: False)


def _holding(eqn: Equation, inputs: Sequence[bool]) -> list[bool]:
    count = len(eqn.outputs)
    if eqn.call is not None and any(inputs):
        return _run(eqn.call, inputs)
    if eqn.name in _MOVES:
        return [any(inputs)] * count
    if eqn.name in _ENDS:
        return [False] * count
    shapes = {x.shape for x, holds in zip(eqn.inputs, inputs, strict=True) if holds}
    return [x.shape in shapes for x in eqn.outputs]
