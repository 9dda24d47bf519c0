"""The warning of `quantize` that its rules ask for weights and do not reach most of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from jqinject.model.inspect.coverage import coverage_of
from jqinject.model.quantizing.plan import LayerRule
from jqinject.model.quantizing.rules import Rule
from jqinject.model.walk import ModelIndex
from jqinject.program import Call

HALF = 0.5
SHOWN = 4


class LowCoverageWarning(UserWarning):
    """`quantize` reached less than half of the weight bytes that its rules ask for."""


def asked_bytes(index: ModelIndex, rules: Sequence[Rule]) -> dict[str, int]:
    """The bytes of each parameter of at least two axes that the rules want quantized, by path.

    Args:
        index: of the float model.
        rules: the first that matches a parameter's path, or its module's, counts.
    """
    found: dict[str, int] = {}
    for entry in index.variables:
        if entry.in_quantizer or not isinstance(entry.variable, nnx.Param) or entry.variable.ndim < 2:
            continue
        value = entry.variable.get_value()
        path = ".".join(entry.path)
        if is_asked(path, rules):
            found[path] = math.prod(value.shape) * np.dtype(value.dtype).itemsize
    return found


def is_asked(path: str, rules: Sequence[Rule]) -> bool:
    """Whether the rules want a parameter quantized."""
    for rule in rules:
        if rule.op is None and any(rule.matches(place) for place in (path, path.rpartition(".")[0])):
            return rule.configures or rule.quantizer("weight_quant") is not None
    return False


def reached_paths(
    index: ModelIndex, plan: Mapping[int, LayerRule], planned: Collection[str]
) -> frozenset[str]:
    """The paths of the modules and parameters whose weights the rules quantize.

    Args:
        index: of the float model.
        plan: its layers, by id.
        planned: paths of the parameters that it contracts by itself and that get a quantizer.
    """
    layers = (
        ".".join(path)
        for path, node in index.places
        if (entry := plan.get(id(node))) is not None and {"weight_quant", "contraction"} & {*entry.slots}
    )
    return frozenset((*layers, *planned))


def warn_of_low_coverage(
    asked: Mapping[str, int],
    reached: Collection[str],
    model: Any,
    calls: Sequence[Call],
    rules: Sequence[Rule],
) -> None:
    """Warn if less than half of the bytes that the rules ask for are reached.

    Args:
        asked: see `asked_bytes`.
        reached: see `reached_paths`.
        model: the quantized model.
        calls: that were traced.
        rules: the rules.

    Warns:
        LowCoverageWarning: with the coverage line, and the largest weights that are not reached.
    """
    here = sum(size for path, size in asked.items() if {path, path.rpartition(".")[0]} & {*reached})
    if here >= HALF * sum(asked.values()):
        return
    found = coverage_of(model, calls, rules)
    missed = [one for one in found.missed if is_asked(one.parameter, rules)]
    if here >= HALF * (here + sum(one.nbytes for one in missed)):
        return  # the others are only added or multiplied
    shown = "".join(f"\n    {one.parameter} ({one.size:,} numbers): {one.why}" for one in missed[:SHOWN])
    more = f"\n    and {len(missed) - SHOWN} more" if len(missed) > SHOWN else ""
    cure = (
        "jqinject.coverage(model, *inputs) lists every weight with why it stays float"
        if calls
        else "quantize(model, rules, inputs=(x,)), with arrays or jax.ShapeDtypeStructs: what a model contracts by "
        "itself is found by tracing it"
    )
    warnings.warn(
        f"quantize reached less than half of the weight bytes that the rules ask for.\n  {found.line}{shown}{more}\n"
        f"  cure: {cure}",
        LowCoverageWarning,
        3,
    )
