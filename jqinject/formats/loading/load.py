"""`load`: another library's checkpoint into a model, frozen as the file says."""

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from jqinject.dot import FrozenParam
from jqinject.formats.checkpoint import Checkpoint, read_checkpoint
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.layouts.jax_trees import Tree
from jqinject.formats.loading import layer_rules
from jqinject.formats.loading.frozen_matrix import floats_of, low_bits_of
from jqinject.formats.loading.loading_plan import Assignment, LoadPlan, plan_of, stored_variables
from jqinject.formats.loading.parameter_names import Names
from jqinject.model import LowBits, LowCoverageWarning, load_frozen, quantize
from jqinject.model.frozen_weights import put_in_place
from jqinject.model.walk import ModelIndex, place_name
from jqinject.nn.base.slots import is_on
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import listed

Model = TypeVar("Model", bound=nnx.Module)


class DequantizedWarning(UserWarning):
    """Matrices of a checkpoint became floats: their groups do not follow the axes of a weight, or floats are joined."""


def explain_load(
    model: nnx.Module,
    checkpoint: str | Path | Tree | Checkpoint,
    *,
    names: Names | None = None,
    inputs: Iterable[object] | Mapping[str, object] | None = None,
    ignore: Iterable[str] = (),
) -> LoadPlan:
    """Return what `load` would do with each tensor and each parameter; nothing is read or changed.

    Args:
        model, checkpoint, names, inputs, ignore: as for `load`; without `inputs`, the plan says what needs them.
    """
    opened = _opened(model, checkpoint)
    plan = plan_of(model, opened, names, ignore, layer_rules.cache_proxies(model))
    if inputs is not None or is_adapted(model):
        return plan
    return replace(plan, needs_inputs=layer_rules.shown_by_calls(model, _low_bits(plan, True), plan.caches))


