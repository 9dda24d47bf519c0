"""How the axes of a file's matrix become those of a parameter: `"(heads dim) in -> in heads dim"`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jqinject.formats.checkpoint_errors import CheckpointError

TERM = re.compile(r"\(([^()]*)\)|(\S+)")
HEADS_OF = "(heads dim) in -> in heads dim"
OF_HEADS = "out (heads dim) -> heads dim out"
TRANSPOSED = "out in -> in out"
AS_ROWS = "rows columns -> rows columns"


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
        """Return axes from a text.

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

    def sizes(
        self, source: tuple[int, ...], shape: tuple[int, ...], stated: Mapping[str, int]
    ) -> dict[str, int]:
        """Return the size of each axis.

        Args:
            source: of the matrix; empty where the parameter alone decides.
            shape: of the parameter.
            stated: sizes that a rule has.

        Raises:
            ValueError: the shapes do not fit, or leave a size open.

        Example:
            >>> AxesOfLayout.of("(heads half two) in -> in (heads two half)").sizes((), (4, 12), {"heads": 3, "two": 2})
            {'heads': 3, 'two': 2, 'in': 4, 'half': 2}
        """
        sides = zip((self.outputs, self.inputs), source, strict=False)
        terms = [*zip(self.target, shape, strict=False), *sides]
        sizes = dict(stated)
        for _ in terms:
            for names, size in terms:
                _fill(sizes, names, size)
        fits = (math.prod(sizes.get(name, 0) for name in names) == size for names, size in terms)
        if len(shape) != len(self.target) or not {*self._flat} <= sizes.keys() or not all(fits):
            raise ValueError(f"{self} does not make {shape}{f' of {source}' if source else ''}")
        return sizes

    def rows(self, x: np.ndarray, sizes: Mapping[str, int], in_groups: bool) -> np.ndarray:
        """Return codes, scales or zero points as rows and columns: the inverse of `apply`; as one row, if all rows
        share it.

        Args:
            x: in the parameter's axes, any of which may be of size 1.
            sizes: of all axes.
            in_groups: whether the last axis of inputs has groups, so that further inputs have columns of their own.

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
        x = x.reshape(split).transpose([self._flat.index(name) for name in (*self.outputs, *self.inputs)])
        depth = len(self.outputs)
        rows, columns = x.shape[:depth], x.shape[depth:]
        if math.prod(rows) > 1:
            rows = tuple(sizes[name] for name in self.outputs)
        if in_groups:
            columns = *(sizes[name] for name in self.inputs[:-1]), columns[-1]
        return np.ascontiguousarray(np.broadcast_to(x, (*rows, *columns)).reshape(math.prod(rows), -1))

    def apply(self, x: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Return an array `(..., rows, columns)` rearranged.

        Args:
            x: the array.
            sizes: of the axes that its rows and columns are made of.
        """
        names = (*self.outputs, *self.inputs)
        lead = x.shape[: x.ndim - (2 if self.inputs else 1)]
        order = [len(lead) + names.index(name) for name in self._flat]
        split = x.reshape(*lead, *(sizes[name] for name in names)).transpose(*range(len(lead)), *order)
        return split.reshape(*lead, *(math.prod(sizes[name] for name in term) for term in self.target))

    @property
    def _flat(self) -> list[str]:
        return [name for term in self.target for name in term]

    def __str__(self) -> str:
        def shown(term: tuple[str, ...]) -> str:
            return term[0] if len(term) == 1 else f"({' '.join(term)})"

        left = [shown(self.outputs), *([shown(self.inputs)] if self.inputs else [])]
        return f"'{' '.join(left)} -> {' '.join(map(shown, self.target))}'"


#: Axes that are not rearranged.
UNCHANGED = AxesOfLayout((), (), ())


def _fill(sizes: dict[str, int], names: Sequence[str], size: int) -> None:
    """Enter the only size that is open among axes whose product is known."""
    free = [name for name in names if name not in sizes]
    rest = math.prod(sizes[name] for name in names if name in sizes)
    if len(free) == 1 and rest and size % rest == 0:
        sizes[free[0]] = size // rest


#: How a matrix lies in a parameter of two axes, by the parameter's name.
BY_LEAF = {"kernel": TRANSPOSED, "embedding": AS_ROWS, "weight": AS_ROWS}


def axes_by_name(path: str, source: tuple[int, ...], shape: tuple[int, ...], name: str) -> AxesOfLayout:
    """Return how a tensor lies in a parameter where neither a rule nor a header says it.

    The parameter's name decides for two axes (`kernel`, `embedding`, `weight`); else the shapes do, if they fit in one
    way.

    Args:
        path, shape: of the parameter.
        name, source: of the tensor, and its shape.

    Raises:
        CheckpointError: it may lie in several ways, or in none.
    """
    if not shape and source == (1,):
        return UNCHANGED
    if len(source) == 1:
        letters = " ".join("abcdefgh"[: len(shape)])
        return AxesOfLayout.of(f"({letters}) -> {letters}")
    rows, columns = source if len(source) == 2 else (0, 0)
    fits = {
        TRANSPOSED: shape == (columns, rows),
        AS_ROWS: shape == (rows, columns),
        HEADS_OF: len(shape) == 3 and shape[0] == columns,
        OF_HEADS: len(shape) == 3 and shape[-1] == rows,
    }
    by_leaf = BY_LEAF.get(path.rpartition(".")[2]) if len(shape) == 2 else None
    axes = [text for text, is_fit in fits.items() if is_fit and by_leaf in (None, text)]
    if len(axes) != 1:
        what = "may be transposed in" if len(axes) > 1 else "does not fit"
        raise CheckpointError(
            f"{name}, {source}, {what} {path}, {shape}.\n  cure: a model of the checkpoint's sizes; or "
            f"names={{{name!r}: ({path!r}, 'out in -> in out')}}, which says how its axes lie, or what is joined"
        )
    return AxesOfLayout.of(axes[0])
