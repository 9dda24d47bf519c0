"""8-bit floats for weights, activations and gradients, scaled by earlier steps (Delayed) or by the tensor (Current).

Names read as in Brevitas: the format (`Fp8e4m3`, `Fp8e5m2`; `FNUZ` for the formats without negative zero), what is
quantized, what shares a scale, and where the scale comes from.
"""

from jqinject.quant import float_base


class Fp8e4m3WeightPerTensorDelayed(float_base.Fp8e4m3, float_base.DelayedWeight):
    """Weights in `float8_e4m3fn`, one scale, from the amaxes of earlier steps."""


class Fp8e4m3WeightPerTensorCurrent(float_base.Fp8e4m3, float_base.CurrentWeight):
    """Weights in `float8_e4m3fn`, one scale, from the weight itself."""


class Fp8e4m3WeightPerChannelDelayed(float_base.PerOutputChannel, Fp8e4m3WeightPerTensorDelayed):
    """Weights in `float8_e4m3fn`, a scale for each output channel, made from the amaxes of earlier steps."""


class Fp8e4m3WeightPerChannelCurrent(float_base.PerOutputChannel, Fp8e4m3WeightPerTensorCurrent):
    """Weights in `float8_e4m3fn`, a scale for each output channel, made from the channel itself."""


class Fp8e4m3ActPerTensorDelayed(float_base.Fp8e4m3, float_base.DelayedAct):
    """Activations in `float8_e4m3fn`, one scale, from the amaxes of earlier steps."""


class Fp8e4m3ActPerTensorCurrent(float_base.Fp8e4m3, float_base.CurrentAct):
    """Activations in `float8_e4m3fn`, one scale, from the tensor itself."""


class Fp8e5m2GradPerTensorDelayed(float_base.Fp8e5m2, float_base.DelayedGrad):
    """Gradients in `float8_e5m2`, one scale, from the amaxes of earlier steps."""


class Fp8e5m2GradPerTensorCurrent(float_base.Fp8e5m2, float_base.CurrentGrad):
    """Gradients in `float8_e5m2`, one scale, from the gradient itself."""


class Fp8e4m3GradPerTensorDelayed(float_base.Fp8e4m3, float_base.DelayedGrad):
    """Gradients in `float8_e4m3fn`, one scale, from the amaxes of earlier steps."""


class Fp8e4m3GradPerTensorCurrent(float_base.Fp8e4m3, float_base.CurrentGrad):
    """Gradients in `float8_e4m3fn`, one scale, from the gradient itself."""


class Fp8e4m3FNUZWeightPerTensorDelayed(float_base.Fp8e4m3FNUZ, float_base.DelayedWeight):
    """Weights in `float8_e4m3fnuz`, one scale, from the amaxes of earlier steps."""


class Fp8e4m3FNUZWeightPerTensorCurrent(float_base.Fp8e4m3FNUZ, float_base.CurrentWeight):
    """Weights in `float8_e4m3fnuz`, one scale, from the weight itself."""


class Fp8e4m3FNUZWeightPerChannelDelayed(float_base.PerOutputChannel, Fp8e4m3FNUZWeightPerTensorDelayed):
    """Weights in `float8_e4m3fnuz`, a scale for each output channel, made from the amaxes of earlier steps."""


class Fp8e4m3FNUZWeightPerChannelCurrent(float_base.PerOutputChannel, Fp8e4m3FNUZWeightPerTensorCurrent):
    """Weights in `float8_e4m3fnuz`, a scale for each output channel, made from the channel itself."""


class Fp8e4m3FNUZActPerTensorDelayed(float_base.Fp8e4m3FNUZ, float_base.DelayedAct):
    """Activations in `float8_e4m3fnuz`, one scale, from the amaxes of earlier steps."""


class Fp8e4m3FNUZActPerTensorCurrent(float_base.Fp8e4m3FNUZ, float_base.CurrentAct):
    """Activations in `float8_e4m3fnuz`, one scale, from the tensor itself."""


class Fp8e5m2FNUZGradPerTensorDelayed(float_base.Fp8e5m2FNUZ, float_base.DelayedGrad):
    """Gradients in `float8_e5m2fnuz`, one scale, from the amaxes of earlier steps."""


class Fp8e5m2FNUZGradPerTensorCurrent(float_base.Fp8e5m2FNUZ, float_base.CurrentGrad):
    """Gradients in `float8_e5m2fnuz`, one scale, from the gradient itself."""


class Fp8e4m3FNUZGradPerTensorDelayed(float_base.Fp8e4m3FNUZ, float_base.DelayedGrad):
    """Gradients in `float8_e4m3fnuz`, one scale, from the amaxes of earlier steps."""


class Fp8e4m3FNUZGradPerTensorCurrent(float_base.Fp8e4m3FNUZ, float_base.CurrentGrad):
    """Gradients in `float8_e4m3fnuz`, one scale, from the gradient itself."""
