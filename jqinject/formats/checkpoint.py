"""`read_checkpoint`: another library's checkpoint as matrices in low bits and plain arrays."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.files.gguf_files import open_gguf
from jqinject.formats.files.libraries import broken
from jqinject.formats.files.safetensors_files import open_safetensors
from jqinject.formats.files.tensors import Tensor, Tensors
from jqinject.formats.layouts.bitsandbytes import read_bitsandbytes
from jqinject.formats.layouts.cache_format import cache_format
from jqinject.formats.layouts.common import Settings
from jqinject.formats.layouts.compressed_tensors import read_compressed_tensors
from jqinject.formats.layouts.fp8_block import read_fp8_blocks
from jqinject.formats.layouts.gguf import read_gguf
from jqinject.formats.layouts.hqq import read_hqq
from jqinject.formats.layouts.input_major import read_awq, read_gptq
from jqinject.formats.layouts.jax_trees import read_tree
from jqinject.formats.layouts.modelopt import read_modelopt
from jqinject.formats.layouts.own import read_own
from jqinject.formats.layouts.torchao import is_torchao, read_torchao
from jqinject.formats.stored_matrix import InputFormat, StoredMatrix
from jqinject.inject.errors import did_you_mean

METHODS: dict[str, Callable[[Tensors, Settings], list[StoredMatrix]]] = {
    "compressed-tensors": read_compressed_tensors,
    "gptq": read_gptq,
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "fp8": read_fp8_blocks,
    "hqq": read_hqq,
    "modelopt": read_modelopt,
    "torchao": read_torchao,
    "jqinject": read_own,
}
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
# Where a config keeps the settings, by the name of the method; older releases of compressed-tensors had another one.
SECTIONS = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds; numbers are read when they are asked for.

    Attributes:
        path: where it is.
        method: the name of its quantization method, as its config says; "gguf", "qwix", "aqt", or "float" without any.
        matrices: those in low bits, by the names of their parameters.
        tensors: the others by name.
        config: its config.json, or the values of a GGUF file.
        used: the names of the tensors that matrices are made of.
        is_tree: whether its arrays lie as the parameters of a JAX model do.
        cache_format: how keys and values are quantized when they are cached; None if it does not say so.
    """

    path: str
    method: str
    matrices: dict[str, StoredMatrix]
    tensors: dict[str, Tensor]
    config: dict[str, Any] = field(repr=False)
    used: tuple[str, ...] = field(repr=False, default=())
    is_tree: bool = False
    cache_format: InputFormat | None = None

    def array(self, name: str) -> np.ndarray:
        """A tensor that is not in low bits, as it is stored: a view of the file where possible.

        Raises:
            KeyError: there is none of this name.
        """
        if name not in self.tensors:
            hint = did_you_mean(name, list(self.tensors))
            raise KeyError(f"{self.path} has no plain tensor {name}{'; ' + hint if hint else ''}")
        return self.tensors[name].read()

    @property
    def names(self) -> tuple[str, ...]:
        """Of all matrices and plain tensors, sorted."""
        return tuple(sorted({*self.matrices, *self.tensors}))

    @property
    def bytes(self) -> int:
        """Of the codes of all matrices, as the file holds them."""
        return sum(matrix.bytes for matrix in self.matrices.values())


