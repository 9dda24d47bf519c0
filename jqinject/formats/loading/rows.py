"""`Rows`: a stored matrix with its groups along its rows, so that rows can be cut, joined and stacked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.stored_matrix import NumberFormat, Numbers, StoredMatrix


@dataclass(frozen=True)
class Rows:
    """Codes with a scale for each group of consecutive columns of each row.

    Attributes:
        codes: `(..., outputs, inputs)`.
        scale: `(..., outputs, groups)` in the dtype of the file; one row stands for all.
        zero_point: likewise; None for none.
        group: columns of a group; the last group may be short.
        format: what the codes are.
        factor: of all scales; float32, `(...)`.
        table: numbers by their codes.
        in_turn: whether scales and zero points are those of columns, `(..., count, inputs)`: row `i` has those of `i %
            count`. Such rows cannot be cut or joined.
        columns: int32, the group of each column, where a file is to say it (`weight_g_idx`); None if groups are
            consecutive columns, as all are that were loaded.
    """

    codes: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray | None
    group: int
    format: NumberFormat
    factor: np.ndarray | None = None
    table: np.ndarray | None = None
    columns: np.ndarray | None = None
    in_turn: bool = False

    @property
    def whole(self) -> Rows:
        """The same with a scale for each row.

        Raises:
            CheckpointError: rows lie in turn.
        """
        if self.in_turn:
            raise CheckpointError(
                "rows of groups that lie in turn (HQQ's axis 0) cannot be cut, joined or stacked"
            )
        rows = self.codes.shape[-2]

        def each(x: np.ndarray) -> np.ndarray:
            return x if x.shape[-2] == rows else np.repeat(x, rows, axis=-2)

        zero = None if self.zero_point is None else each(self.zero_point)
        return replace(self, scale=each(self.scale), zero_point=zero)

    def cut(self, which: slice | np.ndarray) -> Rows:
        """Some of its rows, or all of them in another order."""
        whole = self.whole
        zero = None if whole.zero_point is None else whole.zero_point[..., which, :]
        return replace(
            whole, codes=whole.codes[..., which, :], scale=whole.scale[..., which, :], zero_point=zero
        )


def rows_of(matrix: StoredMatrix) -> Rows | None:
    """A matrix by its rows; None if its blocks do not follow them, so that only its floats can be taken.

    Columns of groups that are not consecutive come in the order that makes them so (`order_of_groups`).
    Integers without a sign lose half of their range, and so get one: `codes - 2^(bits - 1)`, their zero points too.

    Args:
        matrix: of two axes.

    Raises:
        CheckpointError: a scale is not finite.
    """
    numbers, shape = matrix.read(), (math.prod(matrix.shape[:-1]), matrix.shape[-1])
    if not np.all(np.isfinite(numbers.scales())):
        raise CheckpointError(f"{matrix.name} has scales that are not finite")
    if numbers.group_of_column is not None:
        order = order_of_groups(numbers.group_of_column)
        if order is None:
            return None
        numbers = replace(numbers, codes=numbers.codes[:, order], group_of_column=None)
    found = _in_turn(numbers, shape) if matrix.in_turn else _by_rows(numbers, shape)
    if found is None:
        return None
    codes, scale, zero, group = found
    if numbers.minimum is not None:
        codes, scale, zero = _shifted(numbers, codes, scale)
    form = matrix.format
    if form.kind == "int" and codes.dtype == np.uint8:
        half = 1 << (form.bits - 1)
        codes = (codes.astype(np.int16) - half).astype(np.int8)
        zero = np.full(scale.shape, -half, np.int8) if zero is None else _less(zero, half)
    if zero is not None and not np.any(zero):
        zero = None
    form = replace(form, signed=True, has_zero_point=zero is not None) if form.kind == "int" else form
    factor = None if numbers.factor is None else np.asarray(numbers.factor)
    return Rows(codes, scale, zero, group, form, factor, numbers.table, in_turn=matrix.in_turn > 0)


def order_of_groups(groups: np.ndarray) -> np.ndarray | None:
    """The order of columns in which each group is consecutive; None if groups have different sizes.

    Args:
        groups: the group of each column.

    Example:
        >>> order_of_groups(np.array([1, 0, 0, 1])).tolist()
        [1, 2, 0, 3]
    """
    sizes = np.bincount(groups)
    if np.any(sizes[:-1] != sizes[0]) or sizes[-1] > sizes[0]:
        return None
    return np.argsort(groups, kind="stable")


def _less(zero: np.ndarray, half: int) -> np.ndarray:
    if np.issubdtype(zero.dtype, np.integer):
        return (zero.astype(np.int16) - half).astype(np.int8)
    return zero.astype(np.float32) - np.float32(half)


def _in_turn(
    numbers: Numbers, shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, int]:
    """As `_by_rows`, with a scale for each column of rows that lie in turn."""
    zero = None if numbers.zero_point is None else numbers.zero_point.reshape(-1, shape[1])
    return numbers.codes.reshape(shape), numbers.scale.reshape(-1, shape[1]), zero, shape[1]


def _by_rows(
    numbers: Numbers, shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, int] | None:
    """Codes, scales, zero points and columns of a group, in the shape of the matrix."""
    rows, columns = shape
    block, zero = numbers.block, numbers.zero_point
    if numbers.codes.shape == shape:
        group = min(block[1], columns) or 1
        if block[0] == 1 or (block[0] >= rows and numbers.scale.shape[0] == 1):
            return numbers.codes, numbers.scale, zero, group
        spread = [None if x is None else np.repeat(x, block[0], axis=0)[:rows] for x in (numbers.scale, zero)]
        assert spread[0] is not None, "scales are always there"
        return numbers.codes, spread[0], spread[1], group
    if block[0] != 1 or numbers.minimum is not None:
        return None
    # A view with blocks of its rows is one run of blocks, which may cross the rows of the matrix.
    group = math.gcd(block[1], columns) or 1
    first = np.arange(rows * columns // group) * group
    width = numbers.codes.shape[1]
    at = (first // width) * numbers.scale.shape[1] + (first % width) // block[1]
    codes = numbers.codes.reshape(-1)[: rows * columns].reshape(shape)
    scale, each = (None if x is None else x.reshape(-1)[at].reshape(rows, -1) for x in (numbers.scale, zero))
    assert scale is not None, "scales are always there"
    return codes, scale, each, group


def _shifted(
    numbers: Numbers, codes: np.ndarray, scale: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Minima as zero points, in units of the codes. A group without a scale is its minimum: code 0."""
    assert numbers.minimum is not None, "asked for"
    scale, minimum = scale.astype(np.float32), numbers.minimum.astype(np.float32)
    empty = scale == 0
    if empty.any():
        spread = np.repeat(empty, numbers.block[1], axis=1)[:, : codes.shape[1]]
        codes, scale = np.where(spread, codes.dtype.type(0), codes), np.where(empty, np.float32(1), scale)
    zero = minimum / scale
    return codes, scale, zero if numbers.zero_point is None else zero + numbers.zero_point.astype(np.float32)


