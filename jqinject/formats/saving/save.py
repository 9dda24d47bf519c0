"""`save`: a frozen model as a checkpoint of another library."""

import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from flax import nnx

from jqinject.formats.checkpoint import METHODS
from jqinject.formats.checkpoint_errors import CheckpointError, library, nearest
from jqinject.formats.gguf_files import Block, check_gguf, write_gguf
from jqinject.formats.layouts.gguf_blocks import gguf_blocks
from jqinject.formats.loading import parameter_names
from jqinject.formats.safetensors_files import Values, write_safetensors
from jqinject.formats.saving import saved_inputs
from jqinject.formats.saving.saved_matrices import Weight, matrices_of, weights_of
from jqinject.model.inspect.site_table import shared_inputs
from jqinject.model.quantizing.rule_policy import call_with

T = TypeVar("T")
CONFIG, GGUF = "config.json", "model.gguf"


def save(
    model: nnx.Module,
    folder: str | Path,
    *,
    method: str = "compressed-tensors",
    names: parameter_names.Names | None = None,
    config: Mapping[str, Any] | None = None,
    inputs: Iterable[object] | Mapping[str, object] | None = None,
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
        inputs: the model's arguments, arrays or `jax.ShapeDtypeStruct`s, by which the weights are found that contract
            one activation: engines fuse them, which NVFP4 allows with one global scale. None for no such check.
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

    Warns:
        UnsharedScaleWarning: weights in NVFP4 that contract one activation of `inputs` have several global scales.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> from jqinject import Rule, freeze, quantize
        >>> from jqinject.formats import read_checkpoint
        >>> from jqinject.quant import Int8WeightPerChannelFloat
        >>> floats = nnx.Sequential(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
        >>> served = freeze(quantize(floats, Rule(weight_quant=Int8WeightPerChannelFloat, weight_bit_width=4)))
        >>> folder = save(served, Path(tempfile.mkdtemp()) / "int4")
        >>> matrix = read_checkpoint(folder).matrices["layers.0.weight"]
        >>> matrix.label, bool(jnp.allclose(matrix.dequantize().T, served.layers[0].kernel[...]))
        ('int4', True)
    """
    place = _checked_place(model, folder, method, shard_bytes)
    rules = None if names is None else parameter_names.checked_names(names)
    weights = list(weights_of(model, rules, unchanged=method == "jqinject"))
    tensors, cache_settings, caches = (
        saved_inputs.caches_of(model, rules) if method == "compressed-tensors" else ({}, {}, [])
    )
    orders = [weight.order for weight in weights if weight.proxy is None and weight.order is not None]
    saved_inputs.refuse_other_quantizers(model, orders, caches)
    if method == "gguf":
        return _gguf(weights, place, dict(config or {}), round_scales)
    schemes: Values = {}
    floats: list[str] = []
    is_own, layout = method == "jqinject", METHODS[method]
    assert layout.write is not None and layout.settings is not None, "of a method that is written"
    factors: dict[str, list[float]] = {}
    for saved in matrices_of(weights):
        if isinstance(saved.numbers, np.ndarray):
            _add(tensors, {saved.name: saved.numbers})
            floats += [saved.module] if saved.numbers.ndim == 2 else []
        else:
            arrays, scheme = layout.write(saved)
            if saved.numbers.factor is not None:
                factors.setdefault(saved.path, []).append(float(saved.numbers.factor))
            _add(tensors, arrays)
            schemes[saved.name if is_own else saved.module] = scheme
    if inputs is not None and not is_own:
        _warn_of_unshared(model, inputs, factors)
    written = dict(config or {})
    if schemes or cache_settings or is_own:
        written["quantization_config"] = layout.settings(schemes, floats) | cache_settings
    text = json.dumps(written, indent=2) + "\n"
    place.mkdir(parents=True, exist_ok=True)
    write_safetensors(place, tensors, shard_bytes)
    (place / CONFIG).write_text(text)
    return place


class UnsharedScaleWarning(UserWarning):
    """Weights of one input, which engines fuse into one matrix, have several global scales."""


def _warn_of_unshared(model: nnx.Module, inputs: object, factors: Mapping[str, list[float]]) -> None:
    """Warn of weights that contract one activation with several global scales.

    Args:
        model: frozen.
        inputs: what it is called with.
        factors: path of a weight -> the global scale of each of its matrices.
    """
    call = call_with(inputs)
    for group in shared_inputs(model, [] if call is None else [call]):
        paths = [path for path in group if path in factors]
        differ = any(factors[path] != factors[paths[0]] for path in paths)
        if differ and len({factor for path in paths for factor in factors[path]}) > 1:
            scales = ", ".join(f"{path} ({1 / factors[path][0]:.6g})" for path in paths)
            warnings.warn(
                f"save: {scales} contract one input, and their weight_global_scale differs; expected one number, "
                "which engines take for all of them as they fuse these weights.\n  cure: "
                "jqinject.recipes.ShareGlobalScales() before Solve(...) in the recipe, then freeze",
                UnsharedScaleWarning,
                stacklevel=3,
            )


def _checked_place(model: object, folder: str | Path, method: str, shard_bytes: int | None) -> Path:
    """Return the folder, if it can take such a checkpoint."""
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"save writes an NNX module, got {type(model).__name__}.\n  cure: save(model, folder)"
        )
    methods = ("gguf", *(name for name, layout in METHODS.items() if layout.write is not None))
    if method not in methods:
        raise ValueError(
            f"method is {method!r}{nearest(str(method), methods)}; known are {', '.join(map(repr, methods))}"
        )
    is_gguf = method == "gguf"
    if shard_bytes is not None and (is_gguf or shard_bytes < 1):
        raise ValueError(f"shard_bytes is {shard_bytes}, expected bytes of a safetensors file, or None")
    place = Path(folder)
    library("gguf" if is_gguf else "safetensors.numpy", place)
    if place.is_file():
        raise FileExistsError(f"{place} is a file.\n  cure: a folder")
    for file in place.glob("*"):
        if file.suffix == (".gguf" if is_gguf else ".safetensors") or (file.name == CONFIG and not is_gguf):
            raise FileExistsError(f"{file} exists.\n  cure: another folder")
    return place


def _gguf(weights: list[Weight], place: Path, values: Values, round_scales: bool) -> Path:
    tensors: dict[str, np.ndarray | Block] = {}
    for saved in matrices_of(weights):
        name, numbers = parameter_names.gguf_name(saved.name), saved.numbers
        heads = parameter_names.heads_in_turn(name, values) if name != saved.name else 0
        if heads:
            numbers = numbers[np.argsort(parameter_names.published_order(len(numbers), heads, name))]
        block = np.ascontiguousarray(numbers) if isinstance(numbers, np.ndarray) else None
        block = gguf_blocks(replace(saved, numbers=numbers), round_scales) if block is None else block
        _add(tensors, {name: block})
    check_gguf(tensors, values)
    place.mkdir(parents=True, exist_ok=True)
    write_gguf(place / GGUF, tensors, values)
    return place


def _add(tensors: dict[str, T], more: Mapping[str, T]) -> None:
    for name, array in more.items():
        if name in tensors:
            raise CheckpointError(f"two weights are called {name}.\n  cure: names= with a rule for each")
        tensors[name] = array
