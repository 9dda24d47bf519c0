"""R3: a Hadamard matrix on both operands of the product of queries and keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from jqinject.core.transforms import Hadamard
from jqinject.inject import Binding
from jqinject.model.quantizing.rule_policy import RulePolicy
from jqinject.model.quantizing.rules import Rule
from jqinject.program import operation_of
from jqinject.proxy import transform_of
from jqinject.quant import NoneActQuant
from jqinject.recipes.online import NO_RULE, rule_like
from jqinject.recipes.stream.flat_program import CASTS, MOVES, FlatProgram, FlatStep, LeftOut, Product, Slot
from jqinject.recipes.transforms.axes import followed

WRITES = ("dynamic_update_slice", "scatter", "concatenate")
# What scores go through on their way to a softmax.
SCALING = ("mul", "div", "add", "add_any", "sub", "neg", "select_n", "tanh", "max", "min")
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
        cached = f"before the cache {self.cache} and on what meets it"
        note = f"; {self.note}" if self.note else ""
        where = cached if self.cache else "on both operands"
        return f"R3 of {self.site}: blocks of {self.block} channels, online, {where}{note}"


@dataclass(frozen=True)
class _KeyCache:
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
class _Scores:
    """A product of two activations, of which a softmax is taken.

    Attributes:
        product: in the program.
        channels: how many numbers it sums over: the size of a head.
        cache: where one of its operands comes from; None if it comes from no cache, or not as complete rows.
    """

    product: Product
    channels: int
    cache: _KeyCache | None


def turned_scores(
    flat: FlatProgram, rules: tuple[Rule, ...], size_of: Callable[[int, str], int]
) -> tuple[list[TurnedScores | LeftOut], tuple[Rule, ...]]:
    """The rules by which queries and keys go through a Hadamard matrix before they are quantized.

    The matrix is orthogonal, so the products stay; nothing is folded.

    Args:
        flat: the float model's program.
        rules: by which it is to be quantized.
        size_of: from how many channels a head has, and the name of the product, to how many one matrix mixes.

    Returns:
        What was done, and rules that come before all others.
    """
    scores = _AllScores(flat)
    turns = _Turns(rules, {x.product.name: size_of(x.channels, x.product.name) for x in scores.all})
    done = [turns.turn(x, scores.note(x)) for x in scores.all]
    return done, (*turns.rules_first.values(),)


class _AllScores:
    """The products of queries and keys in a program, x name once.

    Args:
        flat: the program.

    Attributes:
        caches: the slots of the arrays that the program is given, with their names.
        all: the products.
    """

    def __init__(self, flat: FlatProgram) -> None:
        self.flat = flat
        self.caches = {
            slot: x.cache
            for slot, x in zip(flat.inputs, flat.arguments, strict=True)
            if x.cache and jnp.issubdtype(x.value.dtype, jnp.floating)
        }
        scores: dict[str, _Scores] = {}
        for product in flat.products:
            step = flat.steps[product.step]
            if step.name != "dot_general" or product.name in scores or not self._leads_to_softmax(step):
                continue
            summed = step.params["dimension_numbers"][0]
            if len(summed[0]) == 1:
                channels = flat.shapes[step.inputs[0]][summed[0][0]]
                behind = (self._behind(step.inputs[place], summed[place][0], channels) for place in (0, 1))
                caches = [_KeyCache(*pair, place) for place, pair in enumerate(behind) if pair is not None]
                cache = caches[0] if len(caches) == 1 else None
                scores[product.name] = _Scores(product, channels, cache)
        self.all = [*scores.values()]

    def _leads_to_softmax(self, step: FlatStep) -> bool:
        waiting, reached, ends = [*step.outputs], {*step.outputs}, set[str]()
        while waiting:
            for reader in self.flat.readers(waiting.pop()):
                ends |= {reader.name} & {"exp", "reduce_max"}
                if reader.name in (*CASTS, *MOVES, *SCALING):
                    waiting += [slot for slot in reader.outputs if slot not in reached]
                    reached.update(reader.outputs)
        return ends == {"exp", "reduce_max"}

    def _behind(self, slot: Slot, axis: int, block: int, writer: str | None = None) -> tuple[str, str] | None:
        """The cache whose rows a value holds, and the module that writes it; None if absent.

        Args:
            slot: of the value.
            axis: of the value, along which blocks of features lie.
            block: how many features stay together.
            writer: path of the module that wrote what is looked at; None if it was written by none so far.
        """
        flat = self.flat
        if slot in self.caches:
            last = axis == len(flat.shapes[slot]) - 1
            return (self.caches[slot], writer) if last and writer is not None else None
        step, _ = flat.made_by.get(slot, (None, 0))
        if step is None or step.name not in (*CASTS, *MOVES, *WRITES):
            return None
        for data in step.inputs if step.name == "concatenate" else step.inputs[:1]:
            shapes = flat.shapes[data], flat.shapes[slot]
            before = axis if step.name == "scatter" else followed(step, axis, block, shapes, True)
            if not isinstance(before, str):
                by = writer if writer is not None or step.name not in WRITES else step.path
                cache = self._behind(data, before, block, by)
                if cache is not None:
                    return cache
        return None

    def note(self, scores: _Scores) -> str:
        """Why the cache of a product's keys cannot keep them turned; empty if it can."""
        if scores.cache is None:
            return ""
        name = scores.cache.name
        readers = [x for x in self.all if x.cache is not None and x.cache.name == name]
        if len({x.channels for x in readers}) > 1:
            return f"heads of several sizes read the cache {name}"
        return self._other_readers(name, readers)

    def _other_readers(self, cache: str, products: Sequence[_Scores]) -> str:
        """Which step reads a cache's numbers beyond the products that contract them; empty if none does."""
        names = {
            (scores.product.name, scores.cache.operand) for scores in products if scores.cache is not None
        }
        waiting = [(slot, False) for slot, name in self.caches.items() if name == cache]
        reached = {*waiting}
        while waiting:
            slot, written = waiting.pop()
            for step in self.flat.readers(slot):
                writes = step.name in WRITES and (step.inputs[0] == slot or step.name == "concatenate")
                moves = step.name in (*CASTS, *MOVES) and step.inputs[0] == slot
                if writes or moves or step.name == "stack":
                    results = {(output, written or writes) for output in step.outputs} - reached
                    waiting += results
                    reached |= results
                elif (self._name_of(step, products), step.inputs.index(slot)) not in names:
                    return f"{step.name}{step.where} reads the cache {cache} too"
                elif not written:
                    return f"the cache {cache} is read before it is written"
        return ""

    def _name_of(self, step: FlatStep, products: Sequence[_Scores]) -> str:
        """The name of a step that is one of the products: in a loop, those of all turns have one equation."""
        same = (x.product.name for x in products if self.flat.steps[x.product.step].equation == step.equation)
        return next(same, "")


