"""`load_brevitas`: the state dict of a Brevitas model into the same model of ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.files.safetensors_files import open_safetensors
from jqinject.formats.loading.parameter_names import compiled
from jqinject.inject.errors import did_you_mean
from jqinject.model import LoadReport, load_state
from jqinject.model.state.checkpoint_entries import RECORD
from jqinject.model.walk import ModelIndex, dotted
from jqinject.nn.base.weight_layer import QuantWeightLayer

# Parts of Brevitas's names that ours do not have, and those that have another name.
WITHIN = ("fused_activation_quant_proxy", "runtime_stats", "stats_scaling_impl")
RENAMED = {"msb_clamp_bit_width_impl": "bit_width_impl"}
LEAVES = {"weight": ("kernel", "embedding", "scale"), "running_mean": ("mean",), "running_var": ("var",)}
LEFT = ("num_batches_tracked",)


def load_brevitas(
    model: nnx.Module,
    state: str | Path | Mapping[str, Any],
    *,
    names: Mapping[str, str] | None = None,
) -> LoadReport:
    """Load a Brevitas model's state dict: weights, learned scales and zero points, bit widths, statistics.

    A state dict does not say how a model is quantized: `model` is built with the quantizers of the same names. Weights
    are turned into JAX's axes, and so is what is beside them (scales of channels and groups, learned rounding).
    Everything is checked before it is written, as `load_state` does.

    Args:
        model: a quantized module of ours; it is written to.
        state: arrays by Brevitas's names, or a safetensors file of them. Tensors of torch come as `.numpy()`.
        names: a module of the file -> the module of the model, with `{i}` for a part of both:
            `{"features.{i}": "layers.{i}"}`. None for modules that have the same path.

    Returns:
        See `load_state`.

    Raises:
        CheckpointError: a name that the model has not; axes that are not known.
        ValueError: see `load_state`; nothing is written then.

    Example:
        >>> from jqinject.nn import QuantLinear
        >>> from jqinject.quant import Int8WeightPerChannelFloatMSE
        >>> layer = QuantLinear(3, 2, use_bias=False, weight_quant=Int8WeightPerChannelFloatMSE, rngs=nnx.Rngs(0))
        >>> scale = "weight_quant.tensor_quant.scaling_impl.value"
        >>> report = load_brevitas(
        ...     layer, {"weight": np.ones((2, 3), np.float32), scale: np.array([[1], [2]], np.float32)}
        ... )
        >>> layer.weight_quant.tensor_quant.scaling_impl.value[...]
        Array([[1., 2.]], dtype=float32)
    """
    held = _arrays(state)
    index = ModelIndex(model)
    layers = {path: node for path, node in index.places if isinstance(node, nnx.Module)}
    paths = index.by_path
    nested: dict[str, Any] = {}
    for name, array in held.items():
        if name.rpartition(".")[2] in LEFT:
            continue
        path = _path_of(name, names, paths)
        value = _turned(np.asarray(array), name, path, layers, paths[path].variable.get_value())
        node = nested
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return load_state(model, nested)


def _arrays(state: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(state, Mapping):
        return state
    place = Path(state)
    if not place.exists():
        raise FileNotFoundError(
            f"there is no file {str(state)!r}.\n  cure: the path of a safetensors file, or a mapping of arrays"
        )
    if place.is_file() and place.suffix != ".safetensors":
        raise CheckpointError(
            f"{place} may hold code (a pickle): it is not opened.\n"
            "  cure: safetensors.torch.save_file(model.state_dict(), path)"
        )
    return {name: tensor.read() for name, tensor in open_safetensors(place).found.items()}


def _path_of(
    name: str, names: Mapping[str, str] | None, paths: Mapping[tuple[str, ...], Any]
) -> tuple[str, ...]:
    """The path of a Variable of ours."""
    called = _renamed(name, names)
    parts = [RENAMED.get(part, part) for part in called.split(".") if part not in WITHIN]
    for leaf in (parts[-1], *LEAVES.get(parts[-1], ())):
        for path in ((*parts[:-1], leaf), (*parts[:-1], RECORD, leaf)):
            if path in paths:
                return path
    wanted = ".".join(parts)
    hint = did_you_mean(wanted, [dotted(path) for path in paths])
    raise CheckpointError(
        f"{name} is for {wanted}, which the model has not{'; ' + hint if hint else ''}.\n"
        "  cure: quantizers of the same names and settings as in Brevitas; names={'module': 'path'} for other paths"
    )


def _renamed(name: str, names: Mapping[str, str] | None) -> str:
    """A name whose module is called as the model calls it: by the longest pattern that it has."""
    parts = name.split(".")
    for stop in range(len(parts), 0, -1):
        head = ".".join(parts[:stop])
        for pattern, other in (names or {}).items():
            found = compiled(pattern).fullmatch(head)
            if found is not None:
                return ".".join([other.format(**found.groupdict()), *parts[stop:]]).strip(".")
    return name


def _turned(
    array: np.ndarray,
    name: str,
    path: tuple[str, ...],
    layers: Mapping[tuple[str, ...], nnx.Module],
    held: Any,
) -> np.ndarray:
    """An array of torch's in the axes of ours: a weight, or what lies beside it in its quantizer."""
    places = (
        at for at in range(len(path) - 1, -1, -1) if isinstance(layers.get(path[:at]), QuantWeightLayer)
    )
    depth = next(places, None)
    layer = None if depth is None else layers[path[:depth]]
    of_weight = depth is not None and path[depth] in (
        getattr(layer, "weight_name", ""),
        "weight_quant",
        "kernel",
    )
    if isinstance(layer, nnx.Embed) or (not of_weight and path[-1] != "kernel"):
        return _reshaped(array, held)
    if "Transpose" in type(layer).__name__:
        raise CheckpointError(f"{name}: transposed convolutions are not read.\n  cure: jqinject.load_state")
    ndim = array.ndim if layer is None else len(_weight_shape(layer))
    if array.ndim == ndim:
        return array.transpose(*range(2, ndim), 1, 0)
    if array.ndim == ndim + 1:  # groups of inputs, behind which their elements lie
        return array.transpose(*range(3, ndim + 1), 1, 2, 0)
    return _reshaped(array, held)


def _weight_shape(layer: Any) -> tuple[int, ...]:
    return tuple(layer.weight.get_value().shape)


def _reshaped(array: np.ndarray, held: Any) -> np.ndarray:
    """One number, which torch may keep with axes that ours has not."""
    return array.reshape(held.shape) if array.size == 1 == held.size else array
