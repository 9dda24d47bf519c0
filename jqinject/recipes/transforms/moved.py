"""Factors of values whose numbers are moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jqinject.recipes.stream.flat_program import Step
from jqinject.recipes.transforms.walk import Walk


def moved(walk: Walk, step: Step, index: int) -> None:
    """Operations that move the numbers of their first operand: slices, transpositions, copies along axes."""
    for slot in step.inputs[1:]:
        walk.refuse(slot, f"numbers are picked by it in {step.name}")
    if all(slot in walk.links.unowned for slot in step.inputs[1:]):
        _moved(walk, step, step.inputs[:1])
    else:
        for slot in (step.inputs[0], *step.outputs):
            walk.refuse(slot, f"which of its numbers are picked by {step.name} depends on the input")


def joined(walk: Walk, step: Step, index: int) -> None:
    """Concatenation and stacking."""
    _moved(walk, step, step.inputs)


def _moved(walk: Walk, step: Step, data: Sequence[int]) -> None:
    outputs = [slot for slot in step.outputs if walk.has(slot)]
    if not outputs and not any(walk.has(slot) for slot in data):
        return
    places = _places(walk, step, data)
    sizes = [int(np.prod(walk.shape(slot))) for slot in data]
    ends = np.cumsum([0, *sizes])
    whole = np.zeros(ends[-1], int)
    if not outputs:
        for slot, start, end in zip(data, ends[:-1], ends[1:], strict=True):
            if walk.has(slot):
                whole[start:end] = np.broadcast_to(walk.labels[slot], walk.shape(slot)).reshape(-1)
        for slot, place in zip(step.outputs, places, strict=True):
            walk.give(slot, whole[place])
        return
    seen = np.zeros(ends[-1], bool)
    for slot, place in zip(step.outputs, places, strict=True):
        if walk.has(slot):
            labels = np.broadcast_to(walk.labels[slot], place.shape)
            whole[place], seen[place] = labels, True
            walk.channels.join(whole[place], labels)
    for slot, start, end in zip(data, ends[:-1], ends[1:], strict=True):
        shape = walk.shape(slot)
        walk.give(slot, whole[start:end].reshape(shape), seen[start:end].reshape(shape))


def _places(walk: Walk, step: Step, data: Sequence[int]) -> list[np.ndarray]:
    """For each output, where its numbers come from in the operands, one after the other."""
    start, operands = 0, []
    for slot in data:
        shape = walk.shape(slot)
        size = int(np.prod(shape))
        operands.append(np.arange(start, start + size, dtype=np.int32).reshape(shape))
        start += size
    simple = moved_by_numpy(step, operands[0])
    if simple is not None:
        return [simple]
    rest = [walk.known(slot) for slot in step.inputs[len(data) :]]
    return [np.asarray(made) for made in step.run(*map(jnp.asarray, operands), *rest)]


def moved_by_numpy(step: Step, x: np.ndarray) -> Any:
    """The commonest moves, without a compilation for each shape, and mostly without a copy; None for others.

    Args:
        step: the move.
        x: what is moved.
    """
    params = step.params
    if step.name == "reshape" and params.get("dimensions") is None:
        return x.reshape(params["new_sizes"])
    if step.name == "transpose":
        return x.transpose(params["permutation"])
    if step.name == "squeeze":
        return x.squeeze(tuple(params["dimensions"]))
    if step.name == "broadcast_in_dim":
        axes, shape = params["broadcast_dimensions"], params["shape"]
        sizes = [1] * len(shape)
        for axis, size in zip(axes, x.shape, strict=True):
            sizes[axis] = size
        return np.broadcast_to(x.reshape(sizes), shape)
    return None
