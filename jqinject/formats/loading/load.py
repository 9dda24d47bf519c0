"""`load`: another library's checkpoint into a model, frozen as the file says."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.dot import FrozenParam
from jqinject.formats.checkpoint import Checkpoint, read_checkpoint
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.loading.adapted import is_adapted, put_under_adapters
from jqinject.formats.loading.assigned_arrays import floats_of, maker_of
from jqinject.formats.loading.column_orders import column_order, keeps_payload, put_orders
from jqinject.formats.loading.dtypes import rounded
from jqinject.formats.loading.loaded_caches import (
    cache_formats,
    cache_proxies,
    cache_rules,
    check_proxies,
    put_cache_scales,
    refuse_caches,
)
from jqinject.formats.loading.loaded_rules import (
    contracted_by_model,
    put_ranges_of_stacks,
    refuse_quantized,
    rules_of,
)
from jqinject.formats.loading.loading_plan import Assignment, LoadPlan, plan_of
from jqinject.formats.loading.parameter_names import Names
from jqinject.model import LowBits, LowCoverageWarning, load_frozen, quantize
from jqinject.model.walk import ModelIndex, dotted

Model = TypeVar("Model", bound=nnx.Module)


class DequantizedWarning(UserWarning):
    """Matrices of a checkpoint became floats, because their groups do not follow the axes of a weight."""


def explain_load(
    model: nnx.Module,
    checkpoint: str | Path | Mapping[Any, Any] | Checkpoint,
    *,
    names: Names | None = None,
    inputs: Iterable[Any] | Mapping[str, Any] | None = None,
    ignore: Iterable[str] = (),
) -> LoadPlan:
    """What `load` would do with each tensor and each parameter; nothing is read or changed.

    Args:
        model, checkpoint, names, inputs, ignore: as for `load`; without `inputs`, the plan says what needs them.
    """
    opened = _opened(model, checkpoint)
    plan = _plan(model, opened, names, ignore, cache_proxies(model))
    if inputs is not None or is_adapted(model):
        return plan
    return replace(plan, needs_inputs=_needs_inputs(model, plan, _kept(opened, plan, True)))


def load(
    model: Model,
    checkpoint: str | Path | Mapping[Any, Any] | Checkpoint,
    *,
    names: Names | None = None,
    inputs: Iterable[Any] | Mapping[str, Any] | None = None,
    ignore: Iterable[str] = (),
) -> Model:
    """A model with the numbers of another library's quantized checkpoint, frozen as the file says.

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
            divide the outputs, or if matrices are joined, divided, or have heads as an axis).

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
        refuse_quantized(model)
    proxies = cache_proxies(model)
    plan = _plan(model, opened, names, ignore, proxies)
    plan.check(opened)
    caches = cache_formats(opened, plan.caches)
    check_proxies(proxies, plan.caches, caches)
    if any(each.is_proxy for each in plan.caches):
        model = nnx.clone(model, graph=True)
        put_cache_scales(model, plan.caches, caches)
    kept = _kept(opened, plan, not over_base)
    _tell_floats([each for each in plan.assignments if each.is_low and each not in kept])
    if over_base:
        refuse_caches(plan.caches)
        adapted = nnx.clone(model, graph=True)
        put_under_adapters(adapted, _under_adapters(adapted, opened, plan, kept))
        return adapted
    needs = () if inputs is not None else _needs_inputs(model, plan, kept)
    if needs:
        shown = ", ".join(needs[:4]) + (f" and {len(needs) - 4} more" if len(needs) > 4 else "")
        raise CheckpointError(
            f"{opened.path} has low-bit numbers for {shown}, which the model contracts without a layer: how, only a "
            "call shows.\n  cure: load(model, checkpoint, inputs=...), the model's arguments: arrays or "
            "jax.ShapeDtypeStructs"
        )
    rules = [*rules_of(model, opened, kept), *cache_rules(plan.caches, caches)]
    graphdef, state = nnx.split(model, graph=True)
    arrays = _arrays(model, opened, plan, {each.path for each in kept})
    if not rules:
        return _with_floats(nnx.merge(graphdef, state, copy=True), arrays)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)

    def make() -> Model:
        floats = nnx.merge(graphdef, jax.tree.map(_zeros, shapes))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LowCoverageWarning)  # the checkpoint decides what is quantized
            return quantize(floats, rules, inputs=inputs)

    loaded = load_frozen(make, arrays)
    orders = [column_order(opened, each) for each in kept]
    put_orders(loaded, [order for order in orders if order is not None])
    put_ranges_of_stacks(loaded, opened, kept)
    return loaded


