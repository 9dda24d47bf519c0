"""`load`: another library's checkpoint into a model, frozen as the file says."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.formats.checkpoint import Checkpoint, read_checkpoint
from jqinject.formats.errors import CheckpointError
from jqinject.formats.loading.axes import Axes
from jqinject.formats.loading.gguf_names import published_order
from jqinject.formats.loading.names import Names
from jqinject.formats.loading.plan import Assignment, LoadPlan, plan_of
from jqinject.formats.loading.quant_tensors import numbers_of
from jqinject.formats.loading.quantizers import input_quantizer
from jqinject.formats.loading.rows import Rows, joined, rows_of, stacked
from jqinject.formats.stored_matrix import InputFormat
from jqinject.model import LowBits, LowCoverageWarning, Rule, load_frozen, quantize
from jqinject.model.quantizing.counterparts import counterpart_of
from jqinject.model.walk import ModelIndex, dotted
from jqinject.quant import Int8WeightPerChannelFloat

Model = TypeVar("Model", bound=nnx.Module)


class DequantizedWarning(UserWarning):
    """Matrices of a checkpoint became floats, because their groups do not follow the axes of a weight."""


def explain_load(
    model: nnx.Module,
    checkpoint: str | Path | Mapping[Any, Any] | Checkpoint,
    *,
    names: Names | None = None,
    ignore: Iterable[str] = (),
) -> LoadPlan:
    """What `load` would do with each tensor and each parameter; nothing is read or changed.

    Args:
        model, checkpoint, names, ignore: as for `load`.
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else read_checkpoint(checkpoint)
    return plan_of(opened, _parameters(model), names, tuple(ignore))


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
    before anything is read (`explain_load` shows how). Tensors are read one after the other from a memory map, and
    where a mesh is in use, put where the parameters' Variables say.

    GGUF files of Llama's architecture have the rows of queries and keys in llama.cpp's order. They are turned back
    where names are the published ones (`model.layers.{i}.self_attn.q_proj.weight`), and left where they are the file's
    (`blk.{i}.attn_q.weight`). Scales of caches (`k_scale`, `v_scale`) are left; `explain_load` names them.

    Args:
        model: a float NNX module, concrete or abstract (`nnx.eval_shape`); it is not changed.
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
        ValueError: rules that name no parameter; see `quantize`.

    Warns:
        DequantizedWarning: matrices whose groups follow no axis (activation order, HQQ's axis 0) became floats.

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
        >>> net.up.frozen.value.dtype, round(float(net(jnp.ones((1, 8)))[0, 0]), 4)
        (dtype('int8'), 0.126)
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else read_checkpoint(checkpoint)
    plan = plan_of(opened, _parameters(model), names, tuple(ignore))
    plan.check(opened)
    low = [each for each in plan.assignments if each.is_low]
    whole = [each for each in low if not _follows_rows(opened, each)]
    if whole:
        shown = ", ".join(each.path for each in whole[:4]) + (
            f" and {len(whole) - 4} more" if len(whole) > 4 else ""
        )
        warnings.warn(
            f"load: the groups of {shown} follow no axis of the weight, so it became floats.\n  cure: a checkpoint "
            "without activation order (GPTQ's desc_act = false), or HQQ with axis = 1",
            DequantizedWarning,
            stacklevel=2,
        )
    kept = [each for each in low if each not in whole]
    rules = _rules(model, opened, kept)
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

    return load_frozen(make, arrays)


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


def _parameters(model: nnx.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters, by their first paths."""
    index = ModelIndex(model)
    return {
        dotted(found.path): tuple(found.variable.get_value().shape)
        for found in index.variables
        if isinstance(found.variable, nnx.Param | nnx.BatchStat)
    }


def _follows_rows(checkpoint: Checkpoint, each: Assignment) -> bool:
    for name, _ in each.sources:
        layout = checkpoint.matrices[name].layout
        if layout.endswith("axis 0") or checkpoint.matrices[name].has_column_groups:
            return False
    return True


def _rules(model: nnx.Module, checkpoint: Checkpoint, kept: list[Assignment]) -> list[Rule]:
    """A rule for each matrix: that of its layer, if this is one that quantizers go into; else of the parameter."""
    layers = {dotted(path): node for path, node in ModelIndex(model).places if isinstance(node, nnx.Module)}
    made = []
    for each in kept:
        module, _, _ = each.path.rpartition(".")
        is_layer = module in layers and counterpart_of(layers[module]) is not None
        given = _input_of(checkpoint, each)
        made.append(
            Rule(
                re.escape(module if is_layer else each.path),
                weight_quant=Int8WeightPerChannelFloat,
                input_quant=input_quantizer(given, each.path),
            )
        )
    return made


def _input_of(checkpoint: Checkpoint, each: Assignment) -> InputFormat | None:
    found = [checkpoint.matrices[name].input_format for name, _ in each.sources]
    first = found[0]
    if first is not None and first.scale is not None and len(found) > 1:
        # One input goes into all of them: the largest range holds what each of them saw.
        stated = [
            (float(np.max(one.scale)), one) for one in found if one is not None and one.scale is not None
        ]
        return max(stated, key=lambda pair: pair[0])[1]
    return first


def _arrays(
    model: nnx.Module, checkpoint: Checkpoint, plan: LoadPlan, kept: set[str]
) -> Iterator[tuple[str, Any]]:
    """Path and numbers of each parameter; and what the model has beside parameters."""
    dtypes = {}
    for found in ModelIndex(model).variables:
        value = found.variable.get_value()
        if isinstance(found.variable, nnx.Param | nnx.BatchStat):
            dtypes[dotted(found.path)] = value.dtype
        elif not isinstance(found.variable, nnx.RngState) and isinstance(value, jax.Array):
            yield dotted(found.path), value
    for each in plan.assignments:
        dtype = dtypes[each.path]
        if each.path in kept:
            yield each.path, LowBits(each.shape, _maker(checkpoint, each, dtype))
        else:
            yield each.path, _floats(checkpoint, each).astype(dtype)


def _maker(checkpoint: Checkpoint, each: Assignment, dtype: Any) -> Any:
    def make(layer: Any, stack: int) -> Any:
        rows, axes = _gathered(checkpoint, each), each.axes
        lead = each.depth[:stack]
        if len(each.depth) < stack:
            lead, rows, axes = _taken_apart(rows, each, stack)
        summed, sums = layer.summed_axes(), layer.axes_of_sums()
        if not lead:
            return numbers_of(rows, axes, dict(each.sizes), dtype, summed, sums)
        made = [
            numbers_of(_at(rows, at), axes, dict(each.sizes), dtype, summed, sums) for at in np.ndindex(*lead)
        ]
        numbers = {
            name: jnp.stack([one[0][name] for one in made]).reshape(*lead, *made[0][0][name].shape)
            for name in made[0][0]
        }
        return numbers, made[0][1]

    return make


def _taken_apart(rows: Rows, each: Assignment, stack: int) -> tuple[tuple[int, ...], Rows, Axes]:
    """The matrices of a stack that is stored as one, whose rows are those of one layer after the other."""
    names = each.axes.outputs[:stack]
    if each.depth or len(names) < stack or each.axes.target[:stack] != tuple((name,) for name in names):
        raise CheckpointError(
            f"{each.path} is a stack of layers, but one matrix is for it.\n  cure: names that stack matrices"
        )
    lead, whole = tuple(each.sizes[name] for name in names), rows.whole

    def split(x: np.ndarray) -> np.ndarray:
        return x.reshape(*lead, -1, x.shape[-1])

    zero = None if whole.zero_point is None else split(whole.zero_point)
    factor = None if whole.factor is None else np.broadcast_to(whole.factor, lead)
    apart = replace(whole, codes=split(whole.codes), scale=split(whole.scale), zero_point=zero, factor=factor)
    return lead, apart, Axes(each.axes.outputs[stack:], each.axes.inputs, each.axes.target[stack:])


def _at(rows: Rows, at: tuple[int, ...]) -> Rows:
    """One matrix of a stack."""

    def one(x: np.ndarray | None) -> np.ndarray | None:
        return None if x is None else x[at]

    codes, scale = one(rows.codes), one(rows.scale)
    assert codes is not None and scale is not None, "always there"
    return Rows(codes, scale, one(rows.zero_point), rows.group, rows.format, one(rows.factor), rows.table)


def _gathered(checkpoint: Checkpoint, each: Assignment) -> Rows:
    """The rows of a parameter, of all its tensors."""
    parts = []
    for name, cut in each.sources:
        rows = rows_of(checkpoint.matrices[name])
        assert rows is not None, "checked before"
        if each.heads:
            rows = rows.cut(published_order(rows.codes.shape[0], each.heads, name))
        parts.append(rows if cut is None else rows.cut(slice(*cut)))
    if not each.depth:
        return joined(parts, each.path)
    share = len(parts) // math.prod(each.depth)
    single = [joined(parts[at : at + share], each.path) for at in range(0, len(parts), share)]
    whole = stacked(single, each.path)

    def deep(x: np.ndarray | None) -> np.ndarray | None:
        return None if x is None else x.reshape(*each.depth, *x.shape[1:])

    codes, scale = deep(whole.codes), deep(whole.scale)
    assert codes is not None and scale is not None, "always there"
    return Rows(
        codes, scale, deep(whole.zero_point), whole.group, whole.format, deep(whole.factor), whole.table
    )


def _floats(checkpoint: Checkpoint, each: Assignment) -> np.ndarray:
    """The floats of a parameter, of all its tensors."""
    parts = []
    for name, cut in each.sources:
        held = checkpoint.matrices.get(name)
        found = checkpoint.array(name) if held is None else held.dequantize()
        found = found.reshape(-1) if held is None and checkpoint.is_tree else found
        if each.heads:
            found = found[published_order(found.shape[0], each.heads, name)]
        parts.append(found if cut is None else found[cut[0] : cut[1]])
    share = len(parts) // max(math.prod(each.depth), 1)
    single = [
        np.concatenate(parts[at : at + share]) if share > 1 else parts[at]
        for at in range(0, len(parts), share)
    ]
    whole = np.stack(single).reshape(*each.depth, *single[0].shape) if each.depth else single[0]
    outputs = tuple(each.sizes[name] for name in each.axes.outputs)
    return each.axes.apply(whole, outputs, tuple(each.sizes[name] for name in each.axes.inputs))
