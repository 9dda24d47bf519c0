"""The catalogue of ready-made quantizers, read from a file next to this one: searched without importing JAX.

The file has an entry a line. `tools/catalogue_index.py` makes it from the quantizers themselves, and a
test compares it with them. A goal names the few quantizers to begin with.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from jqinject.inject import ExtendedInjector, errors
from jqinject.terminal import wrapped, wrapped_tree

FILTERS = ("kind", "format", "granularity", "scaling")


@dataclass(frozen=True)
class Entry:
    """One quantizer.

    Attributes:
        name: its name in `jqinject.quant`.
        kind: its role: weight, act, bias, grad or trunc.
        format: of its numbers: int8, uint8, fp8 e4m3, binary, ...
        granularity: what shares a scale: tensor, channel, group or row.
        scaling: where the scale comes from.
        about: its docstring without the example.
        given: the names that it leaves to its user, with the values of the example, as text.
        formulas: what each of its components computes, as items of a Markdown list.
        wiring: the tree of its components.
        points: its transfer curve, as the points of a line in a picture; empty if absent.
    """

    name: str
    kind: str
    format: str
    granularity: str
    scaling: str
    about: str = ""
    given: str = ""
    formulas: tuple[str, ...] = ()
    wiring: str = ""
    points: str = ""

    @property
    def quantizer(self) -> type[ExtendedInjector]:
        """The injector; looking it up imports JAX."""
        import jqinject.quant

        return getattr(jqinject.quant, self.name)

    @property
    def facts(self) -> dict[str, str]:
        """The values that `find` filters by."""
        return {name: vars(self)[name] for name in FILTERS}

    @property
    def summary(self) -> str:
        """The first paragraph of the docstring, on one line."""
        return " ".join(self.about.split("\n\n")[0].split())


@dataclass(frozen=True)
class Goal:
    """A usual goal, and the few quantizers to begin with.

    Attributes:
        aim: what is gained, and by which call.
        names: of the quantizers in `jqinject.quant`, separated by spaces.
    """

    aim: str
    names: str

    @property
    def quantizers(self) -> tuple[str, ...]:
        """The names of the quantizers in `jqinject.quant`."""
        return tuple(self.names.split())


GOALS = {
    "serve-int": Goal(
        "Integers contracted by integers: quantize, calibrate unless dynamic, freeze.",
        "Int8WeightPerChannelFloat Int8WeightPerChannelAbsMax Int8WeightPerTensorFloat "
        "Int8DynamicActPerRowAbsMax Int8DynamicActPerTensorAbsMax Int8ActPerTensorAbsMax "
        "Int8ActPerTensorMinMax Int8ActPerTensorMSE Int8ActPerTensorFloat Uint8ActPerTensorFloat Int32Bias",
    ),
    "ptq-8bit": Goal(
        "8 bits after training: post_training_quantize with calibration data.",
        "Int8WeightPerChannelFloat Int8WeightPerChannelFloatMSE Int8ActPerTensorMinMax "
        "Int8ActPerTensorAbsMax Int8ActPerTensorPercentile Int8ActPerTensorMSE "
        "Fp8e4m3OCPWeightPerChannelFloat Fp8e4m3OCPActPerTensorFloat",
    ),
    "ptq-4bit": Goal(
        "Weights in 4 bits after training, activations in float: less memory.",
        "Int4WeightPerGroupAbsMax IntWeightSymmetricGroupQuant IntWeightSymmetricGroupQuantMSE "
        "ShiftedUint8WeightGroupQuantFloat ShiftedUint8WeightPerGroupFloatHQO NF4WeightPerGroupFloat "
        "NF4WeightPerGroupFp8Scale MXFloat4e2m1Weight NVFP4Weight",
    ),
    "qat-int": Goal(
        "Integers trained in the loop, with learned scales: quantize, train, freeze.",
        "Int8WeightPerChannelFloat Int8WeightPerChannelLearned Int4WeightPerChannelLearned "
        "Int8ActPerTensorFloat Uint8ActPerTensorFloat Int32Bias",
    ),
    "qat-2bit": Goal(
        "Two bits, three values or two, trained in the loop.",
        "Int2WeightPerChannelLearned SignedTernaryWeightPerTensorConst SignedTernaryActPerTensorConst "
        "SignedBinaryWeightPerTensorConst SignedBinaryActPerTensorConst",
    ),
    "train-fp8": Goal(
        "Both passes in 8-bit floats: grad_quant= beside the others, value_and_grad.",
        "Fp8e4m3WeightPerTensorDelayed Fp8e4m3WeightPerTensorCurrent Fp8e4m3WeightPerChannelCurrent "
        "Fp8e4m3ActPerTensorDelayed Fp8e4m3ActPerTensorCurrent Fp8e5m2GradPerTensorDelayed "
        "Fp8e5m2GradPerTensorCurrent",
    ),
    "train-mx": Goal(
        "Both passes in MX formats: a power-of-two scale for 32 numbers.",
        "MXFloat8e4m3Weight MXFloat8e4m3Act MXFloat8e4m3Grad MXFloat8e5m2Grad MXFloat4e2m1Weight "
        "MXFloat4e2m1Act MXFloat4e2m1GradStochastic",
    ),
    "train-int8": Goal(
        "Both passes in integers.",
        "Int8WeightPerChannelFloat Int8DynamicActPerTensorAbsMax Int8DynamicActPerRowAbsMax "
        "Int8DynamicGradPerTensorFloatStochastic Int8DynamicGradPerRowFloatStochastic "
        "Int8GradPerTensorDelayed",
    ),
    "finetune-4bit": Goal(
        "Adapters on 4-bit weights, QLoRA: jqinject.lora with rules.",
        "NF4WeightPerGroupFp8Scale NF4WeightPerGroupFloat Int4WeightPerGroupAbsMax",
    ),
    "fixed-point": Goal(
        "Powers of two as scales: shifts instead of multiplications.",
        "Int8WeightPerTensorFixedPoint Int8WeightPerChannelFixedPoint Int8WeightPerChannelFixedPointMSE "
        "Int8ActPerTensorFixedPoint Uint8ActPerTensorFixedPoint Int8DynamicActPerRowFixedPoint "
        "Int8BiasPerTensorFixedPointInternalScaling RoundTo8bit ShiftRoundSaturateTo8bit",
    ),
    "accumulators": Goal(
        "Weights so small that narrow accumulators do not overflow: A2Q, A2Q+.",
        "Int8AccumulatorAwareWeightQuant Int8AccumulatorAwareZeroCenterWeightQuant Int8ActPerTensorFloat "
        "Uint8ActPerTensorFloat TruncTo8bit",
    ),
}


def goal_named(name: str) -> Goal:
    """Return the goal of a name.

    Raises:
        ValueError: no goal has it; the message suggests the nearest, or lists them all.

    Example:
        >>> goal_named("ptq-4bit").quantizers[0]
        'Int4WeightPerGroupAbsMax'
    """
    if name not in GOALS:
        hint = errors.did_you_mean(name, GOALS) or f"there are: {', '.join(GOALS)}"
        raise ValueError(f"there is no goal {name!r}; {hint}")
    return GOALS[name]


INDEX = Path(__file__).with_name("index.jsonl")


@functools.cache
def all_entries() -> tuple[Entry, ...]:
    """Return every ready-made quantizer, by name.

    Example:
        >>> all_entries()[0].kind in ("weight", "act", "bias", "grad", "trunc")
        True
    """
    lines = INDEX.read_text(encoding="utf-8").splitlines()
    read = (json.loads(line) for line in lines)
    return tuple(Entry(**{**fields, "formulas": tuple(fields["formulas"])}) for fields in read)


def entry_of(name: str) -> Entry:
    """Return the entry of one quantizer.

    Args:
        name: its name in `jqinject.quant`.

    Raises:
        ValueError: no quantizer has it; the message suggests the nearest.

    Example:
        >>> entry = entry_of("Int8WeightPerChannelFloat")
        >>> entry.kind, entry.format, entry.granularity, entry.scaling
        ('weight', 'int8', 'channel', 'statistics')
    """
    by_name = {entry.name: entry for entry in all_entries()}
    if name not in by_name:
        hint = errors.did_you_mean(name, by_name)
        raise ValueError(f"there is no quantizer {name!r}{': ' + hint if hint else ''}")
    return by_name[name]


def find(
    *,
    text: str = "",
    kind: str = "",
    format: str = "",
    granularity: str = "",
    scaling: str = "",
    goal: str = "",
) -> tuple[Entry, ...]:
    """Return the ready-made quantizers that match all criteria.

    Args:
        text: part of the name, in any case.
        kind, format, granularity, scaling: the entry's value, or its first words, in any case.
        goal: what they are for, one of `jqinject.catalogue.index.GOALS`.

    Raises:
        ValueError: no quantizer has this kind, format, granularity or scaling, or there is no such goal; the message
            lists those that exist.

    Example:
        >>> [entry.name for entry in find(kind="bias", text="16")]
        ['Int16Bias']
        >>> [entry.name for entry in find(goal="train-fp8", kind="grad")]
        ['Fp8e5m2GradPerTensorCurrent', 'Fp8e5m2GradPerTensorDelayed']
    """
    criteria = dict(zip(FILTERS, (kind, format, granularity, scaling), strict=True))
    entries = all_entries()
    for name, text_of in criteria.items():
        choices = sorted({entry.facts[name] for entry in entries})
        if text_of and not any(_is_of(choice, text_of) for choice in choices):
            raise ValueError(f"no quantizer has the {name} {text_of!r}; there are: {', '.join(choices)}")
    fitting = goal_named(goal).quantizers if goal else None
    return tuple(
        entry
        for entry in entries
        if text.lower() in entry.name.lower()
        and (fitting is None or entry.name in fitting)
        and all(_is_of(entry.facts[name], text_of) for name, text_of in criteria.items())
    )


def _is_of(fact: str, text: str) -> bool:
    return fact.lower().startswith(text.lower())


def described(entry: Entry, changed: str = "") -> str:
    """One quantizer for the terminal: docstring, facts, formulas and wiring.

    Args:
        entry: its entry, with the overrides.
        changed: the names that the reader redeclared, as text; the docstring describes the quantizer without them.
    """
    width = max(map(len, FILTERS))
    facts = [f"  {name.ljust(width)}  {fact}" for name, fact in entry.facts.items()]
    several = ", " in changed
    return "\n".join(
        [
            f"{entry.name} with {changed}" if changed else entry.name,
            "",
            wrapped(f"Without {'them' if several else 'it'}: {entry.about}" if changed else entry.about),
            "",
            *facts,
            "",
            "Formulas",
            "",
            *(wrapped(formula, hang="  ") for formula in entry.formulas),
            "",
            "Wiring",
            "",
            wrapped_tree(entry.wiring),
        ]
    )
