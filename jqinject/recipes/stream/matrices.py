"""Contractions as products of matrices: weights of rows and columns, inputs of samples and columns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.program.jaxpr import Equation

Axes = tuple[int, ...]


@dataclass(frozen=True)
class Moved:
    """An array whose axes are those of a stack of matrices: `(stack..., rows..., columns...)`.

    Attributes:
        axes: of the array, in that order.
        shape: of the array, its axes in that order.
        split: how many axes belong to the stack, and how many to the rows.
    """

    axes: Axes
    shape: Axes
    split: tuple[int, int]

    @classmethod
    def of(cls, shape: Axes, stack: Axes, columns: Axes) -> Moved:
        """The rows are the axes that belong neither to the stack nor to the columns."""
        rows = tuple(axis for axis in range(len(shape)) if axis not in (*stack, *columns))
        axes = (*stack, *rows, *columns)
        return cls(axes, tuple(shape[axis] for axis in axes), (len(stack), len(rows)))

    def matrices(self, x: Any) -> Any:
        """The array as matrices `(stack, rows, columns)`."""
        stack, rows = self.split
        cut = (self.shape[:stack], self.shape[stack : stack + rows], self.shape[stack + rows :])
        return x.transpose(self.axes).reshape(tuple(map(math.prod, cut)))

    def array(self, x: Any) -> Any:
        """Matrices as the array."""
        back = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        return x.reshape(self.shape).transpose(back)


@dataclass(frozen=True)
class DotMatrices:
    """Of `dot_general`: the batch axes are the stack.

    Attributes:
        weight, other: the layouts of both operands.
    """

    weight: Moved
    other: Moved

    def samples(self, x: jax.Array, *rest: Any) -> tuple[jax.Array, None]:
        """The other operand as `(stack, samples, columns)`."""
        return self.other.matrices(x), None


@dataclass(frozen=True)
class ConvolutionMatrices:
    """Of `conv_general_dilated`: the groups of channels are the stack, patches are the samples.

    Columns are ordered by channel, then by place in the window.

    Attributes:
        weight: the layout of the kernel.
        groups: of channels.
        window: the arguments for `jax.lax.conv_general_dilated_patches`.
    """

    weight: Moved
    groups: int
    window: tuple[tuple[str, Any], ...]

    def samples(self, x: jax.Array, *rest: Any) -> tuple[jax.Array, None]:
        """The images as patches `(groups, patches, columns)`."""
        made = dict(self.window)
        spec = made["dimension_numbers"]
        patches = jax.lax.conv_general_dilated_patches(x, **made)
        patches = jnp.moveaxis(patches, spec.out_spec[1], -1)
        patches = patches.reshape(-1, self.groups, patches.shape[-1] // self.groups)
        return patches.transpose(1, 0, 2), None


@dataclass(frozen=True)
class RaggedMatrices:
    """Of `ragged_dot`: the groups of rows are the stack; every group sees all rows, weighted 1 or 0.

    Attributes:
        weight: the layout of the weights.
    """

    weight: Moved

    def samples(self, x: jax.Array, group_sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The rows `(groups, rows, columns)`, and which of them belong to a group, `(groups, rows)`."""
        ends = jnp.cumsum(group_sizes)[:, None]
        place = jnp.arange(x.shape[0])[None]
        own = ((place < ends) & (place >= ends - group_sizes[:, None])).astype(jnp.float32)
        return own[:, :, None] * x[None], own


Matrices = DotMatrices | ConvolutionMatrices | RaggedMatrices


def matrices_of(eqn: Equation, place: int) -> Matrices | str:
    """How a contraction is a product of matrices, or a sentence that says why it is none.

    Args:
        eqn: its equation.
        place: which operand is the weight.
    """
    weight, other = (tuple(eqn.inputs[which].shape) for which in (place, 1 - place))
    name, params = eqn.name, eqn.params
    if name == "dot_general":
        contracted, batch = params["dimension_numbers"]
        layouts = (
            Moved.of(shape, tuple(batch[which]), tuple(contracted[which]))
            for shape, which in ((weight, place), (other, 1 - place))
        )
        return DotMatrices(*layouts)
    if name == "conv_general_dilated":
        return _of_convolution(eqn, place, weight)
    numbers = params["ragged_dot_dimension_numbers"]
    (left, right), (rows_batch, _) = numbers.dot_dimension_numbers
    plain = tuple(left) == (1,) and not rows_batch and tuple(numbers.lhs_ragged_dimensions) == (0,)
    if place != 1 or not plain:
        return "it is a ragged product of another kind than rows in groups, each with a matrix of its own"
    return RaggedMatrices(Moved.of(weight, tuple(numbers.rhs_group_dimensions), tuple(right)))


def _of_convolution(eqn: Equation, place: int, weight: Axes) -> Matrices | str:
    params = eqn.params
    if place != 1:
        return "the parameter is what is convolved, not the kernel"
    if params["batch_group_count"] != 1:
        return "the convolution groups its batch"
    spec, groups = params["dimension_numbers"], params["feature_group_count"]
    out, ins, *spatial = spec.rhs_spec
    split = (groups, weight[out] // groups)
    # Output channels of one group follow one another, so the stack is the outer part of their axis.
    axes = (out, ins, *spatial)
    layout = _GroupedKernel(axes, tuple(weight[axis] for axis in axes), (1, 1), split)
    window = {
        "filter_shape": tuple(weight[axis] for axis in spatial),
        "window_strides": params["window_strides"],
        "padding": params["padding"],
        "lhs_dilation": params["lhs_dilation"],
        "rhs_dilation": params["rhs_dilation"],
        "dimension_numbers": spec,
    }
    return ConvolutionMatrices(layout, groups, tuple(window.items()))


@dataclass(frozen=True)
class _GroupedKernel(Moved):
    """A kernel `(outputs, inputs, window...)`, whose outputs are cut into groups.

    Attributes:
        outputs: how many groups, and outputs in each.
    """

    outputs: tuple[int, int]

    def matrices(self, x: Any) -> Any:
        """The kernel as matrices `(groups, outputs, columns)`."""
        return x.transpose(self.axes).reshape(*self.outputs, -1)
