"""Contractions as products of matrices, and where their weights' numbers are in the parameter.

Weights have rows and columns, inputs samples and columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.program import jaxpr, operations

Shape = tuple[int, ...]
OTHER_PRODUCT = "it is no product of rows with a matrix, nor of rows in groups each with a matrix of its own"
X = TypeVar("X", jax.Array, np.ndarray)


@partial(jax.tree_util.register_dataclass, data_fields=["scattered"], meta_fields=["shape", "start"])
@dataclass(frozen=True, eq=False)
class Places:
    """For each number of an operand, its place in the flattened parameter.

    Most operands are a parameter, or a slice of a stack, in the parameter's own order: then a place to start at says it
    all, and nothing is gathered.

    Attributes:
        shape: of the operand.
        start: of a run of numbers in the parameter's order; None if they stand otherwise.
        scattered: then the place of each number, in the shape of the operand.

    Example:
        >>> stack = jnp.arange(12.0).reshape(2, 2, 3)
        >>> second = Places.of(np.arange(12).reshape(2, 2, 3)[1])
        >>> second.start, second.taken(stack).tolist()
        (6, [[6.0, 7.0, 8.0], [9.0, 10.0, 11.0]])
        >>> second.put(stack, jnp.zeros((2, 3))).sum() == stack[0].sum()
        Array(True, dtype=bool)
    """

    shape: tuple[int, ...]
    start: int | None
    scattered: np.ndarray | None = None

    @classmethod
    def of(cls, places: np.ndarray) -> Places | None:
        """The places, in the shortest form; None if a number of the parameter has several of them.

        Args:
            places: of the operand's numbers, in its shape.
        """
        flat = places.reshape(-1)
        if flat.size and np.array_equal(flat, np.arange(flat[0], flat[0] + flat.size, dtype=flat.dtype)):
            return cls(places.shape, int(flat[0]))
        if np.bincount(flat, minlength=1).max(initial=0) > 1:
            return None
        return cls(places.shape, None, places)

    @property
    def size(self) -> int:
        """How many numbers the operand has."""
        return math.prod(self.shape)

    @property
    def _at(self) -> np.ndarray | slice | None:
        return self.scattered if self.start is None else slice(self.start, self.start + self.size)

    def taken(self, parameter: X) -> X:
        """The operand.

        Args:
            parameter: whose numbers it has.
        """
        if self.start is not None and self.size == parameter.size:
            return parameter.reshape(self.shape)
        return parameter.reshape(-1)[self._at].reshape(self.shape)

    def put(self, parameter: jax.Array, operand: jax.Array) -> jax.Array:
        """A parameter with the operand's numbers in these places.

        Args:
            parameter: with other numbers there.
            operand: in its shape.
        """
        operand = operand.astype(parameter.dtype)
        if self.start is not None:
            operand = operand.reshape(-1)
            if self.size == parameter.size:
                return operand.reshape(parameter.shape)
        return parameter.reshape(-1).at[self._at].set(operand).reshape(parameter.shape)

    def same_as(self, places: Places) -> bool:
        """Whether others are the same, in the same shape."""
        if self.scattered is None or places.scattered is None:
            return (self.shape, self.start) == (places.shape, places.start)
        return np.array_equal(self.scattered, places.scattered)

    def mark(self, taken: np.ndarray) -> bool:
        """Set the places of a flat array of flags; whether some was not set.

        Args:
            taken: one flag for each number of the parameter; it is changed.
        """
        is_new = not taken[self._at].all()
        taken[self._at] = True
        return is_new


@dataclass(frozen=True)
class Moved:
    """An array that is a stack of matrices once its axes are `(stack..., rows..., columns...)`.

    Attributes:
        axes: of the array, in that order.
        shape: of the array, its axes in that order.
        sizes: of the matrices, `(stack, rows, columns)`.
    """

    axes: operations.Axes
    shape: operations.Axes
    sizes: tuple[int, int, int]

    @classmethod
    def of(cls, shape: operations.Axes, stack: Sequence[int], columns: Sequence[int]) -> Moved:
        """The rows are the axes that belong neither to the stack nor to the columns."""
        rows = [axis for axis in range(len(shape)) if axis not in (*stack, *columns)]
        stacked, high, wide = (math.prod(shape[axis] for axis in axes) for axes in (stack, rows, columns))
        axes = (*stack, *rows, *columns)
        return cls(axes, tuple(shape[axis] for axis in axes), (stacked, high, wide))

    def matrices(self, x: X) -> X:
        """The array as matrices `(stack, rows, columns)`."""
        return x.transpose(self.axes).reshape(self.sizes)

    def array(self, x: X) -> X:
        """Matrices as the array."""
        back = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        return x.reshape(self.shape).transpose(back)


Samples = Callable[..., tuple[jax.Array, jax.Array | None]]


@dataclass(frozen=True)
class Matrices:
    """A contraction as a product of matrices.

    Attributes:
        weight: its layout: batch axes, the groups of a convolution and those of ragged rows are the stack.
        input_axes: the axes of the other operand along which its channels are, in the order of the weight's columns.
        channels: how many channels it contracts; columns are ordered by channel, then by place in a window.
        samples: from the other operand, and further operands, to `(stack, samples, columns)`, and which samples belong
            to which matrix, `(stack, samples)`; None if all do.
    """

    weight: Moved
    input_axes: operations.Axes
    channels: int
    samples: Samples


def _patches(window: Mapping[str, Any], groups: int, x: jax.Array) -> tuple[jax.Array, None]:
    """The patches of a convolution's input; `window` are arguments for `jax.lax.conv_general_dilated_patches`."""
    patches = jax.lax.conv_general_dilated_patches(x, **window)
    patches = jnp.moveaxis(patches, window["dimension_numbers"].out_spec[1], -1)
    return patches.reshape(-1, groups, patches.shape[-1] // groups).transpose(1, 0, 2), None


def _in_groups(x: jax.Array, group_sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rows of a ragged product: every group sees all of them, weighted 1 or 0."""
    ends = jnp.cumsum(group_sizes)[:, None]
    place = jnp.arange(x.shape[0])[None]
    own = ((place < ends) & (place >= ends - group_sizes[:, None])).astype(jnp.float32)
    return own[:, :, None] * x[None], own


def matrices_of(eqn: jaxpr.Equation, place: int) -> Matrices | str:
    """How a contraction is a product of matrices, or a sentence that says why it is none.

    Args:
        eqn: its equation.
        place: which operand is the weight.
    """
    if not operations.multiplies_matrices(eqn):
        return OTHER_PRODUCT
    if place == 0 and eqn.name != "dot_general":
        return "the parameter is what is convolved, or rows in groups, and no matrix"
    axes = operations.operand_axes(eqn)
    own, other = axes[place], axes[1 - place]
    weight, inputs = (tuple(eqn.inputs[which].shape) for which in (place, 1 - place))
    channels = math.prod(weight[axis] for axis in own.summed)
    if eqn.name == "conv_general_dilated":
        layout, samples = _of_convolution(eqn, weight)
        return Matrices(layout, other.summed, channels, samples)
    layout = Moved.of(weight, (*own.batch, *own.stack), own.summed)
    rows = Moved.of(inputs, other.batch, other.summed)
    samples = _in_groups if own.stack else lambda x: (rows.matrices(x), None)
    return Matrices(layout, other.summed, channels, samples)


def _of_convolution(eqn: jaxpr.Equation, weight: operations.Axes) -> tuple[Moved, Samples]:
    params = eqn.params
    spec, groups = params["dimension_numbers"], params["feature_group_count"]
    shape = tuple(weight[axis] for axis in spec.rhs_spec)
    # Output channels of one group follow one another, so the stack is the outer part of their axis.
    sizes = (groups, shape[0] // groups, math.prod(shape[1:]))
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers")
    window = {"filter_shape": shape[2:]} | {name: params[name] for name in names}
    return Moved(tuple(spec.rhs_spec), shape, sizes), partial(_patches, window, groups)


def moved_by_numpy(eqn: jaxpr.Equation, x: np.ndarray) -> np.ndarray | None:
    """The result of one of the commonest moves; None for others."""
    params = eqn.params
    if eqn.name == "reshape" and params.get("dimensions") is None:
        return x.reshape(params["new_sizes"])
    if eqn.name == "transpose":
        return x.transpose(params["permutation"])
    if eqn.name == "squeeze":
        return x.squeeze(tuple(params["dimensions"]))
    if eqn.name == "slice":
        strides = params["strides"] or x.ndim * (1,)
        ends = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
        return x[tuple(slice(*end) for end in ends)]
    if eqn.name == "broadcast_in_dim":
        shape, own = params["shape"], params["broadcast_dimensions"]
        new = tuple(axis for axis in range(len(shape)) if axis not in own)
        return np.broadcast_to(np.expand_dims(x, new), shape)
    return None