def read_checkpoint(path: str | Path | Mapping[Any, Any]) -> Checkpoint:
    """What a quantized checkpoint holds: nothing is computed, and no number is read before it is asked for.

    Headers, shapes, settings and shards are checked against one another; nothing in a file is executed.

    Args:
        path: a folder with `config.json` and safetensors files (compressed-tensors, GPTQ, AWQ, bitsandbytes, FP8
            blocks, HQQ, torchao, ModelOpt, or floats), or a GGUF file. Or the parameters of a JAX model, nested
            mappings of arrays, that Qwix quantized (`QArray`s) or AQT froze (`QTensor`s), as objects or as mappings.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        CheckpointError: it is broken, contradicts itself, or is of an unknown kind.
        MissingLibraryError: its library is not installed.

    Example:
        >>> from pathlib import Path
        >>> import tempfile
        >>> from safetensors.numpy import save_file
        >>> folder = Path(tempfile.mkdtemp())
        >>> codes, scale = np.ones((4, 8), np.int8), np.full(4, 2.0, np.float32)
        >>> save_file({"up.weight": codes, "up.SCB": scale}, folder / "model.safetensors")
        >>> _ = (folder / "config.json").write_text(
        ...     '{"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": true}}'
        ... )
        >>> found = read_checkpoint(folder)
        >>> found.matrices["up.weight"].layout, found.matrices["up.weight"].format.label
        ('bitsandbytes int8', 'int8')
    """
    if isinstance(path, Mapping):
        method, found, arrays = read_tree(path)
        by_name = {matrix.name: matrix for matrix in found}
        return Checkpoint("the tree", method, by_name, arrays, {}, tuple(by_name), is_tree=True)
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(
            f"there is no file or folder {str(path)!r}.\n  cure: a folder of safetensors, or a GGUF"
        )
    if place.is_dir() and not any(place.glob("*.safetensors")) and len(found := [*place.glob("*.gguf")]) == 1:
        place = found[0]
    if place.is_file() and place.suffix.lower() != ".safetensors":
        return _gguf(place)
    tensors = open_safetensors(place)
    if not tensors.found:
        others = (
            sorted(file.name for end in PICKLES for file in place.glob(f"*{end}")) if place.is_dir() else []
        )
        held = f"; {others[0]} may hold code (a pickle) and is not opened" if others else ""
        raise CheckpointError(
            f"{place} has no tensors{held}.\n  cure: a folder with .safetensors files, or a .gguf file"
        )
    folder = place if place.is_dir() else place.parent
    config = _json(folder / "config.json")
    method, settings = _method(config, folder, tensors)
    caches = cache_format(method, settings)
    matrices = METHODS[method](tensors, settings) if method != "float" else []
    _refuse_lost(tensors, method)
    by_name = {matrix.name: matrix for matrix in matrices}
    clash = sorted({*by_name} & {*tensors.rest()})
    if clash:
        raise CheckpointError(f"{place} has {clash[0]} twice: in low bits and as floats")
    used, is_tree = tuple(sorted(tensors.used)), method == "jqinject"
    return Checkpoint(str(path), method, by_name, tensors.rest(), config, used, is_tree, caches)


def _gguf(place: Path) -> Checkpoint:
    if place.suffix.lower() in PICKLES:
        raise CheckpointError(
            f"{place} may hold code (a pickle): it is not opened.\n  cure: convert it to safetensors"
        )
    if place.suffix.lower() != ".gguf" and not _begins(place, b"GGUF"):
        raise CheckpointError(
            f"{place} is not a checkpoint.\n  cure: a folder with .safetensors files, one of them, or a .gguf file"
        )
    blocks, values = open_gguf(place)
    matrices, arrays = read_gguf(blocks, place.name)
    by_name = {matrix.name: matrix for matrix in matrices}
    return Checkpoint(str(place), "gguf", by_name, arrays, values, tuple(by_name))


def _begins(path: Path, start: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(start)) == start


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise broken(path, "a JSON file", error) from None
    if not isinstance(found, dict):
        raise broken(path, "a config", f"it holds a {type(found).__name__}")
    return found


def _method(config: dict[str, Any], folder: Path, tensors: Tensors) -> tuple[str, Settings]:
    """The name of the quantization method, and its settings."""
    optimizer = _json(folder / "hf_quant_config.json")
    if optimizer.get("quantization"):
        return "modelopt", Settings(optimizer["quantization"], "hf_quant_config.json: quantization")
    section = next((name for name in SECTIONS if config.get(name)), None)
    if section is None:
        if is_torchao(tensors):
            return "torchao", Settings({}, "no settings")
        older = _json(folder / "quantize_config.json")
        if older:  # of GPTQ, before configs named the method
            return "gptq", Settings(older, "quantize_config.json")
        return "float", Settings({}, "no settings")
    settings = Settings(config[section], f"config.json: {section}")
    method = settings.held.get("quant_method")
    if method is None and section == "compression_config":
        method = "compressed-tensors"
    if method not in METHODS:
        hint = did_you_mean(str(method), list(METHODS))
        known = ", ".join(METHODS)
        raise CheckpointError(
            f"{settings.where}: quant_method is {method!r}{'; ' + hint if hint else ''}\n  known are {known}"
        )
    return str(method), settings


def _refuse_lost(tensors: Tensors, method: str) -> None:
    """Raise if numbers in low bits are left over, which mean nothing without their scales."""
    ends = (
        ".qweight",
        ".weight_packed",
        ".W_q",
        ".qzeros",
        "_scale_inv",
        ".SCB",
        ".weight_scale",
        ".absmax",
        "_qdata",
    )
    for name, tensor in tensors.rest().items():
        is_low = tensor.dtype.itemsize == 1 and tensor.dtype.name != "bool" and name.endswith("weight")
        if is_low or name.endswith(ends):
            who = "no settings say" if method == "float" else f"{method} does not say"
            raise CheckpointError(
                f"{name} ({tensor.dtype.name}) is left over: {who} what it means, or its scales are missing.\n"
                "  cure: fetch config.json and all tensors again"
            )
