"""Products of queries and keys in a program: what their softmax is taken of, and the caches that keys come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jqinject.recipes.stream.flat_program import FlatProgram, FlatStep, Slot
from jqinject.recipes.stream.site import CASTS, MOVES, Product
from jqinject.recipes.transforms.axes import followed
from jqinject.recipes.transforms.transform_walk import DefUse

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
                where = f" in {step.path}" if step.path else ""
                return f"{step.name}{where} reads the cache {cache} too"
            elif not written:
                return f"the cache {cache} is read before it is written"
    return ""


def _name_of(flat: FlatProgram, index: int, known: Sequence[Scores]) -> str:
    """The name of a step that is one of the products: in a loop, those of all turns have one equation."""
    here = flat.steps[index]
    same = (each for each in known if flat.steps[each.product.step].equation == here.equation)
    return next((each.product.name for each in same), "")
