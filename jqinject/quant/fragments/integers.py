"""Which integers: signed, narrow, unsigned, with a zero point, or just two values."""

from jqinject.core.quantizers.rescaling_int_quant import ClampedBinaryQuant
from jqinject.core.statistics.extremes import NegativeMinOrZero, NegativePercentileOrZero
from jqinject.core.zero_point import ParameterFromRuntimeZeroPoint, StatsFromParameterZeroPoint, ZeroZeroPoint
from jqinject.inject import ExtendedInjector, this
from jqinject.quant.enums import (
    BitWidthImplType,
    FloatToIntImplType,
    QuantType,
    RestrictValueType,
    ScalingImplType,
    ScalingPerOutputType,
)


class IntQuant(ExtendedInjector):
    """Signed integers, the full range."""

    quant_type = QuantType.INT
    bit_width_impl_type = BitWidthImplType.CONST
    float_to_int_impl_type = FloatToIntImplType.ROUND
    narrow_range = False
    signed = True
    zero_point_impl = ZeroZeroPoint


class NarrowIntQuant(IntQuant):
    """Signed integers without the smallest one, so that the range is symmetric about 0."""

    narrow_range = True


class UintQuant(IntQuant):
    """Unsigned integers."""

    signed = False


class ShiftedMinUintQuant(IntQuant):
    """Unsigned integers with a zero point at the minimum of a parameter."""

    signed = False
    quantize_zero_point = True
    zero_point_stats_impl = NegativeMinOrZero
    zero_point_shape = this.scaling_shape
    zero_point_stats_input_view_shape_impl = this.scaling_stats_input_view_shape_impl
    zero_point_stats_input_concat_dim = this.scaling_stats_input_concat_dim
    zero_point_impl = StatsFromParameterZeroPoint


class ShiftedParamFromPercentileUintQuant(IntQuant):
    """Unsigned integers whose learned zero point starts from a low percentile of an activation."""

    signed = False
    quantize_zero_point = True
    zero_point_impl = ParameterFromRuntimeZeroPoint
    zero_point_stats_impl = NegativePercentileOrZero
    low_percentile_q = 0.001
    zero_point_shape = this.scaling_shape
    zero_point_stats_input_view_shape_impl = this.scaling_stats_input_view_shape_impl


class SignedBinaryClampedConst(ExtendedInjector):
    """-scale and scale, with a constant scale; no gradient outside [-scale, scale]."""

    tensor_quant = ClampedBinaryQuant
    scaling_impl_type = ScalingImplType.CONST
    restrict_scaling_type = RestrictValueType.FP
    float_to_int_impl_type = FloatToIntImplType.ROUND
    scaling_per_output_type = ScalingPerOutputType.TENSOR
    narrow_range = True
    signed = True
