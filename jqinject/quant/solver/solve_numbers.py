"""The quantizer itself: its kind, its bit width, how it rounds and clamps."""

import numpy as np

from jqinject.core.clamp import TensorClamp, TensorClampSte
from jqinject.core.quantizers.decoupled import TruncIntQuant
from jqinject.core.quantizers.int_quant import IntQuant
from jqinject.core.quantizers.rescaling_int_quant import (
    BinaryQuant,
    ClampedBinaryQuant,
    PrescaledRestrictIntQuant,
    RescalingIntQuant,
    TernaryQuant,
)
from jqinject.inject import choices, value
from jqinject.quant.enums import (
    BitWidthImplType,
    FloatToIntImplType,
    LearnedRoundImplType,
    QuantType,
    ScalingImplType,
    ScalingPerOutputType,
    as_enum,
    chooses,
)
from jqinject.quant.solver.tables import BIT_WIDTH_IMPL, FLOAT_TO_INT_IMPL, LEARNED_ROUND_IMPL, pick

WEIGHT_TENSOR_QUANT = {
    QuantType.FP: None,
    QuantType.INT: RescalingIntQuant,
    QuantType.TERNARY: TernaryQuant,
    QuantType.BINARY: BinaryQuant,
}
ACT_TENSOR_QUANT = {**WEIGHT_TENSOR_QUANT, QuantType.BINARY: ClampedBinaryQuant}
PRESCALED_BIAS_TENSOR_QUANT = {QuantType.FP: None, QuantType.INT: PrescaledRestrictIntQuant}
OWN_SCALE_BIAS_TENSOR_QUANT = {QuantType.FP: None, QuantType.INT: RescalingIntQuant}
TRUNC_TENSOR_QUANT = {QuantType.FP: None, QuantType.INT: TruncIntQuant}
LEARNED_SCALING = (
    ScalingImplType.AFFINE_STATS,
    ScalingImplType.PARAMETER_FROM_STATS,
    ScalingImplType.PARAMETER,
)


@choices(RescalingIntQuant, TernaryQuant, BinaryQuant)
def weight_tensor_quant(quant_type, scaling_per_output=None):
    """`tensor_quant` of weights from `quant_type`."""
    _check_groups_fit(quant_type, scaling_per_output)
    return pick(QuantType, quant_type, WEIGHT_TENSOR_QUANT, "quant_type")


@choices(RescalingIntQuant, TernaryQuant, ClampedBinaryQuant)
def act_tensor_quant(quant_type, scaling_per_output=None):
    """`tensor_quant` of activations from `quant_type`."""
    _check_groups_fit(quant_type, scaling_per_output)
    return pick(QuantType, quant_type, ACT_TENSOR_QUANT, "quant_type")


@choices(PrescaledRestrictIntQuant, RescalingIntQuant)
def bias_tensor_quant(quant_type, requires_input_scale):
    """`tensor_quant` of biases from `quant_type` and from whether the scale comes in with the input."""
    table = PRESCALED_BIAS_TENSOR_QUANT if requires_input_scale else OWN_SCALE_BIAS_TENSOR_QUANT
    return pick(QuantType, quant_type, table, "quant_type")


@choices(TruncIntQuant)
def trunc_tensor_quant(quant_type):
    """`tensor_quant` of accumulators from `quant_type`."""
    return pick(QuantType, quant_type, TRUNC_TENSOR_QUANT, "quant_type")


def _check_groups_fit(quant_type, scaling_per_output):
    if chooses(scaling_per_output, ScalingPerOutputType.GROUP) and chooses(
        quant_type, QuantType.TERNARY, QuantType.BINARY
    ):
        raise ValueError(
            f"quant_type = {str(quant_type)!r} has no scales for groups.\n"
            "  cure: quant_type = 'int' with bit_width = 2, or scaling_per_output_type = 'channel'"
        )


@choices(IntQuant)
def int_quant(quant_type):
    """`int_quant` from `quant_type`."""
    return IntQuant if as_enum(QuantType, quant_type, name="quant_type") is QuantType.INT else None


@choices(*BIT_WIDTH_IMPL.values())
def bit_width_impl(bit_width_impl_type):
    """`bit_width_impl` from `bit_width_impl_type`."""
    return pick(BitWidthImplType, bit_width_impl_type, BIT_WIDTH_IMPL, "bit_width_impl_type")


@choices(*FLOAT_TO_INT_IMPL.values())
def float_to_int_impl(float_to_int_impl_type):
    """`float_to_int_impl` from `float_to_int_impl_type`."""
    return pick(FloatToIntImplType, float_to_int_impl_type, FLOAT_TO_INT_IMPL, "float_to_int_impl_type")


@choices(*LEARNED_ROUND_IMPL.values())
def learned_round_impl(learned_round_impl_type):
    """`learned_round_impl` from `learned_round_impl_type`."""
    return pick(LearnedRoundImplType, learned_round_impl_type, LEARNED_ROUND_IMPL, "learned_round_impl_type")


@value
def learned_round_init(tracked_parameter_list):
    """Where learned rounding starts: at 0 for each element of the weight."""
    if len(tracked_parameter_list) != 1:
        found = "no weight" if not tracked_parameter_list else f"{len(tracked_parameter_list)} weights"
        raise ValueError(
            "float_to_int_impl_type = 'learned_round' learns how each element of one weight is rounded, and this "
            f"quantizer has {found}.\n  cure: a quantizer of its own for each layer (weight_quant=MyQuantizer), "
            "and 'round' or 'stochastic_round' for activations"
        )
    return np.zeros(tracked_parameter_list[0].shape, np.float32)


@choices(TensorClamp, TensorClampSte)
def parameter_tensor_clamp_impl(bit_width_impl_type, scaling_impl_type):
    """`tensor_clamp_impl`: a learned scale or bit width needs the gradient of the clamped elements, others pass it."""
    learned = chooses(bit_width_impl_type, BitWidthImplType.PARAMETER) or chooses(
        scaling_impl_type, *LEARNED_SCALING
    )
    return TensorClamp if learned else TensorClampSte
