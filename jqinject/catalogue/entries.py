"""The facts about every ready-made quantizer, read from its wiring."""

import ast
import functools
import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

import jqinject.core
import jqinject.quant
from jqinject.catalogue import examples, index
from jqinject.dot import Scheme
from jqinject.inject import ExtendedInjector, Node, errors, explain
from jqinject.ops import NF4, Codebook
from jqinject.quant.float_base import FpFNUZMixin, FpOCPMixin

# Components by the reader's search term; subclasses count too. Methods take precedence over scalings.
SCALINGS = {
    "ConstScaling": "constant",
    "ParameterScaling": "parameter",
    "StatsFromParameterScaling": "statistics",
    "RuntimeStatsScaling": "running statistics",
    "ParameterFromStatsFromParameterScaling": "parameter from statistics",
    "LearnedActStepScaling": "learned step",
    "LearnedStepScaling": "learned step",
    "ParameterFromRuntimeStatsScaling": "parameter from statistics",
    "AmaxScaling": "delayed",
    "RuntimeDynamicStatsScaling": "dynamic",
    "RuntimeDynamicGroupStatsScaling": "dynamic",
    "SharedExponentScaling": "dynamic",
    "RuntimeDynamicTwoLevelScaling": "dynamic",
    "PrescaledRestrictIntQuant": "of input and weight",
    "TruncIntQuant": "of the accumulator",
}
METHODS = {
    "AccumulatorAwareParameterPreScaling": "accumulator-aware",
    "AccumulatorAwareZeroCenterParameterPreScaling": "accumulator-aware",
    "ParameterPreScalingWeightNorm": "weight normalization",
    "MSE": "mean squared error",
    "HalfQuadraticOptimizerScale": "half-quadratic",
    "HalfQuadraticOptimizerZeroPoint": "half-quadratic",
}


@functools.cache
def ready_made() -> dict[str, type[ExtendedInjector]]:
    """The quantizers that `jqinject.quant` offers, by name."""
    quantizers = {
        name: member
        for name, member in vars(jqinject.quant).items()
        if isinstance(member, type)
        and issubclass(member, ExtendedInjector)
        and not issubclass(member, Scheme)
    }
    return dict(sorted(quantizers.items()))


def entry_from_wiring(
    name: str, quantizer: type[ExtendedInjector], overrides: Mapping[str, object]
) -> index.Entry:
    """The entry of any quantizer, also a user's own, with some names redeclared; all but its curve.

    Args:
        name: the title.
        quantizer: the injector.
        overrides: the redeclared names.

    Raises:
        DependencyError, TypeError, ValueError: the quantizer cannot be assembled like this.
    """
    return entry_of_example(name, quantizer, examples.example_of(quantizer, overrides))


def entry_of_example(name: str, quantizer: type[ExtendedInjector], example: examples.Example) -> index.Entry:
    """The entry of a quantizer in a layer; all but its curve.

    Args:
        name: the title.
        quantizer: the injector.
        example: the layer.
    """
    tree = explain(example.proxy, module=example.layer)
    formulas = (
        f"- `{node.name}` {node.value.__name__}: {summary_of(node.value)}" for node in components_of(tree)
    )
    kind = examples.kind_of(quantizer)
    return index.Entry(
        name,
        kind,
        format=_format(tree) + _variant(quantizer),
        granularity=_granularity(tree),
        scaling=_scaling(tree, kind),
        about=(inspect.getdoc(quantizer) or "").split("\n\nExample:")[0],
        given=_shown(example.overrides),
        formulas=tuple(formulas),
        wiring=str(tree),
    )


def summary_of(quantizer: type) -> str:
    """The first sentence of a docstring."""
    paragraph = (inspect.getdoc(quantizer) or "").split("\n\n")[0]
    return " ".join(paragraph.split())


def components_of(wiring: Node) -> Iterable[Node]:
    """The components of a wiring, the outermost first, each kind once."""
    kinds: set[type] = set()
    for node in wiring.walk():
        is_component = node.kind in ("component", "link") and isinstance(node.value, type)
        if is_component and node.value not in kinds:
            kinds.add(node.value)
            yield node


