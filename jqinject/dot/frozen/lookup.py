"""Indexing frozen numbers before they are dequantized: only what is read is dequantized."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot.frozen.frozen_form import FrozenForm

WHOLE = slice(None)


def look_up(
    numbers: dict[str, jax.Array],
    form: FrozenForm,
    index: object,
    dequantize: Callable[[dict[str, jax.Array]], jax.Array],
) -> jax.Array:
    """Index a weight by integers, arrays of integers, and slices: its stored numbers, as far as possible.

    Axes that are cut into groups or packed into bytes are indexed in the dequantized array, and so is a weight by an
    index of another kind (masks, new axes, several arrays).

    Args:
        numbers: as stored.
        form: theirs, `fitted`.
        index: as in `weight[index]`.
        dequantize: the numbers, which keep every axis, to an array.
    """
    entries = _entries(index, form.shape)
    if entries is None:
        return dequantize(numbers)[index]
    rest = list(map(_keeping_rank, entries))
    for axis, entry in enumerate(rest):
        place = form.axis_of_payload(axis)
        if place is not None and not _is_whole(entry):
            numbers, rest[axis] = _indexed(numbers, form, axis, place, entry), WHOLE
    value = dequantize(numbers)
    for axis, entry in enumerate(rest):
        value = value if _is_whole(entry) else value[(*(WHOLE,) * axis, entry)]
    shape: list[int] = []
    for entry, size in zip(entries, value.shape, strict=True):
        shape += [size] if isinstance(entry, slice) else np.shape(entry)
    return value.reshape(shape)


def _indexed(
    numbers: dict[str, jax.Array], form: FrozenForm, axis: int, place: int, entry: object
) -> dict[str, jax.Array]:
    """The numbers with one axis indexed; sums over this axis are dropped."""
    of_scale, indexed = form.axis_of_scale(axis), {}
    for name, array in numbers.items():
        at = place if name == "value" else of_scale
        varies = name == "value" or (at < array.ndim and array.shape[at] > 1)
        if varies:
            array = array[(*(WHOLE,) * at, entry)]
        if varies or name != "sums":
            indexed[name] = array
    return indexed


def _keeping_rank(entry: Any) -> Any:
    """An entry that reads the same, along one axis."""
    if isinstance(entry, int):
        return slice(entry, entry + 1)
    return entry if isinstance(entry, slice) else entry.reshape(-1)


def _entries(index: object, shape: tuple[int, ...]) -> tuple[Any, ...] | None:
    """One entry for each axis: slices, ints in range, and at most one array; None for any other index."""
    entries = index if isinstance(index, tuple) else (index,)
    places = [place for place, entry in enumerate(entries) if entry is Ellipsis]
    named = len(entries) - len(places)
    if len(places) > 1 or named > len(shape) or (places and named == len(shape)):
        return None
    at = places[0] if places else len(entries)
    full = (*entries[:at], *(WHOLE,) * (len(shape) - named), *entries[at + 1 :])
    normalized = tuple(_in_range(entry, size) for entry, size in zip(full, shape, strict=True))
    if not all(_is_plain(entry) for entry in normalized):
        return None
    arrays = [
        axis for axis, entry in enumerate(normalized) if np.ndim(entry) and not isinstance(entry, slice)
    ]
    single = [axis for axis, entry in enumerate(normalized) if not isinstance(entry, slice)]
    adjacent = not single or single[-1] - single[0] == len(single) - 1
    return normalized if not arrays or (len(arrays) == 1 and adjacent) else None


def _in_range(entry: object, size: int) -> Any:
    """An int, counted from the front, or None if it is out of range; any other entry unchanged."""
    if isinstance(entry, bool) or not isinstance(entry, int | np.integer):
        return entry
    return int(entry) % size if -size <= entry < size else None


def _is_plain(entry: object) -> bool:
    if isinstance(entry, jax.Array | np.ndarray):
        return bool(jnp.issubdtype(entry.dtype, jnp.integer))
    return isinstance(entry, slice) or (isinstance(entry, int) and not isinstance(entry, bool))


def _is_whole(entry: object) -> bool:
    return isinstance(entry, slice) and entry == WHOLE
