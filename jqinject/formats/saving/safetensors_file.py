"""Safetensors: one file, or several with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jqinject.formats.files.libraries import library
from jqinject.formats.files.safetensors_files import INDEX


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
    held = 0
    for name, array in tensors.items():
        if shard_bytes is not None and shards[-1] and held + array.nbytes > shard_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = np.ascontiguousarray(array)
        held += array.nbytes
    if len(shards) == 1:
        writer.save_file(shards[0], folder / "model.safetensors")
        return
    files = [f"model-{at:05}-of-{len(shards):05}.safetensors" for at in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        writer.save_file(shard, folder / file)
    index = {
        "metadata": {"total_size": sum(array.nbytes for array in tensors.values())},
        "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
