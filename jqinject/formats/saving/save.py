"""`save`: a frozen model as a checkpoint of another library."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.files.libraries import library
from jqinject.formats.loading.gguf_names import gguf_name, heads_in_turn, published_order
from jqinject.formats.loading.parameter_names import Names, checked_names
from jqinject.formats.loading.rows import Rows
from jqinject.formats.saving.compressed import compressed, settings_of
from jqinject.formats.saving.gguf_file import checked, write_gguf
from jqinject.formats.saving.inputs import input_format_of, refuse_other_quantizers
from jqinject.formats.saving.other_layouts import (
    bitsandbytes,
    bitsandbytes_settings,
    fp8_blocks,
    fp8_settings,
    gguf_blocks,
)
from jqinject.formats.saving.own_format import own_layout, own_settings
from jqinject.formats.saving.safetensors_file import write_safetensors
from jqinject.formats.saving.saved_caches import cache_quantizers, cache_tensors
from jqinject.formats.saving.saved_matrices import matrices_of
from jqinject.formats.saving.weights import Weight, weights_of
from jqinject.formats.stored_matrix import InputFormat
from jqinject.inject.errors import did_you_mean

METHODS = ("compressed-tensors", "bitsandbytes", "fp8", "gguf", "jqinject")
CONFIG, GGUF = "config.json", "model.gguf"


def save(
    model: nnx.Module,
    folder: str | Path,
    *,
    method: str = "compressed-tensors",
    names: Names | None = None,
    config: Mapping[str, Any] | None = None,
    round_scales: bool = False,
    shard_bytes: int | None = None,
) -> Path:
    """Write a frozen model as a checkpoint that other libraries and `load` read.

    Codes and scales are those that the model has, for compressed-tensors also the static scales of caches (`k_scale`).
    All that is not frozen is written as floats. What a format cannot hold is refused before anything is written: also
    an input quantizer if the one that `load` would make gives other numbers anywhere, in the last bit too.
    Columns in activation order are written in compressed-tensors' older way (`weight_g_idx`), which its release 0.20
    refuses.

    | `method`               | weights                                                         | inputs              |
    |------------------------|-----------------------------------------------------------------|---------------------|
    | `"compressed-tensors"` | integers of 2 to 8 bits, e4m3 (tensors to blocks), NVFP4, MX    | dynamic, static     |
    | `"bitsandbytes"`       | NF4 in groups that its blocks divide                            | float               |
    | `"fp8"`                | e4m3 with a scale for 128 rows and columns, as DeepSeek's       | e4m3, groups of 128 |
    | `"gguf"`               | integers in groups of 32: Q8_0, and Q4_0 of at most 4 bits      | float               |
    | `"jqinject"`           | all of the above, other tables and zero points; any axes        | dynamic, static     |

    The last one is for `load` alone. It keeps the paths and axes of the model, and carries a version: later releases
    read what earlier ones wrote.

    Args:
        model: a frozen NNX module.
        folder: is made; files of a checkpoint that it has are not overwritten.
        method: as `read_checkpoint(folder).method` says it.
        names: rules as for `load`, from names of the file to paths of the model. None calls a `kernel`, an `embedding`
            and a norm's `scale` `weight`. What a rule divides is joined, and what it joins is divided, if its axes
            begin with an axis of the tensors. For GGUF, names of published checkpoints become llama.cpp's, and so does
            the order of the rows of Llama's queries and keys.
        config: further entries of `config.json` (`{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}`); of
            GGUF, its values (`{"general.architecture": "llama", "llama.attention.head_count": 32, ...}`).
        round_scales: whether scales are rounded to the float16 of GGUF, which changes weights by up to 1 in 2048;
            refused otherwise.
        shard_bytes: the most bytes of one safetensors file; more are written as several, with an index. None for one
            file.

    Returns:
        The folder.

    Raises:
        TypeError: `model` is not an NNX module.
        ValueError: an unknown method, or shards of GGUF.
        CheckpointError: a weight or an input that the format cannot hold; two weights of one name.
        FileExistsError: the folder has such files, or is a file.
        MissingLibraryError: the library safetensors or gguf is not installed.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> from jqinject import Rule, freeze, quantize
        >>> from jqinject.formats import read_checkpoint
        >>> from jqinject.quant import Int8WeightPerChannelFloat
        >>> floats = nnx.Sequential(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
        >>> served = freeze(quantize(floats, Rule(weight_quant=Int8WeightPerChannelFloat, weight_bit_width=4)))
        >>> folder = save(served, Path(tempfile.mkdtemp()) / "int4")
        >>> found = read_checkpoint(folder).matrices["layers.0.weight"]
        >>> found.format.label, bool(jnp.allclose(found.dequantize().T, served.layers[0].kernel[...]))
        ('int4', True)
    """
    place = _checked_place(model, folder, method, shard_bytes)
    rules = None if names is None else checked_names(names)
    own = method == "jqinject"
    weights = list(weights_of(model, rules, as_they_lie=own))
    caches = cache_quantizers(model, rules) if method == "compressed-tensors" else []
    refuse_other_quantizers(model, weights, caches)
    if method == "gguf":
        return _gguf(weights, place, dict(config or {}), round_scales)
    tensors, of_caches = cache_tensors(caches)
    schemes: dict[str, Any] = {}
    floats = []
    for weight, held, inputs in _as_they_lie(weights) if own else matrices_of(weights):
        made: dict[str, np.ndarray]
        if isinstance(held, np.ndarray):
            made = {weight.name: held}
            floats += [weight.module] if np.ndim(weight.value) == 2 else []
        elif isinstance(held, Rows):
            made, schemes[weight.module] = WRITERS[method](held, weight, inputs)
        else:
            made, schemes[weight.name] = own_layout(weight, inputs)
        _put(tensors, made)
    written = dict(config or {})
    if schemes or of_caches or own:
        written["quantization_config"] = SETTINGS[method](schemes, floats) | of_caches
    text = json.dumps(written, indent=2) + "\n"
    place.mkdir(parents=True, exist_ok=True)
    write_safetensors(place, tensors, shard_bytes)
    (place / CONFIG).write_text(text)
    return place


def _checked_place(model: Any, folder: str | Path, method: str, shard_bytes: int | None) -> Path:
    """The folder, if it can take such a checkpoint."""
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"save writes an NNX module, got {type(model).__name__}.\n  cure: save(model, folder)"
        )
    if method not in METHODS:
        hint = did_you_mean(str(method), METHODS)
        raise ValueError(
            f"method is {method!r}{'; ' + hint if hint else ''}; known are {', '.join(map(repr, METHODS))}"
        )
    if shard_bytes is not None and (method == "gguf" or shard_bytes < 1):
        raise ValueError(f"shard_bytes is {shard_bytes}, expected bytes of a safetensors file, or None")
    place = Path(folder)
    library("gguf" if method == "gguf" else "safetensors.numpy", place)
    if place.is_file():
        raise FileExistsError(f"{place} is a file.\n  cure: a folder")
    for file in place.glob("*"):
        if (
            file.suffix == ".gguf"
            if method == "gguf"
            else file.suffix == ".safetensors" or file.name == CONFIG
        ):
            raise FileExistsError(f"{file} exists.\n  cure: another folder")
    return place


WRITERS: dict[str, Callable[..., tuple[dict[str, np.ndarray], Any]]] = {
    "compressed-tensors": compressed,
    "bitsandbytes": bitsandbytes,
    "fp8": fp8_blocks,
}
SETTINGS: dict[str, Callable[[dict[str, Any], list[str]], dict[str, Any]]] = {
    "compressed-tensors": lambda schemes, floats: settings_of(schemes),
    "bitsandbytes": lambda schemes, floats: bitsandbytes_settings(floats),
    "fp8": lambda schemes, floats: fp8_settings(floats),
    "jqinject": lambda schemes, floats: own_settings(schemes),
}


def _as_they_lie(weights: list[Weight]) -> Iterator[tuple[Weight, np.ndarray | None, InputFormat | None]]:
    """The weights of the model, floats as arrays."""
    for weight in weights:
        if len(weight.names) > 1 or weight.parts > 1:
            raise CheckpointError(
                f"{weight.path}: method='jqinject' keeps the matrices of the model, and joins or divides none.\n"
                "  cure: no names"
            )
        if weight.numbers is None:
            yield weight, np.asarray(weight.value), None
        else:
            yield weight, None, input_format_of(weight.layer, weight.path, weight.order is not None)


def _gguf(weights: list[Weight], place: Path, values: dict[str, Any], round_scales: bool) -> Path:
    tensors: dict[str, Any] = {}
    for weight, held, inputs in matrices_of(weights):
        name = gguf_name(weight.name)
        heads = heads_in_turn(name, values) if name != weight.name else 0
        rows = held.shape[0] if isinstance(held, np.ndarray) else held.codes.shape[0]
        order = np.argsort(published_order(rows, heads, name)) if heads else slice(None)
        if isinstance(held, np.ndarray):
            _put(tensors, {name: np.ascontiguousarray(held[order] if heads else held)})
        else:
            _put(tensors, {name: gguf_blocks(held.cut(order), weight, inputs, round_scales)})
    checked(tensors, values, place)
    place.mkdir(parents=True, exist_ok=True)
    write_gguf(place / GGUF, tensors, values)
    return place


def _put(tensors: dict[str, Any], made: Mapping[str, Any]) -> None:
    for name, array in made.items():
        if name in tensors:
            raise CheckpointError(f"two weights are called {name}.\n  cure: names= with a rule for each")
        tensors[name] = array
