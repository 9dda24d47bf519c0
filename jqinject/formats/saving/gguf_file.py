"""A GGUF file: what its tensors are called, in which order their rows lie, and how it is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.files.libraries import library

ARCHITECTURE = "general.architecture"
LONGEST_NAME = 63  # of a tensor, in llama.cpp


def write_gguf(path: Path, tensors: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Write a GGUF file.

    Args:
        path: of the file.
        tensors: arrays of floats; or the type and the bytes of blocks.
        values: what the file carries beside them; `general.architecture` among them.

    Raises:
        MissingLibraryError: the library gguf is not installed.
    """
    gguf = library("gguf", path)
    writer = gguf.GGUFWriter(str(path), str(values[ARCHITECTURE]))
    for name, value in values.items():
        if name != ARCHITECTURE:
            _add_value(gguf, writer, name, value)
    for name, held in tensors.items():
        if isinstance(held, tuple):
            kind, blocks = held
            raw = np.ascontiguousarray(blocks).reshape(blocks.shape[0], -1)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
        elif held.dtype == np.dtype(ml_dtypes.bfloat16):
            writer.add_tensor(name, held.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, held)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def checked(tensors: Mapping[str, Any], values: Mapping[str, Any], path: Path) -> None:
    """Raise if GGUF has no such file.

    Raises:
        CheckpointError: a value or a tensor of another kind, or without a name that it allows.
        MissingLibraryError: the library gguf is not installed.
    """
    library("gguf", path)
    if not isinstance(values.get(ARCHITECTURE), str):
        raise CheckpointError(
            f"a GGUF file says what its model is.\n  cure: config={{{ARCHITECTURE!r}: 'llama', ...}}"
        )
    for name, value in values.items():
        parts = value if isinstance(value, list | tuple) else [value]
        if not parts or not all(isinstance(part, str | bool | int | float) for part in parts):
            raise CheckpointError(
                f"config: {name} is {value!r:.80}, expected texts, numbers, or a list of them"
            )
    for name, held in tensors.items():
        if len(name.encode()) > LONGEST_NAME:
            raise CheckpointError(
                f"{name} has more than {LONGEST_NAME} bytes, which GGUF allows.\n  cure: names= with shorter ones"
            )
        kinds = ("float16", "float32", "float64", "bfloat16", "int8", "int16", "int32", "int64")
        if not isinstance(held, tuple) and (held.dtype.name not in kinds or not held.ndim):
            raise CheckpointError(
                f"{name} is {held.dtype.name} with {held.ndim} axes; GGUF has {', '.join(kinds)}"
            )


def _add_value(gguf: Any, writer: Any, name: str, value: Any) -> None:
    kinds = gguf.GGUFValueType
    if isinstance(value, list | tuple):
        writer.add_array(name, list(value))
    elif isinstance(value, bool):
        writer.add_key_value(name, value, kinds.BOOL)
    elif isinstance(value, int):
        large = not 0 <= value < 2**32
        writer.add_key_value(name, value, kinds.INT64 if large else kinds.UINT32)
    else:
        writer.add_key_value(name, value, kinds.STRING if isinstance(value, str) else kinds.FLOAT32)
