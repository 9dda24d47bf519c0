"""Finds the quantizers of a plan that will have static ranges, which must see data before serving."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flax import nnx

from jqinject.core import StaticRange
from jqinject.model.quantizing.plan import LayerRule
from jqinject.model.quantizing.quantize_model import quantize_layer
from jqinject.model.quantizing.rule_policy import held_at
from jqinject.model.quantizing.rules import Rule
from jqinject.model.static_ranges import static_ranges
from jqinject.model.walk import ModelIndex
from jqinject.program import HELD, Site


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
    known: dict[Any, tuple[str, ...]] = {}
    for layer in index.modules:
        entry = plan.get(id(layer))
        if entry is None or entry.rule is None or not entry.slots:
            continue
        kind = (entry.rule, entry.layer, entry.slots)
        if kind not in known:
            known[kind] = _ranges_of(layer, rules[entry.rule], entry)
        yield from (f"{entry.path}.{name}" if layer is not root else name for name in known[kind])
    for site in sites:
        if held_at(site, nnx.Rngs(0)).has_range() is not None:
            yield f"{HELD}.held.{site.name}"


def _ranges_of(layer: Any, rule: Rule, entry: LayerRule) -> tuple[str, ...]:
    """The attributes of a layer that will hold static ranges."""
    if rule.shares:  # with existing quantizers, which may have seen data
        held = ((slot, rule.quantizer(slot)) for slot in entry.slots)
        return tuple(slot for slot, q in held if isinstance(q, StaticRange) and q.has_range() is False)
    found: list[str] = []

    def quantized(layer: Any) -> tuple[()]:
        quantize_layer(layer, rule, entry, nnx.Rngs(0))
        found.extend(
            path
            for path, holder in static_ranges(ModelIndex(layer)).items()
            if holder.has_range() is not None
        )
        return ()

    nnx.eval_shape(quantized, nnx.clone(layer, graph=True))
    return tuple(found)
