"""One convolution of low-bit numbers, without a derivative."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jqinject.dot.geometry.dimensions import OutSharding, scale_in_output, scaled_axes
from jqinject.dot.kernels.accumulate import (
    Block,
    in_parts,
    integer_accumulator,
    largest_magnitude,
    longest_sum,
    part,
)
from jqinject.dot.kernels.integer import Affine, are_sharded
from jqinject.dot.kernels.kernel_table import Window, integer_convolution
from jqinject.ops.sharding import sharded_as
from jqinject.quant_tensor import QuantTensor

Spec = tuple[int, ...]


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
        lhs_dilation: of each spatial axis.
        options: the others, by name.
        dtype: of the output.
        accumulator_dtype: dtype of integer sums; None means int32.
        out_sharding: of the output, on a mesh with explicit axes; else None.
    """

    specs: tuple[Spec, Spec, Spec]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
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
    ) -> Convolution:
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
        options = {
            "window_strides": strides,
            "rhs_dilation": rhs_dilation,
            "feature_group_count": feature_group_count,
            "batch_group_count": batch_group_count,
        }
        return cls(
            (tuple(numbers.lhs_spec), tuple(numbers.rhs_spec), tuple(numbers.out_spec)),
            tuple((int(before), int(after)) for before, after in padding),
            (1,) * space if lhs_dilation is None else tuple(lhs_dilation),
            tuple(options.items()),
            np.dtype(dtype),
            accumulator_dtype,
            out_sharding,
        )

    def of_gradient(
        self, number: int, shapes: tuple[tuple[int, ...], ...], dtype: np.dtype
    ) -> Convolution | None:
        """The convolution that gives the gradient of an operand; None with groups, where it is not a plain one.

        That of the left operand convolves the gradient with the right operand, its spatial axes reversed; that of the
        right operand the left operand with the gradient.

        Args:
            number: 0 for the left operand, 1 for the right one.
            shapes: of the left operand, the right one and the output.
            dtype: of the result.
        """
        options = dict(self.options)
        if options["feature_group_count"] != 1 or options["batch_group_count"] != 1:
            return None
        steps = self.lhs_dilation, options["rhs_dilation"], options["window_strides"]
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
            dilation = options["window_strides"]
            changed = {"window_strides": self.lhs_dilation}
        else:
            high = [k - 1 + o - a - before for a, k, o, before in zip(lhs, kernel, out, low, strict=True)]
            specs = (feature, batch, *space), (out_feature, out_batch, *places), (inputs, output, *window)
            dilation = self.lhs_dilation
            changed = {"window_strides": options["rhs_dilation"], "rhs_dilation": options["window_strides"]}
        return replace(
            self,
            specs=specs,
            padding=tuple(zip(low, high, strict=True)),
            lhs_dilation=dilation,
            options=tuple((options | changed).items()),
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

    def numbers(self, lhs: jax.Array, rhs: jax.Array, dtype: DTypeLike) -> jax.Array:
        """The convolution of plain arrays, summed in `dtype`.

        Args:
            lhs, rhs: arrays of one dtype.
            dtype: of the output.
        """
        return jax.lax.conv_general_dilated(
            lhs,
            rhs,
            padding=self.padding,
            lhs_dilation=self.lhs_dilation,
            dimension_numbers=jax.lax.ConvDimensionNumbers(*self.specs),
            preferred_element_type=dtype,
            out_sharding=self.out_sharding,
            **dict(self.options),
        )

    def of_integers(self, lhs: Affine, rhs: Affine) -> jax.Array:
        """The convolution of integers, in `dtype`; `lhs` may have one zero point, `rhs` one for each output feature.

        Padding consists of zeros, stored in `lhs` as its zero point.
        """
        lhs, rhs = lhs.signed(), rhs.signed()
        zero = None if lhs.zero_point is None else jnp.round(lhs.zero_point.reshape(())).astype(jnp.int32)
        y = self._summed(lhs.payload, rhs.payload, zero, rhs.zero_point, rhs.sums)
        for scale in (self._of_lhs(lhs.scale), self._of_rhs(rhs.scale)):
            y = y.astype(jnp.float32) * sharded_as(scale, y)
        return y.astype(self.dtype)

    def _summed(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        lhs_zero: jax.Array | None = None,
        rhs_zero: jax.Array | None = None,
        rhs_sums: jax.Array | None = None,
    ) -> jax.Array:
        """`sum (q_l - z_l) (q_r - z_r)`: int32, or float32 from parts if int32 cannot hold it."""
        axes = tuple(axis for axis in range(rhs.ndim) if axis != self.channel_axis)
        lengths = [rhs.shape[axis] for axis in axes]
        spans = largest_magnitude(lhs.dtype, lhs_zero), largest_magnitude(rhs.dtype, rhs_zero)
        accumulator = integer_accumulator(self.accumulator_dtype, math.prod(lengths), *spans)
        padded = self
        if lhs_zero is not None:
            lhs = self._with_border(lhs, lhs_zero)
            space = len(self.padding)
            padded = replace(self, padding=((0, 0),) * space, lhs_dilation=(1,) * space)

        def contract(block: Block) -> jax.Array:
            right = part(rhs, axes, block)
            sums = rhs_sums if right is rhs else None
            conv, left = padded._of_block(lhs, rhs.shape, dict(zip(axes, block, strict=True)))
            return conv._exact(left, right, accumulator, lhs_zero, rhs_zero, sums)

        return in_parts(lengths, longest_sum(accumulator, *spans), contract)

    def _of_block(
        self, lhs: jax.Array, rhs_shape: tuple[int, ...], block: dict[int, tuple[int, int]]
    ) -> tuple[Convolution, jax.Array]:
        """The convolution for a part of the right operand, and the matching part of the left one."""
        lhs_spec, rhs_spec, _ = self.specs
        options = dict(self.options)
        groups = options["feature_group_count"]
        feature, inputs = lhs_spec[1], rhs_spec[1]
        if block[inputs] != (0, rhs_shape[inputs]):
            apart = lhs.reshape(*lhs.shape[:feature], groups, rhs_shape[inputs], *lhs.shape[feature + 1 :])
            apart = part(apart, (feature + 1,), (block[inputs],))
            lhs = apart.reshape(*lhs.shape[:feature], -1, *lhs.shape[feature + 1 :])
        padding = [
            (before - block[axis][0] * step, after - (rhs_shape[axis] - block[axis][1]) * step)
            for (before, after), axis, step in zip(
                self.padding, rhs_spec[2:], options["rhs_dilation"], strict=True
            )
        ]
        return replace(self, padding=tuple(padding)), lhs

    def _exact(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        accumulator: np.dtype,
        lhs_zero: jax.Array | None,
        rhs_zero: jax.Array | None,
        rhs_sums: jax.Array | None,
    ) -> jax.Array:
        """The sum in an accumulator that holds it; a left operand with a zero point is already padded."""
        y = self._integers(lhs, rhs, accumulator)
        if lhs_zero is not None:
            if rhs_sums is None:
                axes = tuple(axis for axis in range(rhs.ndim) if axis != self.channel_axis)
                rhs_sums = jnp.sum(rhs, axis=axes, keepdims=True, dtype=accumulator)
            y = y - lhs_zero.astype(accumulator) * sharded_as(self._of_rhs(rhs_sums), y)
        if rhs_zero is None:
            return y
        groups = dict(self.options)["feature_group_count"] * dict(self.options)["batch_group_count"]
        ones = jnp.ones(
            [groups if n == self.channel_axis else size for n, size in enumerate(rhs.shape)], jnp.int8
        )
        covered = replace(self, out_sharding=None)._integers(lhs, ones, accumulator)
        if lhs_zero is not None:
            covered = covered - math.prod(ones.shape) // groups * lhs_zero.astype(accumulator)
        repeated = jnp.repeat(covered, rhs.shape[self.channel_axis] // groups, axis=self.specs[2][1])
        covered = sharded_as(repeated, y)
        return y - sharded_as(self._of_rhs(jnp.round(rhs_zero).astype(accumulator)), y) * covered

    def _integers(self, lhs: jax.Array, rhs: jax.Array, accumulator: np.dtype) -> jax.Array:
        plain = _ByXla(self, accumulator)
        lhs, rhs = lhs.astype(jnp.int8), rhs.astype(jnp.int8)
        window = None if are_sharded(lhs, rhs) else self._window()
        return integer_convolution(lhs, rhs, accumulator, plain, window)

    def _window(self) -> Window | None:
        """The window; None with groups or a dilated input, which are not a plain product."""
        options = dict(self.options)
        grouped = options["feature_group_count"] != 1 or options["batch_group_count"] != 1
        dilated = any(step != 1 for step in self.lhs_dilation)
        if grouped or dilated or any(edge < 0 for edges in self.padding for edge in edges):
            return None
        return Window(self.specs, self.padding, options["window_strides"], options["rhs_dilation"])

    def _with_border(self, payload: jax.Array, zero: jax.Array) -> jax.Array:
        config = [(0, 0, 0)] * payload.ndim
        for axis, (before, after), dilation in zip(
            self.specs[0][2:], self.padding, self.lhs_dilation, strict=True
        ):
            config[axis] = (before, after, dilation - 1)
        return jax.lax.pad(payload, zero.astype(payload.dtype), config)

    def _of_lhs(self, scale: jax.Array | None) -> Any:
        """The left operand's scale, which may differ between examples, laid out like the output."""
        return _moved(scale, len(self.specs[0]), self.specs[0][0], self.specs[2][0], "lhs", "example")

    def _of_rhs(self, scale: jax.Array | None) -> Any:
        ndim, place = len(self.specs[1]), self.specs[2][1]
        return _moved(scale, ndim, self.channel_axis, place, "rhs", "output feature")


@dataclass(frozen=True)
class _ByXla:
    """The convolution of integers by XLA, compared by value."""

    convolution: Convolution
    accumulator: np.dtype

    def __call__(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return self.convolution.numbers(lhs, rhs, self.accumulator)


def _moved(scale: jax.Array | None, ndim: int, axis: int, place: int, side: str, what: str) -> Any:
    if scale is None:
        return None
    placed = scale_in_output(scale, ndim, {axis: place}, ndim)
    if placed is None:
        raise ValueError(
            f"the scale of {side} has shape {scale.shape}, but a convolution can only undo one scale, or one for each "
            f"{what} (axis {axis}).\n  cure: quantize {side} so, or contraction='float'"
        )
    return placed
