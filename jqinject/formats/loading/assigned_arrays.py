"""The arrays of a parameter, gathered from the tensors that are for it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jqinject.formats.checkpoint import Checkpoint
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.loading.gguf_names import published_order
from jqinject.formats.loading.layout_axes import AxesOfLayout
from jqinject.formats.loading.loading_plan import Assignment
from jqinject.formats.loading.quant_tensors import numbers_of
from jqinject.formats.loading.rows import Rows, joined, rows_of, stacked


def maker_of(checkpoint: Checkpoint, each: Assignment, dtype: Any) -> Any:
    """A function that makes a parameter's low-bit numbers, as `LowBits` asks for.

    Args:
        checkpoint: the checkpoint.
        each: the parameter, and what it is made of.
        dtype: of the parameter.
    """

    def make(layer: Any, stack: int) -> Any:
        rows, axes = _gathered(checkpoint, each), each.axes
        lead = each.depth[:stack]
        if len(each.depth) < stack:
            lead, rows, axes = _taken_apart(rows, each, stack)
        summed, sums = layer.summed_axes, layer.axes_of_sums()
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


def _taken_apart(rows: Rows, each: Assignment, stack: int) -> tuple[tuple[int, ...], Rows, AxesOfLayout]:
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
    return lead, apart, AxesOfLayout(each.axes.outputs[stack:], each.axes.inputs, each.axes.target[stack:])


def _at(rows: Rows, at: tuple[int, ...]) -> Rows:
    """One matrix of a stack."""

    def one(x: np.ndarray | None) -> np.ndarray | None:
        return None if x is None else x[at]

    codes, scale = one(rows.codes), one(rows.scale)
    assert codes is not None and scale is not None, "always there"
    return replace(rows, codes=codes, scale=scale, zero_point=one(rows.zero_point), factor=one(rows.factor))


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
    return replace(
        whole, codes=codes, scale=scale, zero_point=deep(whole.zero_point), factor=deep(whole.factor)
    )


def floats_of(checkpoint: Checkpoint, each: Assignment) -> np.ndarray:
    """The floats of a parameter, of all its tensors, in its axes."""
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
