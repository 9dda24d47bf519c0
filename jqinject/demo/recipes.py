"""The quantizers of the main job, composed as a user would: subclasses that override a name or two."""

from dataclasses import dataclass
from typing import Any

from jqinject.model import Rule
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8ActPerTensorMinMax,
    Int8WeightPerChannelFloat,
    Int32Bias,
    Uint8ActPerTensorFloat,
)

CALIBRATION_STEPS = 8


class Image(Int8ActPerTensorFloat):
    """8-bit pixels, calibrated in a few batches."""

    collect_stats_steps = CALIBRATION_STEPS
    scaling_stats_op = "max"


class Act8(Uint8ActPerTensorFloat):
    """8-bit results of a ReLU, calibrated in a few batches."""

    collect_stats_steps = CALIBRATION_STEPS


class Act4(Act8):
    """The same in 4 bits."""

    bit_width = 4


class Weight4(Int8WeightPerChannelFloat):
    """4-bit weights, a scale for each output channel."""

    bit_width = 4


class TernaryWeightByThreshold(Int8WeightPerChannelFloat):
    """-s, 0 or s for each output channel: s is the mean magnitude, and what is below 0.7 s is 0 (Li et al., 2016)."""

    quant_type = "ternary"
    threshold = 0.7
    scaling_stats_op = "ave"


class BinaryWeight(Int8WeightPerChannelFloat):
    """-s or s for each output channel: s is the mean magnitude (Rastegari et al., 2016)."""

    quant_type = "binary"
    scaling_stats_op = "ave"


@dataclass(frozen=True)
class DemoRecipe:
    """How the classifier is quantized.

    Attributes:
        name: for the table.
        weight: quantizer of the inner weights.
        weight_bits: their bits.
        act: quantizer of the activations.
        act_bits: their bits.
        epochs: of quantization-aware training; 0 for none.
    """

    name: str
    weight: Any
    weight_bits: float
    act: Any
    act_bits: int
    epochs: int


RECIPES = (
    DemoRecipe("int8, no training", Int8WeightPerChannelFloat, 8, Act8, 8, epochs=0),
    DemoRecipe("int4", Weight4, 4, Act4, 4, epochs=15),
    DemoRecipe("ternary", TernaryWeightByThreshold, 2, Act8, 8, epochs=20),
    DemoRecipe("binary", BinaryWeight, 1, Act8, 8, epochs=20),
)


@dataclass(frozen=True)
class RuleRecipe:
    """How the float classifier itself is quantized.

    Attributes:
        name: for the table.
        rule: for all its layers.
        weight_bits: of their weights.
        epochs: of quantization-aware training; 0 for none.
    """

    name: str
    rule: Rule
    weight_bits: int
    epochs: int


STATIC_INT8 = Rule(
    weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorMinMax, bias_quant=Int32Bias
)
STATIC_INT4_WEIGHTS = Rule(weight_quant=Weight4, input_quant=Int8ActPerTensorMinMax, bias_quant=Int32Bias)
RULE_RECIPES = (
    RuleRecipe("int8, static PTQ", STATIC_INT8, 8, epochs=0),
    RuleRecipe("4-bit weights, QAT", STATIC_INT4_WEIGHTS, 4, epochs=5),
)
