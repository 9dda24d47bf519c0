"""`StoredMatrix`: the low-bit matrix of a checkpoint, whatever the layout of its file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The numbers of the 4-bit minifloat, by their codes."""


E2M3 = np.array(
    [
        sign * (m / 8 if e == 0 else (1 + m / 8) * 2.0 ** (e - 1))
        for sign in (1.0, -1.0)
        for e in range(4)
        for m in range(8)
    ],
    np.float32,
)
"""The numbers of the 6-bit minifloat with three bits of mantissa, by their codes."""


@dataclass(frozen=True)
class NumberFormat:
    """What the codes of a matrix are.

    Attributes:
        kind: "int"; "float" for minifloats; "table" for codes that look a number up.
        bits: of a code.
        signed: of integers.
        name: of minifloats: "e4m3", "e5m2", "e2m1", "e2m3"; of tables: "nf4", "fp4".
        scale: what the file says scales are: "float", "e4m3" (with one factor for the matrix) or "e8m0".
        has_zero_point: whether a zero point may be another than 0.

    Example:
        >>> NumberFormat("int", 4).label
        'int4'
    """

    kind: str
    bits: int
    signed: bool = True
    name: str = ""
    scale: str = "float"
    has_zero_point: bool = False

    @property
    def label(self) -> str:
        """A short name, for reports."""
        named = self.name if self.kind != "int" else f"{'' if self.signed else 'u'}int{self.bits}"
        scaled = {"e8m0": "mx", "e4m3": "nv"}.get(self.scale, "")
        return scaled + named


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


@dataclass(frozen=True)
class Numbers:
    """The arrays of a matrix: `matrix = factor * scale * (codes - zero_point) - minimum`.

    Scales, zero points and minima belong to blocks of `block` numbers of the codes; the last blocks may be short.

    Attributes:
        codes: integers, codes of a table, or 8-bit minifloats in their own dtype: the matrix, `(outputs, inputs)`,
            or, for blocks that do not follow its rows, a view of it in another shape.
        scale: `(ceil(rows / block[0]), ceil(columns / block[1]))`, in the dtype of the file.
        block: rows and columns of a block.
        zero_point: in units of the codes, shaped like the scale.
        minimum: in units of the matrix, shaped like the scale.
        factor: one for the matrix.
        table: numbers by their codes.
        group_of_column: int32, the block of each column, where blocks are not consecutive columns.
    """

    codes: np.ndarray
    scale: np.ndarray
    block: tuple[int, int]
    zero_point: np.ndarray | None = None
    minimum: np.ndarray | None = None
    factor: np.float32 | None = None
    table: np.ndarray | None = None
    group_of_column: np.ndarray | None = None

    def dequantize(self) -> np.ndarray:
        """The numbers of the codes, float32, in the codes' shape."""
        values = self.codes.astype(np.float32) if self.table is None else self.table[self.codes]
        if self.zero_point is not None:
            values = values - self._spread(self.zero_point)
        values = values * self._spread(self.scales())
        return values if self.minimum is None else values - self._spread(self.minimum)

    def scales(self) -> np.ndarray:
        """The scales with their common factor, float32."""
        scale = self.scale.astype(np.float32)
        return scale if self.factor is None else scale * self.factor

    def _spread(self, x: np.ndarray) -> np.ndarray:
        """Numbers of blocks, one for each code: float32."""
        rows, columns = self.codes.shape
        x = x.astype(np.float32)
        x = np.repeat(x, self.block[0], axis=0)[:rows] if self.block[0] > 1 else x
        if self.group_of_column is not None:
            return x[:, self.group_of_column]
        return np.repeat(x, self.block[1], axis=1)[:, :columns]


@dataclass(frozen=True)
class StoredMatrix:
    """A low-bit matrix of a checkpoint; nothing is read before `read` is called.

    Attributes:
        name: of the parameter, as the float checkpoint would call it (`model.layers.0.mlp.up_proj.weight`).
        shape: `(outputs, inputs)`.
        format: what its codes are.
        layout: the name of its layout in the file.
        parts: the tensors of the file that it is made of.
        bytes: of the codes in the file.
        input_format: how its input is quantized; None for float inputs.
        column_groups: the group of each column, where groups are not consecutive columns (GPTQ's activation order).
        by_rows: whether blocks are columns of one row; False where they run across rows (HQQ's axis 0).
        in_turn: rows of a block, where blocks are one column of rows that lie in turn: row `i` belongs to block `i %
            (rows / in_turn)`; 0 for any others.
        axes: how rows and columns become the axes of the parameter, where the checkpoint knows; see `Name`.
        parameter_shape: of the parameter, likewise.
    """

    name: str
    shape: tuple[int, ...]
    format: NumberFormat
    layout: str
    parts: tuple[str, ...]
    bytes: int
    decode: Callable[[], Numbers] = field(repr=False, compare=False)
    input_format: InputFormat | None = None
    column_groups: Callable[[], np.ndarray] | None = field(default=None, repr=False, compare=False)
    by_rows: bool = True
    in_turn: int = 0
    axes: str | None = None
    parameter_shape: tuple[int, ...] | None = None

    def read(self) -> Numbers:
        """Its codes and scales, read from the file."""
        return self.decode()

    def dequantize(self) -> np.ndarray:
        """The matrix, float32."""
        return self.decode().dequantize().reshape(-1)[: int(np.prod(self.shape))].reshape(self.shape)

    def codes(self) -> np.ndarray:
        """Its codes, in its shape."""
        return self.decode().codes.reshape(-1)[: int(np.prod(self.shape))].reshape(self.shape)

    def with_input(self, input_format: InputFormat | None) -> StoredMatrix:
        """The same with another format of its input."""
        return replace(self, input_format=input_format)
