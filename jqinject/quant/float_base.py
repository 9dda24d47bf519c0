"""Fragments of minifloat quantizers: what is quantized, and the format.

A quantizer lists a format (`Fp8e4m3Mixin`, ...) and a base (`ScaledFloatWeightBase`, ...), and perhaps codes for inf
and nan (`FpOCPMixin`) or another bias (`FpFNUZMixin`). Names and numbers are those of Brevitas.
"""

from typing import Any

from jqinject.core.clamp import TensorClamp
from jqinject.core.float_clamp import FloatClamp
from jqinject.core.float_width import StaticExponentBias
from jqinject.core.quant import FloatQuant
from jqinject.core.scaling import FloatScaling
from jqinject.inject import ExtendedInjector, value
from jqinject.inject.enum import (
    BitWidthImplType,
    FloatToIntImplType,
    RestrictValueType,
    ScalingImplType,
    ScalingPerOutputType,
    StatsOp,
)
from jqinject.proxy import (
    ActFloatQuantProxyFromInjector,
    GroupwiseActFloatQuantProxyFromInjector,
    GroupwiseWeightFloatQuantProxyFromInjector,
    WeightFloatQuantProxyFromInjector,
)
from jqinject.quant.solver import ActQuantSolver, WeightQuantSolver
from jqinject.quant.solver.common import SolveTensorQuantFloatToIntImplFromEnum
from jqinject.quant.solver.floats import SolveFloatBitWidthImplFromEnum


class FloatBase(SolveTensorQuantFloatToIntImplFromEnum, SolveFloatBitWidthImplFromEnum):
    """Minifloats of declared widths, all of whose codes are numbers; without a scale."""

    tensor_quant = FloatQuant
    signed = True
    float_to_int_impl_type = FloatToIntImplType.ROUND
    scaling_min_val = 1e-10
    float_clamp_impl = FloatClamp
    tensor_clamp_impl = TensorClamp
    exponent_bit_width_impl_type = BitWidthImplType.CONST
    mantissa_bit_width_impl_type = BitWidthImplType.CONST
    exponent_bias_impl = StaticExponentBias

    @value
    def exponent_bias(exponent_bit_width: Any):
        return 2 ** (exponent_bit_width - 1) - 1


class FloatWeightBase(FloatBase, WeightQuantSolver):
    """Weights as minifloats, without a scale."""

    @value
    def proxy_class(scaling_per_output: Any):
        per_group = scaling_per_output == ScalingPerOutputType.GROUP
        return GroupwiseWeightFloatQuantProxyFromInjector if per_group else WeightFloatQuantProxyFromInjector


class FloatActBase(FloatBase, ActQuantSolver):
    """Activations as minifloats, without a scale."""

    @value
    def proxy_class(scaling_per_output: Any):
        per_group = scaling_per_output == ScalingPerOutputType.GROUP
        return GroupwiseActFloatQuantProxyFromInjector if per_group else ActFloatQuantProxyFromInjector


class ScaledFloatWeightBase(FloatWeightBase):
    """Weights as minifloats, scale = max |w| / largest number, recomputed at every forward."""

    scaling_stats_op = StatsOp.MAX
    scaling_impl_type = ScalingImplType.STATS
    restrict_scaling_type = RestrictValueType.FP
    float_scaling_impl = FloatScaling


class ScaledFloatActBase(FloatActBase):
    """Activations as minifloats, a learned scale that starts from max |x| over the first 300 training batches."""

    scaling_stats_op = StatsOp.MAX
    scaling_impl_type = ScalingImplType.PARAMETER_FROM_STATS
    restrict_scaling_type = RestrictValueType.FP
    collect_stats_steps = 300
    float_scaling_impl = FloatScaling


class Fp8e4m3Mixin(ExtendedInjector):
    """8 bits: 4 of exponent, 3 of mantissa."""

    bit_width = 8
    exponent_bit_width = 4
    mantissa_bit_width = 3
    saturating = True


class Fp8e5m2Mixin(ExtendedInjector):
    """8 bits: 5 of exponent, 2 of mantissa."""

    bit_width = 8
    exponent_bit_width = 5
    mantissa_bit_width = 2
    saturating = True


class Fp6e3m2Mixin(ExtendedInjector):
    """6 bits: 3 of exponent, 2 of mantissa, up to 28."""

    bit_width = 6
    exponent_bit_width = 3
    mantissa_bit_width = 2
    saturating = True


class Fp6e2m3Mixin(ExtendedInjector):
    """6 bits: 2 of exponent, 3 of mantissa, up to 7.5."""

    bit_width = 6
    exponent_bit_width = 2
    mantissa_bit_width = 3
    saturating = True


class Fp4e2m1Mixin(ExtendedInjector):
    """4 bits: 2 of exponent, 1 of mantissa, up to 6."""

    bit_width = 4
    exponent_bit_width = 2
    mantissa_bit_width = 1
    saturating = True