def load(
    model: Model,
    checkpoint: str | Path | Tree | Checkpoint,
    *,
    names: Names | None = None,
    inputs: Iterable[object] | Mapping[str, object] | None = None,
    ignore: Iterable[str] = (),
) -> Model:
    """Return a model with the numbers of another library's quantized checkpoint, frozen as the file says.

    Layers and parameters whose matrices are in low bits become quantized and frozen; their codes and scales are those
    of the file. Inputs that the checkpoint quantizes get a quantizer. Every tensor and every parameter is accounted for
    before anything is read (`explain_load` shows how). Floats come in the dtype of the model's parameters, and low-bit
    numbers are dequantized to it. Tensors are read one after the other from a memory map, and
    where a mesh is in use, put where the parameters' Variables say.

    GGUF files of Llama's architecture have the rows of queries and keys in llama.cpp's order. They are turned back
    where names are the published ones (`model.layers.{i}.self_attn.q_proj.weight`), and left where they are the file's
    (`blk.{i}.attn_q.weight`). Columns in activation order (`g_idx`) change places, so that groups are consecutive, and
    the layer's input is permuted (`jqinject.core.transforms.Permutation`).

    Scales of caches (`k_scale`, `v_scale`) go into the quantizers of keys and values that the model's attention layers
    have at the same path, or, by a name, into a cache among `inputs`:
    `{"model.layers.{i}.self_attn.k_scale": "cache.layer_{i}.k"}`, which `jqinject.quantized_cache` then stores in the
    checkpoint's numbers. Others are left, and `explain_load` says so.

    Args:
        model: a float NNX module, concrete or abstract (`nnx.eval_shape`); it is not changed. Or one that
            `jqinject.lora` made: the checkpoint then takes the place of its base.
        checkpoint: a folder, a file, a tree of arrays (Qwix's, AQT's), or what `read_checkpoint` returned.
        names: `Name` rules, or a mapping from names of the file to paths of the model, with `{i}` for a part of both:
            `{"model.layers.{i}.mlp.up_proj.weight": "layers.{i}.up.kernel"}`. None finds parameters with the path of
            the tensor, apart from the leaf (`weight` is `kernel`, `embedding`, `scale` or `w`) and a leading `model.`
        inputs: the model's arguments, arrays or `jax.ShapeDtypeStruct`s; needed where matrices are parameters that the
            model contracts by itself.
        ignore: regular expressions of tensors that the model does not need.

    Returns:
        A new model, as `freeze` returns it.

    Raises:
        FileNotFoundError, CheckpointError, MissingLibraryError: see `read_checkpoint`; tensors and parameters that do
            not fit one another.
        TypeError: `model` is not an NNX module; `names` are no rules.
        ValueError: rules that name no parameter; `ignore` holds no regular expressions; weights that are quantized
            already; see `quantize`.

    Warns:
        IdleNameWarning: a rule of `names`, other than those of ready tables, is for no tensor.
        DequantizedWarning: matrices whose groups follow no axis became floats (HQQ's axis 0, if its groups do not
            divide the outputs, or if matrices are joined, divided, or have heads as an axis); or those that are joined
            with tensors of floats.

    Example:
        >>> from pathlib import Path
        >>> import tempfile
        >>> import numpy as np
        >>> from safetensors.numpy import save_file
        >>> folder = Path(tempfile.mkdtemp())
        >>> codes, scale = np.ones((4, 8), np.int8), np.full(4, 2.0, np.float32)
        >>> save_file({"up.weight": codes, "up.SCB": scale}, folder / "model.safetensors")
        >>> _ = (folder / "config.json").write_text(
        ...     '{"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": true}}'
        ... )
        >>> class Net(nnx.Module):
        ...     def __init__(self):
        ...         self.up = nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(0))
        ...     def __call__(self, x):
        ...         return self.up(x)
        >>> net = load(Net(), folder)
        >>> net.up.kernel.numbers["value"].dtype, round(float(net(jnp.ones((1, 8)))[0, 0]), 4)
        (dtype('int8'), 0.126)
    """
    opened = _opened(model, checkpoint)
    over_base = is_adapted(model)
    if not over_base:
        _refuse_quantized(model)
    proxies = layer_rules.cache_proxies(model)
    plan = plan_of(model, opened, names, ignore, proxies)
    plan.check(opened)
    caches = layer_rules.cache_formats(opened, plan.caches)
    model = layer_rules.with_cache_scales(model, plan.caches, caches)
    low_bits = _low_bits(plan, not over_base)
    _warn_of_floats(opened, [part for part in plan.assignments if part not in low_bits])
    if over_base and plan.caches:
        raise CheckpointError(
            f"{plan.caches[0].target} should get {plan.caches[0].sources[0]}, which is not written under adapters.\n"
            "  cure: ignore=['.*_scale'], and rules with cache_quant for lora"
        )
    if over_base:
        return _with_numbers(model, opened, plan, low_bits)
    needs = () if inputs is not None else layer_rules.shown_by_calls(model, low_bits, plan.caches)
    if needs:
        raise CheckpointError(
            f"{opened.path} has low-bit numbers for {listed(needs, 4)}, which the model contracts without a layer: how,"
            " only a call shows.\n  cure: load(model, checkpoint, inputs=...), the model's arguments: arrays or "
            "jax.ShapeDtypeStructs"
        )
    by_name = {cache.target: caches[cache.target] for cache in plan.caches if not cache.is_proxy}
    rules = layer_rules.rules_of(model, low_bits, by_name)
    if not rules:
        return _with_numbers(model, opened, plan, [])
    graphdef, streams, others = nnx.split(model, nnx.RngState, ..., graph=True)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), others)

    def make() -> Model:
        # No file has random numbers: their streams stay those of the model.
        floats = nnx.merge(graphdef, jax.tree.map(_stream, streams), jax.tree.map(_zeros, shapes))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LowCoverageWarning)  # the checkpoint decides what is quantized
            return quantize(floats, rules, inputs=inputs)

    loaded = load_frozen(make, _arrays(model, opened, plan, {assignment.path for assignment in low_bits}))
    layer_rules.set_ranges_of_stacks(loaded, low_bits)
    return loaded


def _opened(model: nnx.Module, checkpoint: str | Path | Tree | Checkpoint) -> Checkpoint:
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"load puts a checkpoint into an NNX module, got {type(model).__name__}.\n  cure: nnx.bridge.ToNNX(linen)"
        )
    return checkpoint if isinstance(checkpoint, Checkpoint) else read_checkpoint(checkpoint)