class _Turns:
    """The rules for products and caches.

    Args:
        rules: by which the model is to be quantized.
        sizes: name of a product -> how many channels one matrix mixes.

    Attributes:
        rules_first: for products and caches by name, rules that come before all others.
    """

    def __init__(self, rules: tuple[Rule, ...], sizes: Mapping[str, int]) -> None:
        self.rules, self.sizes, self.policy = rules, sizes, RulePolicy(rules)
        self.rules_first: dict[str, Rule] = {}

    def turn(self, scores: _Scores, note: str) -> TurnedScores | LeftOut:
        """Add the rules for one product, or say why not."""
        product, cache = scores.product, scores.cache
        index = self.policy.rule_of(product.path, operation_of(product.operation), (), product.name)
        took = NO_RULE if index is None else self.rules[index]
        stored = None if cache is None else self._cache_quantizer(cache)
        sides = [_quantizer(took, side, "input_quant") for side in SIDES]
        why = _why_not(took, [*sides, stored], self.sizes[product.name])
        if why:
            return LeftOut(product.name, "", why)
        transform = Hadamard(self.sizes[product.name])
        quantizers: dict[str, Binding | None] = {"input_quant": None}
        for side, own in zip(SIDES, sides, strict=True):
            binding = Binding(NoneActQuant) if own is None else own
            quantizers[side] = binding.let(pre_transform=transform)
        overrides = {name: x for name, x in took.overrides if not name.startswith(("lhs_", "rhs_", "input_"))}
        path = re.escape(product.name)
        self.rules_first[product.name] = rule_like(took, path, quantizers, overrides, product.operation)
        size = self.sizes[product.name]
        if cache is None or stored is None or note:
            return TurnedScores(product.name, size, note=note if stored is not None else "")
        turned = stored.let(pre_transform=transform)
        self.rules_first[cache.name] = Rule(re.escape(cache.name), cache_quant=turned)
        return TurnedScores(product.name, size, cache.name)

    def _cache_quantizer(self, cache: _KeyCache) -> Binding | None:
        index = self.policy.cache_rule_of(cache.writer, cache.name)
        if index is None or self.rules[index].keeps_float:
            return None
        return _quantizer(self.rules[index], "cache_quant")


def _quantizer(rule: Rule, *slots: str) -> Binding | None:
    """What a rule declares for the first of some slots that it has, with the rule's overrides."""
    for slot in slots:
        quantizer = rule.quantizer(slot)
        if quantizer is not None:
            prefix = slot.removesuffix("quant")
            own = {name.removeprefix(prefix): x for name, x in rule.overrides if name.startswith(prefix)}
            return (quantizer if isinstance(quantizer, Binding) else Binding(quantizer)).let(**own)
    return None


def _why_not(took: Rule, quantizers: Sequence[Binding | None], size: int) -> str:
    """Why nothing is turned; empty if something can be."""
    if took.configures:
        return "R3: a scheme quantizes it"
    if all(quantizer is None for quantizer in quantizers):
        return "R3: no rule quantizes queries, keys or their cache, and without one it changes nothing"
    if any(transform_of(quantizer) is not None for quantizer in quantizers):
        return "R3: a rule has a transform there already"
    return "R3: a head of this size has no Hadamard matrix" if size == 1 else ""
