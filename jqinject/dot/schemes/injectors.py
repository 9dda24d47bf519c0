"""Quantized contractions as injectors: every quantizer, format and accumulator is a name that can be overridden."""

from __future__ import annotations

from typing import Any

import numpy as np

from jqinject.dot.schemes.contraction import Contraction
from jqinject.dot.schemes.noise import NOISES
from jqinject.dot.schemes.numerics import FLOAT8_NAMES, Float8Numerics, IntNumerics
from jqinject.dot.schemes.operand import OperandQuantizer
from jqinject.dot.schemes.operand_ranges import AbsMaxCalibration
from jqinject.dot.schemes.quantized_dot import QuantizedDotGeneral
from jqinject.inject import CheckedInjector, choices, this, value


class OperandInjector(CheckedInjector, assembles=("quantizer",)):
    """One operand of one contraction.

    | name | |
    |---|---|
    | `bits` | 2 to 22, `"e4m3"`, `"e5m2"`, an 8-bit float dtype, or None for no quantization |
    | `calibration` | `AbsMaxCalibration` (`clipping_scale`, `po2_scale`), `ConstantCalibration` (`bound`, ...), ... |
    | `preserve_zero`, `preserve_max_val`, `clip`, `clip_gradient` | as for `IntNumerics` |
    | `rng_type` | noise of stochastic rounding: `"jax.uniform"`, `"custom-1"`, or None to round to nearest |
    | `noise_sharing_axes` | axes along which all numbers get the same noise |
    | `calibration_axes`, `dequant_mode`, `use_fwd_quant` | as for `OperandQuantizer` |
    """

    quantizer = OperandQuantizer
    calibration = AbsMaxCalibration
    bits = 8
    rng_type = None
    noise_sharing_axes = ()

    @choices(IntNumerics, Float8Numerics)
    def numerics(bits: Any) -> Any:
        """The format's class, wired by name; None for no quantization."""
        if bits is None:
            return None
        if isinstance(bits, int):
            return IntNumerics
        if isinstance(bits, str | np.dtype) or isinstance(getattr(bits, "dtype", None), np.dtype):
            return Float8Numerics
        names = ", ".join(map(repr, FLOAT8_NAMES))
        raise TypeError(
            f"bits must be an int, one of {names}, an 8-bit float dtype, or None; got {bits!r:.80}"
        )

    @value
    def dtype(bits: Any) -> Any:
        """Dtype of 8-bit floats."""
        return FLOAT8_NAMES.get(bits, bits) if isinstance(bits, str) else bits

    @choices(*NOISES.values())
    def noise(rng_type: Any) -> Any:
        """The noise's class."""
        if rng_type is None:
            return None
        if rng_type not in NOISES:
            raise ValueError(
                f"rng_type must be one of {', '.join(map(repr, NOISES))} or None, got {rng_type!r}"
            )
        return NOISES[rng_type]


class ContractionInjector(CheckedInjector, assembles=("contraction",)):
    """One contraction: two operands, `lhs` and `rhs`, an `accumulator_dtype` and `local_aqt`."""

    contraction = Contraction
    lhs = OperandInjector
    rhs = OperandInjector
    lhs_quantizer = this.lhs.quantizer
    rhs_quantizer = this.rhs.quantizer
    accumulator_dtype = None
    local_aqt = None


class DotGeneralInjector(CheckedInjector, assembles=("dot_general", "lhs_range")):
    """Three contractions: `forward`, and `backward_lhs` and `backward_rhs` for the gradients of the two operands.

    Names that `let` declares, of the three or of their operands too, and that are not read are refused when
    `dot_general` is assembled.
    """

    dot_general = QuantizedDotGeneral
    forward = ContractionInjector
    backward_lhs = ContractionInjector
    backward_rhs = ContractionInjector
    fwd = this.forward.contraction
    dlhs = this.backward_lhs.contraction
    drhs = this.backward_rhs.contraction
