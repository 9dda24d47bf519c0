"""The same place of a model's code in the programs of several methods: it has one quantizer, and one name.

`__call__` may run `encode` as a part of its own program. What `encode` quantizes there is then the site that `encode`
has when it is called by itself: `encode:add0_lhs` is `add0_lhs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jqinject.program.jaxpr import Equation
from jqinject.program.policy import Site


@dataclass(frozen=True)
class SiteNames:
    """The names of sites in a model, of a program of one of its methods.

    Attributes:
        prefix: what the method's own names begin with.
        same: its own name -> that of the same place in the program of an earlier method.
    """

    prefix: str = ""
    same: Mapping[str, str] = field(default_factory=dict)

    def full(self, name: str) -> str:
        """The name in the model."""
        own = self.prefix + name
        return self.same.get(own, own)


PLAIN = SiteNames()


class Occurrence(NamedTuple):
    """An operation in a program, or a call of a layer.

    Attributes:
        path: of the module.
        operation: its name; "layer" for the call of a layer.
        read: what it reads that no other place does: a parameter's path, or the layer's; empty if nothing.
        equation: of the program.
        name: of the method's own.
    """

    path: str
    operation: str
    read: tuple[Any, ...]
    equation: Equation
    name: str


def same_places(programs: Iterable[tuple[Sequence[Occurrence], Mapping[str, Site]]]) -> dict[str, str]:
    """The sites of later programs that are those of earlier ones, by name.

    A place that reads a parameter, or is a layer, is the same if its module, its operation and what it reads are, and
    it is the n-th such place in both programs. Places beside one that is the same are the same if they are the same
    operation of the same line of code. A site is not shared if it would have other axes of scales.

    Args:
        programs: the operations of each, in order, and its sites by name.
    """
    found: dict[str, str] = {}
    known: list[tuple[Sequence[Occurrence], Mapping[str, Site]]] = []
    for occurrences, sites in programs:
        own = {one.name for one in occurrences}
        for earlier, its_sites in known:
            matches = {
                occurrences[b].name: earlier[a].name for b, a in _matched(earlier, occurrences).items()
            }
            for name, site in sites.items():
                whole = name in own
                place, _, operand = (name, "", "") if whole else name.rpartition("_")
                other = matches.get(place, "") + ("" if whole else f"_{operand}")
                if name not in found and other in its_sites and _alike(site, its_sites[other]):
                    found[name] = found.get(other, other)
        known.append((occurrences, sites))
    return {name: other for name, other in found.items() if name != other}


def _alike(one: Site, other: Site) -> bool:
    """Whether one quantizer serves both."""
    known = [(x.quantizer, x.overrides, x.is_weight, len(x.shape), x.contraction) for x in (one, other)]
    return known[0] == known[1]


def _matched(first: Sequence[Occurrence], second: Sequence[Occurrence]) -> dict[int, int]:
    """Index in the second program -> index of the same place in the first."""
    numbered = _numbered(first)
    anchors = {b: numbered[key] for key, b in _numbered(second).items() if key in numbered}
    found, taken = dict(anchors), set(anchors.values())
    for start, other in anchors.items():
        for step in (1, -1):
            b, a = start + step, other + step
            while 0 <= b < len(second) and 0 <= a < len(first):
                if b in found or a in taken or not _is_one_line(first[a], second[b]):
                    break
                found[b] = a
                taken.add(a)
                b, a = b + step, a + step
    return found


def _is_one_line(one: Occurrence, other: Occurrence) -> bool:
    return not other.read and one[:3] == other[:3] and one.equation.line == other.equation.line


def _numbered(program: Sequence[Occurrence]) -> dict[tuple[Any, ...], int]:
    """Places that read something, with their number among those alike -> index."""
    found: dict[tuple[Any, ...], int] = {}
    for index, one in enumerate(program):
        if one.read:
            number = 0
            while (*one[:3], number) in found:
                number += 1
            found[*one[:3], number] = index
    return found