def _kept(checkpoint: Checkpoint, plan: LoadPlan, in_order: bool) -> list[Assignment]:
    """The matrices that stay in low bits."""
    return [each for each in plan.assignments if each.is_low and keeps_payload(checkpoint, each, in_order)]


def _needs_inputs(model: nnx.Module, plan: LoadPlan, kept: list[Assignment]) -> tuple[str, ...]:
    """Paths of matrices, and caches, that are found in a call of the model."""
    caches = [each.target for each in plan.caches if not each.is_proxy]
    return (*contracted_by_model(model, kept), *caches)


def _tell_floats(whole: list[Assignment]) -> None:
    """Warn of matrices in low bits that become floats."""
    if whole:
        shown = ", ".join(each.path for each in whole[:4]) + (
            f" and {len(whole) - 4} more" if len(whole) > 4 else ""
        )
        warnings.warn(
            f"load: the groups of {shown} follow no axis of the weight, so it became floats.\n  cure: a checkpoint "
            "with axis = 1 (HQQ), or without activation order (desc_act = false) where matrices of several orders are "
            "joined, or adapters lie above",
            DequantizedWarning,
            stacklevel=3,
        )


def _opened(model: nnx.Module, checkpoint: Any) -> Checkpoint:
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"load puts a checkpoint into an NNX module, got {type(model).__name__}.\n"
            "  cure: load(model, checkpoint); a Linen module goes through nnx.bridge.ToNNX"
        )
    return checkpoint if isinstance(checkpoint, Checkpoint) else read_checkpoint(checkpoint)


def _plan(
    model: nnx.Module,
    checkpoint: Checkpoint,
    names: Names | None,
    ignore: Iterable[str],
    proxies: Iterable[str],
) -> LoadPlan:
    variables = dict(_of_checkpoints(ModelIndex(model)))
    shapes = {path: tuple(variable.shape) for path, variable in variables.items()}
    patterns = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    plan = plan_of(checkpoint, shapes, names, patterns, proxies)
    return rounded(plan, {path: np.dtype(variable.dtype) for path, variable in variables.items()}, checkpoint)


def _under_adapters(
    model: nnx.Module, checkpoint: Checkpoint, plan: LoadPlan, kept: list[Assignment]
) -> Iterator[tuple[Assignment, Any]]:
    """What `put_under_adapters` takes."""
    dtypes = {path: variable.dtype for path, variable in _of_checkpoints(ModelIndex(model))}
    for each in plan.assignments:
        dtype = dtypes[each.path]
        low = each in kept
        yield each, maker_of(checkpoint, each, dtype) if low else floats_of(checkpoint, each).astype(dtype)


def _with_floats(model: Model, arrays: Iterator[tuple[str, Any]]) -> Model:
    """A model with arrays of which none is in low bits."""
    by_path = {dotted(found.path): found.variable for found in ModelIndex(model).variables}
    for path, array in arrays:
        by_path[path].set_value(jnp.asarray(array))
    return model


def _zeros(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), leaf.shape)
    return jnp.zeros(leaf.shape, leaf.dtype)


def _of_checkpoints(index: ModelIndex) -> Iterator[tuple[str, Any]]:
    """The Variables that a checkpoint has numbers for, by their first paths."""
    for found in index.variables:
        known = isinstance(found.variable, nnx.Param | nnx.BatchStat)
        if known and not found.in_quantizer and not isinstance(found.variable, nnx.LoRAParam):
            yield dotted(found.path), found.variable
    frozen = {
        id(node): (path, node) for path, node in reversed(index.places) if isinstance(node, FrozenParam)
    }
    yield from ((dotted(path), node) for path, node in frozen.values())


def _arrays(
    model: nnx.Module, checkpoint: Checkpoint, plan: LoadPlan, kept: set[str]
) -> Iterator[tuple[str, Any]]:
    """Path and numbers of each parameter; and what the model has beside parameters."""
    dtypes = {}
    for found in ModelIndex(model).variables:
        value = found.variable.get_value()
        if isinstance(found.variable, nnx.Param | nnx.BatchStat) and not found.in_quantizer:
            dtypes[dotted(found.path)] = value.dtype
        elif not isinstance(found.variable, nnx.RngState) and isinstance(value, jax.Array):
            yield dotted(found.path), value
    for each in plan.assignments:
        dtype = dtypes[each.path]
        if each.path in kept:
            yield each.path, LowBits(each.shape, maker_of(checkpoint, each, dtype))
        else:
            yield each.path, floats_of(checkpoint, each).astype(dtype)
