"""What quantizers are for: the few to begin with, for each of the usual goals."""

from __future__ import annotations

from dataclasses import dataclass

from jqinject.inject.errors import did_you_mean


@dataclass(frozen=True)
class Goal:
    """One goal.

    Attributes:
        aim: what is gained, and by which call.
        quantizers: their names in `jqinject.quant`.
    """

    aim: str
    quantizers: tuple[str, ...]


GOALS = {
    "serve-int": Goal(
        "Integers contracted by integers: quantize, calibrate unless dynamic, freeze.",
        (
            "Int8WeightPerChannelFloat",
            "Int8WeightPerChannelAbsMax",
            "Int8WeightPerTensorFloat",
            "Int8DynamicActPerRowAbsMax",
            "Int8DynamicActPerTensorAbsMax",
            "Int8ActPerTensorAbsMax",
            "Int8ActPerTensorMinMax",
            "Int8ActPerTensorMSE",
            "Int8ActPerTensorFloat",
            "Uint8ActPerTensorFloat",
            "Int32Bias",
        ),
    ),
    "ptq-8bit": Goal(
        "8 bits after training: post_training_quantize with calibration data.",
        (
            "Int8WeightPerChannelFloat",
            "Int8WeightPerChannelFloatMSE",
            "Int8ActPerTensorMinMax",
            "Int8ActPerTensorAbsMax",
            "Int8ActPerTensorPercentile",
            "Int8ActPerTensorMSE",
            "Fp8e4m3OCPWeightPerChannelFloat",
            "Fp8e4m3OCPActPerTensorFloat",
        ),
    ),
    "ptq-4bit": Goal(
        "Weights in 4 bits after training, activations in float: less memory.",
        (
            "Int4WeightPerGroupAbsMax",
            "IntWeightSymmetricGroupQuant",
            "IntWeightSymmetricGroupQuantMSE",
            "ShiftedUint8WeightGroupQuantFloat",
            "ShiftedUint8WeightPerGroupFloatHQO",
            "NF4WeightPerGroupFloat",
            "NF4WeightPerGroupFp8Scale",
            "MXFloat4e2m1Weight",
            "NVFP4Weight",
        ),
    ),
    "qat-int": Goal(
        "Integers trained in the loop, with learned scales: quantize, train, freeze.",
        (
            "Int8WeightPerChannelFloat",
            "Int8WeightPerChannelLearned",
            "Int4WeightPerChannelLearned",
            "Int8ActPerTensorFloat",
            "Uint8ActPerTensorFloat",
            "Int32Bias",
        ),
    ),
    "qat-2bit": Goal(
        "Two bits, three values or two, trained in the loop.",
        (
            "Int2WeightPerChannelLearned",
            "SignedTernaryWeightPerTensorConst",
            "SignedTernaryActPerTensorConst",
            "SignedBinaryWeightPerTensorConst",
            "SignedBinaryActPerTensorConst",
        ),
    ),
    "train-fp8": Goal(
        "Both passes in 8-bit floats: grad_quant= beside the others, value_and_grad.",
        (
            "Fp8e4m3WeightPerTensorDelayed",
            "Fp8e4m3WeightPerTensorCurrent",
            "Fp8e4m3WeightPerChannelCurrent",
            "Fp8e4m3ActPerTensorDelayed",
            "Fp8e4m3ActPerTensorCurrent",
            "Fp8e5m2GradPerTensorDelayed",
            "Fp8e5m2GradPerTensorCurrent",
        ),
    ),
    "train-mx": Goal(
        "Both passes in MX formats: a power-of-two scale for 32 numbers.",
        (
            "MXFloat8e4m3Weight",
            "MXFloat8e4m3Act",
            "MXFloat8e4m3Grad",
            "MXFloat8e5m2Grad",
            "MXFloat4e2m1Weight",
            "MXFloat4e2m1Act",
            "MXFloat4e2m1GradStochastic",
        ),
    ),
    "train-int8": Goal(
        "Both passes in integers.",
        (
            "Int8WeightPerChannelFloat",
            "Int8DynamicActPerTensorAbsMax",
            "Int8DynamicActPerRowAbsMax",
            "Int8DynamicGradPerTensorFloatStochastic",
            "Int8DynamicGradPerRowFloatStochastic",
            "Int8GradPerTensorDelayed",
        ),
    ),
    "finetune-4bit": Goal(
        "Adapters on 4-bit weights, QLoRA: jqinject.lora with rules.",
        ("NF4WeightPerGroupFp8Scale", "NF4WeightPerGroupFloat", "Int4WeightPerGroupAbsMax"),
    ),
    "fixed-point": Goal(
        "Powers of two as scales: shifts instead of multiplications.",
        (
            "Int8WeightPerTensorFixedPoint",
            "Int8WeightPerChannelFixedPoint",
            "Int8WeightPerChannelFixedPointMSE",
            "Int8ActPerTensorFixedPoint",
            "Uint8ActPerTensorFixedPoint",
            "Int8DynamicActPerRowFixedPoint",
            "Int8BiasPerTensorFixedPointInternalScaling",
            "RoundTo8bit",
            "ShiftRoundSaturateTo8bit",
        ),
    ),
    "accumulators": Goal(
        "Weights so small that narrow accumulators do not overflow: A2Q, A2Q+.",
        (
            "Int8AccumulatorAwareWeightQuant",
            "Int8AccumulatorAwareZeroCenterWeightQuant",
            "Int8ActPerTensorFloat",
            "Uint8ActPerTensorFloat",
            "TruncTo8bit",
        ),
    ),
}


def goal_named(name: str) -> Goal:
    """The goal of a name.

    Raises:
        ValueError: there is none; the message suggests the nearest, or lists them all.

    Example:
        >>> goal_named("ptq-4bit").quantizers[0]
        'Int4WeightPerGroupAbsMax'
    """
    if name not in GOALS:
        hint = did_you_mean(name, GOALS) or f"there are: {', '.join(GOALS)}"
        raise ValueError(f"there is no goal {name!r}; {hint}")
    return GOALS[name]
