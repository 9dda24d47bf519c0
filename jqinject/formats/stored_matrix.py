"""`Matrix`: the low-bit numbers of a checkpoint's matrix, whatever the layout of its file; `StoredMatrix` reads one.

A file becomes `Matrix`es on grids of `jqinject.ops`; `loading.frozen_matrix` makes the numbers of a `FrozenParam` of
one, and `saving.saved_matrices` one of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.safetensors_files import Tensor
from jqinject.ops import NF4, FloatGrid, Grid, IntGrid, TableGrid

E4M3, E5M2, E2M1, E2M3 = map(
    FloatGrid.of_dtype, ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "float6_e2m3fn")
)
#: The minifloats that files hold.
MINIFLOATS = {"e4m3": E4M3, "e5m2": E5M2, "e2m1": E2M1, "e2m3": E2M3}
SCALED = {"float8_e8m0fnu": "mx", "float8_e4m3fn": "nv"}


@dataclass(frozen=True)
class InputFormat:
    """How a checkpoint says that the input of a matrix is quantized.

    Attributes:
        kind: "int" or "float".
        bits: 8, or 4 of minifloats.
        symmetric: without a zero point.
        strategy: "tensor", "token", "group" or "tensor_group": what shares a scale.
        group_size: consecutive numbers that share a scale, in the last two.
        dynamic: scales are taken of the input itself.
        scale, zero_point, global_scale: those that the checkpoint stores, float32; None if it stores none. A zero
            point is that of signed integers.
        unsigned: whether static integers with a zero point are rounded as unsigned ones: `round(x / scale + zero_point
            + 128)`, which falls on the other side of a tie now and then.
    """

    kind: str
    bits: int
    symmetric: bool = True
    strategy: str = "tensor"
    group_size: int | None = None
    dynamic: bool = True
    scale: np.ndarray | None = None
    zero_point: np.ndarray | None = None
    global_scale: np.ndarray | None = None
    unsigned: bool = False


def minifloat_name(grid: Grid) -> str:
    """Return the name of a minifloat in `MINIFLOATS`; empty for any other grid.

    Example:
        >>> minifloat_name(E4M3), minifloat_name(IntGrid(4))
        ('e4m3', '')
    """
    return next((name for name, minifloat in MINIFLOATS.items() if minifloat.dtype == grid.dtype), "")


def table_grid(table: np.ndarray, name: str) -> TableGrid:
    """Return the grid of the numbers of a table, in any order.

    Raises:
        CheckpointError: they are not finite, or fewer than two.
    """
    try:
        return TableGrid(tuple(np.unique(table).tolist()))
    except ValueError as error:
        raise CheckpointError(f"{name} is no table of numbers: {error}") from None


def label_of(grid: Grid, scale_dtype: np.dtype) -> str:
    """Return a short name of a grid with its scales, for reports.

    Example:
        >>> label_of(IntGrid(4), np.dtype(np.float32)), label_of(E2M1, E4M3.storage)
        ('int4', 'nve2m1')
    """
    if grid.is_integer:
        return f"{'' if grid.signed else 'u'}int{grid.bit_width}"
    name = "nf4" if grid == NF4 else minifloat_name(grid) or str(grid)
    return (SCALED.get(scale_dtype.name, "") if grid.is_minifloat else "") + name


@dataclass(frozen=True)
class Matrix:
    """The arrays of a matrix: `matrix = factor * scale * (codes - zero_point) - minimum`.

    Scales, zero points and minima belong to blocks of codes; the last blocks may be short.

    Attributes:
        codes: `(..., rows, columns)`: integers, codes of minifloats or of a table, or 8-bit minifloats in their own
            dtype: the matrix, `(outputs, inputs)`, or, for blocks that do not follow its rows, a view of it in another
            shape.
        scale: `(..., ceil(rows / block[0]), ceil(columns / block[1]))`, in the dtype of the file.
        grid: the number format.
        block: rows and columns of a block.
        zero_point: in units of the codes, shaped like the scale; None for 0.
        minimum: in units of the matrix, shaped like the scale; None for 0.
        factor: of all scales, float32, `(...)`; None for 1.
        table: numbers by their codes, in the file's order.
        group_of_column: int32, the group of each column, where groups are not consecutive columns.
        in_turn: whether blocks are one column of rows that lie in turn: with `n` rows of scales, row `i` has those of
            `i % n`. Such rows cannot be cut or joined.
    """

    codes: np.ndarray
    scale: np.ndarray
    grid: Grid
    block: tuple[int, int]
    zero_point: np.ndarray | None = None
    minimum: np.ndarray | None = None
    factor: np.ndarray | None = None
    table: np.ndarray | None = None
    group_of_column: np.ndarray | None = None
    in_turn: bool = False

    def dequantize(self) -> np.ndarray:
        """Return the numbers of the codes, float32, in the codes' shape."""
        if self.table is not None:
            values = self.table[self.codes]
        elif self.grid.is_minifloat:
            values = self.codes.view(self.grid.dtype).astype(np.float32)
        else:
            values = self.codes.astype(np.float32)
        if self.zero_point is not None:
            values = values - self._broadcast(self.zero_point)
        values = values * self._broadcast(self.scales())
        return values if self.minimum is None else values - self._broadcast(self.minimum)

    def scales(self) -> np.ndarray:
        """Return the scales with their common factor, float32."""
        scale = self.scale.astype(np.float32)
        return scale if self.factor is None else scale * self.factor

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.block[1]

    @property
    def label(self) -> str:
        """A short name of its numbers, for reports."""
        return label_of(self.grid, self.scale.dtype)

    def _broadcast(self, x: np.ndarray) -> np.ndarray:
        """Return the numbers of blocks, one for each code: float32."""
        rows, columns = self.codes.shape
        x = x.astype(np.float32)
        x = np.repeat(x, self.block[0], axis=0)[:rows] if self.block[0] > 1 else x
        if self.group_of_column is not None:
            return x[:, self.group_of_column]
        return np.repeat(x, self.block[1], axis=1)[:, :columns]

    def map(self, change: Callable[[np.ndarray], np.ndarray], *names: str) -> Matrix:
        """Return the same with some of its arrays changed; those that are None stay so."""
        arrays = {name: vars(self)[name] for name in names}
        return replace(self, **{name: None if x is None else change(x) for name, x in arrays.items()})

    def by_row(self) -> Matrix:
        """Return the same with scales of its own for each row.

        Raises:
            CheckpointError: rows lie in turn.
        """
        if self.in_turn:
            raise CheckpointError("rows in turn (HQQ's axis 0) are not cut or joined")
        rows = self.codes.shape[-2]
        return self.map(
            lambda x: np.broadcast_to(x, (*x.shape[:-2], rows, x.shape[-1])), "scale", "zero_point"
        )

    def signed(self) -> Matrix:
        """Return integers without a sign as integers with one, less half of their range; others as they are."""
        if not self.grid.is_integer or self.grid.signed:
            return self
        half = 1 << (self.grid.bit_width - 1)
        zero = np.zeros(self.scale.shape, np.int8) if self.zero_point is None else self.zero_point
        zero_dtype = np.int8 if np.issubdtype(zero.dtype, np.integer) else np.float32
        zero = (zero.astype(np.float32) - half).astype(zero_dtype)
        codes = (self.codes.astype(np.int16) - half).astype(np.int8)
        return replace(self, codes=codes, zero_point=zero, grid=IntGrid(self.grid.bit_width))

    def without_zeros(self) -> Matrix:
        """Return the same without zero points that are all 0."""
        return self if self.zero_point is None or np.any(self.zero_point) else replace(self, zero_point=None)

    def __len__(self) -> int:
        """The number of rows, as of an array."""
        return self.codes.shape[0]

    def __getitem__(self, rows: slice | np.ndarray) -> Matrix:
        """Return some of its rows, or all of them in another order, as of an array."""
        return self.by_row().map(lambda x: x[..., rows, :], "codes", "scale", "zero_point")


