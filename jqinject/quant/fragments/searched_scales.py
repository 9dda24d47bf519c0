"""Scales and zero points found by a search: for the least squared error (MSE), or half-quadratic (HQO).

List one before the quantizer that it changes: `class Q(MSESymmetricScale, Int8WeightPerTensorFloat): ...`. The search
initializes a learned scale or zero point, and stops once that is filled. Names and numbers are Brevitas's.
"""

from jqinject.core.clamp import Identity
from jqinject.core.statistics.extremes import AbsMax, AbsMinMax, NegativeMinOrZero
from jqinject.core.statistics.half_quadratic import (
    HalfQuadraticOptimizerScale,
    HalfQuadraticOptimizerZeroPoint,
)
from jqinject.core.statistics.search import MSE, MSEUniformStepBase
from jqinject.core.views import OverOutputChannelView, OverTensorView
from jqinject.core.zero_point import ParameterFromRuntimeZeroPoint, ParameterFromStatsFromParameterZeroPoint
from jqinject.inject import ExtendedInjector, choices, this
from jqinject.quant.enums import ScalingImplType, ScalingPerOutputType, chooses
from jqinject.quant.solver.tables import pick

INNER_VIEW = {
    ScalingPerOutputType.CHANNEL: OverOutputChannelView,
    ScalingPerOutputType.TENSOR: OverTensorView,
}


class _MSESubInjector(ExtendedInjector):
    """A search in a namespace of its own, so that the searches of a scale and of a zero point do not clash."""

    stats_impl = MSE
    mse_iters = 20
    mse_base_op = MSEUniformStepBase
    mse_search_method = "grid"
    scaling_per_output = (this << 1).scaling_per_output
    stats_reduce_dim = (this << 1).stats_reduce_dim
    keepdim = (this << 1).keepdim
    permute_dims = (this << 1).permute_dims
    axis_name = (this << 1).axis_name
    inner_stats_input_view_shape_impl = (this << 1).inner_stats_input_view_shape_impl


class MSESymmetricScaleSubInjector(_MSESubInjector):
    """The search of a symmetric scale, from max |x|."""

    mse_init_op = AbsMax
    bipolar_search = (this << 1).bipolar_search


class MSEAsymmetricScaleSubInjector(_MSESubInjector):
    """The search of a scale beside a zero point, from max x - min(min x, 0)."""

    mse_init_op = AbsMinMax
    bipolar_search = (this << 1).bipolar_search


class MSEZeroPointSubInjector(_MSESubInjector):
    """The search of a zero point, from min(min x, 0)."""

    mse_init_op = NegativeMinOrZero


class MSEActZeroPointSubInjector(MSEZeroPointSubInjector):
    """The same, batch after batch: the scale of the next batch is searched with the last zero point."""

    memory_shape = (this << 1).zero_point_shape


@choices(*INNER_VIEW.values())
def inner_view_impl(scaling_per_output):
    """How a search lays out tensors, which it is given without a view."""
    if chooses(scaling_per_output, ScalingPerOutputType.GROUP):
        return this.input_view_impl
    return pick(ScalingPerOutputType, scaling_per_output, INNER_VIEW, "scaling_per_output_type")


class MSESymmetricScale(ExtendedInjector):
    """A learned scale that starts where the squared error of quantization is least, among `max |x| * k / 20`.

    Override what the search does within it: `class Mine(MSESymmetricScale, ...): mse_scale = MySearch`, with
    `class MySearch(MSESymmetricScaleSubInjector): mse_iters = 50`.
    """

    mse_scale = MSESymmetricScaleSubInjector
    axis_name = None
    inner_stats_input_view_shape_impl = inner_view_impl
    scaling_impl_type = ScalingImplType.PARAMETER_FROM_STATS
    scaling_stats_input_view_shape_impl = Identity
    scaling_stats_impl = this.mse_scale.stats_impl


class MSEAsymmetricScale(ExtendedInjector):
    """A learned scale that starts where the squared error is least, from the range of x down to a 20th of it."""

    mse_scale = MSEAsymmetricScaleSubInjector
    axis_name = None
    inner_stats_input_view_shape_impl = inner_view_impl
    scaling_impl_type = ScalingImplType.PARAMETER_FROM_STATS
    scaling_stats_input_view_shape_impl = Identity
    scaling_stats_impl = this.mse_scale.stats_impl


class MSEWeightZeroPoint(ExtendedInjector):
    """A learned zero point of a weight that starts where the squared error of quantization is least."""

    mse_zero_point = MSEZeroPointSubInjector
    axis_name = None
    inner_stats_input_view_shape_impl = inner_view_impl
    zero_point_impl = ParameterFromStatsFromParameterZeroPoint
    zero_point_stats_input_view_shape_impl = Identity
    zero_point_stats_impl = this.mse_zero_point.stats_impl


class MSEActZeroPoint(ExtendedInjector):
    """A learned zero point of an activation that starts from those with the least squared error in each batch."""

    mse_zero_point = MSEActZeroPointSubInjector
    axis_name = None
    inner_stats_input_view_shape_impl = inner_view_impl
    zero_point_impl = ParameterFromRuntimeZeroPoint
    zero_point_stats_input_view_shape_impl = Identity
    zero_point_stats_impl = this.mse_zero_point.stats_impl


class HQOSymmetricScale(ExtendedInjector):
    """A learned scale that half-quadratic optimization finds, from max |x| on."""

    hqo_init_op_scale = AbsMax
    inner_stats_input_view_shape_impl = this.scaling_stats_input_view_shape_impl
    scaling_impl_type = ScalingImplType.PARAMETER_FROM_STATS
    stats_impl_scale = HalfQuadraticOptimizerScale
    scaling_stats_impl = this.stats_impl_scale


class HQOAsymmetricScale(ExtendedInjector):
    """A learned scale that half-quadratic optimization finds, from max x - min(min x, 0) on."""

    hqo_init_op_scale = AbsMinMax
    inner_stats_input_view_shape_impl = this.scaling_stats_input_view_shape_impl
    scaling_impl_type = ScalingImplType.PARAMETER_FROM_STATS
    stats_impl_scale = HalfQuadraticOptimizerScale
    scaling_stats_impl = this.stats_impl_scale


class HQOWeightZeroPoint(ExtendedInjector):
    """A learned zero point of a weight that half-quadratic optimization finds, from min(min w, 0) on."""

    hqo_init_op_zp = NegativeMinOrZero
    inner_stats_input_view_shape_impl = this.zero_point_stats_input_view_shape_impl
    zero_point_impl = ParameterFromStatsFromParameterZeroPoint
    stats_impl_zp = HalfQuadraticOptimizerZeroPoint
    zero_point_stats_impl = this.stats_impl_zp


class HQOActZeroPoint(ExtendedInjector):
    """A learned zero point of an activation, from those that half-quadratic optimization finds in each batch."""

    hqo_init_op_zp = NegativeMinOrZero
    inner_stats_input_view_shape_impl = this.zero_point_stats_input_view_shape_impl
    memory_shape = this.zero_point_shape
    zero_point_impl = ParameterFromRuntimeZeroPoint
    stats_impl_zp = HalfQuadraticOptimizerZeroPoint
    zero_point_stats_impl = this.stats_impl_zp
