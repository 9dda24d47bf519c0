"""Safetensors files: tensors by name, of one file or of several that an index lists, read from a memory map."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from jqinject.formats.checkpoint_errors import CONTRADICTION, CheckpointError, broken, library

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "BOOL": "bool",
}
FLOATS = ("float32", "bfloat16", "float16", "float64")

#: Sizes that a tensor must have; None for any.
Shape: TypeAlias = tuple[int | None, ...]
#: What JSON says by name: numbers, texts, lists, and further values; of a tensor `dtype`, `shape`, `data_offsets`.
Values: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file.

    Attributes:
        dtype: of NumPy, or of ml_dtypes.
        shape: its shape.
        file: the file's name.
        read: returns its array, a read-only view of the file where its layout allows.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    file: str
    read: Callable[[], np.ndarray] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """The bytes of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.read(), dtype)

    def map(self, change: Callable[[np.ndarray], np.ndarray], dtype: np.dtype | None = None) -> Tensor:
        """Return a tensor of the same bytes of the file, of which `change` makes an array when it is read."""
        return replace(self, read=lambda: change(self.read()), dtype=dtype or self.dtype)

    def floats(self) -> np.ndarray:
        """Return its numbers in one axis, float32."""
        return self.read().astype(np.float32).reshape(-1)

    @staticmethod
    def of(array: np.ndarray) -> Tensor:
        """Return an array as a tensor that is read already."""
        return Tensor(array.dtype, array.shape, "", lambda: array)


