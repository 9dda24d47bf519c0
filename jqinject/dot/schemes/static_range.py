"""The left operand of a contraction in a range that is known before: averaged in training, constant in evaluation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jqinject.core import CalibratedQuant
from jqinject.core.calibration.range_to_scale import LEAST_SCALE
from jqinject.dot.schemes.contraction import Operand
from jqinject.dot.schemes.operand import ScaledOperand
from jqinject.dot.schemes.quantized_dot import QuantizedDotGeneral
from jqinject.inject import ExtendedInjector
from jqinject.ops.power import by_reciprocal


def range_of(config: Any) -> Any:
    """The static range that an injector declares, a new one each time; None where it declares none."""
    declares = isinstance(config, type) and issubclass(config, ExtendedInjector) and "lhs_range" in config
    return config.lhs_range if declares else None


def checked_range(found: Any, general: QuantizedDotGeneral, name: str) -> CalibratedQuant | None:
    """A static range that an op can have.

    Raises:
        TypeError: it is no `CalibratedQuant` with an average.
        ValueError: it has a zero point; the operand has no bits; the op is a convolution.
    """
    if found is None:
        return None
    if name == "QConvGeneralDilated":
        raise ValueError(
            f"{name} has no static range.\n  cure: QuantConv(input_quant=...), or a rule with input_quant"
        )
    if not isinstance(found, CalibratedQuant) or found.averaging_impl is None:
        raise TypeError(
            f"{name}: lhs_range must be a CalibratedQuant with an average, got {found!r:.80}.\n"
            "  cure: CalibratedQuant(AbsMaxRange(), SimpleMovingAverage())"
        )
    if found.averaged_range().low is not None or general.fwd.lhs_quantizer.numerics is None:
        raise ValueError(
            f"{name}: a static range is symmetric, and of an operand with bits; got {found.calibration_impl!r}, bits "
            f"{general.fwd.lhs_quantizer.numerics!r}.\n  cure: AbsMaxRange, RMSRange, ...; fwd_bits=8"
        )
    return found


def scaled(lhs: Operand, static: CalibratedQuant, general: QuantizedDotGeneral) -> ScaledOperand:
    """The left operand, which comes as an array, with the scale of its static range."""
    numerics = general.fwd.lhs_quantizer.numerics
    assert not isinstance(lhs, tuple) and numerics is not None, "checked when the op was made"
    scale = by_reciprocal(static.clipping_range(lhs).high, numerics.bound)
    scale = jnp.where(scale < LEAST_SCALE, 1.0, scale).reshape((1,) * lhs.ndim)
    return ScaledOperand(lhs, jax.lax.stop_gradient(scale))
