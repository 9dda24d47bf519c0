"""Matrices as compressed-tensors stores them, and the settings that say so."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jqinject.formats.bits import pack_stream
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.saving.weights import Weight
from jqinject.formats.stored_matrix import InputFormat, Matrix, minifloat_name

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


def compressed(
    matrix: Matrix, weight: Weight, inputs: InputFormat | None
) -> tuple[Tensors, CompressedScheme]:
    """Return the tensors of a module, and how it is quantized.

    Args:
        matrix: its numbers.
        weight: that they belong to.
        inputs: how its input is quantized.

    Raises:
        CheckpointError: the format has no such numbers.
    """
    path, columns = weight.path, matrix.codes.shape[1]
    if matrix.grid.is_table:
        raise CheckpointError(
            f"{path} has codes of a table, which compressed-tensors does not know.\n"
            "  cure: method='bitsandbytes', for NF4"
        )
    if columns % max(matrix.group, 1):
        raise CheckpointError(
            f"{path}: groups of {matrix.group} do not divide its {columns} inputs, which compressed-tensors needs.\n"
            f"  cure: a group_size that divides {columns}"
        )
    write = _integers if matrix.grid.is_integer else _floats
    arrays, name, settings = write(matrix, path, inputs)
    if matrix.group_of_column is not None:
        if name != "pack-quantized":
            raise CheckpointError(
                f"{path} has columns in activation order, which compressed-tensors has for packed integers alone.\n"
                "  cure: integer weights and a float input; or method='jqinject'"
            )
        arrays["weight_g_idx"], settings["actorder"] = matrix.group_of_column, "group"
    input_settings, static = _inputs(inputs)
    tensors = {f"{weight.module}.{end}": array for end, array in (arrays | static).items()}
    return tensors, CompressedScheme(name, settings, input_settings)


def _floats(matrix: Matrix, path: str, inputs: InputFormat | None) -> tuple[Tensors, str, dict[str, Any]]:
    if matrix.zero_point is not None:
        raise CheckpointError(
            f"{path}: minifloats with zero points are not written.\n  cure: symmetric weights"
        )
    bits, name, scale_dtype = matrix.grid.bit_width, minifloat_name(matrix.grid), matrix.scale.dtype.name
    is_mx = scale_dtype == "float8_e8m0fnu"
    if bits == 8 and name != "e4m3":
        raise CheckpointError(
            f"{path}: compressed-tensors has e4m3 alone of the minifloats with 8 bits.\n"
            "  cure: Fp8e4m3OCPWeightPerChannelFloat"
        )
    settings = _settings(matrix, "float")
    if bits == 8 and not is_mx:
        scale, structure = _of_blocks(matrix)
        return {"weight": matrix.codes, "weight_scale": scale}, "float-quantized", settings | structure
    if is_mx and matrix.group == MX_GROUP:
        settings |= {"strategy": "group", "group_size": MX_GROUP, "scale_dtype": "torch.uint8"}
        scale = matrix.scale.view(np.uint8)
        if bits == 8:
            return {"weight": matrix.codes, "weight_scale": scale}, "mxfp8-quantized", settings
        packed = _nibbles(matrix.codes) if bits == 4 else _sextets(matrix.codes)
        return {"weight_packed": packed, "weight_scale": scale}, f"mxfp{bits}-pack-quantized", settings
    is_nv = scale_dtype == "float8_e4m3fn" and matrix.factor is not None and matrix.group == NV_GROUP
    if is_nv and bits == 4:
        tensors = {
            "weight_packed": _nibbles(matrix.codes),
            "weight_scale": matrix.scale,
            "weight_global_scale": np.asarray([1 / np.float64(matrix.factor)], np.float32),
        }
        settings |= {"strategy": "tensor_group", "group_size": NV_GROUP}
        return tensors, "nvfp4-pack-quantized", settings | {"scale_dtype": "torch.float8_e4m3fn"}
    raise CheckpointError(
        f"{path}: compressed-tensors has no {name} with {scale_dtype} scales in groups of {matrix.group}.\n"
        "  cure: MXFloat4e2m1Weight, MXFloat6e2m3Weight or MXFloat8e4m3Weight in groups of 32, or NVFP4Weight"
    )


def _integers(matrix: Matrix, path: str, inputs: InputFormat | None) -> tuple[Tensors, str, dict[str, Any]]:
    bits, half = matrix.grid.bit_width, 1 << (matrix.grid.bit_width - 1)
    if bits < 2:
        raise CheckpointError(f"{path} has 1 bit; compressed-tensors has 2 to 8 bits.\n  cure: 2 bits")
    codes, zero = signed_integers(matrix)
    if zero is not None and (np.any(zero != np.round(zero)) or np.any(np.abs(zero + 0.5) > half)):
        raise CheckpointError(
            f"{path}: compressed-tensors has zero points among the integers alone.\n"
            "  cure: quantize_zero_point = True, or symmetric weights"
        )
    settings = _settings(matrix, "int") | {"symmetric": zero is None}
    if inputs is not None and bits == 8 and zero is None and matrix.scale.shape[1] == 1:
        scale, structure = _of_blocks(matrix)
        tensors = {"weight": codes.astype(np.int8), "weight_scale": scale}
        return tensors, "int-quantized", settings | structure
    tensors = {
        "weight_packed": pack_stream(codes + half, bits),
        "weight_scale": _scale(matrix),
        "weight_shape": np.asarray(codes.shape, np.int64),
    }
    if zero is not None:
        down = np.broadcast_to(zero, (codes.shape[0], zero.shape[1])).astype(np.int16).T + half
        tensors["weight_zero_point"] = np.ascontiguousarray(pack_stream(down, bits).T)
    return tensors, "pack-quantized", settings


def signed_integers(matrix: Matrix) -> tuple[np.ndarray, np.ndarray | None]:
    """Return integers with a sign, int16, and their zero points: unsigned ones are shifted by half of their range."""
    codes, zero = matrix.codes.astype(np.int16), matrix.zero_point
    if matrix.grid.signed:
        return codes, zero
    half = 1 << (matrix.grid.bit_width - 1)
    shifted = (np.zeros(matrix.scale.shape, np.float32) if zero is None else zero.astype(np.float32)) - half
    return codes - half, shifted


def _settings(matrix: Matrix, kind: str) -> dict[str, Any]:
    settings = {"num_bits": matrix.grid.bit_width, "type": kind, "symmetric": True, "dynamic": False}
    if matrix.scale.shape[1] > 1 or matrix.group < matrix.codes.shape[1]:
        return settings | {"strategy": "group", "group_size": matrix.group}
    return settings | {"strategy": "channel"}


def _of_blocks(matrix: Matrix) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the scales of a tensor, of blocks of rows, or of rows, whichever they are; and their settings."""
    scale = _scale(matrix)
    changes = np.flatnonzero(np.any(scale[1:] != scale[:-1], axis=1)) + 1
    height = math.gcd(*map(int, changes)) if changes.size else scale.shape[0]
    if scale.shape[1] == 1 and not changes.size:
        return scale[0], {"strategy": "tensor"}
    if height == 1 or matrix.grid.is_integer:
        return scale, {}
    structure = {"strategy": "block", "group_size": None, "block_structure": [height, matrix.group]}
    return np.ascontiguousarray(scale[::height]), structure


