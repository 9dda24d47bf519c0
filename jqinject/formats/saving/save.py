"""`save`: a frozen model as a checkpoint of compressed-tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from jqinject.dot import FrozenParam
from jqinject.formats.errors import CheckpointError
from jqinject.formats.files.libraries import library
from jqinject.formats.loading.axes import Axes
from jqinject.formats.loading.names import Name, Names, checked_names
from jqinject.formats.saving.compressed import Scheme, compressed
from jqinject.formats.saving.frozen_rows import rows_of_frozen
from jqinject.formats.saving.inputs import input_settings
from jqinject.model.walk import ModelIndex, dotted
from jqinject.nn.base.weight_layer import QuantWeightLayer

LEAVES = ("kernel", "embedding", "scale")


def save(
    model: nnx.Module,
    folder: str | Path,
    *,
    names: Names | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a frozen model as a checkpoint that vLLM, llm-compressor and `load` read: compressed-tensors.

    Integers of 2 to 8 bits, e4m3, NVFP4 and MX formats are written with the codes and scales that the model has; their
    layers' inputs as what the format can say (dynamic per row, or a static scale). All else is written as floats.

    Args:
        model: a frozen NNX module.
        folder: is made; a `model.safetensors` or `config.json` that it has is not overwritten.
        names: rules as for `load`, from names of the file to paths of the model. None calls a `kernel`, an `embedding`
            and a norm's `scale` `weight`.
        config: further entries of `config.json` (`{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}`).

    Returns:
        The folder.

    Raises:
        CheckpointError: a weight or an input that the format cannot hold; two weights of one name.
        FileExistsError: the folder has such files.
        MissingLibraryError: the library safetensors is not installed.

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
    place = Path(folder)
    writer = library("safetensors.numpy", place)
    for name in ("model.safetensors", "config.json"):
        if (place / name).exists():
            raise FileExistsError(f"{place / name} exists.\n  cure: another folder")
    rules = None if names is None else checked_names(names)
    tensors: dict[str, np.ndarray] = {}
    schemes: dict[str, tuple[Scheme, dict[str, Any] | None]] = {}
    for path, name, axes, found in _weights(model, rules):
        if found is None:
            _put(tensors, name, _floats(model, path, axes))
            continue
        numbers, form, layer = found
        module = name.removesuffix(".weight")
        inputs, stored = input_settings(layer, path)
        rows = rows_of_frozen(numbers, form, axes, path)
        own, scheme = compressed(rows, path, inputs is not None)
        for end, array in (own | stored).items():
            _put(tensors, f"{module}.{end}", array)
        schemes[module] = scheme, inputs
    written = dict(config or {})
    if schemes:
        written["quantization_config"] = _settings(schemes)
    place.mkdir(parents=True, exist_ok=True)
    writer.save_file(
        {name: np.ascontiguousarray(array) for name, array in tensors.items()}, place / "model.safetensors"
    )
    (place / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    return place


def _put(tensors: dict[str, np.ndarray], name: str, array: np.ndarray) -> None:
    if name in tensors:
        raise CheckpointError(f"two weights are called {name}.\n  cure: names= with a rule for each")
    tensors[name] = array


def _weights(model: nnx.Module, rules: tuple[Name, ...] | None) -> list[tuple[str, str, Axes, Any]]:
    """Path, name, axes, and numbers and form, of every weight: None for the numbers of floats."""
    index = ModelIndex(model)
    in_quantizer = {id(entry.variable): entry.in_quantizer for entry in index.variables}
    found = []
    seen: set[int] = set()
    for path, node in index.places:
        if isinstance(node, QuantWeightLayer) and node.frozen is not None and id(node) not in seen:
            seen.add(id(node))
            own = dotted((*path, node.weight_name))
            name, axes = _named(own, rules)
            found.append(
                (own, name, axes or _axes_of(node, own), (node.frozen.numbers, node.frozen.form, node))
            )
        elif isinstance(node, FrozenParam) and id(node) not in seen:
            seen.add(id(node))
            own = dotted(path)
            name, axes = _named(own, rules)
            if axes is None:
                raise CheckpointError(
                    f"{own} is contracted by the model itself, so its inputs are not known.\n"
                    f"  cure: names={{'{name}': ('{own}', 'out in -> in out')}}"
                )
            found.append((own, name, axes, (node.numbers, node.form, None)))
        elif (
            isinstance(node, nnx.Param | nnx.BatchStat)
            and id(node) not in seen
            and not in_quantizer[id(node)]
        ):
            seen.add(id(node))
            own = dotted(path)
            name, axes = _named(own, rules)
            found.append((own, name, axes or _plain(own, node.get_value().ndim), None))
    return found


def _named(path: str, rules: tuple[Name, ...] | None) -> tuple[str, Axes | None]:
    """What a parameter is called in the file, and its axes if a rule has them."""
    for rule in rules or ():
        turned = Name(rule.models[0], rule.files[0]) if len(rule.models) == len(rule.files) == 1 else None
        match = None if turned is None else turned.matches(path)
        if match is not None:
            return rule.files[0].format(**match[1]), Axes.of(rule.axes) if rule.axes else None
    if rules is not None:
        raise CheckpointError(f"no name is for {path}.\n  cure: names={{'model.weight': {path!r}}}")
    module, dot, leaf = path.rpartition(".")
    return f"{module}{dot}{'weight' if leaf in LEAVES else leaf}", None


def _axes_of(layer: Any, path: str) -> Axes:
    """The axes of a layer's weight: those that it sums over are the inputs."""
    ndim, summed = layer.weight_ndim, layer.summed_axes()
    if len(layer.frozen.shape) != ndim:
        raise CheckpointError(f"{path} is a stack of layers, which is not written")
    names = [f"a{axis}" for axis in range(ndim)]
    if not summed and ndim == 2:
        summed = (1,)  # a table of rows
    if not summed:
        raise CheckpointError(f"{path}: weights of {type(layer).__name__} are not written")
    outs, ins = (
        [names[axis] for axis in range(ndim) if (axis in summed) is inside] for inside in (False, True)
    )
    return Axes.of(f"({' '.join(outs)}) ({' '.join(ins)}) -> {' '.join(names)}")


