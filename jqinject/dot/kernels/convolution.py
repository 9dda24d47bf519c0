"""One convolution of low-bit numbers, without a derivative."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jqinject.dot.geometry.dimensions import Dimensions, Labels, OutSharding, scale_in_output, scaled_axes
from jqinject.dot.kernels.accumulate import Block, accumulation, in_parts, part
from jqinject.dot.kernels.integer import Affine, are_sharded, corrected
from jqinject.dot.kernels.kernel_table import Window, integer_convolution
from jqinject.ops.sharding import sharded_as
from jqinject.ops.ste import nearest
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
    ) -> "Convolution | None":
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

    def summed(self, product: str) -> tuple[Labels, Labels]:
        """The axes of both operands of a product that share a scale.

        All but examples and outputs; in "dgrad" all but examples and inputs, in "wgrad" all but inputs and outputs.
        """
        (batch, feature, *_), (outputs, inputs, *_), (out_batch, out_feature, *_) = self.specs
        lhs, rhs, out = self.axes.lhs, self.axes.rhs, self.axes.out
        pair = {
            "fprop": ((lhs, batch), (rhs, outputs)),
            "dgrad": ((out, out_batch), (rhs, inputs)),
            "wgrad": ((out, out_feature), (lhs, feature)),
        }[product]
        first, second = (labels[:axis] + labels[axis + 1 :] for labels, axis in pair)
        return first, second

    @property
    def axes(self) -> Dimensions:
        """The axes of the operands and of the output, each with a label of its own."""
        left, right, out = (
            tuple((name, axis) for axis in range(len(spec)))
            for name, spec in zip(("lhs", "rhs", "out"), self.specs, strict=True)
        )
        return Dimensions(left, right, out)

    def __call__(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """The convolution of plain arrays of one dtype, summed in `dtype`."""
        return jax.lax.conv_general_dilated(
            lhs,
            rhs,
            padding=self.padding,
            lhs_dilation=self.lhs_dilation,
            dimension_numbers=jax.lax.ConvDimensionNumbers(*self.specs),
            preferred_element_type=self.dtype,
            out_sharding=self.out_sharding,
            **dict(self.options),
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

    def _exact(self, lhs: Affine, rhs: Affine, accumulator: np.dtype) -> jax.Array:
        """`sum (q_l - z_l) (q_r - z_r)` in an accumulator that holds it; `lhs` with a zero point is already padded."""
        y = self._integers(lhs.payload, rhs.payload, accumulator)
        channel, shape = self.channel_axis, rhs.payload.shape
        axes = tuple(axis for axis in range(len(shape)) if axis != channel)

        def laid_out(x: jax.Array) -> jax.Array:
            return sharded_as(self._in_output(x, 1), y)

        def covered() -> jax.Array:
            """The sums of the left operand that each window position covers."""
            groups = dict(self.options)["feature_group_count"] * dict(self.options)["batch_group_count"]
            ones = jnp.ones((*shape[:channel], groups, *shape[channel + 1 :]), jnp.int8)
            sums = replace(self, out_sharding=None)._integers(lhs.payload, ones, accumulator)
            return sharded_as(jnp.repeat(sums, shape[channel] // groups, axis=self.specs[2][1]), y)

        left, right = (
            None if x.zero_point is None else nearest(x.zero_point).astype(accumulator) for x in (lhs, rhs)
        )
        return corrected(
            y,
            None if left is None else left.reshape(()),
            None if right is None else laid_out(right),
            covered,
            lambda: laid_out(rhs.summed(axes, accumulator)),
            math.prod(shape[axis] for axis in axes),
        )

    def _integers(self, lhs: jax.Array, rhs: jax.Array, accumulator: np.dtype) -> jax.Array:
        lhs, rhs = lhs.astype(jnp.int8), rhs.astype(jnp.int8)
        window = None if are_sharded(lhs, rhs) else self._window()
        return integer_convolution(lhs, rhs, accumulator, replace(self, dtype=accumulator), window)

    def _window(self) -> Window | None:
        """The window; None with groups or a dilated input, which are not a plain product."""
        options = dict(self.options)
        grouped = options["feature_group_count"] != 1 or options["batch_group_count"] != 1
        dilated = any(step != 1 for step in self.lhs_dilation)
        if grouped or dilated or any(edge < 0 for edges in self.padding for edge in edges):
            return None
        return Window(self.specs, self.padding, options["window_strides"], options["rhs_dilation"])

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
        spec, place = self.specs[side], self.specs[2][side]
        labels = [place if axis == spec[0] else None for axis in range(len(spec))]
        layout = scale_in_output(x, labels, range(len(spec)))
        assert layout is not None, "checked by the table"
        return layout
