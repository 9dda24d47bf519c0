"""The tensors of a parameter, gathered into one `Matrix`; and the parameter's frozen numbers, or floats, from it."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jqinject.dot import ScaleForms, frozen_numbers
from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.formats import layout_axes
from jqinject.formats.checkpoint import Checkpoint
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.loading import loading_plan, parameter_names
from jqinject.formats.stored_matrix import Matrix, gathered
from jqinject.quant_tensor import Groups, QuantTensor, in_groups

Numbers: TypeAlias = dict[str, jax.Array]
Axes: TypeAlias = tuple[int, ...]


def low_bits_of(
    assignment: loading_plan.Assignment, summed: Axes, sums: Axes | None, stack: int
) -> tuple[Numbers, FrozenForm]:
    """Return what is stored of a parameter whose numbers a checkpoint has, as `LowBits` takes it.

    Codes stay as they are. Scales and integer zero points stay in the bytes of the file.

    Args:
        assignment: the parameter, what it is made of, and how rows and columns become its axes.
        summed: its axes that a contraction sums over.
        sums: those along which it needs sums of the payload; None for no sums.
        stack: the number of axes in front along which it is a stack, not counted in the others.
    """
    matrix = _gathered(assignment, (stored.rows() for stored in assignment.matrices))
    assert isinstance(matrix, Matrix), "of low bits"
    if len(assignment.depth) < stack:
        matrix = _with_scales_of_layers(matrix, assignment, stack)
    axes, sizes, groups, repeats = assignment.axes, assignment.sizes, None, 1
    columns = {} if matrix.in_turn else dict.fromkeys(axes.inputs, 1)
    if matrix.scale.shape[-1] > 1 and not matrix.in_turn:
        groups = _groups(matrix, axes, sizes[axes.inputs[-1]])
        repeats = -(-matrix.codes.shape[-1] // groups.size) // matrix.scale.shape[-1]
        columns = {axes.inputs[-1]: -(-groups.length // groups.size)}

    def placed(x: np.ndarray) -> np.ndarray:
        rows = dict(zip(axes.outputs, x.shape[-2:-1], strict=True)) if matrix.in_turn else {}
        rows = dict.fromkeys(axes.outputs, 1) if x.shape[-2] == 1 else rows
        x = axes.apply(np.repeat(x, repeats, axis=-1), {**sizes, **columns, **rows})
        return x if groups is None else np.expand_dims(x, groups.dim)

    weight = replace(matrix.map(placed, "scale", "zero_point"), codes=axes.apply(matrix.codes, sizes))
    quantized = _quant_tensor(weight, groups, assignment.dtype)
    zero = matrix.zero_point
    forms = ScaleForms(None, zero is None or np.issubdtype(zero.dtype, np.integer))
    ndim = len(assignment.shape) - stack
    summed = tuple(axis % ndim + stack for axis in summed)
    sums = None if sums is None or matrix.in_turn else tuple(axis % ndim + stack for axis in sums)
    numbers, form = frozen_numbers(quantized, summed, zero is not None, sums, forms)
    numbers["scale"] = jnp.asarray(weight.scale)
    in_turn = axes.target.index(axes.outputs) - len(axes.target) if matrix.in_turn else None
    if matrix.factor is not None:
        numbers["scale_factor"] = jnp.asarray(matrix.factor, jnp.float32)
    form = replace(form, in_turn=in_turn, names=tuple(sorted(numbers)))
    return numbers, form.fitted(numbers["value"].shape[stack:])


def _with_scales_of_layers(matrix: Matrix, assignment: loading_plan.Assignment, stack: int) -> Matrix:
    """Return a stack that is stored as one matrix, whose rows are those of one layer after the other, with scales and
    a factor of its own for each layer."""
    axes, names = assignment.axes, assignment.axes.outputs[:stack]
    if assignment.depth or len(names) < stack or axes.target[:stack] != tuple((name,) for name in names):
        raise CheckpointError(
            f"{assignment.path} is a stack of layers, but one matrix is for it.\n  cure: names that stack matrices"
        )
    return matrix.by_row().map(lambda x: np.broadcast_to(x, assignment.shape[:stack]), "factor")


def _gathered(
    assignment: loading_plan.Assignment, tensors: Iterable[Matrix | np.ndarray | None]
) -> Matrix | np.ndarray:
    """Return the numbers of a parameter, of all its tensors; with the axes of a stack in front."""
    parts = []
    for (name, rows), numbers in zip(assignment.sources, tensors, strict=True):
        assert numbers is not None, "checked before"
        if assignment.heads:
            numbers = numbers[parameter_names.published_order(len(numbers), assignment.heads, name)]
        parts.append(numbers if rows is None else numbers[slice(*rows)])
    return gathered(parts, assignment.path, assignment.depth)


def floats_of(checkpoint: Checkpoint, assignment: loading_plan.Assignment) -> np.ndarray:
    """Return the floats of a parameter, of all its tensors, in its axes and its dtype."""

    def read(name: str) -> np.ndarray:
        if name in checkpoint.matrices:
            return checkpoint.matrices[name].dequantize()
        array = checkpoint.array(name)
        return array.reshape(-1) if checkpoint.is_tree else array

    array = _gathered(assignment, (read(name) for name, _ in assignment.sources))
    assert isinstance(array, np.ndarray), "of floats"
    return assignment.axes.apply(array, assignment.sizes).astype(assignment.dtype)


def _groups(matrix: Matrix, axes: layout_axes.AxesOfLayout, length: int) -> Groups:
    """Return the groups of the parameter along the last axis of inputs, which further inputs divide.

    Args:
        matrix: the numbers.
        axes: how rows and columns become the axes of the parameter.
        length: of the last axis of inputs.

    Raises:
        ValueError: the axis that is cut into groups is a part of one of the parameter.
    """
    axis = next(at for at, term in enumerate(axes.target) if term[-1] == axes.inputs[-1])
    if len(axes.target[axis]) > 1:
        raise ValueError(f"groups lie along {axes.inputs[-1]}, which is a part of an axis in {axes}")
    size = matrix.group if len(axes.inputs) == 1 else math.gcd(matrix.group, length)
    return Groups(size, axis - len(axes.target), length)


def _quant_tensor(matrix: Matrix, groups: Groups | None, dtype: DTypeLike) -> QuantTensor:
    """Return the numbers as a QuantTensor: scales have the axes of `groups`, into which the codes are cut."""
    grid, codes = matrix.grid, matrix.codes
    zero = None if matrix.zero_point is None else jnp.asarray(matrix.zero_point.astype(np.float32))
    scale = jnp.asarray(matrix.scale.astype(np.float32))
    if grid.is_integer:
        zero = jnp.float32(0) if zero is None else zero
    elif grid.is_table:  # its numbers ascend, without a second zero
        codes = codes if matrix.table is None else np.searchsorted(grid.table, matrix.table)[codes]
        codes = codes.astype(np.uint8)
    elif grid.bit_width < 8:  # the code of -0 is nan's in formats that have no other for it
        codes = np.where(codes == 1 << (grid.bit_width - 1), np.uint8(0), codes)
    if groups is None:
        return QuantTensor.stored(jnp.asarray(codes), scale, zero, grid, dtype)
    grouped = QuantTensor.stored(groups.split(jnp.asarray(codes)), scale, zero, grid, dtype)
    return in_groups(grouped, groups.size, groups.dim, groups.length)
