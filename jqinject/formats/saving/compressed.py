"""Rows as compressed-tensors stores them, and the settings that say so."""

from __future__ import annotations

from typing import Any

import numpy as np

from jqinject.formats.bits import pack_stream
from jqinject.formats.errors import CheckpointError
from jqinject.formats.loading.rows import Rows

Tensors = dict[str, np.ndarray]
Scheme = tuple[str, dict[str, Any]]


def compressed(rows: Rows, path: str, quantizes_input: bool) -> tuple[Tensors, Scheme]:
    """The tensors of a module, by the ends of their names; the name of their format, and `weights` of its settings.

    Args:
        rows: its numbers.
        path: of the weight, for errors.
        quantizes_input: whether its input is quantized, so that 8-bit integers are stored in bytes.

    Raises:
        CheckpointError: the format has no such numbers.
    """
    if rows.format.kind == "int":
        return _integers(rows, path, quantizes_input)
    if rows.zero_point is not None:
        raise CheckpointError(f"{path}: minifloats with zero points are not written")
    if rows.format.bits == 8 and rows.format.name != "e4m3":
        raise CheckpointError(f"{path}: compressed-tensors has e4m3 alone of the minifloats with 8 bits")
    kind = rows.format.scale
    if rows.format.bits == 8:
        if kind == "e8m0":
            settings = _settings(rows, "float") | {"scale_dtype": "torch.uint8"}
            return {"weight": rows.codes, "weight_scale": rows.scale.view(np.uint8)}, (
                "mxfp8-quantized",
                settings,
            )
        return {"weight": rows.codes, "weight_scale": _scale(rows)}, (
            "float-quantized",
            _settings(rows, "float"),
        )
    if kind == "e8m0":
        packed = _nibbles(rows.codes) if rows.format.bits == 4 else _sextets(rows.codes)
        settings = _settings(rows, "float") | {"scale_dtype": "torch.uint8"}
        name = f"mxfp{rows.format.bits}-pack-quantized"
        return {"weight_packed": packed, "weight_scale": rows.scale.view(np.uint8)}, (name, settings)
    if kind == "e4m3" and rows.format.bits == 4 and rows.factor is not None:
        whole = np.asarray([1 / np.float64(rows.factor)], np.float32)
        tensors = {
            "weight_packed": _nibbles(rows.codes),
            "weight_scale": rows.scale,
            "weight_global_scale": whole,
        }
        settings = _settings(rows, "float") | {
            "strategy": "tensor_group",
            "scale_dtype": "torch.float8_e4m3fn",
        }
        return tensors, ("nvfp4-pack-quantized", settings)
    raise CheckpointError(
        f"{path}: compressed-tensors has no {rows.format.name} with {rows.scale.dtype} scales in groups of {rows.group}"
    )


def _integers(rows: Rows, path: str, quantizes_input: bool) -> tuple[Tensors, Scheme]:
    bits, half = rows.format.bits, 1 << (rows.format.bits - 1)
    codes, zero = rows.codes.astype(np.int16), rows.zero_point
    if not rows.format.signed:
        codes = codes - half
        zero = (np.zeros_like(rows.scale, np.float32) if zero is None else zero.astype(np.float32)) - half
    if zero is not None and (np.any(zero != np.round(zero)) or np.any(np.abs(zero + 0.5) > half)):
        raise CheckpointError(f"{path}: compressed-tensors has zero points among the integers alone")
    settings = _settings(rows, "int") | {"symmetric": zero is None}
    if quantizes_input and bits == 8 and zero is None and rows.scale.shape[1] == 1:
        return {"weight": codes.astype(np.int8), "weight_scale": _scale(rows)}, ("int-quantized", settings)
    tensors = {
        "weight_packed": pack_stream(codes + half, bits),
        "weight_scale": _scale(rows),
        "weight_shape": np.asarray(codes.shape, np.int64),
    }
    if zero is not None:
        down = np.broadcast_to(zero, (codes.shape[0], zero.shape[1])).astype(np.int16).T + half
        tensors["weight_zero_point"] = np.ascontiguousarray(pack_stream(down, bits).T)
    return tensors, ("pack-quantized", settings)


def _settings(rows: Rows, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {"num_bits": rows.format.bits, "type": kind, "symmetric": True, "dynamic": False}
    if rows.scale.shape[1] > 1 or rows.group < rows.codes.shape[1]:
        return found | {"strategy": "group", "group_size": rows.group}
    return found | {"strategy": "channel"}


def _scale(rows: Rows) -> np.ndarray:
    """A scale for each row, or each of its groups."""
    scale = rows.scale if rows.factor is None else rows.scale.astype(np.float32) * rows.factor
    return np.ascontiguousarray(np.broadcast_to(scale, (rows.codes.shape[0], scale.shape[1])))


def _nibbles(codes: np.ndarray) -> np.ndarray:
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return codes[:, 0::2] | codes[:, 1::2] << 4


def _sextets(codes: np.ndarray) -> np.ndarray:
    """Four codes of six bits in three bytes."""
    size = -(-codes.shape[1] * 6 // 8)
    return np.ascontiguousarray(pack_stream(codes, 6).view(np.uint8)[:, :size])
