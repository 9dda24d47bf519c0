"""Tensors of safetensors files, of one or of several that an index lists, by a memory map."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.files.libraries import broken, library
from jqinject.formats.files.tensors import Tensor, Tensors

INDEX = "model.safetensors.index.json"
DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    **{f"I{bits}": getattr(np, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": getattr(np, f"uint{bits}") for bits in (8, 16, 32, 64)},
    "BOOL": np.bool_,
}


def open_safetensors(path: Path) -> Tensors:
    """The tensors of a safetensors file, or of a folder of them.

    Raises:
        CheckpointError: a file is missing or broken, or two files have a tensor of one name.
        MissingLibraryError: the library safetensors is not installed.
    """
    found: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    listed = _listed(path)
    for file in sorted({*listed.values()}) if listed else _files(path):
        tensors, texts = _in_file(file)
        for name, tensor in tensors.items():
            if listed is not None and listed.get(name) != file:
                continue
            if name in found:
                raise CheckpointError(
                    f"{name} is in {found[name].file} and in {file.name}.\n  cure: an index, {INDEX}"
                )
            found[name] = tensor
        metadata |= texts
    for name, file in (listed or {}).items():
        if name not in found:
            raise CheckpointError(
                f"{path / INDEX} says that {name} is in {file.name}, which does not have it"
            )
    return Tensors(found, metadata)


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def _listed(path: Path) -> dict[str, Path] | None:
    """The file of each tensor, by an index; None without one."""
    index = path / INDEX
    if not path.is_dir() or not index.is_file():
        return None
    try:
        listed = {
            str(name): path / str(file) for name, file in json.loads(index.read_text())["weight_map"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise broken(index, "an index of safetensors files", repr(error)) from None
    for file in sorted({*listed.values()}):
        if file.parent.resolve() != path.resolve():
            raise CheckpointError(f"{index} names {file}, which is not in its folder")
        if not file.is_file():
            raise CheckpointError(
                f"{index} names {file.name}, which is not there.\n  cure: fetch the missing shard"
            )
    return listed


def _in_file(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    safetensors = library("safetensors", path)
    try:
        with safetensors.safe_open(str(path), framework="numpy"):
            pass  # the library checks the header and its offsets
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise broken(path, "a safetensors file", error) from None
    metadata = header.pop("__metadata__", {})
    size = path.stat().st_size - 8 - length
    data = np.memmap(path, np.uint8, "r", 8 + length) if size else np.empty(0, np.uint8)
    return {name: _tensor(path, data, name, entry) for name, entry in header.items()}, metadata


def _tensor(path: Path, data: np.ndarray, name: str, entry: dict[str, Any]) -> Tensor:
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(f"{name} ({path.name}) is {entry['dtype']}; known are {', '.join(DTYPES)}")
    dtype, shape = np.dtype(DTYPES[entry["dtype"]]), tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    if stop - start != math.prod(shape) * dtype.itemsize or stop > data.size:
        raise CheckpointError(
            f"{name} ({path.name}) has {stop - start} bytes for the shape {shape} of {dtype.name}"
        )
    return Tensor(dtype, shape, path.name, lambda: data[start:stop].view(dtype).reshape(shape))
