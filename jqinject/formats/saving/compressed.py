"""Rows as compressed-tensors stores them, and the settings that say so."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jqinject.formats.bits import pack_stream
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.loading.rows import Rows
from jqinject.formats.saving.weights import Weight
from jqinject.formats.stored_matrix import InputFormat

Tensors = dict[str, np.ndarray]
MX_GROUP, NV_GROUP = 32, 16


@dataclass(frozen=True)
class CompressedScheme:
    """How a module is quantized.

    Attributes:
        format: the name of the layout.
        weights: its `weights` settings.
        inputs: its `input_activations`; None for float inputs.
    """

    format: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None


def compressed(rows: Rows, weight: Weight, inputs: InputFormat | None) -> tuple[Tensors, CompressedScheme]:
    """The tensors of a module, and how it is quantized.

    Args:
        rows: its numbers.
        weight: whose they are.
        inputs: how its input is quantized.

    Raises:
        CheckpointError: the format has no such numbers.
    """
    path = weight.path
    if rows.format.kind == "table":
        raise CheckpointError(
            f"{path} has codes of a table, which compressed-tensors does not know.\n"
            "  cure: method='bitsandbytes', for NF4"
        )
    columns = rows.codes.shape[1]
    if columns % max(rows.group, 1):
        raise CheckpointError(
            f"{path}: groups of {rows.group} do not divide its {columns} inputs, which compressed-tensors needs.\n"
            f"  cure: a group_size that divides {columns}"
        )
    made, name, settings = _integers(rows, path, inputs) if rows.format.kind == "int" else _floats(rows, path)
    if rows.columns is not None:
        if name != "pack-quantized":
            raise CheckpointError(
                f"{path} has columns in activation order, which compressed-tensors has for packed integers alone.\n"
                "  cure: integer weights and a float input; or method='jqinject'"
            )
        made, settings = made | {"weight_g_idx": rows.columns}, settings | {"actorder": "group"}
    said, static = _inputs(inputs)
    tensors = {f"{weight.module}.{end}": array for end, array in (made | static).items()}
    return tensors, CompressedScheme(name, settings, said)


def _floats(rows: Rows, path: str) -> tuple[Tensors, str, dict[str, Any]]:
    form = rows.format
    if rows.zero_point is not None:
        raise CheckpointError(
            f"{path}: minifloats with zero points are not written.\n  cure: symmetric weights"
        )
    if form.bits == 8 and form.name != "e4m3":
        raise CheckpointError(
            f"{path}: compressed-tensors has e4m3 alone of the minifloats with 8 bits.\n"
            "  cure: Fp8e4m3OCPWeightPerChannelFloat"
        )
    if form.bits == 8 and form.scale != "e8m0":
        scale, settings = _of_blocks(rows)
        found = _settings(rows, "float") | settings
        return {"weight": rows.codes, "weight_scale": scale}, "float-quantized", found
    if form.scale == "e8m0" and rows.group == MX_GROUP:
        packed = {4: _nibbles, 6: _sextets}.get(form.bits, np.ascontiguousarray)(rows.codes)
        settings = _settings(rows, "float") | {"strategy": "group", "group_size": MX_GROUP}
        end, name = (
            ("weight", "mxfp8-quantized")
            if form.bits == 8
            else ("weight_packed", f"mxfp{form.bits}-pack-quantized")
        )
        tensors = {end: packed, "weight_scale": rows.scale.view(np.uint8)}
        return tensors, name, settings | {"scale_dtype": "torch.uint8"}
    if form.scale == "e4m3" and form.bits == 4 and rows.factor is not None and rows.group == NV_GROUP:
        whole = np.asarray([1 / np.float64(rows.factor)], np.float32)
        tensors = {
            "weight_packed": _nibbles(rows.codes),
            "weight_scale": rows.scale,
            "weight_global_scale": whole,
        }
        settings = {
            "strategy": "tensor_group",
            "group_size": NV_GROUP,
            "scale_dtype": "torch.float8_e4m3fn",
        }
        return tensors, "nvfp4-pack-quantized", _settings(rows, "float") | settings
    raise CheckpointError(
        f"{path}: compressed-tensors has no {form.name} with {rows.scale.dtype} scales in groups of {rows.group}.\n"
        "  cure: MXFloat4e2m1Weight, MXFloat6e2m3Weight or MXFloat8e4m3Weight in groups of 32, or NVFP4Weight"
    )


def _integers(rows: Rows, path: str, inputs: InputFormat | None) -> tuple[Tensors, str, dict[str, Any]]:
    bits, half = rows.format.bits, 1 << (rows.format.bits - 1)
    if bits < 2:
        raise CheckpointError(f"{path} has 1 bit; compressed-tensors has 2 to 8 bits.\n  cure: 2 bits")
    codes, zero = rows.codes.astype(np.int16), rows.zero_point
    if not rows.format.signed:
        codes = codes - half
        zero = (np.zeros_like(rows.scale, np.float32) if zero is None else zero.astype(np.float32)) - half
    if zero is not None and (np.any(zero != np.round(zero)) or np.any(np.abs(zero + 0.5) > half)):
        raise CheckpointError(
            f"{path}: compressed-tensors has zero points among the integers alone.\n"
            "  cure: quantize_zero_point = True, or symmetric weights"
        )
    settings = _settings(rows, "int") | {"symmetric": zero is None}
    if inputs is not None and bits == 8 and zero is None and rows.scale.shape[1] == 1:
        scale, found = _of_blocks(rows)
        return {"weight": codes.astype(np.int8), "weight_scale": scale}, "int-quantized", settings | found
    tensors = {
        "weight_packed": pack_stream(codes + half, bits),
        "weight_scale": _scale(rows),
        "weight_shape": np.asarray(codes.shape, np.int64),
    }
    if zero is not None:
        down = np.broadcast_to(zero, (codes.shape[0], zero.shape[1])).astype(np.int16).T + half
        tensors["weight_zero_point"] = np.ascontiguousarray(pack_stream(down, bits).T)
    return tensors, "pack-quantized", settings


def _settings(rows: Rows, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {"num_bits": rows.format.bits, "type": kind, "symmetric": True, "dynamic": False}
    if rows.scale.shape[1] > 1 or rows.group < rows.codes.shape[1]:
        return found | {"strategy": "group", "group_size": rows.group}
    return found | {"strategy": "channel"}


def _of_blocks(rows: Rows) -> tuple[np.ndarray, dict[str, Any]]:
    """The scales of a tensor, of blocks of rows, or of rows, whichever they are; and what the settings say of them."""
    scale = _scale(rows)
    changes = np.flatnonzero(np.any(scale[1:] != scale[:-1], axis=1)) + 1
    height = math.gcd(*map(int, changes)) if changes.size else scale.shape[0]
    if scale.shape[1] == 1 and not changes.size:
        return scale[0], {"strategy": "tensor"}
    if height == 1 or rows.format.kind == "int":
        return scale, {}
    structure = {"strategy": "block", "group_size": None, "block_structure": [height, rows.group]}
    return np.ascontiguousarray(scale[::height]), structure


def _scale(rows: Rows) -> np.ndarray:
    """A scale for each row, or each of its groups."""
    scale = rows.scale if rows.scale.dtype.itemsize > 1 else rows.scale.astype(np.float32)
    scale = scale if rows.factor is None else scale.astype(np.float32) * rows.factor
    return np.ascontiguousarray(np.broadcast_to(scale, (rows.codes.shape[0], scale.shape[1])))


def _inputs(given: InputFormat | None) -> tuple[dict[str, Any] | None, Tensors]:
    """`input_activations`, and the tensors beside it."""
    if given is None:
        return None, {}
    settings: dict[str, Any] = {
        "num_bits": given.bits,
        "type": given.kind,
        "symmetric": given.symmetric,
        "strategy": given.strategy,
        "dynamic": given.dynamic,
    }
    if given.group_size is not None:
        settings["group_size"] = given.group_size
    tensors: Tensors = {}
    if given.bits == 4:
        settings["scale_dtype"] = "torch.float8_e4m3fn"
    if given.global_scale is not None:
        settings["dynamic"] = "local"
        tensors["input_global_scale"] = given.global_scale
    if given.scale is not None:
        tensors["input_scale"] = given.scale
    if given.zero_point is not None:
        tensors["input_zero_point"] = given.zero_point.astype(np.int8)
    if given.unsigned:
        settings["observer_kwargs"] = {"unsigned": True}  # a note to ourselves: others read it as signed
    return settings, tensors


def settings_of(schemes: Mapping[str, CompressedScheme]) -> dict[str, Any]:
    """`quantization_config`: a group for each way in which modules are quantized.

    Args:
        schemes: by the names of modules.
    """
    groups: dict[str, tuple[list[str], CompressedScheme]] = {}
    for module, scheme in schemes.items():
        key = json.dumps([scheme.format, scheme.weights, scheme.inputs], sort_keys=True)
        groups.setdefault(key, ([], scheme))[0].append(module)
    formats = {scheme.format for _, scheme in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": [],
        "config_groups": {
            f"group_{at}": {
                "targets": targets,
                "format": scheme.format,
                "weights": scheme.weights,
                "input_activations": scheme.inputs,
            }
            for at, (targets, scheme) in enumerate(groups.values())
        },
    }


def _nibbles(codes: np.ndarray) -> np.ndarray:
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return codes[:, 0::2] | codes[:, 1::2] << 4


def _sextets(codes: np.ndarray) -> np.ndarray:
    """Four codes of six bits in three bytes."""
    size = -(-codes.shape[1] * 6 // 8)
    return np.ascontiguousarray(pack_stream(codes, 6).view(np.uint8)[:, :size])
