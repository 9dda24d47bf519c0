"""The matrices of a file: rows of several weights above one another, or those of one weight taken apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import TypeVar

import numpy as np

from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.loading.rows import Rows, joined
from jqinject.formats.saving.frozen_rows import rows_of_frozen
from jqinject.formats.saving.inputs import input_format_of
from jqinject.formats.saving.saved_column_orders import in_place
from jqinject.formats.saving.weights import Weight, array_of
from jqinject.formats.stored_matrix import InputFormat

Matrix = tuple[Weight, Rows | np.ndarray, InputFormat | None]
"""Whose a matrix is, under its own name; its rows, or its floats; and how its input is quantized."""
T = TypeVar("T")


def matrices_of(weights: Iterable[Weight]) -> Iterator[Matrix]:
    """What is written of the weights of a model, as `loading` undoes it.

    Args:
        weights: of a model.

    Raises:
        CheckpointError: weights that divide a matrix differ, or some are missing; how the rows of a weight were joined
            is not known.
    """
    waiting: dict[str, list[Weight]] = {}
    for weight in weights:
        together = waiting.setdefault(weight.name, [])
        together.append(weight)
        if len(together) == weight.parts:
            del waiting[weight.name]
            yield from _apart(_together(sorted(together, key=_part)))
    for name, found in waiting.items():
        held = _shown(sorted(found, key=_part))
        raise CheckpointError(
            f"{name} is made of {found[0].parts} parameters, of which the model has {held}.\n"
            "  cure: a Name of the parameters that the model has"
        )


def _together(weights: Sequence[Weight]) -> Matrix:
    first = weights[0]
    if _alike(first, weights, [each.numbers is None for each in weights], "which are frozen, and which not"):
        arrays = [array_of(each) for each in weights]
        return first, arrays[0] if len(arrays) == 1 else np.concatenate(arrays), None
    order = _alike(first, weights, [each.order for each in weights], "the order of their columns")
    inputs = [input_format_of(each.layer, each.path, each.order is not None) for each in weights]
    given = _alike(first, weights, inputs, "how their inputs are quantized")
    rows = joined([rows_of_frozen(each) for each in weights], f"{first.name} of {_shown(weights)}")
    return first, in_place(rows, order), given


def _alike(first: Weight, weights: Sequence[Weight], found: Sequence[T], what: str) -> T:
    """What all weights of a matrix have in common."""
    if any(not _same(each, found[0]) for each in found[1:]):
        raise CheckpointError(
            f"{_shown(weights)} are one matrix, {first.name}, but differ in {what}.\n"
            "  cure: one rule for all of them, or a Name for each"
        )
    return found[0]


def _same(a: object, b: object) -> bool:
    if isinstance(a, InputFormat) and isinstance(b, InputFormat):
        return all(np.array_equal(getattr(a, each.name), getattr(b, each.name)) for each in fields(a))
    return type(a) is type(b) and np.array_equal(np.asarray(a), np.asarray(b))


def _apart(matrix: Matrix) -> Iterator[Matrix]:
    weight, held, inputs = matrix
    if len(weight.names) == 1:
        yield matrix
        return
    start = 0
    for name, rows in zip(weight.names, _rows(weight, held), strict=True):
        own = slice(start, start := start + rows)
        cut = held[own] if isinstance(held, np.ndarray) else held.cut(own)
        yield replace(weight, names=(name,)), cut, inputs


def _rows(weight: Weight, held: Rows | np.ndarray) -> tuple[int, ...]:
    """How many rows each of the matrices has that were joined."""
    every = held.shape[0] if isinstance(held, np.ndarray) else held.codes.shape[0]
    names, count = ", ".join(weight.names), len(weight.names)
    if weight.rows is not None:
        if sum(weight.rows) != every:
            raise CheckpointError(
                f"{weight.path} has {every} rows; its Name says {' + '.join(map(str, weight.rows))} for {names}"
            )
        return weight.rows
    first, *_ = (*weight.axes.outputs, "")
    if weight.sizes.get(first) != count:
        raise CheckpointError(
            f"{weight.path} joins {names}; how many rows each has is not said.\n"
            "  cure: a Name with rows=(...), a number for each; or axes that begin with an axis of the tensors, "
            f"'(part out) in -> in (part out)' with sizes={ {'part': count} }, if all have as many"
        )
    return (every // count,) * count


def _part(weight: Weight) -> int:
    return weight.part


def _shown(weights: Sequence[Weight]) -> str:
    return ", ".join(each.path for each in weights)
