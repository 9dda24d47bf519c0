"""Which quantizer an operand of a contraction goes through, and along which of its axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jqinject.program.jaxpr import Equation
from jqinject.program.policy import NO_AXES, Choice, SummedAxes, other_axes
from jqinject.program.quantizers import has_row_scales
from jqinject.program.run import Run
from jqinject.program.tracked_value import Tracked, shape_of
from jqinject.proxy import transform_of

Axes = tuple[int, ...]


class OperandQuantizer(NamedTuple):
    """The quantizer of an operand.

    Attributes:
        quantizer: the injector.
        axes: what it has to know of the axes that are summed.
        overrides: names that it redeclares here.
    """

    quantizer: object
    axes: SummedAxes = NO_AXES
    overrides: Mapping[str, object] = {}


def operand_quantizer(
    run: Run, x: Tracked, partner: Tracked, choice: Choice | None, eqn: Equation, place: int
) -> OperandQuantizer | None:
    """The quantizer of an operand at a contraction; None if it is left as it is.

    Args:
        run: the interpreter.
        x: the operand.
        partner: the other one.
        choice: of the policy.
        eqn: the equation.
        place: which operand it is.
    """
    if choice is None or not x.is_float:
        return None
    turned = x.turned is not None
    if x.quantized and (
        turned or not (x.is_activation and transform_of(_declared(choice, x, partner, place)) is not None)
    ):
        return None
    summed, ndim = summed_axes(eqn)[place], len(shape_of(x))
    if x.is_weight:
        if choice.weight is None:
            return None
        axes = run.policy.channel_axes(summed, ndim, True)
        return OperandQuantizer(choice.weight, overrides={"channelwise_axes": axes})
    if not x.is_activation:
        return None
    if choice.dynamic:
        if choice.inputs is None or not partner.is_weight:
            return None
        axes = run.policy.channel_axes(summed, ndim, False)
        return OperandQuantizer(choice.inputs, overrides={"channelwise_axes": axes})
    declared = _declared(choice, x, partner, place)
    if declared is None:
        return None
    rows = () if summed == (ndim - 1,) or not has_row_scales(declared) else summed
    transformed = transformed_axes(eqn, place) if transform_of(declared) is not None else ()
    return OperandQuantizer(declared, SummedAxes(rows, transformed, turned and bool(transformed)))


def check_turned(run: Run, operands: Sequence[Tracked], choice: Choice | None, name: str) -> None:
    """Refuse a product of numbers that a cache holds transformed with others that are not.

    Args:
        run: the interpreter.
        operands: of the contraction.
        choice: of the policy.
        name: of the contraction.

    Raises:
        ValueError: it is one.
    """
    for place, x in enumerate(operands):
        partner = operands[1 - place]
        if x.turned is None or partner.turned == x.turned:
            continue
        declared = None if choice is None else _declared(choice, partner, x, 1 - place)
        if not partner.is_activation or transform_of(declared) != x.turned:
            side = ("lhs", "rhs")[1 - place]
            raise ValueError(
                f"{run.names.full(name)}: its operand comes from the cache {x.cache}, which keeps numbers after "
                f"{x.turned!r}, and the other operand is not transformed by it.\n"
                f"  cure: Rule(..., op=..., {side}_quant=....let(pre_transform=...)) with the same transform, or "
                "Recipe(Rotate('R3')) with inputs that read the cache"
            )


def _declared(choice: Choice, x: Tracked, partner: Tracked, place: int) -> Any:
    own = (choice.lhs, choice.rhs)[place] if partner.is_activation else None
    return own or (None if choice.inputs is None else x.pending or choice.inputs)


def transformed_axes(eqn: Equation, place: int) -> Axes:
    """The axes of a contraction's operand that a transform takes: those summed over; of an image, its channels."""
    if eqn.name == "conv_general_dilated":
        return (eqn.params["dimension_numbers"].lhs_spec[1],)
    return summed_axes(eqn)[place]


def free_axes(eqn: Equation, place: int, ndim: int) -> Axes:
    """The axes of a contraction's operand that its output has, and the other operand does not."""
    if eqn.name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        return ((numbers.lhs_spec, numbers.rhs_spec)[place][0],)
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    contracted, batch = eqn.params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
    groups = () if ragged is None or place == 0 else ragged.rhs_group_dimensions
    return other_axes((*contracted[place], *batch[place], *groups), ndim)


def summed_axes(eqn: Equation) -> tuple[Axes, Axes]:
    """The axes of both operands of a contraction that share a scale because they are summed over."""
    if eqn.name == "conv_general_dilated":
        # Windows run over the spatial axes, so an image has a scale per example, a kernel per filter.
        left, right = eqn.params["dimension_numbers"].lhs_spec, eqn.params["dimension_numbers"].rhs_spec
        return tuple(left[1:]), other_axes((right[0],), len(right))
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    (left, right), _ = eqn.params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
    return tuple(left), tuple(right)
