"""Accumulators with fewer bits: truncated, rounded, or shifted by a learned number of bits."""

from jqinject.inject import ExtendedInjector
from jqinject.quant.enums import BitWidthImplType, FloatToIntImplType, QuantType, TruncScalingImplType
from jqinject.quant.fragments import ParamFromRuntimePercentileScaling, PerTensorPoTScaling8bit
from jqinject.quant.solver import TruncQuantSolver


class _To8bit(ExtendedInjector):
    """8-bit integers from integers of more bits."""

    bit_width = 8
    quant_type = QuantType.INT
    bit_width_impl_type = BitWidthImplType.CONST


class TruncTo8bit(_To8bit, TruncQuantSolver):
    """The 8 most significant bits: `floor(q / 2**(b - 8))`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject import IntQuantTensor
        >>> from jqinject.nn import TruncAvgPool2d
        >>> x = IntQuantTensor.from_int(jnp.array([3, 0, 0, 0]).reshape(1, 2, 2, 1), 1.0, signed=False)
        >>> TruncAvgPool2d((2, 2), trunc_quant=TruncTo8bit)(x).int().ravel()
        Array([0], dtype=uint8)
    """

    float_to_int_impl_type = FloatToIntImplType.FLOOR
    trunc_scaling_impl_type = TruncScalingImplType.MSB


class RoundTo8bit(_To8bit, TruncQuantSolver):
    """The 8 most significant bits, rounded: `round(q / 2**(b - 8))`, ties to even.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject import IntQuantTensor
        >>> from jqinject.nn import TruncAvgPool2d
        >>> x = IntQuantTensor.from_int(jnp.array([3, 0, 0, 0]).reshape(1, 2, 2, 1), 1.0, signed=False)
        >>> TruncAvgPool2d((2, 2), trunc_quant=RoundTo8bit)(x).int().ravel()
        Array([1], dtype=uint8)
    """

    float_to_int_impl_type = FloatToIntImplType.ROUND
    trunc_scaling_impl_type = TruncScalingImplType.MSB


class ShiftRoundSaturateTo8bit(
    _To8bit, ParamFromRuntimePercentileScaling, PerTensorPoTScaling8bit, TruncQuantSolver
):
    """Shifted right by a learned number of bits that starts from the 99.999th percentile of |q|, rounded, saturated."""

    float_to_int_impl_type = FloatToIntImplType.ROUND
    trunc_scaling_impl_type = TruncScalingImplType.WRAPPER
