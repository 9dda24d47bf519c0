"""Rows of a checkpoint as frozen numbers of a parameter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jqinject.dot import ScaleForms, frozen_numbers
from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.formats.loading.layout_axes import AxesOfLayout
from jqinject.formats.loading.rows import Rows
from jqinject.ops import FloatGrid, IntGrid, TableGrid
from jqinject.quant_tensor import CodebookQuantTensor, FloatQuantTensor, IntQuantTensor, in_groups

E2M1, E2M3 = FloatGrid.of_dtype("float4_e2m1fn"), FloatGrid.of_dtype("float6_e2m3fn")


class Placed:
    """The codes and scales of rows in the axes of a parameter.

    Args:
        rows: the numbers.
        axes: how they are rearranged.
        sizes: of the axes.

    Attributes:
        codes: in the parameter's shape, or with two axes for the one that is cut into groups.
        scale, zero_point: broadcast against them; in the file's dtype.
        group: elements of a group; None without groups.
        dim: the axis that is cut into groups, counted from the end.
        in_turn: the axis along which scales and zero points repeat, counted from the end; None for none.
    """

    def __init__(self, rows: Rows, axes: AxesOfLayout, sizes: dict[str, int]) -> None:
        outputs = tuple(sizes[name] for name in axes.outputs)
        inputs = tuple(sizes[name] for name in axes.inputs)
        self.group: int | None = None
        self.dim = 0
        self.length = inputs[-1] if inputs else 0
        self.scale: np.ndarray
        self.zero_point: np.ndarray | None
        columns = rows.codes.shape[-1]
        groups = rows.scale.shape[-1]
        codes = axes.apply(rows.codes, outputs, inputs)
        self.in_turn: int | None = None
        if rows.in_turn:
            self.in_turn = axes.target.index(axes.outputs) - len(axes.target)
            self.codes = codes
            counts = (rows.scale.shape[-2],)
            self.scale = axes.apply(rows.scale, counts, inputs)
            self.zero_point = None if rows.zero_point is None else axes.apply(rows.zero_point, counts, inputs)
            return
        if groups == 1:
            self.codes = codes
            self.scale, self.zero_point = (
                self._spread(x, axes, outputs, (1,) * len(inputs)) for x in (rows.scale, rows.zero_point)
            )
            return
        last = inputs[-1]
        group = rows.group if len(inputs) == 1 else math.gcd(rows.group, last)
        each = last // group if len(inputs) > 1 else groups
        repeats = (columns // group) // groups if len(inputs) > 1 else 1
        of_groups = (*inputs[:-1], each)
        self.group, length = group, last
        self.scale, self.zero_point = (
            self._spread(None if x is None else np.repeat(x, repeats, axis=-1), axes, outputs, of_groups)
            for x in (rows.scale, rows.zero_point)
        )
        axis = next(at for at, term in enumerate(axes.target) if term[-1] == axes.inputs[-1])
        if len(axes.target[axis]) > 1:
            raise ValueError(f"groups lie along {axes.inputs[-1]}, which is a part of an axis in {axes}")
        self.dim, self.length = axis - len(axes.target), length
        at = codes.ndim + self.dim
        short = each * group - length
        if short:
            codes = np.pad(
                codes.view(np.uint8), [(0, short if k == at else 0) for k in range(codes.ndim)]
            ).view(codes.dtype)
        self.codes = codes.reshape(*codes.shape[:at], each, group, *codes.shape[at + 1 :])
        self.scale = self._beside_groups(self.scale)
        self.zero_point = None if self.zero_point is None else self._beside_groups(self.zero_point)

    def _beside_groups(self, x: np.ndarray) -> np.ndarray:
        """Numbers of groups with the axis of a group's elements."""
        return np.expand_dims(x, x.ndim + self.dim + 1)

    @staticmethod
    def _spread(
        x: np.ndarray | None, axes: AxesOfLayout, outputs: tuple[int, ...], inputs: tuple[int, ...]
    ) -> Any:
        if x is None:
            return None
        rows = (1,) * len(outputs) if x.shape[-2] == 1 else outputs
        return axes.apply(x, rows, inputs)


def numbers_of(
    rows: Rows,
    axes: AxesOfLayout,
    sizes: dict[str, int],
    dtype: Any,
    summed: tuple[int, ...],
    axes_of_sums: tuple[int, ...] | None,
) -> tuple[dict[str, Any], FrozenForm]:
    """What is stored of a parameter whose numbers a checkpoint has.

    Codes stay as they are. Scales and integer zero points stay in the bytes of the file.

    Args:
        rows: the numbers.
        axes, sizes: how they are rearranged.
        dtype: of the parameter.
        summed, axes_of_sums: see `frozen_numbers`.
    """
    placed = Placed(rows, axes, sizes)
    quantized = _quant_tensor(rows, placed, dtype)
    whole = rows.zero_point is None or np.issubdtype(rows.zero_point.dtype, np.integer)
    forms = ScaleForms(None, whole)
    numbers, form = frozen_numbers(quantized, summed, rows.zero_point is not None, axes_of_sums, forms)
    numbers["scale"] = jnp.asarray(placed.scale)
    if placed.in_turn is not None:
        if "zero_point" in numbers:
            numbers["zero_point"] = jnp.asarray(placed.zero_point, jnp.float32)
        numbers.pop("sums", None)
        form = replace(form, in_turn=placed.in_turn, names=tuple(sorted(numbers)))
    if rows.factor is not None:
        numbers["scale_factor"] = jnp.asarray(rows.factor, jnp.float32)
        form = replace(form, names=tuple(sorted(numbers)))
    return numbers, form


def _quant_tensor(rows: Rows, placed: Placed, dtype: Any) -> Any:
    scale = jnp.asarray(placed.scale.astype(np.float32))
    form = rows.format
    if form.kind == "int":
        zero = (
            jnp.float32(0) if placed.zero_point is None else jnp.asarray(placed.zero_point.astype(np.float32))
        )
        grid = IntGrid(form.bits, form.signed)
        made: Any = IntQuantTensor.stored(jnp.asarray(placed.codes), scale, zero, grid, dtype)
    elif form.kind == "table":
        made = _of_table(placed.codes, rows.table, scale, dtype)
    elif form.bits == 8:
        codes = jnp.asarray(placed.codes)
        made = FloatQuantTensor.stored(codes, scale, None, FloatGrid.of_dtype(codes.dtype), dtype)
    else:
        minifloat = E2M1 if form.bits == 4 else E2M3
        # The code of -0 is nan's in formats that have no other for it.
        codes = np.where(placed.codes == 1 << (form.bits - 1), np.uint8(0), placed.codes)
        made = FloatQuantTensor.from_payload(jnp.asarray(codes), scale, format=minifloat, dtype=dtype)
    return made if placed.group is None else in_groups(made, placed.group, placed.dim, placed.length)


def _of_table(codes: np.ndarray, table: np.ndarray | None, scale: Any, dtype: Any) -> CodebookQuantTensor:
    """Codes of a table, which a `TableGrid` wants in ascending order and without a second zero."""
    assert table is not None, "a table's codes have one"
    values, places = np.unique(table, return_inverse=True)
    found = TableGrid(tuple(float(value) for value in values))
    return CodebookQuantTensor.from_codes(
        jnp.asarray(places.astype(np.uint8)[codes]), scale, found, dtype=dtype
    )
