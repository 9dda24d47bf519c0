"""`read_checkpoint`: another library's checkpoint as matrices in low bits and plain arrays."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jqinject.formats.checkpoint_errors import KINDS, CheckpointError, broken, existing, file_kind, nearest
from jqinject.formats.layouts import gguf_blocks, jax_trees, own
from jqinject.formats.layouts.compressed_tensors import (
    cache_format,
    read_compressed_tensors,
    settings_of,
    write_compressed_tensors,
)
from jqinject.formats.layouts.layout_settings import Settings
from jqinject.formats.layouts.weight_and_input_layouts import (
    fp8_settings,
    read_fp8_blocks,
    read_modelopt,
    read_torchao,
    write_fp8_blocks,
)
from jqinject.formats.layouts.weight_only_layouts import (
    bitsandbytes_settings,
    read_awq,
    read_bitsandbytes,
    read_gptq,
    read_hqq,
    write_bitsandbytes,
)
from jqinject.formats.safetensors_files import Tensor, Tensors, Values, open_safetensors
from jqinject.formats.stored_matrix import InputFormat, SavedMatrix, StoredMatrix


@dataclass(frozen=True)
class Method:
    """A quantization method of safetensors files.

    Attributes:
        read: from tensors and settings to matrices.
        write: from a matrix to tensors, and how it is quantized; None if it is not written.
        settings: from how each is quantized, by name, and the modules whose weights are matrices of floats to
            `quantization_config`.
    """

    read: Callable[[Tensors, Settings], list[StoredMatrix]]
    write: Callable[[SavedMatrix], tuple[dict[str, np.ndarray], object]] | None = None
    settings: Callable[[Mapping[str, Any], Sequence[str]], Values] | None = None


METHODS = {
    "compressed-tensors": Method(read_compressed_tensors, write_compressed_tensors, settings_of),
    "gptq": Method(read_gptq),
    "awq": Method(read_awq),
    "bitsandbytes": Method(read_bitsandbytes, write_bitsandbytes, bitsandbytes_settings),
    "fp8": Method(read_fp8_blocks, write_fp8_blocks, fp8_settings),
    "hqq": Method(read_hqq),
    "modelopt": Method(read_modelopt),
    "torchao": Method(read_torchao),
    "jqinject": Method(own.read_own, own.write_own, own.own_settings),
}
# Where a config has the settings, by the name of the method; older releases of compressed-tensors had another one.
SECTIONS = ("quantization_config", "compression_config")
# How names of tensors end that hold low-bit numbers, or mean nothing without them.
LOW_BITS = (
    *(".qweight", ".weight_packed", ".W_q", ".qzeros", "_scale_inv", ".SCB", ".weight_scale", ".absmax"),
    "_qdata",
)


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint; numbers are read when they are asked for.

    Attributes:
        path: where it is.
        method: the name of its quantization method, as its config says; "gguf", "qwix", "aqt", or "float" without any.
        matrices: those in low bits, by the names of their parameters.
        tensors: the others by name.
        config: its config.json, or the values of a GGUF file.
        is_tree: whether its arrays have the axes of a JAX model's parameters.
        cache_format: how keys and values are quantized when they are cached; None if it does not say so.
    """

    path: str
    method: str
    matrices: dict[str, StoredMatrix]
    tensors: dict[str, Tensor]
    config: Values = field(repr=False)
    is_tree: bool = False
    cache_format: InputFormat | None = None

    def array(self, name: str) -> np.ndarray:
        """Return a tensor that is not in low bits, as it is stored: a view of the file where possible.

        Raises:
            KeyError: no tensor has this name.
        """
        if name not in self.tensors:
            raise KeyError(f"{self.path} has no plain tensor {name}{nearest(name, self.tensors)}")
        return self.tensors[name].read()

    @property
    def names(self) -> tuple[str, ...]:
        """Of all matrices and plain tensors, sorted."""
        return tuple(sorted({*self.matrices, *self.tensors}))

    @property
    def bytes(self) -> int:
        """Of the codes of all matrices, as the file holds them."""
        return sum(matrix.bytes for matrix in self.matrices.values())

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a matrix or a plain tensor."""
        matrix = self.matrices.get(name)
        return self.tensors[name].shape if matrix is None else matrix.shape


def read_checkpoint(path: str | Path | jax_trees.Tree) -> Checkpoint:
    """Open a quantized checkpoint: nothing is computed, and no number is read before it is asked for.

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
        >>> matrix = read_checkpoint(folder).matrices["up.weight"]
        >>> matrix.layout, matrix.label
        ('bitsandbytes int8', 'int8')
    """
    if isinstance(path, Mapping):
        method, matrices, arrays = jax_trees.read_tree(path)
        return Checkpoint("the tree", method, matrices, arrays, {}, is_tree=True)
    place = existing(path)
    if place.is_dir() and not any(place.glob("*.safetensors")) and len(files := [*place.glob("*.gguf")]) == 1:
        place = files[0]
    if place.is_file() and file_kind(place) == "GGUF":
        matrices, arrays, values = gguf_blocks.read_gguf(place)
        return Checkpoint(str(place), "gguf", matrices, arrays, values)
    tensors = open_safetensors(place)
    if not tensors.by_name:
        raise CheckpointError(
            f"{place} has no tensors; pickles may hold code, and are not opened.\n  cure: give {KINDS}"
        )
    folder = place if place.is_dir() else place.parent
    config = _json(folder / "config.json")
    method, settings = _method(config, folder, tensors)
    caches = cache_format(method, settings)
    matrices = METHODS[method].read(tensors, settings) if method != "float" else []
    by_name = {matrix.name: matrix for matrix in matrices}
    _refuse_lost(tensors, method)
    rest = tensors.rest()
    clash = sorted(by_name.keys() & rest.keys())
    if clash:
        raise CheckpointError(f"{place} has {clash[0]} twice: in low bits and as floats")
    return Checkpoint(str(path), method, by_name, rest, config, method == "jqinject", caches)


def _json(path: Path) -> Values:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise broken(path, "a JSON file", error) from None
    if not isinstance(config, dict):
        raise broken(path, "a config", f"it holds a {type(config).__name__}")
    return config


def _method(config: Mapping[str, Any], folder: Path, tensors: Tensors) -> tuple[str, Settings]:
    """Return the name of the quantization method, and its settings."""
    optimizer = _json(folder / "hf_quant_config.json")
    if optimizer.get("quantization"):
        return "modelopt", Settings(optimizer["quantization"], "hf_quant_config.json: quantization")
    section = next((name for name in SECTIONS if config.get(name)), None)
    if section is None:
        if "tensor_names" in tensors.metadata:
            return "torchao", Settings({}, "no settings")
        older = _json(folder / "quantize_config.json")
        if older:  # of GPTQ, before configs named the method
            return "gptq", Settings(older, "quantize_config.json")
        return "float", Settings({}, "no settings")
    settings = Settings(config[section], f"config.json: {section}")
    default = "compressed-tensors" if section == "compression_config" else None
    method = settings.values.get("quant_method", default)
    if method not in METHODS:
        raise CheckpointError(
            f"{settings.where}: quant_method is {method!r}, not {' or '.join(METHODS)}{nearest(str(method), METHODS)}"
        )
    return str(method), settings


def _refuse_lost(tensors: Tensors, method: str) -> None:
    """Raise if numbers in low bits are left over, which mean nothing without their scales."""
    for name, tensor in tensors.rest().items():
        is_low = tensor.dtype.itemsize == 1 and tensor.dtype.name != "bool" and name.endswith("weight")
        if is_low or name.endswith(LOW_BITS):
            reason = "no settings say" if method == "float" else f"{method} does not say"
            raise CheckpointError(
                f"{name} ({tensor.dtype.name}) is left over: {reason} what it means, or its scales are missing.\n"
                "  cure: fetch config.json and all tensors again"
            )
