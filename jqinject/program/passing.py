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
    taken = [_taken_apart(x) for x in inputs]
    arrays = [array for passed in taken for array in passed.arrays]

    def inside(slices: Sequence[Tracked]) -> list[Tracked]:
        remaining = iter(slices)
        return [x for passed in taken for x in passed.inside([next(remaining) for _ in passed.arrays])]

    return Passed(arrays, inside)


def _is_quantized_weight(x: Tracked) -> bool:
    return x.is_weight and (is_quantized(x.value) or x.chosen is not None)


def _taken_apart(x: Tracked) -> Passed:
    low_rank = x.low_rank
    if low_rank is None:
        return _with_unrounded(x)
    passed = _with_unrounded(replace(x, low_rank=None, twins={}))

    def inside(slices: Sequence[Tracked]) -> list[Tracked]:
        *own, a, b = slices
        return [
            replace(weight, low_rank=replace(low_rank, a=a.value, b=b.value)) for weight in passed.inside(own)
        ]

    return Passed([*passed.arrays, Tracked(low_rank.a), Tracked(low_rank.b)], inside)


def _with_unrounded(x: Tracked) -> Passed:
    if x.unrounded is None:
        return _with_stored(x)
    passed = _with_stored(replace(x, unrounded=None, chosen=None, twins={}))

    def inside(slices: Sequence[Tracked]) -> list[Tracked]:
        *own, unrounded = slices
        return [replace(weight, unrounded=unrounded.value, chosen=x.chosen) for weight in passed.inside(own)]

    return Passed([*passed.arrays, Tracked(x.unrounded)], inside)


def _with_stored(x: Tracked) -> Passed:
    passed, stored = _weight_taken_apart(x), x.stored_numbers
    parts = None if stored is None else stored.in_slices()
    if parts is None:
        return passed
    layers, behind = parts

    def inside(slices: Sequence[Tracked]) -> list[Tracked]:
        own, numbers = slices[: len(passed.arrays)], slices[len(passed.arrays) :]
        arrays = {name: x_inside.value for name, x_inside in zip(layers, numbers, strict=True)}
        return [
            replace(x_inside, stored=behind(x_inside.value, arrays), twins={})
            for x_inside in passed.inside(own)
        ]

    return Passed([*passed.arrays, *(Tracked(arrays, x.origin) for arrays in layers.values())], inside)


def _weight_taken_apart(x: Tracked) -> Passed:
    tensor = x.value
    inner: Any = tensor
    if is_grouped(tensor):
        along = tensor.groups.dim % tensor.ndim
        inner = None if along == 0 else tensor.grouped if tensor.as_it_lies is None else tensor.as_it_lies
    numbers = _numbers(inner) if _is_quantized_weight(x) and shape_of(x) else None
    if numbers is None:
        return Passed([x], list)
    length = shape_of(x)[0]
    full = {
        name: array if array.ndim == 0 else full_rank(array, inner.ndim) for name, array in numbers.items()
    }
    sliced = [name for name, array in full.items() if array.ndim and array.shape[0] == length]
    same = {
        name: array if array.ndim == 0 else array[0] for name, array in full.items() if name not in sliced
    }

    def inside(slices: Sequence[Tracked]) -> list[Tracked]:
        own = {name: one.value for name, one in zip(sliced, slices, strict=True)}
        one = _tensor_like(inner, {**same, **own})
        whole = tensor.moved(one, tensor.groups) if is_grouped(tensor) else one
        return [x.with_value(whole)]

    return Passed([Tracked(full[name], x.origin) for name in sliced], inside)


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
