"""Reads what checkpoints say of their arrays, by the libraries of their formats; no numbers, and nothing is executed.

Libraries are imported when a file asks for them: safetensors and gguf are optional, and Orbax takes JAX along.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jqinject.formats.contents import PACKED, Contents, StoredArray
from jqinject.formats.files.gguf_files import gguf_reader
from jqinject.formats.files.libraries import broken, library

CODE = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".joblib")
KINDS = "an Orbax folder, a .safetensors file (or a folder of them) or a .gguf file"


def inspect_checkpoint(path: str | Path) -> Contents:
    """What is in a checkpoint: the names, formats, shapes and bytes of its arrays.

    Args:
        path: an Orbax folder, a safetensors file or a folder of them, or a GGUF file.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: it is not such a checkpoint, or not a complete one.
        MissingLibraryError: its library is not installed.
    """
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(f"there is no file or folder {str(path)!r}.\n  cure: give {KINDS}")
    if place.is_dir():
        parts = sorted(place.glob("*.safetensors"))
        if parts and not _is_orbax(place):
            found = [array for part in parts for array in _in_safetensors(part)]
            return Contents(str(path), "safetensors", tuple(found))
        return Contents(str(path), "Orbax", tuple(_in_orbax(place)))
    with place.open("rb") as file:
        start = file.read(9)
    if start[:4] == b"GGUF":
        return Contents(str(path), "GGUF", tuple(_in_gguf(place)))
    if place.suffix.lower() in CODE or start[:2] in (b"PK", b"\x80\x02", b"\x80\x04"):
        raise ValueError(
            f"{place} looks like a pickle or an archive, which may hold code: it is not opened.\n"
            f"  cure: convert it, and give {KINDS}"
        )
    if place.suffix.lower() == ".safetensors" or start[8:] == b"{":
        return Contents(str(path), "safetensors", tuple(_in_safetensors(place)))
    if place.suffix.lower() == ".gguf":
        raise broken(place, "a GGUF file", f"it begins with {start[:4]!r}, not with b'GGUF'")
    raise ValueError(f"{place} cannot be read as a checkpoint.\n  cure: give {KINDS}")


def _in_safetensors(path: Path) -> Iterator[StoredArray]:
    safetensors = library("safetensors", path)
    try:
        with safetensors.safe_open(str(path), framework="numpy") as opened:
            parts = [(name, opened.get_slice(name)) for name in opened.keys()]  # noqa: SIM118 (no mapping)
            read = [(name, str(part.get_dtype()), tuple(part.get_shape())) for name, part in parts]
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise broken(path, "a safetensors file", error) from None
    for name, kind, shape in read:
        packed = kind in ("I32", "U32") and name.rpartition(".")[2] in PACKED
        size = -(-math.prod(shape) * _bits(kind) // 8)
        yield StoredArray(name, f"{kind} packed" if packed else kind, shape, size)


def _bits(kind: str) -> int:
    """The bits of a number, from names such as I8, F8_E4M3, BF16."""
    digits = "".join(character for character in kind.split("_")[0] if character.isdigit())
    return int(digits) if digits else 8


def _in_gguf(path: Path) -> Iterator[StoredArray]:
    for tensor in gguf_reader(path).tensors:
        shape = tuple(int(length) for length in reversed(tensor.shape.tolist()))
        yield StoredArray(str(tensor.name), tensor.tensor_type.name, shape, int(tensor.n_bytes))


def _in_orbax(path: Path) -> Iterator[StoredArray]:
    if not _is_orbax(path):
        inside = sorted(child.name for child in path.iterdir() if child.is_dir())
        checkpoints = [name for name in inside if _is_orbax(path / name)]
        steps = [name for name in inside if name.isdigit()]
        if len(checkpoints) == 1:
            yield from _in_orbax(path / checkpoints[0])
            return
        one = ", ".join(checkpoints or steps)
        raise ValueError(
            f"{path} is not a checkpoint"
            + (f"; it holds several: {one}.\n  cure: name one" if one else f".\n  cure: give {KINDS}")
        )
    handler = library("orbax.checkpoint", path).PyTreeCheckpointHandler()
    try:
        tree = handler.metadata(path.absolute())
    except Exception as error:  # of a broken folder: whatever its storage raises
        raise broken(path, "an Orbax checkpoint", error) from None
    yield from _leaves(getattr(tree, "tree", tree), ())


def _is_orbax(path: Path) -> bool:
    return (path / "_METADATA").is_file() or (path / "manifest.ocdbt").is_file()


def _leaves(tree: Any, at: tuple[str, ...]) -> Iterator[StoredArray]:
    if isinstance(tree, Mapping):
        for name, below in tree.items():
            yield from _leaves(below, (*at, str(name)))
    elif isinstance(tree, list | tuple):
        for place, below in enumerate(tree):
            yield from _leaves(below, (*at, str(place)))
    elif getattr(tree, "shape", None) is not None:
        size = -(-math.prod(tree.shape) * _dtype_bits(tree.dtype) // 8)
        yield StoredArray(".".join(at), str(tree.dtype), tuple(tree.shape), size)


def _dtype_bits(dtype: Any) -> int:
    import jax.numpy as jnp

    kind = jnp.dtype(dtype)
    narrow = jnp.issubdtype(kind, jnp.number) and kind.itemsize == 1
    if not narrow:
        return 8 * kind.itemsize
    return jnp.iinfo(kind).bits if jnp.issubdtype(kind, jnp.integer) else jnp.finfo(kind).bits