def joined(parts: Sequence[Rows], name: str) -> Rows:
    """Matrices above one another, as one.

    Raises:
        CheckpointError: they have other formats or groups.
    """
    if len(parts) == 1:
        return parts[0]
    return _together([part.whole for part in parts], name, lambda xs: np.concatenate(xs, axis=-2), "joined")


def stacked(parts: Sequence[Rows], name: str) -> Rows:
    """Matrices behind one another, along a new axis in front.

    Raises:
        CheckpointError: they have other formats or groups.
    """
    return _together(parts, name, np.stack, "stacked")


def _together(
    parts: Sequence[Rows], name: str, put: Callable[[Sequence[np.ndarray]], np.ndarray], what: str
) -> Rows:
    first = parts[0]
    for part in parts:
        if _kind(part) != _kind(first):
            shown = [f"{one.format.label} in groups of {one.group}" for one in (first, part)]
            raise CheckpointError(f"{name}: {shown[0]} and {shown[1]} cannot be {what}")
    with_zero = any(part.zero_point is not None for part in parts)
    zeros = [np.zeros_like(part.scale) if part.zero_point is None else part.zero_point for part in parts]
    factor = first.factor
    if factor is not None:
        factors = [np.asarray(part.factor) for part in parts]
        if what == "stacked":
            factor = np.stack(factors)
        elif any(each != factor for each in factors):
            raise CheckpointError(f"{name}: matrices whose scales have different factors cannot be joined")
    form = replace(first.format, has_zero_point=with_zero)
    codes, scale = (put([getattr(part, held) for part in parts]) for held in ("codes", "scale"))
    zero = put(zeros) if with_zero else None
    return Rows(codes, scale, zero, first.group, form, factor, first.table, in_turn=first.in_turn)


def _kind(rows: Rows) -> tuple[Any, ...]:
    """What rows that are put together must have in common."""
    form = rows.format
    return rows.group, form.bits, form.kind, form.name, form.scale, rows.codes.shape[-1], rows.in_turn