def _scale(matrix: Matrix) -> np.ndarray:
    """Return a scale for each row, or each of its groups."""
    wide = matrix.scale if matrix.scale.dtype.itemsize > 1 and matrix.factor is None else matrix.scales()
    return np.ascontiguousarray(np.broadcast_to(wide, (matrix.codes.shape[0], wide.shape[1])))


def _inputs(inputs: InputFormat | None) -> tuple[dict[str, Any] | None, Tensors]:
    """Return `input_activations`, and the tensors that belong to it."""
    if inputs is None:
        return None, {}
    settings: dict[str, Any] = {
        "num_bits": inputs.bits,
        "type": inputs.kind,
        "symmetric": inputs.symmetric,
        "strategy": inputs.strategy,
        "dynamic": inputs.dynamic if inputs.global_scale is None else "local",
    }
    if inputs.group_size is not None:
        settings["group_size"] = inputs.group_size
    if inputs.bits == 4:
        settings["scale_dtype"] = "torch.float8_e4m3fn"
    if inputs.unsigned:
        settings["observer_kwargs"] = {"unsigned": True}  # a note to ourselves: others read it as signed
    tensors = {
        "input_global_scale": inputs.global_scale,
        "input_scale": inputs.scale,
        "input_zero_point": None if inputs.zero_point is None else inputs.zero_point.astype(np.int8),
    }
    return settings, {name: array for name, array in tensors.items() if array is not None}


def settings_of(schemes: Mapping[str, CompressedScheme]) -> dict[str, Any]:
    """Return `quantization_config`: a group for each way in which modules are quantized.

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
    """Return four codes of six bits in three bytes."""
    size = -(-codes.shape[1] * 6 // 8)
    return np.ascontiguousarray(pack_stream(codes, 6).view(np.uint8)[:, :size])
