"""A static range for the left operand: averaged in training, constant in evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jqinject.core import ClippingRange, RangeScaling
from jqinject.dot.schemes.scheme import SchemeSpec, role_of
from jqinject.inject import Binding
from jqinject.ops.clamp import shaped


@dataclass(frozen=True, eq=False)
class CollectedRange:
    """An averaged range, as the `calibration` of an operand.

    Attributes:
        scaling: whose average is updated by every call in training.
    """

    scaling: RangeScaling

    def __call__(self, x: jax.Array, axes: Any, names: Any = ()) -> ClippingRange:
        """One range for the whole operand."""
        return jax.tree.map(lambda end: shaped(end, (1,) * x.ndim), self.scaling.clipping_range(x))


def range_of(config: Any) -> Any:
    """A new instance of the static range that a scheme declares, if any."""
    injector = config.injector if isinstance(config, Binding) else config
    return injector.lhs_range if "lhs_range" in injector else None


def checked_range(found: Any, scheme: SchemeSpec, name: str) -> RangeScaling | None:
    """Check a static range.

    Raises:
        TypeError: it is not a `RangeScaling` with an average; the left operand's quantizer has its own range.
        ValueError: it has a zero point; the operand has no bits; the op is a convolution.
    """
    if found is None:
        return None
    if name == "QConvGeneralDilated":
        raise ValueError(
            f"{name} has no static range.\n  cure: QuantConv(input_quant=...), or a rule with input_quant"
        )
    operand = scheme["fprop_lhs"]
    if isinstance(operand, Binding) and role_of(operand) != "operand":
        raise TypeError(
            f"{name}: {operand.base.__name__} has a range of its own, and lhs_range would take its place.\n  cure: "
            "fprop_lhs = jqinject.quant.Int8ActPerTensorAbsMax, or another quantizer of activations with a collected "
            "range"
        )
    if not isinstance(found, RangeScaling) or found.averaging_impl is None:
        raise TypeError(
            f"{name}: lhs_range must be a RangeScaling with an average, got {found!r:.80}.\n"
            "  cure: RangeScaling(AbsMaxRange(), SimpleMovingAverage())"
        )
    if operand is None or found.averaged_range().low is not None:
        raise ValueError(
            f"{name}: a static range is symmetric, and of an operand with bits; got {found.calibration_impl!r}, and "
            f"fprop_lhs is {'float' if operand is None else 'quantized'}.\n  cure: AbsMaxRange, RMSRange, ...; "
            "fwd_bits=8"
        )
    return found
