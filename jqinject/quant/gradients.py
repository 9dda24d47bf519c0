"""Gradients as integers and minifloats: per tensor, per row, in groups. `float8` has 8-bit floats scaled by amaxes.

For `grad_quant=` of a layer, and `dgrad_grad` and `wgrad_grad` of a `jqinject.dot.Scheme`. The scale is that of the
current gradient (`Dynamic`, MX), or follows recorded amaxes (`Delayed`). Rounded to nearest, what is small against the
scale vanishes; `Stochastic` rounds up with a probability equal to the fraction, so that a sum of many is right on
average, and to nearest in evaluation mode.
"""

from jqinject import core
from jqinject.quant import enums, float_base, solver
from jqinject.quant.fragments import (
    DynamicPerRow,
    FullIntQuant,
    MaxStatsScaling,
    NarrowIntQuant,
    PerTensorFloatScaling8bit,
)
from jqinject.quant.minifloat.blocks import MXActMixin, fraction_bits


class DynamicMaxScaling(solver.GradQuantSolver):
    """Gradients, scale = max |g| / largest number, of the current gradient."""

    scaling_impl = core.RuntimeDynamicStatsScaling
    scaling_stats_op = enums.StatsOp.MAX
    scaling_min_val = 1e-30


class Int8DynamicGradPerTensorFloat(NarrowIntQuant, DynamicMaxScaling, PerTensorFloatScaling8bit):
    """8-bit narrow signed gradients, scale = max |g| / 127 of the current gradient.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> identity = QuantIdentity(None, grad_quant=Int8DynamicGradPerTensorFloat)
        >>> weights = jnp.array([127.0, 0.4, -2.6])
        >>> jax.grad(lambda x: (identity(x) * weights).sum())(jnp.ones(3))
        Array([127.,   0.,  -3.], dtype=float32)
    """


class Int8DynamicGradPerTensorFloatStochastic(Int8DynamicGradPerTensorFloat):
    """8-bit narrow signed gradients, scale = max |g| / 127 of the current gradient, rounded stochastically."""

    float_to_int_impl_type = enums.FloatToIntImplType.STOCHASTIC_ROUND


class Int8DynamicGradPerRowFloat(DynamicPerRow, NarrowIntQuant, DynamicMaxScaling, PerTensorFloatScaling8bit):
    """8-bit narrow signed gradients, scale = max |g| / 127 of each row: the last axis, in a `Scheme` all that is
    summed over."""


class Int8DynamicGradPerRowFloatStochastic(Int8DynamicGradPerRowFloat):
    """8-bit narrow signed gradients, scale = max |g| / 127 of each row, rounded stochastically."""

    float_to_int_impl_type = enums.FloatToIntImplType.STOCHASTIC_ROUND


class Int8GradPerTensorDelayed(NarrowIntQuant, float_base.DelayedGrad, PerTensorFloatScaling8bit):
    """8-bit narrow signed gradients, scale = the largest of the last 1024 steps' amaxes / 127."""


class Fp8e5m2OCPDynamicGradPerTensorFloat(
    float_base.Fp8e5m2Mixin, float_base.FpOCPMixin, float_base.FloatBase, DynamicMaxScaling
):
    """e5m2 gradients, scale = max |g| / 57344 of the current gradient."""

    restrict_scaling_type = enums.RestrictValueType.FP
    float_scaling_impl = core.FloatScaling


class Fp8e5m2OCPDynamicGradPerTensorFloatStochastic(Fp8e5m2OCPDynamicGradPerTensorFloat):
    """e5m2 gradients, scale = max |g| / 57344 of the current gradient, rounded stochastically."""

    float_to_int_impl_type = enums.FloatToIntImplType.STOCHASTIC_ROUND


class MXInt8Grad(MXActMixin, FullIntQuant, MaxStatsScaling, solver.GradQuantSolver):
    """8-bit signed gradients, a power of two for each group of 32 along the last axis."""

    bit_width = 8
    mantissa_bit_width = fraction_bits


class MXFloatGradBase(MXActMixin, float_base.FpOCPMixin, float_base.FloatBase, solver.GradQuantSolver):
    """OCP's minifloats, a power of two for each group of 32 along the last axis; declare the format."""

    float_scaling_impl = core.FloatScaling


class MXFloat8e4m3Grad(float_base.Fp8e4m3Mixin, MXFloatGradBase):
    """e4m3 gradients, a power of two for each group of 32 along the last axis."""


class MXFloat8e5m2Grad(float_base.Fp8e5m2Mixin, MXFloatGradBase):
    """e5m2 gradients, a power of two for each group of 32 along the last axis."""


class MXFloat6e3m2Grad(float_base.Fp6e3m2Mixin, MXFloatGradBase):
    """e3m2 gradients (6 bits), a power of two for each group of 32 along the last axis."""


class MXFloat6e2m3Grad(float_base.Fp6e2m3Mixin, MXFloatGradBase):
    """e2m3 gradients (6 bits), a power of two for each group of 32 along the last axis."""


class MXFloat4e2m1Grad(float_base.Fp4e2m1Mixin, MXFloatGradBase):
    """e2m1 gradients (4 bits), a power of two for each group of 32 along the last axis."""


class MXFloat4e2m1GradStochastic(float_base.Fp4e2m1Mixin, MXFloatGradBase):
    """e2m1 gradients (4 bits), a power of two for each group of 32 along the last axis, rounded stochastically."""

    float_to_int_impl_type = enums.FloatToIntImplType.STOCHASTIC_ROUND
