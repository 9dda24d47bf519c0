"""The plan of `quantize` by itself: which layers every rule matches, and which ranges must see data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jqinject.core import StaticRange
from jqinject.model.inspect import page
from jqinject.model.inspect.coverage import Coverage, coverage_of
from jqinject.model.quantizing.parameter_sites import plan_parameters
from jqinject.model.quantizing.quantize_model import planned_model, quantize_layer
from jqinject.model.quantizing.rule_policy import (
    NO_SITES,
    Methods,
    RulePolicy,
    held_at,
    plan_sites,
    traced_calls,
)
from jqinject.model.quantizing.rules import (
    LayerRule,
    Rule,
    check_operations,
    checked_rules,
    idle_rules,
    plan_layers,
)
from jqinject.model.walk import ModelIndex, static_ranges, uncalibrated
from jqinject.program import HELD, Call, QuantizedProgram, Site
from jqinject.terminal import table, wrapped


@dataclass(frozen=True)
class RulesReport:
    """Which layers every rule matches, and which rules match none.

    `str()` shows it as a table.

    Attributes:
        rules: the rules.
        layers: an entry for every layer that could be quantized, by path.
        sites: names of the quantized sites between layers; empty if no inputs were given.
        idle: indices of the rules that match nothing.
        uncalibrated: paths of activation quantizers whose static range must see data first (`calibrate`, or training).
        coverage: which weights the rules quantize, how, and why not the others.
    """

    rules: tuple[Rule, ...]
    layers: tuple[LayerRule, ...]
    sites: tuple[str, ...]
    idle: tuple[int, ...]
    uncalibrated: tuple[str, ...]
    coverage: Coverage

    def __str__(self) -> str:
        names, rows = self.table()
        lines = [f"between layers: {name}" for name in self.sites]
        lines += [f"rule {index}: {rule}" for index, rule in enumerate(self.rules)]
        lines += [f"rule {index} takes nothing" for index in self.idle]
        lines += [f"to be calibrated: {path}" for path in self.uncalibrated]
        lines += self.coverage.summary
        return "\n".join([*table(names, rows), *(wrapped(line, hang="  ") for line in lines)])

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """The layers as a table: the names of its columns, and its rows."""
        rows = [
            (entry.path, entry.layer, "-" if entry.rule is None else str(entry.rule), ", ".join(entry.slots))
            for entry in self.layers
        ]
        return ("layer", "class", "rule", "quantizers"), [(*row[:3], row[3] or "stays float") for row in rows]

    def _repr_html_(self) -> str:
        return f'<div class="jqinject">{page.table(*self.table())}</div>{self.coverage._repr_html_()}'


def rules_report(
    model: object,
    rules: Rule | Iterable[Rule],
    *inputs: object,
    methods: Methods | None = None,
    **kwargs: object,
) -> RulesReport:
    """Report which layers of a model every rule matches, and which rules match none; nothing is changed.

    Args:
        model: a float NNX module, concrete or abstract.
        rules: as for `quantize`.
        inputs: the model's arguments, if rules are for operations between layers.
        methods: the arguments of other methods, as for `quantize`.
        kwargs: its keyword arguments.

    Returns:
        The plan, and which of its static ranges must see data before serving.

    Raises:
        TypeError: `model` is not an NNX module; `rules` are not rules; a quantizer does not fit its slot.
        ValueError: a rule names an operation that does not exist; the model has no such method.

    Example:
        >>> from jqinject.quant import Int8WeightPerChannelFloat
        >>> model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
        >>> print(rules_report(model, Rule(".*0", weight_quant=Int8WeightPerChannelFloat)))
        layer     class   rule  quantizers
        layers.0  Linear  0     weight_quant
        layers.1  Linear  -     stays float
        rule 0: Rule('.*0', weight_quant=Int8WeightPerChannelFloat)
        coverage: 1 of 2 matrices quantized, 66.7% of the weight bytes, multiply-adds unknown
        not quantized: 1 more, of at most 1,024 numbers each
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"rules_report takes an NNX module, got {type(model).__name__}")
    checked = checked_rules(rules)
    check_operations(checked)
    call = Call(inputs, kwargs) if inputs or kwargs else None
    calls = traced_calls(model, call, methods, "rules_report")
    index = ModelIndex(model)
    entries, plan = plan_layers(index, checked)
    sites = plan_sites(model, RulePolicy(checked), calls) if calls else NO_SITES
    planned = plan_parameters(sites.uses)
    unseen = (*uncalibrated(index), *planned_ranges(index, checked, plan, sites.sites.values()))
    names = (*planned, *sites.sites)
    quantized = isinstance(model, QuantizedProgram)
    covered = coverage_of(model if quantized else planned_model(model, checked, sites, calls), calls, checked)
    return RulesReport(checked, entries, names, idle_rules(checked, entries, sites.used), unseen, covered)


def planned_ranges(
    index: ModelIndex, rules: tuple[Rule, ...], plan: Mapping[int, LayerRule], sites: Iterable[Site]
) -> Iterator[str]:
    """Paths of the static ranges that rules would create, all without data yet; nothing is changed.

    One layer of each class is quantized for each rule, abstractly.

    Args:
        index: of a float model.
        rules: the rules.
        plan: identity of a layer -> its rule.
        sites: the quantized sites between layers.
    """
    root = index.places[0][1]
    ranges: dict[Any, tuple[str, ...]] = {}
    for layer in index.modules:
        entry = plan.get(id(layer))
        if entry is None or entry.rule is None or not entry.slots:
            continue
        kind = (entry.rule, entry.layer, entry.slots)
        if kind not in ranges:
            ranges[kind] = _ranges_of(layer, rules[entry.rule], entry)
        yield from (f"{entry.path}.{name}" if layer is not root else name for name in ranges[kind])
    for site in sites:
        if held_at(site, nnx.Rngs(0)).has_range() is not None:
            yield f"{HELD}.held.{site.name}"


def _ranges_of(layer: object, rule: Rule, entry: LayerRule) -> tuple[str, ...]:
    """The attributes of a layer that will hold static ranges."""
    if rule.shares:  # with existing quantizers, which may have seen data
        quantizers = ((slot, rule.quantizer(slot)) for slot in entry.slots)
        return tuple(slot for slot, q in quantizers if isinstance(q, StaticRange) and q.has_range() is False)
    paths: list[str] = []

    def quantized(layer: object) -> tuple[()]:
        quantize_layer(layer, rule, entry, nnx.Rngs(0))
        paths.extend(
            path
            for path, holder in static_ranges(ModelIndex(layer)).items()
            if holder.has_range() is not None
        )
        return ()

    nnx.eval_shape(quantized, nnx.clone(layer, graph=True))
    return tuple(paths)