def _refuse_quantized(model: nnx.Module) -> None:
    """Raise if weights of a model are quantized already.

    Raises:
        ValueError: names them.
    """
    quantized = [
        place_name(path)
        for path, node in ModelIndex(model).places
        if isinstance(node, FrozenParam) or (isinstance(node, QuantWeightLayer) and is_on(node.weight_quant))
    ]
    if quantized:
        raise ValueError(
            f"load takes a float model; this one has quantized weights: {listed(quantized, 4)}.\n"
            "  cure: the model before quantize and freeze; jqinject.load_state for float weights"
        )


def _low_bits(plan: LoadPlan, may_permute: bool) -> list[Assignment]:
    """Return the matrices that stay in low bits."""
    return [part for part in plan.assignments if part.is_low and layer_rules.keeps_payload(part, may_permute)]


def _warn_of_floats(checkpoint: Checkpoint, floats: Sequence[Assignment]) -> None:
    """Warn of tensors in low bits that become floats."""
    texts = []
    if across := [part.path for part in floats if part.is_low]:
        texts.append(
            f"the groups of {listed(across, 4)} follow no axis of the weight, so it became floats.\n  cure: a "
            "checkpoint with axis = 1 (HQQ), or without activation order (desc_act = false) where matrices of several "
            "orders are joined, or adapters lie above"
        )
    low = [part.path for part in floats if any(name in checkpoint.matrices for name, _ in part.sources)]
    if joined := [path for path in low if path not in across]:
        texts.append(
            f"{listed(joined, 4)} is joined from tensors in low bits and floats, so it became floats.\n  cure: a "
            "checkpoint that has all of these tensors in low bits, or a model with a parameter for each of them"
        )
    for text in texts:
        warnings.warn(f"load: {text}", DequantizedWarning, stacklevel=3)


def _arrays(
    model: nnx.Module, checkpoint: Checkpoint, plan: LoadPlan, low_bits: Collection[str]
) -> Iterator[tuple[str, LowBits | ArrayLike]]:
    """Return the numbers of each parameter by path; and what the model has besides parameters."""
    stored = {assignment.path for assignment in plan.assignments}
    for entry in ModelIndex(model).variables:
        path, value = place_name(entry.path), entry.variable.get_value()
        is_array = isinstance(value, jax.Array) and not isinstance(entry.variable, nnx.RngState)
        if is_array and path not in stored:
            yield path, value
    for assignment in plan.assignments:
        if assignment.path in low_bits:
            yield assignment.path, LowBits(assignment.shape, partial(low_bits_of, assignment))
        else:
            yield assignment.path, floats_of(checkpoint, assignment)


def _stream(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    if isinstance(leaf, jax.Array):
        return leaf
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.split(jax.random.key(0), leaf.shape) if is_key else _zeros(leaf)


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(leaf.shape, leaf.dtype)


def is_adapted(model: nnx.Module) -> bool:
    """Return whether a model has adapters, as `jqinject.lora` makes them."""
    return any(isinstance(entry.variable, nnx.LoRAParam) for entry in ModelIndex(model).variables)


def _with_numbers(model: Model, checkpoint: Checkpoint, plan: LoadPlan, low_bits: list[Assignment]) -> Model:
    """Return a model with the numbers of a checkpoint in the places of its parameters.

    Raises:
        CheckpointError: low-bit numbers for a parameter that the model keeps float.
    """
    model = nnx.clone(model, graph=True)
    index = ModelIndex(model)
    variables = {path: variable for path, variable, _ in stored_variables(index)}
    for assignment in plan.assignments:
        path, variable = assignment.path, variables[assignment.path]
        if assignment not in low_bits:
            floats = jnp.asarray(floats_of(checkpoint, assignment))
            if isinstance(variable, FrozenParam):
                put_in_place(index, variable, nnx.Param(floats))
            else:
                variable.set_value(floats)
            continue
        if not isinstance(variable, FrozenParam):
            raise CheckpointError(
                f"{path} is in low bits, but lora keeps it float.\n  cure: lora(model, rules), one with weight_quant"
            )
        depth = len(variable.shape) - len(variable.form.shape)
        numbers, form = low_bits_of(assignment, variable.form.summed, None, depth)
        put_in_place(index, variable, FrozenParam.holding(numbers, form, variable.get_metadata()))
    return model
