"""How the axes of a file's matrix become those of a parameter: `"(heads dim) in -> in heads dim"`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

TERM = re.compile(r"\(([^()]*)\)|(\S+)")


@dataclass(frozen=True)
class AxesOfLayout:
    """A rearrangement of a matrix, `outputs inputs -> ...`.

    Attributes:
        outputs, inputs: names of the axes that the matrix' rows and columns are made of.
        target: the names of the parameter's axes, each of which may be several.

    Example:
        >>> axes = AxesOfLayout.of("(heads dim) in -> in heads dim")
        >>> axes.target
        (('in',), ('heads',), ('dim',))
        >>> axes.sizes((6, 4), (4, 2, 3), {})
        {'in': 4, 'heads': 2, 'dim': 3}
    """

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    target: tuple[tuple[str, ...], ...]

    @staticmethod
    @lru_cache(maxsize=256)
    def of(text: str) -> AxesOfLayout:
        """Axes from a text.

        Raises:
            ValueError: it is no such text.
        """
        left, arrow, right = text.partition("->")
        sides = [
            [tuple((inner or word).split()) for inner, word in TERM.findall(side)] for side in (left, right)
        ]
        names = [[name for term in side for name in term] for side in sides]
        if (
            not arrow
            or len(sides[0]) not in (1, 2)
            or sorted(names[0]) != sorted({*names[1]})
            or len(names[0]) != len(names[1])
        ):
            raise ValueError(f"axes are a text such as '(heads dim) in -> in heads dim', got {text!r}")
        inputs = sides[0][1] if len(sides[0]) == 2 else ()
        return AxesOfLayout(sides[0][0], inputs, tuple(sides[1]))

    def sizes(self, source: tuple[int, ...], shape: tuple[int, ...], known: dict[str, int]) -> dict[str, int]:
        """The size of each axis.

        Args:
            source: of the matrix.
            shape: of the parameter.
            known: sizes that are given.

        Raises:
            ValueError: the shapes do not fit.
        """
        found = dict(known)
        terms = [
            *zip(self.target, shape, strict=False),
            *zip((self.outputs, self.inputs), source, strict=False),
        ]
        for _ in range(len(terms)):
            for names, size in terms:
                free = [name for name in names if name not in found]
                held = math.prod(found[name] for name in names if name in found)
                if len(free) == 1 and held and size % held == 0:
                    found[free[0]] = size // held
        fits = len(shape) == len(self.target) and all(
            all(name in found for name in names) and math.prod(found[name] for name in names) == size
            for names, size in terms
        )
        if not fits:
            raise ValueError(f"{self} does not make {shape} of {source}")
        return found

    def sizes_in(self, shape: tuple[int, ...], known: Mapping[str, int]) -> dict[str, int]:
        """The size of each axis, by the parameter alone.

        Args:
            shape: of the parameter.
            known: sizes that are given.

        Raises:
            ValueError: the shape leaves one open, or does not fit.

        Example:
            >>> AxesOfLayout.of("(heads half two) in -> in (heads two half)").sizes_in((4, 12), {"heads": 3, "two": 2})
            {'heads': 3, 'two': 2, 'in': 4, 'half': 2}
        """
        if len(shape) != len(self.target):
            raise ValueError(f"{self} has {len(self.target)} axes, the parameter {len(shape)}")
        found = dict(known)
        for names, size in zip(self.target, shape, strict=True):
            free = [name for name in names if name not in found]
            held = math.prod(found[name] for name in names if name in found)
            if len(free) == 1 and held and size % held == 0:
                found[free[0]] = size // held
            if not all(name in found for name in names) or math.prod(found[name] for name in names) != size:
                raise ValueError(f"the sizes of {' '.join(names)} in {self} do not make {size}")
        return found

    def back(self, x: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """An array in the parameter's axes as the axes of rows and columns, in their order: the inverse of `apply`.

        Args:
            x: in the parameter's axes, any of which may be of size 1.
            sizes: of all axes.

        Raises:
            ValueError: an axis that several make up has another size.
        """
        split: list[int] = []
        for names, size in zip(self.target, x.shape, strict=True):
            if len(names) == 1:
                split.append(size)
            elif size == 1 or size == math.prod(sizes[name] for name in names):
                split += [1 if size == 1 else sizes[name] for name in names]
            else:
                raise ValueError(f"{' '.join(names)} of {self} has {size} numbers")
        flat = [name for term in self.target for name in term]
        return x.reshape(split).transpose([flat.index(name) for name in (*self.outputs, *self.inputs)])

    def apply(self, x: np.ndarray, outputs: tuple[int, ...], inputs: tuple[int, ...]) -> np.ndarray:
        """An array `(..., rows, columns)` rearranged.

        Args:
            x: the array.
            outputs, inputs: sizes of the axes of rows and columns, which `x` may have 1 of.
        """
        lead = x.ndim - (2 if self.inputs else 1)
        x = x.reshape(*x.shape[:lead], *outputs, *inputs)
        order = [*self.outputs, *self.inputs]
        flat = [name for term in self.target for name in term]
        x = x.transpose(*range(lead), *(lead + order.index(name) for name in flat))
        if all(len(term) == 1 for term in self.target):
            return x
        shape, at = list(x.shape[:lead]), lead
        for term in self.target:
            shape.append(math.prod(x.shape[at : at + len(term)]))
            at += len(term)
        return x.reshape(shape)

    def __str__(self) -> str:
        def shown(term: tuple[str, ...]) -> str:
            return term[0] if len(term) == 1 else f"({' '.join(term)})"

        left = [shown(self.outputs), *([shown(self.inputs)] if self.inputs else [])]
        return f"'{' '.join(left)} -> {' '.join(map(shown, self.target))}'"
