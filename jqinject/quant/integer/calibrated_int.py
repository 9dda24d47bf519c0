"""Calibrated clipping ranges: static ones averaged over batches, dynamic ones and those of weights from the tensor.

The names say the method: `MinMax` has a zero point, the others are symmetric. Any of them is another's override:
`calibration_impl = AbsPercentileRange`.
"""

from jqinject import core, proxy
from jqinject.quant import enums, fragments
from jqinject.quant.solver import solve_shapes


class CalibratedAct(fragments.InRange):
    """Signed integers in a range that `calibration_impl` finds, averaged over batches; declare it."""

    proxy_class = proxy.ActQuantProxyFromInjector
    averaging_impl = core.SimpleMovingAverage


class Int8ActPerTensorMinMax(CalibratedAct):
    """8 bits with a zero point; the range is the mean of every batch's smallest and largest number.

    Source: Qwix's `minmax`.

    Example:
        >>> from jqinject.nn import QuantIdentity
        >>> import jax.numpy as jnp
        >>> identity = QuantIdentity(Int8ActPerTensorMinMax, return_quant_tensor=True)
        >>> identity(jnp.array([0.0, 2.55])).int()
        Array([-128,  127], dtype=int8)
    """

    calibration_impl = core.MinMaxRange


class Int8ActPerTensorAbsMax(CalibratedAct):
    """8 bits; the range is the mean of every batch's largest magnitude."""

    calibration_impl = core.AbsMaxRange


class Int8ActPerTensorPercentile(CalibratedAct):
    """8 bits; the range is the mean of every batch's 99.9th percentile of magnitudes (`percentile`)."""

    calibration_impl = core.AbsPercentileRange


class Int8ActPerTensorMSE(CalibratedAct):
    """8 bits; the range is the mean of those with the least mean squared error in every batch."""

    calibration_impl = core.MSERange


class Int8ActPerTensorRMS(CalibratedAct):
    """8 bits; the range is `factor` (4) times the mean of every batch's root mean square."""

    calibration_impl = core.RMSRange


class Int8DynamicActPerTensorAbsMax(Int8ActPerTensorAbsMax):
    """8 bits; the range is the largest magnitude of the current tensor. Nothing is calibrated."""

    averaging_impl = None


class Int8DynamicActPerRowAbsMax(Int8DynamicActPerTensorAbsMax):
    """8 bits; every row (along the last axis) has the range of its own largest magnitude. Nothing is calibrated.

    With a `group_size` every group of so many features of a row has its own: Qwix's `act_qtype` with a `tile_size`.
    """

    shared_axes = (-1,)


class CalibratedWeight(fragments.InRange):
    """Signed integers in a range that `calibration_impl` finds in the weight; a scale for each output channel."""

    proxy_class = proxy.WeightQuantProxyFromInjector
    channelwise_axes = solve_shapes.output_channel_axes


class CalibratedGroupWeight(CalibratedWeight):
    """Signed integers in a range that `calibration_impl` finds in each group of `group_size` inputs, of every channel.

    Groups have to fill the axis of the inputs. Where a weight has several such axes, the last is cut into groups, and
    the others share their ranges.
    """

    scaling_per_output_type = enums.ScalingPerOutputType.GROUP
    group_dim = solve_shapes.weight_group_dim


class Int4WeightPerGroupAbsMax(CalibratedGroupWeight):
    """4 bits, scale = max |w| / 7.5 of each group of `group_size` (32) inputs.

    Source: Qwix's `tile_size`.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(64, 4, weight_quant=Int4WeightPerGroupAbsMax, rngs=nnx.Rngs(0))
        >>> fc.quant_weight().scale_.shape
        (2, 1, 4)
    """

    calibration_impl = core.AbsMaxRange
    bit_width = 4
    group_size = 32


class Int8WeightPerChannelAbsMax(CalibratedWeight):
    """8 bits, scale = max |w| / 127.5 of each output channel (of each combination, where several axes count them).

    Source: Qwix. `Int8WeightPerChannelFloat` divides by 127 and never takes -128.
    """

    calibration_impl = core.AbsMaxRange


class Int8WeightPerTensorAbsMax(Int8WeightPerChannelAbsMax):
    """8 bits, scale = max |w| / 127.5 of the whole weight.

    Source: Qwix.
    """

    channelwise_axes = ()
