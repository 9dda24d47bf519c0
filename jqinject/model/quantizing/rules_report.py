"""Which rule is for which layer of a model: the plan of `quantize`, also on its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jqinject.inject.errors import did_you_mean
from jqinject.model.frozen_ops import op_slot
from jqinject.model.quantizing.counterparts import LAYER_NAMES, counterpart_of, slots_for
from jqinject.model.quantizing.rules import Rule, checked_rules, matches_path
from jqinject.model.static_ranges import uncalibrated
from jqinject.model.walk import dotted, walk
from jqinject.program import known_operations


@dataclass(frozen=True)
class LayerRule:
    """The rule of one layer.

    Attributes:
        path: where the layer is.
        layer: its class.
        rule: index of the rule; None where none matches.
        slots: the quantizers that it gets; empty where it stays float.
    """

    path: str
    layer: str
    rule: int | None
    slots: tuple[str, ...]


@dataclass(frozen=True)
class RulesReport:
    """Which layer every rule takes, and which rules take none.

    `str()` of it is a table.

    Attributes:
        rules: the rules.
        layers: an entry for every layer that could be quantized, by path.
        sites: names of the places between layers that are quantized; empty where no inputs were given.
        idle: indices of the rules that take nothing.
        uncalibrated: paths of the quantizers of activations whose static range is to see data first (`calibrate`, or
            training).
    """

    rules: tuple[Rule, ...]
    layers: tuple[LayerRule, ...]
    sites: tuple[str, ...] = ()
    idle: tuple[int, ...] = ()
    uncalibrated: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [("layer", "class", "rule", "quantizers")]
        for entry in self.layers:
            number = "-" if entry.rule is None else str(entry.rule)
            rows.append((entry.path, entry.layer, number, ", ".join(entry.slots) or "stays float"))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += [f"between layers: {name}" for name in self.sites]
        lines += [f"rule {index}: {rule}" for index, rule in enumerate(self.rules)]
        lines += [f"rule {index} takes nothing" for index in self.idle]
        lines += [f"to be calibrated: {path}" for path in self.uncalibrated]
        return "\n".join(lines)


def plan_layers(model: Any, rules: tuple[Rule, ...]) -> tuple[tuple[LayerRule, ...], dict[int, LayerRule]]:
    """The rule of every layer, by path; and by the identity of the module, shared layers once."""
    entries: list[LayerRule] = []
    by_module: dict[int, LayerRule] = {}
    inside: set[tuple[str, ...]] = set()
    for path, module in walk(model):
        counterpart = counterpart_of(module) if isinstance(module, nnx.Module) else None
        if (
            counterpart is None
            or id(module) in by_module
            or any(path[:depth] in inside for depth in range(len(path)))
        ):
            continue
        inside.add(path)  # a layer of ours holds what is within it
        kind = type(module).__name__
        index = next(
            (i for i, r in enumerate(rules) if r.matches(".".join(path)) and (r.op is None or kind in r.op)),
            None,
        )
        slots: tuple[str, ...] = ()
        if index is not None:
            takes = slots_for(module, counterpart, named=rules[index].op is not None)
            slots = tuple(slot for slot, _ in rules[index].quantizers if slot in takes)
            if rules[index].configures and op_slot(module) is not None:
                slots = ("contraction",)
        by_module[id(module)] = LayerRule(dotted(path), kind, index, slots)
        entries.append(by_module[id(module)])
    return tuple(entries), by_module


def check_operations(rules: Iterable[Rule]) -> None:
    """Refuse names that are neither operations nor layers.

    Raises:
        ValueError: such a name; says the nearest.
    """
    known = (*known_operations(), *LAYER_NAMES)
    for rule in rules:
        for name in rule.op or ():
            if name not in known:
                hint = did_you_mean(name, known)
                raise ValueError(
                    f"{rule}: {name!r} is neither an operation nor a layer{': ' + hint if hint else '.'}\n"
                    f"  operations: {', '.join(known_operations())}\n  layers: {', '.join(LAYER_NAMES)}"
                )


def rules_report(model: Any, rules: Rule | Iterable[Rule], *inputs: Any, **kwargs: Any) -> RulesReport:
    """Which layer of a model every rule takes, and which rules take none; nothing is changed.

    Args:
        model: a float NNX module, concrete or abstract.
        rules: as for `quantize`.
        inputs: what the model is called with, where rules are for operations between layers.
        kwargs: by keyword.

    Returns:
        The plan, and which of its static ranges have to see data before they are served.

    Raises:
        TypeError: `model` is no NNX module; `rules` are no rules; a quantizer that does not fit its slot.
        ValueError: a rule names an operation that there is not.

    Example:
        >>> from jqinject.quant import Int8WeightPerChannelFloat
        >>> model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
        >>> print(rules_report(model, Rule(".*0", weight_quant=Int8WeightPerChannelFloat)))
        layer     class   rule  quantizers
        layers.0  Linear  0     weight_quant
        layers.1  Linear  -     stays float
        rule 0: Rule('.*0', weight_quant=Int8WeightPerChannelFloat)
    """
    from jqinject.model.quantizing.planned_ranges import planned_ranges
    from jqinject.model.quantizing.rule_policy import sites_of

    if not isinstance(model, nnx.Module):
        raise TypeError(f"rules_report takes an NNX module, got {type(model).__name__}")
    given = checked_rules(rules)
    check_operations(given)
    entries, plan = plan_layers(model, given)
    sites, used = sites_of(model, given, inputs, kwargs) if inputs or kwargs else ({}, set())
    unseen = (*uncalibrated(model), *planned_ranges(model, given, plan, sites.values()))
    return RulesReport(given, entries, tuple(sites), idle_rules(given, entries, used), unseen)


def idle_rules(rules: tuple[Rule, ...], entries: Iterable[LayerRule], used: set[int]) -> tuple[int, ...]:
    """The rules that take nothing."""
    taken = used | {entry.rule for entry in entries if entry.rule is not None}
    return tuple(index for index in range(len(rules)) if index not in taken)


def nearest_pattern(rule: Rule, paths: Iterable[str]) -> str:
    """For a rule whose path matches no layer: that it must match a whole path, and the nearest pattern that does.

    Example:
        >>> print(nearest_pattern(Rule("up"), ["layers.0.up", "layers.0.down"]))
        : its path must match the whole of a layer's path, and 'up' only matches a part of 'layers.0.up'; write '.*up'
    """
    known = [] if rule.op is not None else list(paths)
    if any(rule.matches(path) for path in known):
        return ""
    written = rule.path
    whole = ": its path must match the whole of a layer's path, and "
    for pattern in (f".*{written}", f"{written}.*", f".*{written}.*"):
        found = next((path for path in known if matches_path(pattern, path)), None)
        if found is not None:
            return f"{whole}{written!r} only matches a part of {found!r}; write {pattern!r}"
    slashes = "/" in written
    hint = did_you_mean(written, [path.replace(".", "/") if slashes else path for path in known])
    return f"{whole}{written!r} matches none{'; ' + hint if hint else ''}" if known else ""
