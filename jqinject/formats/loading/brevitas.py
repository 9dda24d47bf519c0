"""`load_brevitas`: the state dict of a Brevitas model into the same model of ours."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from jqinject.formats.checkpoint_errors import CheckpointError, existing, file_kind, nearest
from jqinject.formats.loading.parameter_names import compiled
from jqinject.formats.safetensors_files import open_safetensors
from jqinject.model import LoadReport, load_state, walk
from jqinject.model.state.checkpoint_entries import RECORD
from jqinject.nn.base.weight_layer import QuantWeightLayer

VariablePath: TypeAlias = tuple[str, ...]

# Parts of Brevitas's names that ours do not have, and those that are renamed.
WITHIN = ("fused_activation_quant_proxy", "runtime_stats", "stats_scaling_impl")
RENAMED = {"msb_clamp_bit_width_impl": "bit_width_impl"}
LEAVES = {"weight": ("kernel", "embedding", "scale"), "running_mean": ("mean",), "running_var": ("var",)}
LEFT = ("num_batches_tracked",)


def load_brevitas(
    model: nnx.Module,
    state: str | Path | Mapping[str, ArrayLike],
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
    index = walk.ModelIndex(model)
    layers = {path: node for path, node in index.places if isinstance(node, nnx.Module)}
    shapes = {path: np.shape(entry.variable.get_value()) for path, entry in index.by_path.items()}
    arrays: dict[VariablePath, np.ndarray] = {}
    for name, array in _arrays(state).items():
        if name.rpartition(".")[2] in LEFT:
            continue
        path = _path_of(name, names, shapes)
        value = _transposed(np.asarray(array), name, path, layers)
        # One number, which torch may keep with axes that ours has not.
        is_single = value.size == 1 == math.prod(shapes[path])
        arrays[path] = value.reshape(shapes[path]) if is_single else value
    return load_state(model, nnx.traversals.unflatten_mapping(arrays))


def _arrays(state: str | Path | Mapping[str, ArrayLike]) -> Mapping[str, ArrayLike]:
    if isinstance(state, Mapping):
        return state
    place = existing(state)
    if place.is_file() and file_kind(place) != "safetensors":
        raise CheckpointError(f"{place} is no safetensors file.\n  cure: one of model.state_dict()")
    return {name: tensor.read() for name, tensor in open_safetensors(place).by_name.items()}


def _path_of(name: str, names: Mapping[str, str] | None, variables: Collection[VariablePath]) -> VariablePath:
    """Return the path of a Variable of ours."""
    parts = [RENAMED.get(part, part) for part in _renamed(name, names).split(".") if part not in WITHIN]
    for leaf in (parts[-1], *LEAVES.get(parts[-1], ())):
        for path in ((*parts[:-1], leaf), (*parts[:-1], RECORD, leaf)):
            if path in variables:
                return path
    expected = ".".join(parts)
    raise CheckpointError(
        f"{name} is for {expected}, which the model has not{nearest(expected, map(walk.place_name, variables))}.\n"
        "  cure: quantizers of the same names and settings as in Brevitas; names={'module': 'path'} for other paths"
    )


def _renamed(name: str, names: Mapping[str, str] | None) -> str:
    """Return a name with the model's path of its module: by the longest pattern that matches."""
    parts = name.split(".")
    for stop in range(len(parts), 0, -1):
        for pattern, path in (names or {}).items():
            match = compiled(pattern).fullmatch(".".join(parts[:stop]))
            if match is not None:
                return ".".join([path.format(**match.groupdict()), *parts[stop:]]).strip(".")
    return name


def _transposed(
    array: np.ndarray, name: str, path: VariablePath, layers: Mapping[VariablePath, nnx.Module]
) -> np.ndarray:
    """Return an array of torch's in the axes of ours: a weight, or what its quantizer has for it."""
    above = range(len(path) - 1, -1, -1)
    depth = next((at for at in above if isinstance(layers.get(path[:at]), QuantWeightLayer)), None)
    layer = None if depth is None else layers[path[:depth]]
    ndim, is_weight = array.ndim, path[-1] == "kernel"
    if isinstance(layer, QuantWeightLayer) and depth is not None:
        ndim = len(layer.weight_shape)
        is_weight |= path[depth] in (layer.weight_name, "weight_quant", "kernel")
    if isinstance(layer, nnx.Embed) or not is_weight:
        return array
    if "Transpose" in type(layer).__name__:
        raise CheckpointError(f"{name}: transposed convolutions are not read.\n  cure: jqinject.load_state")
    if array.ndim == ndim:
        return array.transpose(*range(2, ndim), 1, 0)
    if array.ndim == ndim + 1:  # groups of inputs, behind which their elements lie
        return array.transpose(*range(3, ndim + 1), 1, 2, 0)
    return array
