"""Quantized weights enter a part of a program (a loop, a rematerialized block) with their payloads and scales.

A part is run on arrays. A weight that is the same in every iteration is closed over; one of a stack that a loop runs
over is taken apart into its arrays, which the loop slices, and put together again inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from jqinject.program.tracked_value import Tracked, shape_of
from jqinject.quant_tensor import (
    QuantTensor,
    as_array,
    is_grouped,
    is_quantized,
    on_integers,
    on_minifloats,
    on_table,
)
from jqinject.quant_tensor.shaping import full_rank

Inside = Callable[[Sequence[Tracked]], list[Tracked]]


class Passed(NamedTuple):
    """How some inputs enter a part of a program.

    Attributes:
        arrays: what is passed in.
        inside: the inputs as the part sees them, from the same arrays inside.
    """

    arrays: list[Tracked]
    inside: Inside


def closed_over(inputs: Sequence[Tracked]) -> Passed:
    """Inputs of which quantized weights are not passed: the part reads them from outside."""
    passed = [x for x in inputs if not _is_quantized_weight(x)]

    def inside(arrays: Sequence[Tracked]) -> list[Tracked]:
        remaining = iter(arrays)
        return [x.with_value(x.value) if _is_quantized_weight(x) else next(remaining) for x in inputs]

    return Passed(passed, inside)


def in_slices(inputs: Sequence[Tracked]) -> Passed:
    """Inputs along whose first axis a loop runs, quantized weights as several arrays each."""
    taken = [_parts_of(x) for x in inputs]
    arrays = [array for parts in taken for part in parts for array in part.arrays]

    def inside(slices: Sequence[Tracked]) -> list[Tracked]:
        remaining = iter(slices)
        outputs: list[Tracked] = []
        for x, parts in zip(inputs, taken, strict=True):
            for part in parts:
                x = part.put(x, [next(remaining) for _ in part.arrays])
            outputs.append(x)
        return outputs

    return Passed(arrays, inside)


class LoopPart(NamedTuple):
    """Arrays of one input of a loop.

    Attributes:
        arrays: what is passed in.
        put: the input as a step sees it, with the slices of these arrays in it.
    """

    arrays: list[Tracked]
    put: Callable[[Tracked, list[Tracked]], Tracked]


def _is_quantized_weight(x: Tracked) -> bool:
    return x.is_weight and (is_quantized(x.value) or x.chosen is not None)


def _parts_of(x: Tracked) -> list[LoopPart]:
    low_rank, unrounded, chosen = x.low_rank, x.unrounded, x.chosen
    if low_rank is not None or unrounded is not None:
        x = replace(x, low_rank=None, unrounded=None, chosen=None, twins={})
    parts = [_value_of(x)]
    stored = None if x.stored_numbers is None else x.stored_numbers.in_slices()
    if stored is not None:
        layers, behind = stored

        def with_stored(x: Tracked, slices: list[Tracked]) -> Tracked:
            numbers = {name: part.value for name, part in zip(layers, slices, strict=True)}
            return replace(x, stored=behind(x.value, numbers), twins={})

        parts.append(LoopPart([Tracked(array, x.origin) for array in layers.values()], with_stored))
    if unrounded is not None:
        parts.append(
            LoopPart(
                [Tracked(unrounded)], lambda x, slices: replace(x, unrounded=slices[0].value, chosen=chosen)
            )
        )
    if low_rank is not None:

        def with_low_rank(x: Tracked, slices: list[Tracked]) -> Tracked:
            a, b = (part.value for part in slices)
            return replace(x, low_rank=replace(low_rank, a=a, b=b))

        parts.append(LoopPart([Tracked(low_rank.a), Tracked(low_rank.b)], with_low_rank))
    return parts


def _value_of(x: Tracked) -> LoopPart:
    tensor = x.value
    inner: Any = tensor
    if is_grouped(tensor):
        along = tensor.groups.dim % tensor.ndim
        inner = None if along == 0 else tensor.grouped if tensor.as_it_lies is None else tensor.as_it_lies
    numbers = _numbers(inner) if _is_quantized_weight(x) and shape_of(x) else None
    if numbers is None:
        return LoopPart([x], lambda _, slices: slices[0])
    length = shape_of(x)[0]
    full = {
        name: array if array.ndim == 0 else full_rank(array, inner.ndim) for name, array in numbers.items()
    }
    sliced = [name for name, array in full.items() if array.ndim and array.shape[0] == length]
    same = {
        name: array if array.ndim == 0 else array[0] for name, array in full.items() if name not in sliced
    }

    def inside(_: Tracked, slices: list[Tracked]) -> Tracked:
        own = {name: part.value for name, part in zip(sliced, slices, strict=True)}
        layer = _tensor_like(inner, {**same, **own})
        return x.with_value(tensor.moved(layer, tensor.groups) if is_grouped(tensor) else layer)

    return LoopPart([Tracked(full[name], x.origin) for name in sliced], inside)


def _numbers(tensor: QuantTensor) -> dict[str, jax.Array] | None:
    """The arrays of a quantized tensor without groups, by name; None if its format is not known here."""
    stored = is_quantized(tensor) and tensor.is_stored
    numbers: Any = tensor.kept_payload if stored else as_array(tensor)
    if on_integers(tensor):
        arrays = {"numbers": numbers, "scale": tensor.scale, "zero_point": tensor.zero_point}
        return arrays if stored or tensor.payload is None else {**arrays, "payload": tensor.payload}
    if on_minifloats(tensor) or on_table(tensor):
        return {"numbers": numbers, "scale": tensor.scale}
    return None


def _tensor_like(like: Any, numbers: dict[str, jax.Array]) -> Any:
    """A tensor of the same format with other arrays; the inverse of `_numbers`."""
    array, payload = numbers["numbers"], numbers.get("payload")
    metadata = {name: x for name, x in numbers.items() if name not in ("numbers", "payload")}
    if like.is_stored:
        return type(like).stored(array, metadata["scale"], metadata.get("zero_point"), like.grid, like.dtype)
    tensor = like.set(value=array, **metadata)
    return tensor.keeping(payload) if payload is not None and on_integers(tensor) else tensor
