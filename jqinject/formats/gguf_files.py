"""GGUF files: tensors as blocks of bytes, by the library's reader, which maps the file into memory, and its writer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from jqinject.formats.checkpoint_errors import CheckpointError, broken, library

# What the library raises where bytes are not what they should be.
ERRORS = (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError)
ARCHITECTURE = "general.architecture"
LONGEST_NAME = 63  # of a tensor, in llama.cpp

#: The name of a type of blocks, such as Q4_0, and the bytes of blocks.
Block: TypeAlias = tuple[str, np.ndarray]


def gguf_reader(path: Path) -> Any:
    """Open a GGUF file with the library's reader.

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
            """Read tensors one after the other, so that an error can name one."""
            tensors = []
            for field in fields:
                try:
                    super()._build_tensors(start_offs, [field])
                except ERRORS:
                    raise broken(path, "a GGUF file", _why(gguf, field)) from None
                tensors += self.tensors
            self.tensors = tensors

    try:
        return Reader(str(path))
    except CheckpointError:
        raise
    except ERRORS as error:
        raise broken(path, "a GGUF file", f"its header cannot be read: {error}") from None


def _why(gguf: Any, field: Any) -> str:
    """Return why a tensor cannot be read."""
    kind = int(field.parts[4][0])
    if kind not in {*map(int, gguf.GGMLQuantizationType)}:
        return f"{field.name} has the type {kind}, which is not known"
    return f"the data of {field.name}, {gguf.GGMLQuantizationType(kind).name}, end beyond it"


def gguf_shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a tensor of the library's, with the contiguous axis last."""
    return tuple(int(length) for length in reversed(tensor.shape.tolist()))


def check_gguf(tensors: Mapping[str, np.ndarray | Block], values: Mapping[str, Any]) -> None:
    """Raise if GGUF has no such file.

    Raises:
        CheckpointError: a value or a tensor of another kind, or without a name that it allows.
    """
    if not isinstance(values.get(ARCHITECTURE), str):
        raise CheckpointError(
            f"a GGUF file says what its model is.\n  cure: config={{{ARCHITECTURE!r}: 'llama', ...}}"
        )
    for name, value in values.items():
        parts = value if isinstance(value, list | tuple) else [value]
        if not parts or not all(isinstance(part, str | bool | int | float) for part in parts):
            raise CheckpointError(f"config: {name} is {value!r:.80}, expected texts or numbers")
    for name, tensor in tensors.items():
        if len(name.encode()) > LONGEST_NAME:
            raise CheckpointError(
                f"{name} has more than {LONGEST_NAME} bytes, which GGUF allows.\n  cure: names= with shorter ones"
            )
        kinds = ("float16", "float32", "float64", "bfloat16", "int8", "int16", "int32", "int64")
        if not isinstance(tensor, tuple) and (tensor.dtype.name not in kinds or not tensor.ndim):
            raise CheckpointError(
                f"{name} is {tensor.dtype.name} with {tensor.ndim} axes; GGUF has {', '.join(kinds)}"
            )


def write_gguf(path: Path, tensors: Mapping[str, np.ndarray | Block], values: Mapping[str, Any]) -> None:
    """Write a GGUF file.

    Args:
        path: of the file.
        tensors: arrays of floats, or blocks.
        values: what the file carries with them; `general.architecture` among them.

    Raises:
        MissingLibraryError: the library gguf is not installed.
    """
    gguf = library("gguf", path)
    writer = gguf.GGUFWriter(str(path), str(values[ARCHITECTURE]))
    for name, value in values.items():
        if isinstance(value, list | tuple):
            writer.add_array(name, list(value))
        elif name != ARCHITECTURE:
            writer.add_key_value(name, value, _value_type(gguf.GGUFValueType, value))
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            kind, blocks = tensor
            raw = np.ascontiguousarray(blocks).reshape(blocks.shape[0], -1)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
        elif tensor.dtype == np.dtype(ml_dtypes.bfloat16):
            writer.add_tensor(name, tensor.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _value_type(kinds: Any, value: str | bool | int | float) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        return kinds.get_type(value)
    return kinds.UINT32 if 0 <= value < 2**32 else kinds.INT64
