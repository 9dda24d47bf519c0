"""Quantized weights enter a part of a program (a loop, a rematerialized block) with their payloads and scales.

A part is run on arrays. A weight that is the same in every iteration is closed over; one of a stack that a loop runs
over is taken apart into its arrays, which the loop slices, and put together again inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from jqinject.program.moved_weight import arrays_of, with_arrays
from jqinject.program.tracked_value import Tracked, shape_of
from jqinject.quant_tensor import is_grouped, is_quantized
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
    taken = [_layers_of(x) for x in inputs]

    def inside(slices: Sequence[Tracked]) -> list[Tracked]:
        remaining = iter(slices)
        return [x for part in taken for x in part.inside([next(remaining) for _ in part.arrays])]

    return Passed([array for part in taken for array in part.arrays], inside)


def _is_quantized_weight(x: Tracked) -> bool:
    return x.is_weight and (is_quantized(x.value) or x.chosen is not None)


def _layers_of(x: Tracked) -> Passed:
    """One input of a loop, with what is behind its value."""
    low_rank, unrounded, chosen = x.low_rank, x.unrounded, x.chosen
    if low_rank is not None or unrounded is not None:
        x = replace(x, low_rank=None, unrounded=None, chosen=None, twins={})
    value = _layers_of_value(x)
    stored = None if x.stored_numbers is None else x.stored_numbers.in_slices()
    layers, behind = ({}, None) if stored is None else stored
    others = [] if unrounded is None else [unrounded]
    others += [] if low_rank is None else [low_rank.a, low_rank.b]
    arrays = [*value.arrays, *map(Tracked, (*layers.values(), *others))]

    def inside(slices: Sequence[Tracked]) -> list[Tracked]:
        (layer,) = value.inside(slices[: len(value.arrays)])
        further = (part.value for part in slices[len(value.arrays) :])
        numbers = {name: next(further) for name in layers}
        if behind is not None:
            layer = replace(layer, stored=behind(layer.value, numbers), twins={})
        if unrounded is not None:
            layer = replace(layer, unrounded=next(further), chosen=chosen)
        if low_rank is not None:
            layer = replace(layer, low_rank=replace(low_rank, a=next(further), b=next(further)))
        return [layer]

    return Passed(arrays, inside)


def _layers_of_value(x: Tracked) -> Passed:
    tensor = x.value
    inner = tensor
    if is_grouped(tensor):
        along = tensor.groups.dim % tensor.ndim
        inner = None if along == 0 else tensor.grouped if tensor.as_it_lies is None else tensor.as_it_lies
    if not (x.is_weight and is_quantized(inner) and shape_of(x)):
        return Passed([x], list)
    full = {
        name: array if array.ndim == 0 else full_rank(array, inner.ndim)
        for name, array in arrays_of(inner).items()
    }
    sliced = {name: array for name, array in full.items() if array.ndim and array.shape[0] == shape_of(x)[0]}
    same = {name: array[0] if array.ndim else array for name, array in full.items() if name not in sliced}

    def inside(slices: Sequence[Tracked]) -> list[Tracked]:
        own = {name: part.value for name, part in zip(sliced, slices, strict=True)}
        layer = with_arrays(inner, {**same, **own})
        return [x.with_value(tensor.moved(layer, tensor.groups) if is_grouped(tensor) else layer)]

    return Passed([Tracked(array, x.origin) for array in sliced.values()], inside)
