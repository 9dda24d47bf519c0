"""The rows of a frozen weight: the inverse of what loading does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.dot.frozen.frozen_numbers import quant_tensor_of
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.loading.rows import Rows
from jqinject.formats.saving.weights import Weight, sizes_of
from jqinject.formats.stored_matrix import NumberFormat
from jqinject.quant_tensor import (
    Groups,
    is_grouped,
    on_integers,
    on_minifloats,
    on_table,
)

NAMES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float4_e2m1fn": "e2m1", "float6_e2m3fn": "e2m3"}
SCALES = {"float8_e8m0fnu": "e8m0", "float8_e4m3fn": "e4m3"}


def rows_of_frozen(weight: Weight) -> Rows:
    """Codes and scales of a frozen weight as the rows of a matrix `(outputs, inputs)`.

    Args:
        weight: with its numbers, and how rows and columns became its axes.

    Raises:
        CheckpointError: its numbers are of no kind that files hold.
    """
    numbers, form, path = weight.numbers, weight.form, weight.path
    assert numbers is not None and form is not None, "of a frozen weight"
    found = quant_tensor_of(numbers, form)
    groups = found.groups if is_grouped(found) else None
    inner = found.grouped if is_grouped(found) else found
    if form.in_turn is not None:
        raise CheckpointError(
            f"{path}: groups of outputs that lie in turn (HQQ's axis 0) are not written.\n"
            "  cure: the checkpoint that they came from"
        )
    if form.cut is not None:
        raise CheckpointError(
            f"{path}: groups that cross shards are not written.\n  cure: gather the model first"
        )
    kind, payload = codes_of(inner, form, path)
    codes = payload if groups is None else np.asarray(groups.join(payload))
    placed = _Placed(weight, groups, codes.shape)
    zero = placed(numbers["zero_point"]) if "zero_point" in numbers else None
    if zero is not None and not np.any(zero):
        zero = None
    matrix = placed.matrix(codes)
    scale = placed(numbers["scale"])
    bits = form.bit_width if kind == "int" else inner.bit_width
    made = NumberFormat(
        kind,
        int(bits),
        signed=form.signed,
        name=name_of(form),
        scale=SCALES.get(scale.dtype.name, "float"),
        has_zero_point=zero is not None,
    )
    factor = np.asarray(numbers["scale_factor"]) if "scale_factor" in numbers else None
    table = form.grid.table
    group = matrix.shape[1] if groups is None else groups.size
    return Rows(matrix, scale, zero, group, made, factor, table)


class _Placed:
    """Arrays of a weight in the axes of the file's matrix.

    Args:
        weight: with its axes.
        groups: of its inputs; None without.
        shape: of the weight.
    """

    def __init__(self, weight: Weight, groups: Groups | None, shape: tuple[int, ...]) -> None:
        self.weight, self.groups, self.axes, self.ndim = weight, groups, weight.axes, len(shape)
        self.sizes = sizes_of(weight, shape)
        self.outputs = tuple(self.sizes[name] for name in self.axes.outputs)
        self.inputs = tuple(self.sizes[name] for name in self.axes.inputs)
        self.rows = math.prod(self.outputs)
        if groups is not None and self.axes.target[groups.dim] != self.axes.inputs[-1:]:
            raise CheckpointError(f"{weight.path} has groups that are not consecutive inputs of {self.axes}")

    def matrix(self, codes: np.ndarray) -> np.ndarray:
        """Codes as rows."""
        return np.ascontiguousarray(self.axes.back(codes, self.sizes).reshape(self.rows, -1))

    def __call__(self, numbers: Any) -> np.ndarray:
        """Scales or zero points, for each group of each row."""
        x, groups = np.asarray(numbers), self.groups
        x = x.reshape((1,) * (self.ndim + (groups is not None) - x.ndim) + x.shape)
        if groups is not None:
            x = np.squeeze(x, axis=x.ndim + groups.dim)
        try:
            x = self.axes.back(x, self.sizes)
        except ValueError as error:
            raise CheckpointError(f"{self.weight.path}: of its scales, {error}") from None
        outs = len(self.outputs)
        if groups is None and math.prod(x.shape[outs:]) != 1:
            raise CheckpointError(f"{self.weight.path} has scales along its inputs, which are no groups")
        inner = x.shape[outs:]
        if groups is not None:  # scales that further inputs share
            inner = *self.inputs[:-1], x.shape[-1]
        found = np.broadcast_to(x, (*self.outputs, *inner))
        return np.ascontiguousarray(found.reshape(self.rows, -1))


def codes_of(inner: Any, form: FrozenForm, path: str) -> tuple[str, Any]:
    """What kind the codes of a weight are, and the codes.

    Args:
        inner: the weight, with its groups as an axis.
        form: its form.
        path: of the weight, for errors.

    Raises:
        CheckpointError: no file holds such numbers.
    """
    if on_integers(inner):
        if form.bit_width > 8:
            raise CheckpointError(f"{path} has {form.bit_width} bits; files hold at most 8")
        return "int", np.asarray(inner.int().astype(np.int16)).astype(np.int8 if form.signed else np.uint8)
    if on_table(inner):
        return "table", np.asarray(inner.codes())
    if on_minifloats(inner) and name_of(form):
        return "float", np.asarray(inner.payload() if inner.bit_width == 8 else inner.codes())
    raise CheckpointError(
        f"{path} has a minifloat, {form.format}, that no format of a checkpoint knows.\n"
        "  cure: a quantizer of a published format, such as Fp8e4m3OCPWeightPerChannelFloat, whose e4m3 goes up to 448"
    )


def name_of(form: FrozenForm) -> str:
    """The name of a minifloat in `NumberFormat`; empty for any other."""
    return "" if form.grid.dtype is None else NAMES.get(form.grid.dtype.name, "")
