"""One convolution of low-bit numbers, without a derivative."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot.geometry.parts import Block, in_parts, part
from jqinject.dot.geometry.patches import Window
from jqinject.dot.kernels.accumulate import integer_accumulator, largest_magnitude, longest_sum
from jqinject.dot.kernels.integer import Affine
from jqinject.dot.kernels.kernel_table import integer_convolution
from jqinject.ops.sharding import sharded_as

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

    def fit(self, lhs: Any, rhs: Any) -> bool:
        """Whether the scales and zero points of two tensors of integers vary along these axes alone."""
        examples = -1 if self.examples is None else self.examples
        return (
            lhs.zero_point.size == 1
            and varies_only_along(rhs.zero_point, rhs.ndim, self.channels)
            and varies_only_along(lhs.scale, lhs.ndim, examples)
            and varies_only_along(rhs.scale, rhs.ndim, self.channels)
        )

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
    accumulator_dtype: Any = None
    out_sharding: Any = None

    @classmethod
    def of(
        cls,
        lhs_shape: tuple[int, ...],
        rhs_shape: tuple[int, ...],
        window_strides: Sequence[int],
        padding: Any,
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        dimension_numbers: Any = None,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
        *,
        dtype: Any,
        accumulator_dtype: Any = None,
        out_sharding: Any = None,
    ) -> Convolution:
        """From the arguments of `lax.conv_general_dilated`."""
        numbers = jax.lax.conv_dimension_numbers(lhs_shape, rhs_shape, dimension_numbers)
        space = len(lhs_shape) - 2
        strides = tuple(window_strides)
        rhs_dilation = (1,) * space if rhs_dilation is None else tuple(rhs_dilation)
        if isinstance(padding, str):
            seen = [lhs_shape[axis] for axis in numbers.lhs_spec[2:]]
            window = [
                (rhs_shape[axis] - 1) * dilation + 1
                for axis, dilation in zip(numbers.rhs_spec[2:], rhs_dilation, strict=True)
            ]
            padding = jax.lax.padtype_to_pads(seen, window, strides, padding)
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

    @property
    def filters(self) -> Filters:
        """Where scales may vary: along examples and output features."""
        return Filters(self.specs[0][0], self.channel_axis)

    @property
    def channel_axis(self) -> int:
        """The axis of the right operand that becomes the output's features."""
        return self.specs[1][0]

    def numbers(self, lhs: jax.Array, rhs: jax.Array, dtype: Any) -> jax.Array:
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
        whole = self
        if lhs_zero is not None:
            lhs = self._with_border(lhs, lhs_zero)
            space = len(self.padding)
            whole = replace(self, padding=((0, 0),) * space, lhs_dilation=(1,) * space)

        def contract(block: Block) -> jax.Array:
            right = part(rhs, axes, block)
            sums = rhs_sums if right is rhs else None
            conv, left = whole._of_block(lhs, rhs.shape, dict(zip(axes, block, strict=True)))
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
        seen = replace(self, out_sharding=None)._integers(lhs, ones, accumulator)
        if lhs_zero is not None:
            seen = seen - math.prod(ones.shape) // groups * lhs_zero.astype(accumulator)
        repeated = jnp.repeat(seen, rhs.shape[self.channel_axis] // groups, axis=self.specs[2][1])
        seen = sharded_as(repeated, y)
        return y - sharded_as(self._of_rhs(jnp.round(rhs_zero).astype(accumulator)), y) * seen

    def _integers(self, lhs: jax.Array, rhs: jax.Array, accumulator: np.dtype) -> jax.Array:
        plain = _ByXla(self, accumulator)
        lhs, rhs = lhs.astype(jnp.int8), rhs.astype(jnp.int8)
        return integer_convolution(lhs, rhs, accumulator, plain, self._window())

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


def _moved(
    scale: jax.Array | None, ndim: int, axis: int, place: int, side: str, what: str
) -> jax.Array | None:
    if scale is None or scale.size == 1:
        return scale if scale is None else scale.reshape(())
    if not varies_only_along(scale, ndim, axis):
        raise ValueError(
            f"the scale of {side} has shape {scale.shape}, but a convolution can only undo one scale, or one for each "
            f"{what} (axis {axis}).\n  cure: quantize {side} so, or contraction='float'"
        )
    shape = [1] * ndim
    shape[place] = scale.size
    return scale.reshape(shape)


def varies_only_along(x: jax.Array, ndim: int, axis: int) -> bool:
    """Whether something that broadcasts to `ndim` axes has size 1 on all but one."""
    shape = (*(1,) * (ndim - x.ndim), *x.shape)
    return all(size == 1 or at == axis for at, size in enumerate(shape))
