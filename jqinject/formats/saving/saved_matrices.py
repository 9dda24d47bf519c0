"""The matrices of a file: frozen weights as `Matrix`es, several above one another, or one taken apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.layouts.own import ParameterArrays
from jqinject.formats.loading.parameter_names import Name
from jqinject.formats.saving.saved_inputs import input_format_of
from jqinject.formats.saving.weights import Weight, group_of_column, in_own_order
from jqinject.formats.stored_matrix import MINIFLOATS, InputFormat, Matrix, joined, minifloat_name
from jqinject.ops import Grid

T = TypeVar("T")


def frozen_arrays(weight: Weight) -> ParameterArrays:
    """Return the arrays of a frozen weight.

    Raises:
        CheckpointError: its numbers are of no kind that files hold.
    """
    numbers, form, path = weight.numbers, weight.form, weight.path
    assert numbers is not None and form is not None, "of a frozen weight"
    if form.in_turn is not None:
        raise CheckpointError(
            f"{path}: groups of outputs that lie in turn (HQQ's axis 0) are not written.\n"
            "  cure: the checkpoint that they came from"
        )
    if form.cut is not None:
        raise CheckpointError(
            f"{path}: groups that cross shards are not written.\n  cure: gather the model first"
        )
    grid, groups = _checked_grid(form.grid, path), form.groups
    payload = form.fitted(numbers["value"].shape).stored.payload(numbers["value"])
    scale, zero_point = numbers["scale"], numbers.get("zero_point")
    codes = payload if groups is None else groups.join(payload)
    if grid.is_integer or grid.bit_width < 8 or grid.is_table:
        codes = codes.astype(grid.storage if grid.is_integer else np.uint8)

    def one_for_a_group(x: jax.Array) -> np.ndarray:
        return np.asarray(x) if groups is None else np.squeeze(x, axis=x.ndim + groups.dim)

    factor = numbers.get("scale_factor")
    return ParameterArrays(
        np.asarray(codes),
        grid,
        groups,
        one_for_a_group(scale),
        None if zero_point is None else one_for_a_group(zero_point),
        None if factor is None else np.asarray(factor),
    )


def _checked_grid(grid: Grid, path: str) -> Grid:
    """Return the grid of a weight, if files hold it."""
    if grid.is_integer and grid.bit_width > 8:
        raise CheckpointError(f"{path} has {grid.bit_width} bits; files hold at most 8")
    if not grid.is_minifloat:
        return grid
    name = minifloat_name(grid) if grid.dtype is not None else ""
    if name:
        return MINIFLOATS[name]
    raise CheckpointError(
        f"{path} has a minifloat, {grid}, that no format of a checkpoint knows.\n"
        "  cure: a quantizer of a published format, such as Fp8e4m3OCPWeightPerChannelFloat, whose e4m3 goes up to 448"
    )


def arrays_in_own_order(weight: Weight) -> ParameterArrays:
    """Return the arrays of a frozen weight, with columns in the order of the layer's input before it is permuted.

    Raises:
        CheckpointError: see `frozen_arrays`; which axis is permuted is unknown, or it is not one.
    """
    arrays = frozen_arrays(weight)
    if weight.order is None:
        return arrays
    groups, shape = arrays.groups, arrays.codes.shape
    summed = () if weight.layer is None else weight.layer.summed_axes
    axis = groups.dim if groups is not None else summed[0] if len(summed) == 1 else None
    if axis is None or shape[axis] != weight.order.size:
        raise CheckpointError(
            f"{weight.path}: its permuted input is no single axis of {shape}, so its columns have no order.\n"
            "  cure: method='compressed-tensors', with names"
        )
    codes = np.take(arrays.codes, np.argsort(weight.order), axis)
    columns = None if groups is None else group_of_column(weight.order, groups.size)
    return arrays._replace(codes=codes, group_of_column=columns)


def matrix_of_frozen(weight: Weight) -> Matrix:
    """Return codes and scales of a frozen weight as a matrix `(outputs, inputs)`: the inverse of what loading does.

    Args:
        weight: with its numbers, and how rows and columns became its axes.

    Raises:
        CheckpointError: its numbers are of no kind that files hold.
    """
    arrays, axes = frozen_arrays(weight), weight.known_axes
    groups, sizes = arrays.groups, weight.sizes_in(arrays.codes.shape)
    outputs, inputs = (tuple(sizes[name] for name in names) for names in (axes.outputs, axes.inputs))
    rows = math.prod(outputs)
    if groups is not None and axes.target[groups.dim] != axes.inputs[-1:]:
        raise CheckpointError(f"{weight.path} has groups that are not consecutive inputs of {axes}")

    def by_group(x: np.ndarray) -> np.ndarray:
        """Return scales or zero points for each group of each row."""
        try:
            x = axes.back(x, sizes)
        except ValueError as error:
            raise CheckpointError(f"{weight.path}: of its scales, {error}") from None
        columns = x.shape[len(outputs) :]
        if groups is None and math.prod(columns) != 1:
            raise CheckpointError(f"{weight.path} has scales along its inputs, which are no groups")
        if groups is not None:  # scales that further inputs share
            columns = *inputs[:-1], x.shape[-1]
        return np.ascontiguousarray(np.broadcast_to(x, (*outputs, *columns)).reshape(rows, -1))

    codes = np.ascontiguousarray(axes.back(arrays.codes, sizes).reshape(rows, -1))
    zero = None if arrays.zero_point is None else by_group(arrays.zero_point)
    return Matrix(
        codes,
        by_group(arrays.scale),
        arrays.grid,
        (1, codes.shape[1] if groups is None else groups.size),
        zero if zero is None or np.any(zero) else None,
        factor=arrays.factor,
        table=arrays.grid.table,
    )


class SavedMatrix(NamedTuple):
    """A matrix of the file.

    Attributes:
        weight: that it belongs to, under its own name.
        matrix: its low bits, or its floats.
        inputs: how its input is quantized.
    """

    weight: Weight
    matrix: Matrix | np.ndarray
    inputs: InputFormat | None


def matrices_of(weights: Iterable[Weight]) -> Iterator[SavedMatrix]:
    """Return what is written of the weights of a model, as `loading` undoes it.

    Args:
        weights: of a model.

    Raises:
        CheckpointError: weights that divide a matrix differ, or some are missing; how the rows of a weight were joined
            is not known.
    """
    waiting: dict[str, list[Weight]] = {}
    for weight in weights:
        parts = waiting.setdefault(weight.name, [])
        parts.append(weight)
        if len(parts) == len(weight.rule.models):
            del waiting[weight.name]
            yield from _divided(_joined(sorted(parts, key=_part)))
    for name, parts in waiting.items():
        raise CheckpointError(
            f"{name} is made of {len(parts[0].rule.models)} parameters, of which the model has "
            f"{_paths(sorted(parts, key=_part))}.\n  cure: a Name of the parameters that the model has"
        )


def _joined(weights: Sequence[Weight]) -> SavedMatrix:
    first = weights[0]
    is_float = [weight.numbers is None for weight in weights]
    if _shared(weights, is_float, "which are frozen, and which not"):
        arrays = [weight.floats() for weight in weights]
        return SavedMatrix(first, arrays[0] if len(arrays) == 1 else np.concatenate(arrays), None)
    order = _shared(weights, [weight.order for weight in weights], "the order of their columns")
    formats = [input_format_of(weight.layer, weight.path, weight.order is not None) for weight in weights]
    inputs = _shared(weights, formats, "how their inputs are quantized")
    matrix = joined([matrix_of_frozen(weight) for weight in weights], f"{first.name} of {_paths(weights)}")
    return SavedMatrix(first, in_own_order(matrix, order), inputs)


def _shared(weights: Sequence[Weight], values: Sequence[T], what: str) -> T:
    """Return what all weights of a matrix have in common."""
    if any(not _same(value, values[0]) for value in values[1:]):
        raise CheckpointError(
            f"{_paths(weights)} are one matrix, {weights[0].name}, but differ in {what}.\n"
            "  cure: one rule for all of them, or a Name for each"
        )
    return values[0]


def _same(a: object, b: object) -> bool:
    if isinstance(a, InputFormat) and isinstance(b, InputFormat):
        return all(np.array_equal(vars(a)[name], vars(b)[name]) for name in vars(a))
    return type(a) is type(b) and np.array_equal(np.asarray(a), np.asarray(b))


def _divided(saved: SavedMatrix) -> Iterator[SavedMatrix]:
    weight, matrix, inputs = saved
    if len(weight.rule.files) == 1:
        yield saved
        return
    start = 0
    for name, rows in zip(weight.rule.files, _rows(weight, saved.matrix), strict=True):
        own = slice(start, start := start + rows)
        part = matrix[own] if isinstance(matrix, np.ndarray) else matrix.cut(own)
        yield SavedMatrix(replace(weight, rule=Name(name, weight.path)), part, inputs)


def _rows(weight: Weight, matrix: Matrix | np.ndarray) -> tuple[int, ...]:
    """Return how many rows each of the matrices has that were joined."""
    rows = matrix.shape[0] if isinstance(matrix, np.ndarray) else matrix.codes.shape[0]
    rule, names, count = weight.rule, ", ".join(weight.rule.files), len(weight.rule.files)
    if rule.rows is not None:
        if sum(rule.rows) != rows:
            stated = " + ".join(map(str, rule.rows))
            raise CheckpointError(f"{weight.path} has {rows} rows; its Name says {stated} for {names}")
        return rule.rows
    first, *_ = (*weight.known_axes.outputs, "")
    if rule.sizes.get(first) != count:
        raise CheckpointError(
            f"{weight.path} joins {names}; how many rows each has is not said.\n"
            "  cure: a Name with rows=(...), a number for each; or axes that begin with an axis of the tensors, "
            f"'(part out) in -> in (part out)' with sizes={ {'part': count} }, if all have as many"
        )
    return (rows // count,) * count


def _part(weight: Weight) -> int:
    return weight.rule.models.index(weight.path)


def _paths(weights: Sequence[Weight]) -> str:
    return ", ".join(weight.path for weight in weights)
