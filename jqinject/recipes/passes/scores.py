"""R3: a Hadamard matrix on both operands of the product of queries and keys."""

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
from jqinject.recipes.stream.flat_program import FlatProgram, FlatStep, Slot
from jqinject.recipes.stream.site import CASTS, MOVES, LeftOut, Product
from jqinject.recipes.transforms.values import DefUse, followed

WRITES = ("dynamic_update_slice", "scatter", "concatenate")
# What scores go through on their way to a softmax.
SCALING = ("mul", "div", "add", "add_any", "sub", "neg", "select_n", "tanh", "max", "min")


@dataclass(frozen=True)
class KeyCache:
    """A cache whose rows a product contracts.

    Attributes:
        name: as `jqinject.Rule` names it.
        writer: path of the module that writes it.
        operand: which operand of the product comes from it.
    """

    name: str
    writer: str
    operand: int


@dataclass(frozen=True)
class Scores:
    """A product of two activations, of which a softmax is taken.

    Attributes:
        product: in the program.
        channels: how many numbers it sums over: the size of a head.
        cache: where one of its operands comes from; None if it comes from no cache, or not as whole rows.
    """

    product: Product
    channels: int
    cache: KeyCache | None


def scores_of(
    flat: FlatProgram, links: DefUse, products: Sequence[Product], caches: Mapping[Slot, str]
) -> list[Scores]:
    """The products of queries and keys in a program, each name once.

    Args:
        flat: the program.
        links: what makes and reads each of its values.
        products: of two activations.
        caches: the slots of the arrays that the program is given, with their names.
    """
    found: dict[str, Scores] = {}
    for product in products:
        step = flat.steps[product.step]
        if step.name != "dot_general" or product.name in found or not _leads_to_softmax(flat, links, step):
            continue
        summed = step.params["dimension_numbers"][0]
        if len(summed[0]) == 1:
            channels = links.shapes[step.inputs[0]][summed[0][0]]
            behind = (
                _behind(links, step.inputs[place], summed[place][0], channels, caches) for place in (0, 1)
            )
            known = [(name, writer, place) for place, (name, writer) in enumerate(behind) if name]
            found[product.name] = Scores(product, channels, KeyCache(*known[0]) if len(known) == 1 else None)
    return [*found.values()]


def _leads_to_softmax(flat: FlatProgram, links: DefUse, step: FlatStep) -> bool:
    waiting, seen, ends = [*step.outputs], {*step.outputs}, set[str]()
    while waiting:
        slot = waiting.pop()
        for index in links.touching(slot):
            reader = flat.steps[index]
            if slot not in reader.inputs:
                continue
            ends |= {reader.name} & {"exp", "reduce_max"}
            if reader.name in (*CASTS, *MOVES, *SCALING):
                waiting += [made for made in reader.outputs if made not in seen]
                seen.update(reader.outputs)
    return ends == {"exp", "reduce_max"}


def _behind(
    links: DefUse, slot: Slot, axis: int, block: int, caches: Mapping[Slot, str], writer: str | None = None
) -> tuple[str, str]:
    """The cache whose rows a value holds, and the module that writes it; empty texts if there is none.

    Args:
        links: of the program.
        slot: of the value.
        axis: of the value, along which blocks of features lie.
        block: how many features stay together.
        caches: see `scores_of`.
        writer: path of the module that wrote what is looked at; None if it was written by none so far.
    """
    if slot in caches:
        last = axis == len(links.shapes[slot]) - 1
        return (caches[slot], writer) if last and writer is not None else ("", "")
    if slot not in links.made_by:
        return "", ""
    step, _ = links.made_by[slot]
    if step.name not in (*CASTS, *MOVES, *WRITES):
        return "", ""
    for data in step.inputs if step.name == "concatenate" else step.inputs[:1]:
        shapes = links.shapes[data], links.shapes[slot]
        before = axis if step.name == "scatter" else followed(step, axis, block, shapes, True)
        if not isinstance(before, str):
            by = writer if writer is not None or step.name not in WRITES else step.path
            name, by = _behind(links, data, before, block, caches, by)
            if name:
                return name, by
    return "", ""


def other_readers(
    flat: FlatProgram, links: DefUse, cache: str, caches: Mapping[Slot, str], known: Sequence[Scores]
) -> str:
    """Who reads a cache's numbers but the products that they are known to go into; empty if no one does.

    Args:
        flat: the program.
        links: what makes and reads each of its values.
        cache: its name.
        caches: see `scores_of`.
        known: the products with an operand from this cache.
    """
    names = {(scores.product.name, scores.cache.operand) for scores in known if scores.cache is not None}
    waiting = [(slot, False) for slot, name in caches.items() if name == cache]
    seen = {*waiting}
    while waiting:
        slot, written = waiting.pop()
        for index in links.touching(slot):
            step = flat.steps[index]
            if slot not in step.inputs:
                continue
            writes = step.name in WRITES and (step.inputs[0] == slot or step.name == "concatenate")
            if writes or step.name == "stack" or (step.name in (*CASTS, *MOVES) and step.inputs[0] == slot):
                made = {(each, written or writes) for each in step.outputs} - seen
                waiting += made
                seen |= made
            elif (_name_of(flat, index, known), step.inputs.index(slot)) not in names:
                return f"{step.name}{step.where} reads the cache {cache} too"
            elif not written:
                return f"the cache {cache} is read before it is written"
    return ""


def _name_of(flat: FlatProgram, index: int, known: Sequence[Scores]) -> str:
    """The name of a step that is one of the products: in a loop, those of all turns have one equation."""
    here = flat.steps[index]
    same = (each for each in known if flat.steps[each.product.step].equation == here.equation)
    return next((each.product.name for each in same), "")


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
