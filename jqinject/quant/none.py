"""No quantization, as a quantizer: a layer given one of these computes in float."""

from jqinject.quant.enums import QuantType
from jqinject.quant.solver import ActQuantSolver, BiasQuantSolver, TruncQuantSolver, WeightQuantSolver


class NoneWeightQuant(WeightQuantSolver):
    """Float weights."""

    quant_type = QuantType.FP


class NoneActQuant(ActQuantSolver):
    """Float activations."""

    quant_type = QuantType.FP


class NoneBiasQuant(BiasQuantSolver):
    """Float biases."""

    quant_type = QuantType.FP
    requires_input_scale = False


class NoneTruncQuant(TruncQuantSolver):
    """Accumulators with all their bits."""

    quant_type = QuantType.FP
