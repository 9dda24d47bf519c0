"""R3: the Hadamard matrix between queries and keys, on both operands of their product."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jqinject.core.transforms import Hadamard
from jqinject.inject import Binding
from jqinject.model.quantizing.rule_policy import RulePolicy
from jqinject.model.quantizing.rules import Rule
from jqinject.program import operation_of
from jqinject.proxy import transform_of
from jqinject.quant import NoneActQuant
from jqinject.recipes.passes.float_change import FloatChange
from jqinject.recipes.stream.flat_program import Slot
from jqinject.recipes.stream.site import LeftOut
from jqinject.recipes.transforms.attention import Scores, other_readers, scores_of

SIDES = ("lhs_quant", "rhs_quant")


@dataclass(frozen=True)
class TurnedScores:
    """What was done to the queries and keys of a product.

    Attributes:
        site: name of the product.
        block: how many channels are mixed by one matrix.
        cache: name of the cache that keeps turned keys; empty if none does.
        note: why the keys' cache keeps them as they are; empty if it does not.
    """

    site: str
    block: int
    cache: str = ""
    note: str = ""
    kind = "R3"

    @property
    def sites(self) -> tuple[str, ...]:
        """The product, as one of several sites."""
        return (self.site,)

    def __str__(self) -> str:
        where = (
            f"online, before the cache {self.cache} and on what meets it"
            if self.cache
            else ("online, on both operands")
        )
        return f"R3 of {self.site}: blocks of {self.block} channels, {where}" + (
            f"; {self.note}" if self.note else ""
        )


def turned_scores(
    change: FloatChange, size_of: Callable[[int, str], int]
) -> tuple[list[TurnedScores | LeftOut], tuple[Rule, ...]]:
    """The rules by which queries and keys go through a Hadamard matrix before they are quantized.

    The matrix is orthogonal, so the products stay; nothing is folded.

    Args:
        change: of the float model.
        size_of: from how many channels a head has, and the name of the product, to how many one matrix mixes.

    Returns:
        What was done, and rules that come before all others.
    """
    flat, links, rules = change.traced.flat, change.links, change.work.rules
    inputs = zip(flat.inputs, change.traced.program.inputs, strict=True)
    caches = {
        slot: given.cache
        for slot, given in inputs
        if given.cache and jnp.issubdtype(given.value.dtype, jnp.floating)
    }
    found = scores_of(flat, links, change.traced.found.products, caches)
    turns = _Turns(rules, {each.product.name: size_of(each.channels, each.product.name) for each in found})
    done = [turns.one(each, _note(change, each, found, caches)) for each in found]
    return done, (*turns.made.values(),)


def _note(change: FloatChange, scores: Scores, found: Sequence[Scores], caches: Mapping[Slot, str]) -> str:
    """Why the cache of a product's keys cannot keep them turned; empty if it can."""
    if scores.cache is None:
        return ""
    name = scores.cache.name
    beside = [each for each in found if each.cache is not None and each.cache.name == name]
    if len({each.channels for each in beside}) > 1:
        return f"heads of several sizes read the cache {name}"
    return other_readers(change.traced.flat, change.links, name, caches, beside)


@dataclass
class _Turns:
    """The rules for products and caches, as they are made."""

    rules: tuple[Rule, ...]
    sizes: Mapping[str, int]

    def __post_init__(self) -> None:
        self.policy = RulePolicy(self.rules)
        self.made: dict[str, Rule] = {}

    def one(self, scores: Scores, note: str) -> TurnedScores | LeftOut:
        """The rules for one product, or why there are none."""
        product, cache = scores.product, scores.cache
        index = self.policy.rule_of(product.path, operation_of(product.operation), (), product.name)
        took = None if index is None else self.rules[index]
        kept = None if cache is None else self.policy.cache_rule_of(cache.writer, cache.name)
        kept = None if kept is None or self.rules[kept].keeps_float else kept
        sides = [_quantizer(took, side, "input_quant") for side in SIDES]
        stored = None if kept is None else _quantizer(self.rules[kept], "cache_quant")
        why = _why_not(took, [*sides, stored], self.sizes[product.name])
        if why:
            return LeftOut(product.name, (), why)
        turn = Hadamard(self.sizes[product.name])
        given: dict[str, Any] = {} if took is None else dict(took.quantizers)
        overrides = {} if took is None else dict(took.overrides)
        for side, own in zip(SIDES, sides, strict=True):
            given[side] = (Binding(NoneActQuant) if own is None else own).let(pre_transform=turn)
        given.pop("input_quant", None)
        own_prefix = ("lhs_", "rhs_", "input_")
        self.made[product.name] = Rule(
            re.escape(product.name),
            op=product.operation,
            contraction="auto" if took is None else took.contraction,
            **given,
            **{name: x for name, x in overrides.items() if not name.startswith(own_prefix)},
        )
        if cache is None or stored is None or note:
            return TurnedScores(product.name, turn.block_size or 1, note=note if stored is not None else "")
        stored = stored.let(pre_transform=turn)
        self.made[cache.name] = Rule(re.escape(cache.name), cache_quant=stored)
        return TurnedScores(product.name, turn.block_size or 1, cache.name)


def _quantizer(rule: Rule | None, *slots: str) -> Binding | None:
    """What a rule declares for the first of some slots that it has, with the rule's overrides."""
    if rule is None:
        return None
    for slot in slots:
        given = rule.quantizer(slot)
        if given is not None:
            prefix = slot.removesuffix("quant")
            own = {n.removeprefix(prefix): v for n, v in rule.overrides if n.startswith(prefix)}
            return (given if isinstance(given, Binding) else Binding(given)).let(**own)
    return None


def _why_not(took: Rule | None, quantizers: Sequence[Binding | None], size: int) -> str:
    """Why nothing is turned; empty if something can be."""
    if took is not None and took.configures:
        return "R3: a scheme quantizes it"
    if all(each is None for each in quantizers):
        return "R3: no rule quantizes queries, keys or their cache, and without one it changes nothing"
    if any(transform_of(each) is not None for each in quantizers):
        return "R3: a rule has a transform there already"
    return "R3: a head of this size has no Hadamard matrix" if size == 1 else ""
