"""Which quantizer an operand of a contraction goes through, and along which of its axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jqinject.program.jaxpr import Equation
from jqinject.program.operations import operand_axes
from jqinject.program.policy import NO_AXES, Choice, SummedAxes
from jqinject.program.quantizers import has_row_scales
from jqinject.program.run import Run
from jqinject.program.tracked_value import Tracked, shape_of
from jqinject.proxy import transform_of


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
    axes, ndim = operand_axes(eqn)[place], len(shape_of(x))
    summed = axes.reduced
    if x.is_weight:
        if choice.weight is None:
            return None
        channels = run.policy.channel_axes(summed, ndim, True)
        return OperandQuantizer(choice.weight, overrides={"channelwise_axes": channels})
    if not x.is_activation:
        return None
    if choice.dynamic:
        if choice.inputs is None or not partner.is_weight:
            return None
        channels = run.policy.channel_axes(summed, ndim, False)
        return OperandQuantizer(choice.inputs, overrides={"channelwise_axes": channels})
    declared = _declared(choice, x, partner, place)
    if declared is None:
        return None
    rows = () if summed == (ndim - 1,) or not has_row_scales(declared) else summed
    transformed = axes.summed if transform_of(declared) is not None else ()
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
