"""Tensors of GGUF files: blocks of bytes, by the library's reader, which maps the file into memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.files.libraries import broken, library

# What the library raises where bytes are not what they should be.
ERRORS = (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError)


@dataclass(frozen=True)
class GgufBlocks:
    """A tensor of a GGUF file.

    Attributes:
        name: its name.
        type: the name of its type, such as Q4_0.
        shape: with the contiguous axis last.
        raw: its bytes, `(rows, bytes of a row)`: a view of the file.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    raw: np.ndarray


def open_gguf(path: Path) -> tuple[dict[str, GgufBlocks], dict[str, Any]]:
    """The tensors of a GGUF file, and the values that it carries beside them.

    Raises:
        CheckpointError: it is broken, or not a whole one.
        MissingLibraryError: the library gguf is not installed.
    """
    reader = gguf_reader(path)
    found: dict[str, GgufBlocks] = {}
    for tensor in reader.tensors:
        name = str(tensor.name)
        if name in found:
            raise CheckpointError(f"{path.name} has two tensors {name}.\n  cure: fetch or write it again")
        shape = tuple(int(length) for length in reversed(tensor.shape.tolist()))
        data = np.asarray(tensor.data)
        raw = data.view(np.uint8).reshape(-1) if data.flags.c_contiguous else data.tobytes()
        rows = int(np.prod(shape[:-1])) if len(shape) > 1 else 1
        found[name] = GgufBlocks(
            name, tensor.tensor_type.name, shape, np.frombuffer(raw, np.uint8).reshape(rows, -1)
        )
    values = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return found, values


def gguf_reader(path: Path) -> Any:
    """The library's reader of a GGUF file.

    Raises:
        CheckpointError: it is broken, or not a whole one; the message names the tensor.
        MissingLibraryError: the library gguf is not installed.
    """
    gguf = library("gguf", path)
    with path.open("rb") as file:
        start = file.read(4)
    if start != b"GGUF":
        raise broken(path, "a GGUF file", f"it begins with {start!r}, not with b'GGUF'")

    class Reader(gguf.GGUFReader):
        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            """Tensors one after the other, so that an error can say which one."""
            found = []
            for field in fields:
                try:
                    super()._build_tensors(start_offs, [field])
                except ERRORS:
                    raise broken(path, "a GGUF file", _of_tensor(gguf, field)) from None
                found += self.tensors
            self.tensors = found

    try:
        return Reader(str(path))
    except CheckpointError:
        raise
    except ERRORS as error:
        raise broken(path, "a GGUF file", f"its header cannot be read: {error}") from None


def _of_tensor(gguf: Any, field: Any) -> str:
    """Why a tensor cannot be read."""
    kind = int(field.parts[4][0])
    if kind not in {int(each) for each in gguf.GGMLQuantizationType}:
        return f"{field.name} has the type {kind}, which is not known"
    return f"the data of {field.name}, {gguf.GGMLQuantizationType(kind).name}, end beyond it"
