"""The plan of `quantize`: which rule applies to which layer of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jqinject.inject.errors import did_you_mean
from jqinject.model.frozen_ops import op_slot
from jqinject.model.quantizing.counterparts import LAYER_NAMES, counterpart_of, slots_for
from jqinject.model.quantizing.rules import Rule, matches_path
from jqinject.model.walk import ModelIndex, dotted
from jqinject.program import known_operations


@dataclass(frozen=True)
class LayerRule:
    """The rule of one layer.

    Attributes:
        path: the layer's path.
        layer: its class.
        rule: index of the rule; None if none matches.
        slots: the quantizers that it gets; empty if it stays float.
    """

    path: str
    layer: str
    rule: int | None
    slots: tuple[str, ...]


def plan_layers(
    index: ModelIndex, rules: tuple[Rule, ...]
) -> tuple[tuple[LayerRule, ...], dict[int, LayerRule]]:
    """The rule of every layer: as a table by path, and by the module's id (shared layers once)."""
    entries: list[LayerRule] = []
    by_module: dict[int, LayerRule] = {}
    inside: set[tuple[str, ...]] = set()
    for path, module in index.places:
        counterpart = counterpart_of(module) if isinstance(module, nnx.Module) else None
        if (
            counterpart is None
            or id(module) in by_module
            or any(path[:depth] in inside for depth in range(len(path)))
        ):
            continue
        inside.add(path)  # modules inside a jqinject layer belong to it
        kind = type(module).__name__
        number = next(
            (i for i, r in enumerate(rules) if takes_layer(r, module, ".".join(path))),
            None,
        )
        slots: tuple[str, ...] = ()
        if number is not None:
            takes = slots_for(module, counterpart, named=rules[number].op is not None)
            slots = tuple(slot for slot, _ in rules[number].quantizers if slot in takes)
            if rules[number].configures and op_slot(module) is not None:
                slots = ("contraction",)
        by_module[id(module)] = LayerRule(dotted(path), kind, number, slots)
        entries.append(by_module[id(module)])
    return tuple(entries), by_module


def takes_layer(rule: Rule, module: Any, path: str) -> bool:
    """Whether a rule is for a layer: by the layer's path, or by that of its weight."""
    if rule.op is not None:
        return type(module).__name__ in rule.op and rule.matches(path)
    if not rule.takes_weights:
        return False
    weight = next((name for name in ("kernel", "embedding") if name in vars(module)), None)
    return rule.matches(path) or (weight is not None and rule.matches(f"{path}.{weight}".lstrip(".")))


def check_operations(rules: Iterable[Rule]) -> None:
    """Refuse names that are neither operations nor layers.

    Raises:
        ValueError: such a name; the message suggests the nearest.
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


def idle_rules(
    rules: tuple[Rule, ...], entries: Iterable[LayerRule], used: Collection[int]
) -> tuple[int, ...]:
    """Indices of the rules that match nothing."""
    taken = {*used} | {entry.rule for entry in entries if entry.rule is not None}
    return tuple(index for index in range(len(rules)) if index not in taken)


def nearest_pattern(rule: Rule, paths: Iterable[str]) -> str:
    """A hint for a rule whose path matches only part of a layer's path: the nearest pattern that matches all of it.

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