class Tensors:
    """The tensors of a checkpoint, of which some become parts of matrices.

    Args:
        by_name: the tensors.
        metadata: texts that the files carry with them.
    """

    def __init__(self, by_name: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
        self.by_name, self.metadata = by_name, metadata or {}
        self._used: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self.by_name

    def ending(self, end: str) -> list[str]:
        """Return what names that end so have in front of `end`, sorted."""
        return sorted(name.removesuffix(end) for name in self.by_name if name.endswith(end))

    def take(
        self, name: str, *shapes: Shape, dtype: str | Sequence[str] | None = None, why: str = ""
    ) -> Tensor:
        """Return a tensor that becomes a part of something else.

        Args:
            name: its name.
            shapes: one of which it must have; none for any.
            dtype: the names of dtypes, one of which it must have.
            why: what requires shape and dtype.

        Raises:
            CheckpointError: it is missing, or another.
        """
        tensor = self.by_name.get(name)
        if tensor is None:
            reason = f", {why}" if why else ""
            raise CheckpointError(f"the checkpoint has no {name}{reason}.\n  cure: fetch it again")
        if shapes and not any(_fits(tensor.shape, sizes) for sizes in shapes):
            expected = " or ".join(map(_shown, shapes)) + (f": {why}" if why else "")
            raise CheckpointError(
                f"{name} ({tensor.file}) has the shape {_shown(tensor.shape)}, expected {expected}"
                + CONTRADICTION
            )
        dtypes = (dtype,) if isinstance(dtype, str) else dtype
        if dtypes is not None and tensor.dtype.name not in dtypes:
            expected = "floats" if dtypes is FLOATS else " or ".join(dtypes)
            raise CheckpointError(
                f"{name} ({tensor.file}) is {tensor.dtype.name}, expected {expected}" + CONTRADICTION
            )
        self._used.add(name)
        return tensor

    def take_blocks(
        self,
        name: str,
        shape: Sequence[int],
        block: tuple[int, int],
        dtype: str | Sequence[str] | None = FLOATS,
        why: str = "",
    ) -> Tensor:
        """Return scales, or zero points, with a number for each block of a matrix.

        Of one block, or of blocks of whole rows, the tensor may have fewer axes.

        Args:
            name: of the tensor.
            shape: of the matrix.
            block: rows and columns of a block.
            dtype: that it must have.
            why: what else requires the tensor.

        Raises:
            CheckpointError: it is missing, or another.
        """
        (rows, columns), (height, width) = shape, block
        blocks = math.ceil(rows / height), math.ceil(columns / width)
        shapes = [blocks, blocks[:1], ()][: 1 if blocks[1] > 1 else 2 if blocks[0] > 1 else 3]
        reason = f"blocks of {height}x{width} of {rows}x{columns}" + (why and f"; {why}")
        return self.take(name, *shapes, dtype=dtype, why=reason).map(lambda x: x.reshape(blocks))

    def take_number(self, name: str, why: str, dtype: Sequence[str] | None = FLOATS) -> Tensor:
        """Return a tensor of one number, float32 without axes.

        Raises:
            CheckpointError: it is missing, or another.
        """
        tensor = self.take(name, (), (1,), dtype=dtype, why=why)
        return tensor.map(lambda x: x.astype(np.float32).reshape(()), np.dtype(np.float32))

    def rest(self) -> dict[str, Tensor]:
        """Return the tensors that nothing took."""
        return {name: tensor for name, tensor in self.by_name.items() if name not in self._used}


def _fits(shape: tuple[int, ...], sizes: Shape) -> bool:
    same = (size in (None, length) for size, length in zip(sizes, shape, strict=False))
    return len(shape) == len(sizes) and all(same)


def _shown(shape: Shape) -> str:
    return "x".join("any" if size is None else str(size) for size in shape) or "()"


def open_safetensors(path: Path) -> Tensors:
    """Open a safetensors file, or a folder of them.

    Raises:
        CheckpointError: a file is missing or broken, or two files have a tensor of one name.
        MissingLibraryError: the library safetensors is not installed.
    """
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    listed = _listed(path)
    files = {*listed.values()} if listed else path.glob("*.safetensors") if path.is_dir() else [path]
    for file in sorted(files):
        header, texts, start = header_of(file)
        data = np.memmap(file, np.uint8, "r", start) if file.stat().st_size > start else np.empty(0, np.uint8)
        for name, entry in header.items():
            if listed is not None and listed.get(name) != file:
                continue
            if name in tensors:
                raise CheckpointError(
                    f"{name} is in {tensors[name].file} and in {file.name}.\n  cure: an index, {INDEX}"
                )
            tensors[name] = _tensor(file, data, name, entry)
        metadata |= texts
    for name, file in (listed or {}).items():
        if name not in tensors:
            raise CheckpointError(f"{path / INDEX}: {name} is not in {file.name}")
    return Tensors(tensors, metadata)


def header_of(path: Path) -> tuple[dict[str, Values], dict[str, str], int]:
    """Read the header of a file: what it says of each tensor, its metadata, and where its data begin.

    Raises:
        CheckpointError: the file is broken.
        MissingLibraryError: the library safetensors is not installed.
    """
    safetensors = library("safetensors", path)
    try:
        with safetensors.safe_open(str(path), framework="numpy"):
            pass  # the library checks the header and its offsets
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise broken(path, "a safetensors file", error) from None
    return header, header.pop("__metadata__", {}), 8 + length


def _listed(path: Path) -> dict[str, Path] | None:
    """Return the file of each tensor, by an index; None without one."""
    index = path / INDEX
    if not path.is_dir() or not index.is_file():
        return None
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        listed = {str(name): path / str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise broken(index, "an index of safetensors files", repr(error)) from None
    for file in sorted({*listed.values()}):
        if file.parent.resolve() != path.resolve():
            raise CheckpointError(f"{index} names {file}, which is not in its folder")
        if not file.is_file():
            raise CheckpointError(f"{index}: {file.name} is missing.\n  cure: fetch it")
    return listed


def _tensor(path: Path, data: np.ndarray, name: str, entry: Values) -> Tensor:
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(f"{name} ({path.name}) is {entry['dtype']}; known are {', '.join(DTYPES)}")
    dtype, shape = np.dtype(DTYPES[entry["dtype"]]), tuple(entry["shape"])
    start, stop = entry["data_offsets"]  # which the library has checked
    return Tensor(dtype, shape, path.name, lambda: data[start:stop].view(dtype).reshape(shape))


def write_safetensors(folder: Path, tensors: Mapping[str, np.ndarray], shard_bytes: int | None) -> None:
    """Write tensors into a folder.

    Args:
        folder: that exists.
        tensors: by name.
        shard_bytes: the most bytes of a file, unless one tensor has more; None for one file.

    Raises:
        MissingLibraryError: the library safetensors is not installed.
    """
    writer = library("safetensors.numpy", folder)
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, array in tensors.items():
        if shard_bytes is not None and shards[-1] and size + array.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = np.ascontiguousarray(array)
        size += array.nbytes
    if len(shards) == 1:
        writer.save_file(shards[0], folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for at, shard in enumerate(shards, 1):
        file = f"model-{at:05}-of-{len(shards):05}.safetensors"
        writer.save_file(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    total = {"total_size": sum(array.nbytes for array in tensors.values())}
    (folder / INDEX).write_text(json.dumps({"metadata": total, "weight_map": weight_map}, indent=2) + "\n")
