"""What says which contraction of its kind an equation is."""

from __future__ import annotations

from typing import Any

from jqinject.program.jaxpr import Equation

CONVOLUTION = (
    "window_strides",
    "padding",
    "lhs_dilation",
    "rhs_dilation",
    "feature_group_count",
    "batch_group_count",
)


def arguments_of(eqn: Equation) -> dict[str, Any]:
    """What says which contraction of its kind an equation is."""
    if eqn.name == "ragged_dot_general":
        return {name: eqn.params[name] for name in ("ragged_dot_dimension_numbers", "precision")}
    convolution = eqn.name == "conv_general_dilated"
    names = (*CONVOLUTION, "dimension_numbers") if convolution else ("dimension_numbers",)
    return {name: eqn.params[name] for name in names}


def weight_last(numbers: Any, ndim: int, weight_ndim: int) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The arguments of a `dot_general` whose left operand is the weight, for the operands the other way round.

    Args:
        numbers: its dimension numbers, the weight first.
        ndim, weight_ndim: axes of the other operand, and of the weight.

    Returns:
        (the arguments, the permutation of that contraction's output to the output of this one).
    """
    (of_weight, of_other), (batch_of_weight, batch_of_other) = numbers
    batch = len(batch_of_other)
    free, free_of_weight = ndim - len(of_other) - batch, weight_ndim - len(of_weight) - batch
    first, last = range(batch + free, batch + free + free_of_weight), range(batch, batch + free)
    swapped = (of_other, of_weight), (batch_of_other, batch_of_weight)
    return {"dimension_numbers": swapped}, (*range(batch), *first, *last)