def _format(wiring: Node) -> str:
    if wiring.value is None:
        return "float"
    bases = [base.__name__ for base in wiring.value.__mro__]
    for plain in ("Binary", "Ternary"):
        if any(plain in base for base in bases):
            return plain.lower()
    if "CodebookQuant" in bases:
        codebook = Codebook.of(wiring["codebook"].value)
        return "nf4" if codebook == NF4 else f"codebook of {len(codebook.table)}"
    if _value(wiring, "q_dtype") is not None:
        return np.dtype(wiring["q_dtype"].value).name.replace("float", "fp").replace("_", " ")
    if "FloatQuant" in bases:
        exponent, mantissa = wiring["exponent_bit_width"].value, wiring["mantissa_bit_width"].value
        return f"fp{1 + exponent + mantissa} e{exponent}m{mantissa}"
    return f"{'uint' if _value(wiring, 'signed') is False else 'int'}{_value(wiring, 'bit_width')}"


def _variant(quantizer: type[ExtendedInjector]) -> str:
    """Whose codes a minifloat has: those of the Open Compute Project, or finite ones with one zero."""
    return (
        " ocp" if issubclass(quantizer, FpOCPMixin) else " fnuz" if issubclass(quantizer, FpFNUZMixin) else ""
    )


def _granularity(wiring: Node) -> str:
    if wiring.value is not None and _value(wiring, "scaling_impl") is None and "scaling_impl" in wiring:
        return "unscaled"
    if _value(wiring, "group_size"):
        return "group"
    if _value(wiring, "channelwise_axes"):
        return "channel"
    if _value(wiring, "shared_axes") or _value(wiring, "stats_reduce_dim") == -1:
        return "row"
    return str(_value(wiring, "scaling_per_output_type") or "tensor")


def _scaling(wiring: Node, kind: str) -> str:
    if _granularity(wiring) == "unscaled":
        return "none"
    bases = [base.__name__ for node in components_of(wiring) for base in node.value.__mro__]
    if "RangeScaling" in bases:
        calibrated = "calibrated" if "SimpleMovingAverage" in bases else "dynamic"
        return "statistics" if kind == "weight" else calibrated
    if _value(wiring, "delayed") is False:
        return "current"
    tables = (METHODS, SCALINGS)
    return next((table[base] for table in tables for base in bases if base in table), "-")


def _value(wiring: Node, name: str) -> Any:
    return wiring[name].value if name in wiring else None


def _shown(overrides: Mapping[str, object]) -> str:
    if not overrides:
        return ""
    return "; here with " + ", ".join(f"`{name}={value!r}`" for name, value in overrides.items())


def explained_anew(name: str, overrides: Sequence[str]) -> str:
    """The text of `explain`, made from the classes. See `jqinject.catalogue.catalogue_command.explained`."""
    quantizer = quantizer_named(name)
    values = dict(_override(text) for text in overrides)
    changed = ", ".join(f"{name}={errors.brief(value)}" for name, value in values.items())
    return index.described(entry_from_wiring(name, quantizer, values), changed)


def quantizer_named(name: str) -> type[ExtendedInjector]:
    """The quantizer of a name.

    Args:
        name: of `jqinject.quant`, or a reader's own as `package.module:Name`.

    Raises:
        ValueError: no quantizer has this name; the message suggests the nearest.
    """
    if ":" not in name:
        return index.entry_of(name).quantizer
    module, _, attribute = name.partition(":")
    try:
        quantizer = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} cannot be imported: {error}") from None
    if not (isinstance(quantizer, type) and issubclass(quantizer, ExtendedInjector)):
        raise ValueError(f"{name} is not a quantizer: expected a class derived from ExtendedInjector")
    return quantizer


def _override(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise ValueError(f"an override is name=value, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, getattr(jqinject.core, value, value)
