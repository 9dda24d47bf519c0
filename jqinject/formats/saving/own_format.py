"""The arrays of a frozen weight in jqinject's own layout (`layouts.own`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jqinject.dot.frozen.frozen_numbers import quant_tensor_of
from jqinject.formats.bits import pack_stream
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.layouts.own import FORMAT_VERSION, INPUTS
from jqinject.formats.saving.frozen_rows import codes_of, name_of
from jqinject.formats.saving.saved_column_orders import group_of_each
from jqinject.formats.saving.weights import Weight
from jqinject.formats.stored_matrix import InputFormat
from jqinject.quant_tensor import is_grouped


def own_layout(weight: Weight, inputs: InputFormat | None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors of a weight, and its settings.

    Args:
        weight: with its numbers.
        inputs: how the input of its layer is quantized.

    Raises:
        CheckpointError: its numbers are of no kind that files hold.
    """
    numbers, form, name = weight.numbers, weight.form, weight.name
    assert numbers is not None and form is not None, "of a frozen weight"
    if form.in_turn is not None:
        raise CheckpointError(
            f"{weight.path}: groups of outputs that lie in turn (HQQ's axis 0) are not written.\n"
            "  cure: the checkpoint that they came from"
        )
    if form.cut is not None:
        raise CheckpointError(
            f"{weight.path}: groups that cross shards are not written.\n  cure: gather the model first"
        )
    found = quant_tensor_of(numbers, form)
    groups = found.groups if is_grouped(found) else None
    inner = found.grouped if is_grouped(found) else found
    kind, payload = codes_of(inner, form, weight.path)
    codes = payload if groups is None else np.asarray(groups.join(payload))
    columns = None
    if weight.order is not None:
        axis = _permuted_axis(weight, None if groups is None else groups.dim)
        codes = np.take(codes, np.argsort(weight.order), axis)
        columns = None if groups is None else group_of_each(weight.order, groups.size)
    bits = int(form.bit_width if kind == "int" else inner.bit_width)

    def beside(x: Any) -> np.ndarray:
        x = np.asarray(x)
        x = x.reshape((1,) * (codes.ndim + (groups is not None) - x.ndim) + x.shape)
        return x if groups is None else np.squeeze(x, axis=x.ndim + groups.dim)

    mask = np.uint8(2**bits - 1)
    tensors = {
        f"{name}.codes": codes if bits == 8 else pack_stream(codes.view(np.uint8).reshape(-1) & mask, bits),
        f"{name}.scale": beside(numbers["scale"]),
    }
    if columns is not None:
        tensors[f"{name}.g_idx"] = columns
    if "zero_point" in numbers:
        tensors[f"{name}.zero_point"] = beside(numbers["zero_point"])
    if "scale_factor" in numbers:
        factor = np.asarray(numbers["scale_factor"])
        if factor.size != 1:
            raise CheckpointError(
                f"{weight.path} is a stack with a factor of scales for each layer, which is not written"
            )
        tensors[f"{name}.scale_factor"] = factor.reshape(())
    if form.grid.is_table:
        tensors[f"{name}.table"] = form.grid.table
    settings: dict[str, Any] = {"kind": kind, "bits": bits, "signed": form.signed, "name": name_of(form)}
    settings |= {"shape": list(codes.shape), "group": None if groups is None else groups.size}
    if inputs is not None:
        settings["input"] = _input(inputs)
    return tensors, settings


def _permuted_axis(weight: Weight, grouped: int | None) -> int:
    """The axis of a weight whose input is permuted: the one with groups, or the only one that is summed over.

    Raises:
        CheckpointError: nobody knows it, or it is not one axis.
    """
    summed = () if weight.layer is None else weight.layer.summed_axes
    axis = grouped if grouped is not None else summed[0] if len(summed) == 1 else None
    shape = () if weight.form is None else weight.form.shape
    if axis is None or weight.order is None or shape[axis] != weight.order.size:
        raise CheckpointError(
            f"{weight.path}: its permuted input is no single axis of {shape}, so its columns have no order.\n"
            "  cure: method='compressed-tensors', with names"
        )
    return axis


def _input(inputs: InputFormat) -> dict[str, Any]:
    settings = {name: getattr(inputs, name) for name in INPUTS if getattr(inputs, name) is not None}
    if not inputs.unsigned:
        del settings["unsigned"]
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in settings.items()
    }


def own_settings(weights: Mapping[str, Any]) -> dict[str, Any]:
    """`quantization_config`.

    Args:
        weights: the settings of each.
    """
    return {"quant_method": "jqinject", "format_version": FORMAT_VERSION, "weights": dict(weights)}
