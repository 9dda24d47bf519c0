"""Fragments of minifloat quantizers: what is quantized, the format, and the codes.

A quantizer lists a format (`Fp8e4m3Mixin`, ...), perhaps codes for inf and nan (`FpOCPMixin`) or another bias
(`FpFNUZMixin`), and a base (`ScaledFloatWeightBase`, ...). Names and numbers are those of Brevitas.
"""

from typing import Any

import jax.numpy as jnp

from jqinject import core
from jqinject.inject import ExtendedInjector, this, value
from jqinject.ops import max_available_float as largest_below_codes
from jqinject.quant import enums, solver
from jqinject.quant.solver.roles import BIT_WIDTH_IMPL, selected

EXPONENT_WIDTH_IMPL = BIT_WIDTH_IMPL | {enums.BitWidthImplType.CONST: core.ExponentWidthConst}
MANTISSA_WIDTH_IMPL = BIT_WIDTH_IMPL | {enums.BitWidthImplType.CONST: core.MantissaWidthConst}
# known beforehand where the mantissa's bits are
MAX_MANTISSA = dict.fromkeys(BIT_WIDTH_IMPL, core.ComputeMaxMantissa) | {
    enums.BitWidthImplType.CONST: core.StaticMaxMantissa
}
# (bits, mantissa bits, exponent bits) -> mantissas that mean inf, or nan, with the largest exponent
OCP_INF = {(8, 2, 5): ("00",)}
OCP_NAN = {(8, 3, 4): ("111",), (8, 2, 5): ("01", "11", "10")}


def _codes(table: dict[tuple[int, int, int], tuple[str, ...]]) -> Any:
    @value
    def codes(bit_width: int, mantissa_bit_width: int, exponent_bit_width: int) -> tuple[str, ...] | None:
        return table.get((bit_width, mantissa_bit_width, exponent_bit_width))

    return codes


class ExponentBitWidthClass(ExtendedInjector):
    """The bits of the exponent: `bit_width` means those in here."""

    exponent_bit_width_impl_type = (this << 1).exponent_bit_width_impl_type
    bit_width = (this << 1).exponent_bit_width
    bit_width_impl = selected("exponent_bit_width_impl_type", EXPONENT_WIDTH_IMPL)


class MantissaBitWidthClass(ExtendedInjector):
    """The bits of the mantissa: `bit_width` means those in here."""

    mantissa_bit_width_impl_type = (this << 1).mantissa_bit_width_impl_type
    bit_width = (this << 1).mantissa_bit_width
    bit_width_impl = selected("mantissa_bit_width_impl_type", MANTISSA_WIDTH_IMPL)
    compute_max_mantissa = selected("mantissa_bit_width_impl_type", MAX_MANTISSA)


class FloatBase(ExtendedInjector):
    """Minifloats of declared widths, all of whose codes are numbers.

    There is no scale unless `scaling_impl_type` or `scaling_impl` is declared; it then comes from the largest magnitude
    of the tensor, and with `float_scaling_impl = FloatScaling` it is divided by the largest number of the format.
    """

    tensor_quant = core.FloatQuant
    scaling_per_output_type = enums.ScalingPerOutputType.TENSOR
    scaling_stats_op = enums.StatsOp.MAX
    signed = saturating = True
    float_to_int_impl_type = enums.FloatToIntImplType.ROUND
    scaling_min_val = 1e-10
    float_clamp_impl = core.FloatClamp
    tensor_clamp_impl = core.TensorClamp
    exponent_bit_width_impl_type = enums.BitWidthImplType.CONST
    mantissa_bit_width_impl_type = enums.BitWidthImplType.CONST
    exponent_bit_class = ExponentBitWidthClass
    mantissa_bit_class = MantissaBitWidthClass
    exponent_bit_width_impl = this.exponent_bit_class.bit_width_impl
    mantissa_bit_width_impl = this.mantissa_bit_class.bit_width_impl
    compute_max_mantissa = this.mantissa_bit_class.compute_max_mantissa
    exponent_bias_impl = core.StaticExponentBias
    exponent_bias = value(lambda exponent_bit_width: 2 ** (exponent_bit_width - 1) - 1)


class FloatWeightBase(FloatBase, solver.WeightQuantSolver):
    """Weights as minifloats, without a scale."""


class FloatActBase(FloatBase, solver.ActQuantSolver):
    """Activations as minifloats, without a scale."""


class ScaledFloatWeightBase(FloatBase, solver.WeightQuantSolver):
    """Weights as minifloats, scale = max |w| / largest number, recomputed at every forward."""

    scaling_impl_type = enums.ScalingImplType.STATS
    restrict_scaling_type = enums.RestrictValueType.FP
    float_scaling_impl = core.FloatScaling


class ScaledFloatActBase(FloatBase, solver.ActQuantSolver):
    """Activations as minifloats, a learned scale that starts from max |x| over the first 300 training batches."""

    scaling_impl_type = enums.ScalingImplType.PARAMETER_FROM_STATS
    restrict_scaling_type = enums.RestrictValueType.FP
    collect_stats_steps = 300
    float_scaling_impl = core.FloatScaling


