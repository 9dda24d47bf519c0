"""R3: a Hadamard matrix on both operands of the product of queries and keys."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jqinject.core.transforms import Hadamard
from jqinject.model.quantizing.rule_policy import RulePolicy
from jqinject.model.quantizing.rules import Rule
from jqinject.program import operation_of, operations
from jqinject.proxy import transform_of, undone_transform_of
from jqinject.recipes.online import NO_RULE, rule_with_transform
from jqinject.recipes.stream.flat_program import CASTS, MOVES, FlatProgram, FlatStep, Note, Slot
from jqinject.recipes.transforms.rotations import Refused, followed

WRITES = ("dynamic_update_slice", "scatter", "concatenate")
# What scores go through on their way to a softmax.
SCALING = ("mul", "div", "add", "add_any", "sub", "neg", "select_n", "tanh", "max", "min")
SIDES = ("lhs_quant", "rhs_quant")


def rotated(
    kind: str, sites: Sequence[str], block: int, folded: Sequence[str] = (), online: str = ""
) -> Note:
    """What was done to the inputs of some sites.

    Args:
        kind: "R1", "R2", "R3" or "R4".
        sites: their names.
        block: how many channels are mixed by one matrix.
        folded: the parameters that the matrix, or the inverse of an online one, is in.
        online: where it also runs; empty if it does not.
    """
    where = [f"online, {online}"] if online else []
    where += [f"in {', '.join(folded)}"] if folded else []
    what = f"blocks of {block} channels, {' '.join(where)}"
    facts = {"kind": kind, "block": block, "folded": tuple(folded)}
    return Note(f"{kind} of {', '.join(sites)}", "", what, facts)


@dataclass(frozen=True)
class _Scores:
    """A product of two activations, of which a softmax is taken.

    Attributes:
        product: its step in the program.
        channels: how many numbers it sums over: the size of a head.
        cache: the cache whose rows one of its operands holds, as `jqinject.Rule` names it; empty without one.
        writer: path of the module that writes the cache.
        operand: which operand comes from it.
    """

    product: FlatStep
    channels: int
    cache: str = ""
    writer: str = ""
    operand: int = 0


def rotated_scores(
    flat: FlatProgram, rules: tuple[Rule, ...], size_of: Callable[[int, str], int]
) -> tuple[list[Note], tuple[Rule, ...]]:
    """The rules by which queries and keys go through a Hadamard matrix before they are quantized.

    The matrix is orthogonal, so the products stay; nothing is folded.

    Args:
        flat: the float model's program.
        rules: by which it is to be quantized.
        size_of: from how many channels a head has, and the name of the product, to how many one matrix mixes.

    Returns:
        What was done, and rules that come before all others.
    """
    caches, policy = _Caches(flat), RulePolicy(rules)
    done: list[Note] = []
    first: dict[str, Rule] = {}
    for scores in caches.scores:
        name, size = scores.product.site, size_of(scores.channels, scores.product.site)
        index = policy.rule_of(scores.product.path, operation_of(scores.product.kind), (), name)
        took = NO_RULE if index is None else rules[index]
        sides = {side: took.declared(side) or took.declared("input_quant") for side in SIDES}
        stored: Any = policy.cache_quantizer(scores.writer, scores.cache) if scores.cache else None
        why = _why_not(took, [*sides.values(), stored], size)
        if why:
            done.append(Note(name, "", reason=why))
            continue
        transform, where = Hadamard(size), "on both operands"
        first[name] = rule_with_transform(took, name, sides, transform, scores.product.kind)
        reader = "" if stored is None else caches.other_reader(scores)
        if reader:
            where = f"{where}; {reader}"
        elif stored is not None:
            first[scores.cache] = Rule(
                re.escape(scores.cache), cache_quant=stored.let(pre_transform=transform)
            )
            where = f"before the cache {scores.cache} and on what meets it"
        done.append(rotated("R3", (name,), size, online=where))
    return done, (*first.values(),)


class _Caches:
    """The caches of a program, and the products of queries and keys.

    Args:
        flat: the program.

    Attributes:
        caches: the slots of the arrays that the program is given, with their names.
        scores: the products, each name once.
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
            summed = [axes.summed for axes in operations.operand_axes(step.equation)]
            if len(summed[0]) == 1:
                channels = flat.shapes[step.inputs[0]][summed[0][0]]
                behind = (self._behind(step.inputs[place], summed[place][0], channels) for place in (0, 1))
                caches = [(pair[0], pair[1], place) for place, pair in enumerate(behind) if pair is not None]
                cache, writer, place = caches[0] if len(caches) == 1 else ("", "", 0)
                scores[step.site] = _Scores(step, channels, cache, writer, place)
        self.scores = [*scores.values()]

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

    def other_reader(self, scores: _Scores) -> str:
        """What reads the numbers of a product's cache beyond products with heads of its size; empty if nothing does."""
        cache = scores.cache
        alike = [x for x in self.scores if (x.cache, x.channels) == (cache, scores.channels)]
        products = {(x.product.site, x.operand) for x in alike}
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
                elif (step.site, step.inputs.index(slot)) not in products:
                    return f"{step.name}{step.where} reads the cache {cache} too"
                elif not written:
                    return f"the cache {cache} is read before it is written"
        return ""


def _why_not(took: Rule, quantizers: Sequence[Any], size: int) -> str:
    """Return why nothing is rotated; empty if something can be."""
    if took.configures:
        return "R3: a scheme quantizes it"
    if all(quantizer is None for quantizer in quantizers):
        return "R3: no rule quantizes queries, keys or their cache, and without one it changes nothing"
    if any(transform_of(quantizer) or undone_transform_of(quantizer) for quantizer in quantizers):
        return "R3: a rule has a transform there already"
    return "R3: a head of this size has no Hadamard matrix" if size == 1 else ""
