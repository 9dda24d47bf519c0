"""R3: a Hadamard matrix on both operands of the product of queries and keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from jqinject.core.transforms import Hadamard
from jqinject.inject import Binding
from jqinject.model.quantizing.rule_policy import RulePolicy
from jqinject.model.quantizing.rules import Rule
from jqinject.program import operation_of
from jqinject.program.operations import operand_axes
from jqinject.proxy import transform_of
from jqinject.recipes.online import NO_RULE, declared_quantizer, rule_with_transform
from jqinject.recipes.stream.flat_program import CASTS, MOVES, FlatProgram, FlatStep, LeftOut, Slot
from jqinject.recipes.transforms.axes import Refused, followed

WRITES = ("dynamic_update_slice", "scatter", "concatenate")
# What scores go through on their way to a softmax.
SCALING = ("mul", "div", "add", "add_any", "sub", "neg", "select_n", "tanh", "max", "min")
SIDES = ("lhs_quant", "rhs_quant")


@dataclass(frozen=True)
class Rotated:
    """What was done to the inputs of some sites.

    Attributes:
        kind: "R1", "R2", "R3" or "R4".
        sites: their names.
        block: how many channels are mixed by one matrix.
        folded: the parameters that the matrix, or the inverse of an online one, is in.
        online: where it also runs; empty if it does not.
    """

    kind: str
    sites: tuple[str, ...]
    block: int
    folded: tuple[str, ...] = ()
    online: str = ""

    def __str__(self) -> str:
        online = [f"online, {self.online}"] if self.online else []
        folded = [f"in {', '.join(self.folded)}"] if self.folded else []
        where = " ".join([*online, *folded])
        return f"{self.kind} of {', '.join(self.sites)}: blocks of {self.block} channels, {where}"


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
        product: its step in the program.
        channels: how many numbers it sums over: the size of a head.
        cache: where one of its operands comes from; None if it comes from no cache, or not as complete rows.
    """

    product: FlatStep
    channels: int
    cache: _KeyCache | None


def turned_scores(
    flat: FlatProgram, rules: tuple[Rule, ...], size_of: Callable[[int, str], int]
) -> tuple[list[Rotated | LeftOut], tuple[Rule, ...]]:
    """The rules by which queries and keys go through a Hadamard matrix before they are quantized.

    The matrix is orthogonal, so the products stay; nothing is folded.

    Args:
        flat: the float model's program.
        rules: by which it is to be quantized.
        size_of: from how many channels a head has, and the name of the product, to how many one matrix mixes.

    Returns:
        What was done, and rules that come before all others.
    """
    scores, policy = _AllScores(flat), RulePolicy(rules)
    done: list[Rotated | LeftOut] = []
    first: dict[str, Rule] = {}
    for x in scores.all:
        size = size_of(x.channels, x.product.site)
        record, more = _turned(x, scores.note(x), size, rules, policy)
        done.append(record)
        first |= more
    return done, (*first.values(),)


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
        for step in flat.products:
            if step.name != "dot_general" or step.site in scores or not self._leads_to_softmax(step):
                continue
            summed = [axes.summed for axes in operand_axes(step.equation)]
            if len(summed[0]) == 1:
                channels = flat.shapes[step.inputs[0]][summed[0][0]]
                behind = (self._behind(step.inputs[place], summed[place][0], channels) for place in (0, 1))
                caches = [_KeyCache(*pair, place) for place, pair in enumerate(behind) if pair is not None]
                cache = caches[0] if len(caches) == 1 else None
                scores[step.site] = _Scores(step, channels, cache)
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
            try:
                before = axis if step.name == "scatter" else followed(step, axis, block, shapes, True)
            except Refused:
                continue
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
            (scores.product.site, scores.cache.operand) for scores in products if scores.cache is not None
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
                elif (step.site, step.inputs.index(slot)) not in names:
                    return f"{step.name}{step.where} reads the cache {cache} too"
                elif not written:
                    return f"the cache {cache} is read before it is written"
        return ""


def _turned(
    scores: _Scores, note: str, size: int, rules: tuple[Rule, ...], policy: RulePolicy
) -> tuple[Rotated | LeftOut, dict[str, Rule]]:
    """What is done to one product, or why nothing is; and the rules for it and its cache, by name.

    Args:
        scores: the product.
        note: why the keys' cache keeps them as they are; empty if it does not.
        size: how many channels one matrix mixes.
        rules: by which the model is to be quantized.
        policy: of these rules.
    """
    product, cache = scores.product, scores.cache
    index = policy.rule_of(product.path, operation_of(product.kind), (), product.site)
    took = NO_RULE if index is None else rules[index]
    stored = None
    if cache is not None:
        index = policy.cache_rule_of(cache.writer, cache.name)
        if index is not None and not rules[index].keeps_float:
            stored = declared_quantizer(rules[index], "cache_quant")
    sides = {side: declared_quantizer(took, side, "input_quant") for side in SIDES}
    why = _why_not(took, [*sides.values(), stored], size)
    if why:
        return LeftOut(product.site, "", why), {}
    transform = Hadamard(size)
    path, where = re.escape(product.site), "on both operands"
    more = {product.site: rule_with_transform(took, path, sides, transform, product.kind)}
    if cache is not None and stored is not None and not note:
        turned = stored.let(pre_transform=transform)
        more[cache.name] = Rule(re.escape(cache.name), cache_quant=turned)
        where = f"before the cache {cache.name} and on what meets it"
    elif stored is not None and note:
        where = f"{where}; {note}"
    return Rotated("R3", (product.site,), size, online=where), more


def _why_not(took: Rule, quantizers: Sequence[Binding | None], size: int) -> str:
    """Why nothing is turned; empty if something can be."""
    if took.configures:
        return "R3: a scheme quantizes it"
    if all(quantizer is None for quantizer in quantizers):
        return "R3: no rule quantizes queries, keys or their cache, and without one it changes nothing"
    if any(transform_of(quantizer) is not None for quantizer in quantizers):
        return "R3: a rule has a transform there already"
    return "R3: a head of this size has no Hadamard matrix" if size == 1 else ""
