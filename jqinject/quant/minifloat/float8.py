"""8-bit floats for weights, activations and gradients, scaled by earlier steps (Delayed) or by the tensor (Current).

Names read as in Brevitas: the format (`Fp8e4m3`, `Fp8e5m2`; `FNUZ` for the formats without negative zero), what is
quantized, what shares a scale, and where the scale comes from.
"""

import jax.numpy as jnp

from jqinject.core import AmaxScaling, Float8Cast, FloatQuant, RoundSte
from jqinject.inject import ExtendedInjector
from jqinject.quant.enums import ScalingPerOutputType, StatsOp
from jqinject.quant.solver import ActQuantSolver, GradQuantSolver, WeightQuantSolver


class Fp8Quant(ExtendedInjector):
    """8-bit floats: declare `q_dtype`, and `dq_dtype` for another dtype of the dequantized numbers."""

    tensor_quant = FloatQuant
    cast_impl = Float8Cast
    float_to_int_impl = RoundSte
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

    scaling_stats_op = StatsOp.MAX
    scaling_per_output_type = ScalingPerOutputType.TENSOR
    scaling_impl = AmaxScaling
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

    scaling_per_output_type = ScalingPerOutputType.CHANNEL


class Fp8e4m3WeightPerTensorDelayed(Fp8e4m3, DelayedAmaxScaling, WeightQuantSolver):
    """Weights in `float8_e4m3fn`, one scale, from the amaxes of earlier steps."""


class Fp8e4m3WeightPerTensorCurrent(Fp8e4m3, CurrentAmaxScaling, WeightQuantSolver):
    """Weights in `float8_e4m3fn`, one scale, from the weight itself."""


class Fp8e4m3WeightPerChannelDelayed(Fp8e4m3, PerOutputChannel, DelayedAmaxScaling, WeightQuantSolver):
    """Weights in `float8_e4m3fn`, a scale for each output channel, made from the amaxes of earlier steps."""


class Fp8e4m3WeightPerChannelCurrent(Fp8e4m3, PerOutputChannel, CurrentAmaxScaling, WeightQuantSolver):
    """Weights in `float8_e4m3fn`, a scale for each output channel, made from the channel itself."""


class Fp8e4m3ActPerTensorDelayed(Fp8e4m3, DelayedAmaxScaling, ActQuantSolver):
    """Activations in `float8_e4m3fn`, one scale, from the amaxes of earlier steps."""


class Fp8e4m3ActPerTensorCurrent(Fp8e4m3, CurrentAmaxScaling, ActQuantSolver):
    """Activations in `float8_e4m3fn`, one scale, from the tensor itself."""


class Fp8e5m2GradPerTensorDelayed(Fp8e5m2, DelayedAmaxScaling, GradQuantSolver):
    """Gradients in `float8_e5m2`, one scale, from the amaxes of earlier steps."""


class Fp8e5m2GradPerTensorCurrent(Fp8e5m2, CurrentAmaxScaling, GradQuantSolver):
    """Gradients in `float8_e5m2`, one scale, from the gradient itself."""


class Fp8e4m3GradPerTensorDelayed(Fp8e4m3, DelayedAmaxScaling, GradQuantSolver):
    """Gradients in `float8_e4m3fn`, one scale, from the amaxes of earlier steps."""


class Fp8e4m3GradPerTensorCurrent(Fp8e4m3, CurrentAmaxScaling, GradQuantSolver):
    """Gradients in `float8_e4m3fn`, one scale, from the gradient itself."""


class Fp8e4m3FNUZWeightPerTensorDelayed(Fp8e4m3FNUZ, DelayedAmaxScaling, WeightQuantSolver):
    """Weights in `float8_e4m3fnuz`, one scale, from the amaxes of earlier steps."""


class Fp8e4m3FNUZWeightPerTensorCurrent(Fp8e4m3FNUZ, CurrentAmaxScaling, WeightQuantSolver):
    """Weights in `float8_e4m3fnuz`, one scale, from the weight itself."""


class Fp8e4m3FNUZWeightPerChannelDelayed(
    Fp8e4m3FNUZ, PerOutputChannel, DelayedAmaxScaling, WeightQuantSolver
):
    """Weights in `float8_e4m3fnuz`, a scale for each output channel, made from the amaxes of earlier steps."""


class Fp8e4m3FNUZWeightPerChannelCurrent(
    Fp8e4m3FNUZ, PerOutputChannel, CurrentAmaxScaling, WeightQuantSolver
):
    """Weights in `float8_e4m3fnuz`, a scale for each output channel, made from the channel itself."""


class Fp8e4m3FNUZActPerTensorDelayed(Fp8e4m3FNUZ, DelayedAmaxScaling, ActQuantSolver):
    """Activations in `float8_e4m3fnuz`, one scale, from the amaxes of earlier steps."""


class Fp8e4m3FNUZActPerTensorCurrent(Fp8e4m3FNUZ, CurrentAmaxScaling, ActQuantSolver):
    """Activations in `float8_e4m3fnuz`, one scale, from the tensor itself."""


class Fp8e5m2FNUZGradPerTensorDelayed(Fp8e5m2FNUZ, DelayedAmaxScaling, GradQuantSolver):
    """Gradients in `float8_e5m2fnuz`, one scale, from the amaxes of earlier steps."""


class Fp8e5m2FNUZGradPerTensorCurrent(Fp8e5m2FNUZ, CurrentAmaxScaling, GradQuantSolver):
    """Gradients in `float8_e5m2fnuz`, one scale, from the gradient itself."""


class Fp8e4m3FNUZGradPerTensorDelayed(Fp8e4m3FNUZ, DelayedAmaxScaling, GradQuantSolver):
    """Gradients in `float8_e4m3fnuz`, one scale, from the amaxes of earlier steps."""


class Fp8e4m3FNUZGradPerTensorCurrent(Fp8e4m3FNUZ, CurrentAmaxScaling, GradQuantSolver):
    """Gradients in `float8_e4m3fnuz`, one scale, from the gradient itself."""