def _plain(path: str, ndim: int) -> Axes:
    names = [f"a{axis}" for axis in range(ndim)]
    if path.rpartition(".")[2] == "kernel" and ndim == 2:
        return Axes.of("out in -> in out")
    return Axes((), (), tuple((name,) for name in names))


def _floats(model: nnx.Module, path: str, axes: Axes) -> np.ndarray:
    value = np.asarray(ModelIndex(model).by_path[tuple(path.split("."))].variable.get_value())
    if not axes.outputs:
        return value
    flat = [name for term in axes.target for name in term]
    order = [flat.index(name) for name in (*axes.outputs, *axes.inputs)]
    turned = value.transpose(order)
    rows = int(np.prod(turned.shape[: len(axes.outputs)]))
    return turned.reshape(rows, -1) if axes.inputs else turned.reshape(rows)


def _settings(schemes: dict[str, tuple[Scheme, dict[str, Any] | None]]) -> dict[str, Any]:
    """`quantization_config`: a group for each way in which modules are quantized."""
    groups: dict[str, tuple[list[str], str, dict[str, Any], Any]] = {}
    for module, ((name, weights), inputs) in schemes.items():
        key = json.dumps([name, weights, inputs], sort_keys=True)
        groups.setdefault(key, ([], name, weights, inputs))[0].append(module)
    formats = {name for _, name, _, _ in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": [],
        "config_groups": {
            f"group_{at}": {
                "targets": targets,
                "format": name,
                "weights": weights,
                "input_activations": inputs,
            }
            for at, (targets, name, weights, inputs) in enumerate(groups.values())
        },
    }