@dataclass(frozen=True)
class StoredMatrix:
    """A low-bit matrix of a checkpoint: a `Matrix` whose arrays are still in the file.

    Attributes:
        name: of the parameter, as the float checkpoint would call it (`model.layers.0.mlp.up_proj.weight`).
        shape: `(outputs, inputs)`.
        grid: the format of its numbers.
        layout: the name of its layout in the file.
        block: rows and columns of a block.
        arrays: those of the `Matrix` by name, `codes` and `scale` among them; read when they are asked for.
        input_format: how its input is quantized; None for float inputs.
        by_rows: whether blocks are columns of one row; False where they run across rows (HQQ's axis 0).
        in_turn: rows of a block, where blocks are one column of rows that lie in turn: row `i` belongs to block `i %
            (rows / in_turn)`; 0 for any others.
        axes: how rows and columns become the axes of the parameter, where the checkpoint says so; see `Name`.
        parameter_shape: of the parameter, likewise.
        keeps_unsigned: whether integers without a sign stay so in a model: those that `save(method="jqinject")` wrote.
    """

    name: str
    shape: tuple[int, ...]
    grid: Grid
    layout: str
    block: tuple[int, int]
    arrays: Mapping[str, Tensor] = field(repr=False, compare=False)
    input_format: InputFormat | None = None
    by_rows: bool = True
    in_turn: int = 0
    axes: str | None = None
    parameter_shape: tuple[int, ...] | None = None
    keeps_unsigned: bool = False

    @property
    def bytes(self) -> int:
        """Of the codes in the file."""
        return self.arrays["codes"].nbytes

    @property
    def label(self) -> str:
        """A short name of its numbers, for reports."""
        return label_of(self.grid, self.arrays["scale"].dtype)

    def read(self) -> Matrix:
        """Return its codes and scales, from the file."""
        arrays: dict[str, Any] = {name: tensor.read() for name, tensor in self.arrays.items()}
        return Matrix(grid=self.grid, block=self.block, **arrays)

    def order(self) -> np.ndarray | None:
        """Return the order of columns that makes groups consecutive (GPTQ's activation order).

        None if they are, or no order makes them so.
        """
        groups = self.arrays.get("group_of_column")
        return None if groups is None else order_of_groups(groups.read())

    def dequantize(self) -> np.ndarray:
        """Return the matrix, float32."""
        return self._in_shape(self.read().dequantize())

    def codes(self) -> np.ndarray:
        """Return its codes, in its shape."""
        return self._in_shape(self.read().codes)

    def _in_shape(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(-1)[: int(np.prod(self.shape))].reshape(self.shape)

    def rows(self) -> Matrix | None:
        """Return the matrix with blocks of one row each, or one row of scales for all; None if its blocks do not
        follow the rows, so that only floats can be taken.

        Columns of groups that are not consecutive come in the order that makes them so (`order_of_groups`). Integers
        without a sign lose half of their range, and so get one: `codes - 2^(bits - 1)`, their zero points too, unless
        `keeps_unsigned`.

        Raises:
            CheckpointError: a scale is not finite.
        """
        matrix, shape = self.read(), (math.prod(self.shape[:-1]), self.shape[-1])
        if not np.all(np.isfinite(matrix.scales())):
            raise CheckpointError(f"{self.name} has scales that are not finite")
        if matrix.group_of_column is not None:
            order = order_of_groups(matrix.group_of_column)
            if order is None:
                return None
            matrix = replace(matrix, codes=matrix.codes[:, order], group_of_column=None)
        rows = _in_turn(matrix, shape) if self.in_turn else _by_rows(matrix, shape)
        if rows is None:
            return None
        rows = rows if rows.minimum is None else _without_minimum(rows)
        rows = rows if self.keeps_unsigned else rows.signed()
        return rows.without_zeros()


@dataclass(frozen=True)
class SavedMatrix:
    """A matrix, or another array, that is written to a file.

    Attributes:
        name: in the file.
        path: of its weight.
        numbers: in low bits, or floats.
        inputs: how its input is quantized.
    """

    name: str
    path: str
    numbers: Matrix | np.ndarray
    inputs: InputFormat | None

    @property
    def module(self) -> str:
        """The name without `.weight`."""
        return self.name.removesuffix(".weight")

    @property
    def matrix(self) -> Matrix:
        """The numbers in low bits."""
        assert isinstance(self.numbers, Matrix), "in low bits"
        return self.numbers

    def refused(self, method: str, expected: str, cure: str) -> CheckpointError:
        """Return the error of a matrix that a format cannot hold."""
        matrix, inputs = self.matrix, self.inputs
        text = f"{matrix.label}{'' if matrix.zero_point is None else ' with zero points'}"
        text += f" ({matrix.scale.dtype.name} scales), in groups of {matrix.group} in rows of {matrix.codes.shape[-1]}"
        text += "" if matrix.group_of_column is None else ", columns in activation order"
        if inputs is not None:
            text += f", its input quantized as {inputs.strategy} {inputs.kind}{inputs.bits}"
        return CheckpointError(f"{self.path} is {text}; {method} has {expected}.\n  cure: {cure}")


def order_of_groups(groups: np.ndarray) -> np.ndarray | None:
    """Return the order of columns in which each group is consecutive; None if groups have different sizes.

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


def _in_turn(matrix: Matrix, shape: tuple[int, int]) -> Matrix:
    """As `_by_rows`, with scales for each column of rows that lie in turn."""
    rows = matrix.map(lambda x: x.reshape(-1, shape[1]), "scale", "zero_point")
    return replace(rows, codes=matrix.codes.reshape(shape), block=(1, shape[1]), in_turn=True)


def _by_rows(matrix: Matrix, shape: tuple[int, int]) -> Matrix | None:
    """Return the matrix in its shape, with blocks of one row."""
    rows, columns = shape
    height, width = matrix.block
    if matrix.codes.shape == shape:
        matrix = replace(matrix, block=(1, min(width, columns) or 1))
        if height == 1 or (height >= rows and matrix.scale.shape[0] == 1):
            return matrix
        return matrix.map(lambda x: np.repeat(x, height, axis=0)[:rows], "scale", "zero_point", "minimum")
    if height != 1 or matrix.minimum is not None:
        return None
    # A view with blocks of its rows is one run of blocks, which may cross the rows of the matrix.
    group = math.gcd(width, columns) or 1
    first = np.arange(rows * columns // group) * group
    length = matrix.codes.shape[1]
    at = (first // length) * matrix.scale.shape[1] + (first % length) // width
    codes = matrix.codes.reshape(-1)[: rows * columns].reshape(shape)
    blocks = matrix.map(lambda x: x.reshape(-1)[at].reshape(rows, -1), "scale", "zero_point")
    return replace(blocks, codes=codes, block=(1, group))


def _without_minimum(matrix: Matrix) -> Matrix:
    """Return minima as zero points, in units of the codes. A group without a scale is its minimum: code 0."""
    assert matrix.minimum is not None, "asked for"
    codes, scale = matrix.codes, matrix.scale.astype(np.float32)
    empty = scale == 0
    if empty.any():
        columns = np.repeat(empty, matrix.group, axis=1)[:, : codes.shape[1]]
        codes, scale = np.where(columns, codes.dtype.type(0), codes), np.where(empty, np.float32(1), scale)
    zero = matrix.minimum.astype(np.float32) / scale
    zero = zero if matrix.zero_point is None else zero + matrix.zero_point.astype(np.float32)
    return replace(matrix, codes=codes, scale=scale, zero_point=zero, minimum=None)


def gathered(
    parts: Sequence[Matrix | np.ndarray], name: str, depth: tuple[int, ...] = ()
) -> Matrix | np.ndarray:
    """Return matrices, or arrays, above one another, as one; or as a stack of such.

    Args:
        parts: of the first place of the stack from above, then of the next one.
        name: of what is made, for errors.
        depth: sizes of the axes of a stack, which come in front.

    Raises:
        CheckpointError: they have different formats, groups or factors.
    """
    layers = math.prod(depth)
    if len(parts) == 1 and not depth:
        return parts[0]

    def combined(arrays: Sequence[np.ndarray]) -> np.ndarray:
        rows = np.concatenate([np.atleast_1d(array) for array in arrays])
        return rows.reshape(*depth, rows.shape[0] // layers, *rows.shape[1:])

    matrices = [part for part in parts if isinstance(part, Matrix)]
    if not matrices:
        return combined([part for part in parts if isinstance(part, np.ndarray)])
    first = matrices[0]
    for matrix in matrices:
        if _kind(matrix) != _kind(first):
            shown = [f"{matrix.label} in groups of {matrix.group}" for matrix in (first, matrix)]
            raise CheckpointError(f"{name}: {shown[0]} and {shown[1]} cannot be joined or stacked")
    matrices = matrices if len(parts) == layers else [matrix.by_row() for matrix in matrices]
    factors = np.asarray([1 if matrix.factor is None else matrix.factor for matrix in matrices], np.float32)
    factor = factors.reshape(*depth, -1)
    if np.any(factor != factor[..., :1]):
        raise CheckpointError(f"{name}: matrices whose scales have different factors cannot be joined")
    zeros = [np.zeros_like(part.scale) if part.zero_point is None else part.zero_point for part in matrices]
    return replace(
        first,
        codes=combined([matrix.codes for matrix in matrices]),
        scale=combined([matrix.scale for matrix in matrices]),
        zero_point=combined(zeros) if any(part.zero_point is not None for part in matrices) else None,
        factor=None if first.factor is None else factor[..., 0],
    )


def _kind(matrix: Matrix) -> tuple[object, ...]:
    """Return what matrices that are combined have in common."""
    scaled = SCALED.get(matrix.scale.dtype.name)
    has_factor = matrix.factor is not None
    return matrix.grid, matrix.block, scaled, matrix.codes.shape[-1], matrix.in_turn, has_factor
