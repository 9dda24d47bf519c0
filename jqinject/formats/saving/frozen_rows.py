"""The rows of a frozen weight: the inverse of what loading does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.dot.frozen.frozen_numbers import quant_tensor_of
from jqinject.formats.errors import CheckpointError
from jqinject.formats.loading.axes import Axes
from jqinject.formats.loading.rows import Rows
from jqinject.formats.stored_matrix import NumberFormat
from jqinject.ops import Codebook
from jqinject.quant_tensor import FloatQuantTensor, GroupwiseQuantTensor, IntQuantTensor

NAMES = {(4, 3): "e4m3", (2, 1): "e2m1", (2, 3): "e2m3"}
SCALES = {"float8_e8m0fnu": "e8m0", "float8_e4m3fn": "e4m3"}


def rows_of_frozen(numbers: Mapping[str, Any], form: FrozenForm, axes: Axes, path: str) -> Rows:
    """Codes and scales of a frozen weight as the rows of a matrix `(outputs, inputs)`.

    Args:
        numbers, form: of the weight.
        axes: how rows and columns became the weight's axes.
        path: of the weight, for errors.

    Raises:
        CheckpointError: its numbers are of no kind that files hold.
    """
    weight = quant_tensor_of(numbers, form)
    groups = weight.groups if isinstance(weight, GroupwiseQuantTensor) else None
    inner = weight.grouped if isinstance(weight, GroupwiseQuantTensor) else weight
    if form.cut is not None:
        raise CheckpointError(
            f"{path}: groups that cross shards are not written.\n  cure: gather the model first"
        )
    kind, payload = _codes(inner, form, path)
    codes = payload if groups is None else np.asarray(groups.join(payload))
    shape = codes.shape
    flat = [name for term in axes.target for name in term]
    if len(flat) != len(shape):
        raise CheckpointError(f"{path} has {len(shape)} axes, which {axes} does not say the order of")
    order = [flat.index(name) for name in (*axes.outputs, *axes.inputs)]
    outs = len(axes.outputs)
    rows = math.prod(shape[axis] for axis in order[:outs])

    def placed(x: Any) -> np.ndarray:
        x = np.asarray(x)
        x = x.reshape((1,) * (len(shape) + (groups is not None) - x.ndim) + x.shape)
        if groups is not None:
            x = np.squeeze(x, axis=x.ndim + groups.dim)
        x = x.transpose(order)
        within = x.shape[outs:]
        if groups is None and math.prod(within) != 1:
            raise CheckpointError(f"{path} has scales along its inputs, which are no groups")
        if groups is not None and order[-1] - len(shape) != groups.dim:
            raise CheckpointError(f"{path} has groups that are not consecutive inputs of {axes}")
        if groups is not None:  # scales that further inputs share
            x = np.broadcast_to(x, (*x.shape[:outs], *(shape[axis] for axis in order[outs:-1]), x.shape[-1]))
        found = np.broadcast_to(x, (*(shape[axis] for axis in order[:outs]), *x.shape[outs:]))
        return np.ascontiguousarray(found.reshape(rows, -1))

    zero = placed(numbers["zero_point"]) if "zero_point" in numbers else None
    if zero is not None and not np.any(zero):
        zero = None
    matrix = np.ascontiguousarray(codes.transpose(order).reshape(rows, -1))
    group = matrix.shape[1] if groups is None else groups.size
    factor = np.asarray(numbers["scale_factor"]) if "scale_factor" in numbers else None
    scale = placed(numbers["scale"])
    stored = SCALES.get(scale.dtype.name, "float")
    bits = form.bit_width if kind == "int" else inner.bit_width
    made = NumberFormat(
        kind, int(bits), signed=form.signed, name=_name(form), scale=stored, has_zero_point=zero is not None
    )
    return Rows(matrix, scale, zero, group, made, factor)


def _codes(inner: Any, form: FrozenForm, path: str) -> tuple[str, Any]:
    if isinstance(inner, IntQuantTensor):
        if form.bit_width > 8:
            raise CheckpointError(f"{path} has {form.bit_width} bits; files hold at most 8")
        return "int", np.asarray(inner.int().astype(np.int16)).astype(np.int8 if form.signed else np.uint8)
    if isinstance(inner, FloatQuantTensor) and _name(form):
        return "float", np.asarray(inner.payload() if inner.bit_width == 8 else inner.codes())
    raise CheckpointError(f"{path} has codes of a table or a minifloat that compressed-tensors does not know")


def _name(form: FrozenForm) -> str:
    found = form.format
    if found is None or isinstance(found, Codebook):
        return ""
    return NAMES.get((found.exponent_bit_width, found.mantissa_bit_width), "")
