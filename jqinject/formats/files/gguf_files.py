"""Tensors of GGUF files: blocks of bytes, by the library's reader, which maps the file into memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jqinject.formats.errors import CheckpointError
from jqinject.formats.files.libraries import broken, library


@dataclass(frozen=True)
class Blocks:
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


def open_gguf(path: Path) -> tuple[dict[str, Blocks], dict[str, Any]]:
    """The tensors of a GGUF file, and the values that it carries beside them.

    Raises:
        CheckpointError: it is broken, or not a whole one.
        MissingLibraryError: the library gguf is not installed.
    """
    gguf = library("gguf", path)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(4)
    if start != b"GGUF":
        raise broken(path, "a GGUF file", f"it begins with {start!r}, not with b'GGUF'")
    try:
        reader = gguf.GGUFReader(str(path))
        tensors = list(reader.tensors)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError) as error:
        raise broken(path, "a GGUF file", error) from None
    found: dict[str, Blocks] = {}
    for tensor in tensors:
        name = str(tensor.name)
        if int(tensor.data_offset) + int(tensor.n_bytes) > size:
            raise broken(path, "a GGUF file", f"the data of {name} end beyond it")
        if name in found:
            raise CheckpointError(f"{path.name} has two tensors {name}")
        shape = tuple(int(length) for length in reversed(tensor.shape.tolist()))
        data = np.asarray(tensor.data)
        raw = data.view(np.uint8).reshape(-1) if data.flags.c_contiguous else data.tobytes()
        rows = int(np.prod(shape[:-1])) if len(shape) > 1 else 1
        found[name] = Blocks(
            name, tensor.tensor_type.name, shape, np.frombuffer(raw, np.uint8).reshape(rows, -1)
        )
    values = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return found, values