class DynamicFloatAct(ScaledFloatActBase):
    """Minifloats with scale = max |x| / largest number of the current tensor."""

    scaling_impl = core.RuntimeDynamicStatsScaling


class Fp8e4m3Mixin(ExtendedInjector):
    """8 bits: 4 of exponent, 3 of mantissa."""

    bit_width, exponent_bit_width, mantissa_bit_width = 8, 4, 3


class Fp8e5m2Mixin(ExtendedInjector):
    """8 bits: 5 of exponent, 2 of mantissa."""

    bit_width, exponent_bit_width, mantissa_bit_width = 8, 5, 2


class Fp6e3m2Mixin(ExtendedInjector):
    """6 bits: 3 of exponent, 2 of mantissa, up to 28."""

    bit_width, exponent_bit_width, mantissa_bit_width = 6, 3, 2


class Fp6e2m3Mixin(ExtendedInjector):
    """6 bits: 2 of exponent, 3 of mantissa, up to 7.5."""

    bit_width, exponent_bit_width, mantissa_bit_width = 6, 2, 3


class Fp4e2m1Mixin(ExtendedInjector):
    """4 bits: 2 of exponent, 1 of mantissa, up to 6."""

    bit_width, exponent_bit_width, mantissa_bit_width = 4, 2, 1


class FpOCPMixin(ExtendedInjector):
    """The codes for inf and nan of OCP's formats, and the largest number below them.

    Source: Open Compute Project, "OCP 8-bit Floating Point Specification (OFP8)" and "Microscaling Formats (MX)".
    """

    inf_values, nan_values = _codes(OCP_INF), _codes(OCP_NAN)
    max_available_float = value(largest_below_codes)


class FpFNUZMixin(ExtendedInjector):
    """The bias of the formats without inf and negative zero (FNUZ): one higher, and the code of -0 is nan."""

    exponent_bias = value(lambda exponent_bit_width: 2 ** (exponent_bit_width - 1))


class Fp8Quant(ExtendedInjector):
    """8-bit floats: declare `q_dtype`, and `dq_dtype` for another dtype of the dequantized numbers."""

    tensor_quant = core.FloatQuant
    cast_impl = core.Float8Cast
    float_to_int_impl = core.RoundSte
    signed = True


class Fp8e4m3(Fp8Quant):
    """4 bits of exponent, 3 of mantissa, up to 448, no inf."""

    q_dtype = jnp.float8_e4m3fn


class Fp8e5m2(Fp8Quant):
    """5 bits of exponent, 2 of mantissa, up to 57344, with inf."""

    q_dtype = jnp.float8_e5m2


class Fp8e4m3FNUZ(Fp8Quant):
    """4 bits of exponent, 3 of mantissa, up to 240, no inf, one zero."""

    q_dtype = jnp.float8_e4m3fnuz


class Fp8e5m2FNUZ(Fp8Quant):
    """5 bits of exponent, 2 of mantissa, up to 57344, no inf, one zero."""

    q_dtype = jnp.float8_e5m2fnuz


class AmaxStatsScaling(ExtendedInjector):
    """The parts of a scale made from `max |x|`, recorded step by step."""

    scaling_stats_op = enums.StatsOp.MAX
    scaling_per_output_type = enums.ScalingPerOutputType.TENSOR
    scaling_impl = core.AmaxScaling
    amax_compute_algo = "max"
    scaling_init = 1.0
    margin = 0


class DelayedAmaxScaling(AmaxStatsScaling):
    """scale = max of the last 1024 steps' amaxes / largest number of the format; known before the tensor."""

    delayed = True
    amax_history_length = 1024


class CurrentAmaxScaling(AmaxStatsScaling):
    """scale = amax of the tensor itself / largest number of the format; the last amax is recorded."""

    delayed = False
    amax_history_length = 1


class PerOutputChannel(ExtendedInjector):
    """A scale for each output channel."""

    scaling_per_output_type = enums.ScalingPerOutputType.CHANNEL


class DelayedWeight(DelayedAmaxScaling, solver.WeightQuantSolver):
    """Weights, their scale from the amaxes of earlier steps."""


class DelayedAct(DelayedAmaxScaling, solver.ActQuantSolver):
    """Activations, their scale from the amaxes of earlier steps."""


class DelayedGrad(DelayedAmaxScaling, solver.GradQuantSolver):
    """Gradients, their scale from the amaxes of earlier steps."""


class CurrentWeight(CurrentAmaxScaling, solver.WeightQuantSolver):
    """Weights, their scale from the tensor itself."""


class CurrentAct(CurrentAmaxScaling, solver.ActQuantSolver):
    """Activations, their scale from the tensor itself."""


class CurrentGrad(CurrentAmaxScaling, solver.GradQuantSolver):
    """Gradients, their scale from the tensor itself."""
