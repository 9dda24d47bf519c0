"""One convolution of low-bit numbers, without a derivative."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jqinject.dot.geometry.dimensions import Dimensions, OutSharding, scale_in_output, scaled_axes
from jqinject.dot.kernels import kernel_table
from jqinject.dot.kernels.accumulate import Block, accumulation, in_parts, part
from jqinject.dot.kernels.integer import Affine, are_sharded, corrected
from jqinject.native import takes
from jqinject.ops import processes
from jqinject.ops.sharding import sharded_as
from jqinject.ops.ste import nearest
from jqinject.quant_tensor import QuantTensor

Spec = tuple[int, ...]

# Slices of larger windows (7 x 7) become one gather: XLA compiles a concatenation of 512 slices in a minute.
LONGEST_UNROLLED = 49


@dataclass(frozen=True)
class Filters:
    """Where scales and zero points may vary in a convolution of integers.

    Attributes:
        examples: the axis of the left operand along which its scale may; None if there may be one alone.
        channels: the axis of the right operand along which its scales and zero points may.
        shifted: whether the right operand may have zero points, or unsigned bytes.
    """

    examples: int | None
    channels: int
    shifted: bool = True

    def fit(self, lhs: QuantTensor, rhs: QuantTensor) -> bool:
        """Whether the scales and zero points of two tensors of integers vary along these axes alone."""
        left = scaled_axes((lhs.scale.shape,), lhs.ndim)
        right = scaled_axes((rhs.scale.shape, rhs.zero_point.shape), rhs.ndim)
        return lhs.zero_point.size == 1 and left <= {self.examples} and right <= {self.channels}

    def take(self, lhs: Affine, rhs: Affine) -> bool:
        """Whether such integers are convolved."""
        return self.shifted or (rhs.zero_point is None and rhs.payload.dtype != jnp.uint8)


@dataclass(frozen=True)
class Convolution:
    """The static part of a convolution: the complete arguments of `lax.conv_general_dilated`.

    Attributes:
        specs: of the left operand, the right operand and the output: (batch, feature, *space) in their axes.
        padding: before and after each spatial axis.
        window_strides, lhs_dilation, rhs_dilation: of each spatial axis.
        feature_group_count, batch_group_count: of groups; 1 without.
        dtype: of the output.
        accumulator_dtype: dtype of integer sums; None means int32.
        out_sharding: of the output, on a mesh with explicit axes; else None.
    """

    specs: tuple[Spec, Spec, Spec]
    padding: tuple[tuple[int, int], ...]
    window_strides: tuple[int, ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    feature_group_count: int
    batch_group_count: int
    dtype: np.dtype
    accumulator_dtype: DTypeLike | None = None
    out_sharding: OutSharding = None

    @classmethod
    def of(
        cls,
        lhs_shape: tuple[int, ...],
        rhs_shape: tuple[int, ...],
        window_strides: Sequence[int],
        padding: str | Sequence[tuple[int, int]],
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        dimension_numbers: object = None,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
        *,
        dtype: DTypeLike,
        accumulator_dtype: DTypeLike | None = None,
        out_sharding: OutSharding = None,
    ) -> "Convolution":
        """From the arguments of `lax.conv_general_dilated`."""
        numbers = jax.lax.conv_dimension_numbers(lhs_shape, rhs_shape, dimension_numbers)
        space = len(lhs_shape) - 2
        strides = tuple(window_strides)
        rhs_dilation = (1,) * space if rhs_dilation is None else tuple(rhs_dilation)
        if isinstance(padding, str):
            sizes = [lhs_shape[axis] for axis in numbers.lhs_spec[2:]]
            window = [
                (rhs_shape[axis] - 1) * dilation + 1
                for axis, dilation in zip(numbers.rhs_spec[2:], rhs_dilation, strict=True)
            ]
            padding = jax.lax.padtype_to_pads(sizes, window, strides, padding)
        return cls(
            (tuple(numbers.lhs_spec), tuple(numbers.rhs_spec), tuple(numbers.out_spec)),
            tuple((int(before), int(after)) for before, after in padding),
            strides,
            (1,) * space if lhs_dilation is None else tuple(lhs_dilation),
            rhs_dilation,
            feature_group_count,
            batch_group_count,
            np.dtype(dtype),
            accumulator_dtype,
            out_sharding,
        )

    def of_gradient(
        self, number: int, shapes: tuple[tuple[int, ...], ...], dtype: np.dtype
    ) -> "Convolution | None":
        """The convolution that gives the gradient of an operand; None with groups, where it is not a plain one.

        That of the left operand convolves the gradient with the right operand, its spatial axes reversed; that of the
        right operand the left operand with the gradient.

        Args:
            number: 0 for the left operand, 1 for the right one.
            shapes: of the left operand, the right one and the output.
            dtype: of the result.
        """
        if self._is_grouped:
            return None
        steps = self.lhs_dilation, self.rhs_dilation, self.window_strides
        lhs, kernel, out = (
            [
                (shape[axis] - 1) * step + 1 if shape[axis] else 0
                for axis, step in zip(spec[2:], by, strict=True)
            ]
            for spec, shape, by in zip(self.specs, shapes, steps, strict=True)
        )
        low = [low for low, _ in self.padding]
        (batch, feature, *space), (output, inputs, *window), (out_batch, out_feature, *places) = self.specs
        if number == 0:
            low = [k - 1 - before for k, before in zip(kernel, low, strict=True)]
            high = [a + k - 1 - o - before for a, k, o, before in zip(lhs, kernel, out, low, strict=True)]
            specs = self.specs[2], (inputs, output, *window), self.specs[0]
            strides, left, right = self.lhs_dilation, self.window_strides, self.rhs_dilation
        else:
            high = [k - 1 + o - a - before for a, k, o, before in zip(lhs, kernel, out, low, strict=True)]
            specs = (feature, batch, *space), (out_feature, out_batch, *places), (inputs, output, *window)
            strides, left, right = self.rhs_dilation, self.lhs_dilation, self.window_strides
        return replace(
            self,
            specs=specs,
            padding=tuple(zip(low, high, strict=True)),
            window_strides=strides,
            lhs_dilation=left,
            rhs_dilation=right,
            dtype=np.dtype(dtype),
            out_sharding=None,
        )

    @property
    def filters(self) -> Filters:
        """Where scales may vary: along examples and output features."""
        return Filters(self.specs[0][0], self.channel_axis)

    @property
    def channel_axis(self) -> int:
        """The axis of the right operand that becomes the output's features."""
        return self.specs[1][0]

    @cached_property
    def axes(self) -> Dimensions:
        """The axes of operands and output; examples, features and outputs are in two of them, windows in one."""
        (batch, feature, *_), (outputs, inputs, *_), (out_batch, out_feature, *_) = self.specs
        lhs, rhs, out = (
            [(name, axis) for axis in range(len(spec))]
            for name, spec in zip(("lhs", "rhs", "out"), self.specs, strict=True)
        )
        rhs[inputs] = lhs[feature]
        out[out_batch], out[out_feature] = lhs[batch], rhs[outputs]
        return Dimensions(tuple(lhs), tuple(rhs), tuple(out))

    def __call__(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """The convolution of plain arrays of one dtype, summed in `dtype`."""
        return jax.lax.conv_general_dilated(
            lhs,
            rhs,
            self.window_strides,
            self.padding,
            self.lhs_dilation,
            self.rhs_dilation,
            jax.lax.ConvDimensionNumbers(*self.specs),
            self.feature_group_count,
            self.batch_group_count,
            preferred_element_type=self.dtype,
            out_sharding=self.out_sharding,
        )

    def integers(self, lhs: Affine, rhs: Affine) -> jax.Array:
        """The convolution of integers, in `dtype`; `lhs` may have one zero point, `rhs` one for each output feature.

        Padding consists of zeros, stored in `lhs` as its zero point.
        """
        lhs, rhs = lhs.signed(), rhs.signed()
        axes = tuple(axis for axis in range(rhs.payload.ndim) if axis != self.channel_axis)
        lengths = tuple(rhs.payload.shape[axis] for axis in axes)
        dtypes = ((x.payload.dtype, x.zero_point is not None) for x in (lhs, rhs))
        accumulator, longest = accumulation(lengths, *dtypes, self.accumulator_dtype)
        padded = self
        if lhs.zero_point is not None:
            lhs = lhs._replace(payload=self._with_border(lhs))
            space = len(self.padding)
            padded = replace(self, padding=((0, 0),) * space, lhs_dilation=(1,) * space)

        def contract(block: Block) -> jax.Array:
            conv, left = padded._of_block(lhs.payload, rhs.payload.shape, dict(zip(axes, block, strict=True)))
            return conv._exact(lhs._replace(payload=left), rhs.part(axes, block), accumulator)

        y = in_parts(lengths, longest, contract)
        for side, scale in enumerate((lhs.scale, rhs.scale)):
            y = y.astype(jnp.float32) * sharded_as(self._in_output(scale, side), y)
        return y.astype(self.dtype)

    def _of_block(
        self, lhs: jax.Array, rhs_shape: tuple[int, ...], block: dict[int, tuple[int, int]]
    ) -> "tuple[Convolution, jax.Array]":
        """The convolution for a part of the right operand, and the matching part of the left one."""
        lhs_spec, rhs_spec, _ = self.specs
        groups = self.feature_group_count
        feature, inputs = lhs_spec[1], rhs_spec[1]
        if block[inputs] != (0, rhs_shape[inputs]):
            apart = lhs.reshape(*lhs.shape[:feature], groups, rhs_shape[inputs], *lhs.shape[feature + 1 :])
            apart = part(apart, (feature + 1,), (block[inputs],))
            lhs = apart.reshape(*lhs.shape[:feature], -1, *lhs.shape[feature + 1 :])
        padding = [
            (before - block[axis][0] * step, after - (rhs_shape[axis] - block[axis][1]) * step)
            for (before, after), axis, step in zip(self.padding, rhs_spec[2:], self.rhs_dilation, strict=True)
        ]
        return replace(self, padding=tuple(padding)), lhs

    def _exact(self, lhs: Affine, rhs: Affine, accumulator: np.dtype) -> jax.Array:
        """`sum (q_l - z_l) (q_r - z_r)` in an accumulator that holds it; `lhs` with a zero point is already padded."""
        y = self._integers(lhs.payload, rhs.payload, accumulator)
        channel, shape = self.channel_axis, rhs.payload.shape
        axes = tuple(axis for axis in range(len(shape)) if axis != channel)

        def laid_out(x: jax.Array, side: int) -> jax.Array:
            return sharded_as(self._in_output(x, side), y)

        def covered() -> jax.Array:
            """The sums of the left operand that each window position covers."""
            groups = self.feature_group_count * self.batch_group_count
            ones = jnp.ones((*shape[:channel], groups, *shape[channel + 1 :]), jnp.int8)
            sums = replace(self, out_sharding=None)._integers(lhs.payload, ones, accumulator)
            return sharded_as(jnp.repeat(sums, shape[channel] // groups, axis=self.specs[2][1]), y)

        return corrected(y, (lhs, rhs), laid_out, ((), axes), accumulator, covered)

    def _integers(self, lhs: jax.Array, rhs: jax.Array, accumulator: np.dtype) -> jax.Array:
        conv, lhs, rhs = replace(self, dtype=accumulator), lhs.astype(jnp.int8), rhs.astype(jnp.int8)
        if kernel_table.XLA_CONVOLVES or are_sharded(lhs, rhs) or not self.is_product:
            return conv(lhs, rhs)
        return processes.on_one_device(processes.Bound(_as_product, (conv,)), conv, lhs, rhs)

    @property
    def _is_grouped(self) -> bool:
        return self.feature_group_count != 1 or self.batch_group_count != 1

    @property
    def is_product(self) -> bool:
        """Whether it is a product of patches: without groups, input dilation and negative padding."""
        dilated = any(step != 1 for step in self.lhs_dilation)
        return not (self._is_grouped or dilated or any(edge < 0 for edges in self.padding for edge in edges))

    def matrices(self, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The patches `(batch, *places, k)` and the kernel `(out features, k)`, `k` window size times features.

        Example:
            >>> specs = jax.lax.ConvDimensionNumbers((0, 2, 1), (2, 1, 0), (0, 2, 1))
            >>> conv = Convolution.of((1, 3, 1), (3, 1, 2), (1,), [(1, 1)], None, None, specs, dtype=np.float32)
            >>> patches, kernel = conv.matrices(jnp.arange(3.0).reshape(1, 3, 1), jnp.ones((3, 1, 2)))
            >>> patches.shape, kernel.shape, patches[0, :, 1].tolist()
            ((1, 3, 3), (2, 3), [0.0, 1.0, 2.0])
        """
        lhs_spec, rhs_spec, _ = self.specs
        lhs = lhs.transpose((lhs_spec[0], *lhs_spec[2:], lhs_spec[1]))
        rhs = rhs.transpose((rhs_spec[0], *rhs_spec[2:], rhs_spec[1]))
        lhs = jnp.pad(lhs, ((0, 0), *self.padding, (0, 0)))
        window = rhs.shape[1:-1]
        places = [
            max((size - (patches - 1) * dilation - 1) // stride + 1, 0)
            for size, patches, stride, dilation in zip(
                lhs.shape[1:-1], window, self.window_strides, self.rhs_dilation, strict=True
            )
        ]
        kernel = kernel_table.row_major(rhs.reshape(rhs.shape[0], math.prod(rhs.shape[1:])))
        if 0 in places:
            return jnp.zeros((len(lhs), *places, kernel.shape[1]), lhs.dtype), kernel
        if math.prod(window) > LONGEST_UNROLLED:
            return self._gathered(lhs, window, places), kernel
        patches = [self._seen(lhs, at, places) for at in itertools.product(*map(range, window))]
        return jnp.concatenate(patches, axis=-1), kernel

    def image(self, y: jax.Array) -> jax.Array:
        """`(batch, *places, out features)` in the order of the output's axes."""
        out_spec = self.specs[2]
        order = (out_spec[0], *out_spec[2:], out_spec[1])
        return y.transpose([order.index(axis) for axis in range(y.ndim)])

    def _seen(self, lhs: jax.Array, at: tuple[int, ...], places: list[int]) -> jax.Array:
        """The input at one place of the window, for all window positions."""
        start = [step * dilation for step, dilation in zip(at, self.rhs_dilation, strict=True)]
        end = [
            first + (count - 1) * stride + 1
            for first, count, stride in zip(start, places, self.window_strides, strict=True)
        ]
        limits = (lhs.shape[0], *end, lhs.shape[-1])
        return jax.lax.slice(lhs, (0, *start, 0), limits, (1, *self.window_strides, 1))

    def _gathered(self, lhs: jax.Array, window: Sequence[int], places: Sequence[int]) -> jax.Array:
        """The patches of a padded input, by one gather."""
        starts = [step * np.arange(count) for step, count in zip(self.window_strides, places, strict=True)]
        inside = [step * np.arange(length) for step, length in zip(self.rhs_dilation, window, strict=True)]
        mesh = np.ix_(*starts, *inside)
        at = [start + offset for start, offset in zip(mesh[: len(window)], mesh[len(window) :], strict=True)]
        patches = lhs.at[:, *at].get(mode="promise_in_bounds")
        return patches.reshape(len(lhs), *places, -1)

    def _with_border(self, lhs: Affine) -> jax.Array:
        zero: Any = lhs.zero_point
        config = [(0, 0, 0)] * lhs.payload.ndim
        for axis, (before, after), dilation in zip(
            self.specs[0][2:], self.padding, self.lhs_dilation, strict=True
        ):
            config[axis] = (before, after, dilation - 1)
        return jax.lax.pad(lhs.payload, nearest(zero).reshape(()).astype(lhs.payload.dtype), config)

    def _in_output(self, x: jax.Array, side: int) -> jax.Array:
        """A scale of one operand, which may vary along its examples or output features, laid out like the output."""
        layout = scale_in_output(x, (self.axes.lhs, self.axes.rhs)[side], self.axes.out)
        assert layout is not None, "checked by the table"
        return layout


def _as_product(conv: Convolution, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """A convolution of bytes as a product of patches, if the platform has a kernel for it."""

    def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        patches, kernel = conv.matrices(lhs, rhs)
        if not takes(patches, kernel, conv.dtype, math.prod(patches.shape[:-1])):
            return conv(lhs, rhs)
        y = kernel_table.by_kernel(patches.reshape(-1, patches.shape[-1]), kernel)
        return conv.image(y.reshape(*patches.shape[:-1], len(kernel)))

    if not kernel_table.is_sized(lhs, rhs) or not takes(lhs, rhs, conv.dtype, rows=1):
        return conv(lhs, rhs)
    return jax.lax.platform_dependent(lhs, rhs, cpu=product, default=conv)
