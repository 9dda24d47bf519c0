"""A convolution as one matrix product: patches times the kernel."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint


@dataclass(frozen=True)
class Window:
    """The window of a convolution without groups and input dilation.

    Attributes:
        specs: of the left operand, the right operand and the output: (batch, feature, *space) in their axes.
        padding: before and after each spatial axis.
        strides, dilation: of the window along each spatial axis.
    """

    specs: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    padding: tuple[tuple[int, int], ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]

    def matrices(self, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The patches `(batch, *places, k)` and the kernel `(out features, k)`, `k` window size times features.

        Example:
            >>> window = Window(((0, 2, 1), (2, 1, 0), (0, 2, 1)), ((1, 1),), (1,), (1,))
            >>> patches, kernel = window.matrices(jnp.arange(3.0).reshape(1, 3, 1), jnp.ones((3, 1, 2)))
            >>> patches.shape, kernel.shape, patches[0, :, 1].tolist()
            ((1, 3, 3), (2, 3), [0.0, 1.0, 2.0])
        """
        lhs_spec, rhs_spec, _ = self.specs
        lhs = lhs.transpose((lhs_spec[0], *lhs_spec[2:], lhs_spec[1]))
        rhs = rhs.transpose((rhs_spec[0], *rhs_spec[2:], rhs_spec[1]))
        lhs = jnp.pad(lhs, ((0, 0), *self.padding, (0, 0)))
        window = rhs.shape[1:-1]
        places = [
            max((size - (seen - 1) * dilation - 1) // stride + 1, 0)
            for size, seen, stride, dilation in zip(
                lhs.shape[1:-1], window, self.strides, self.dilation, strict=True
            )
        ]
        kernel = rhs.reshape(rhs.shape[0], math.prod(rhs.shape[1:]))
        kernel = with_layout_constraint(kernel, Layout(major_to_minor=(0, 1)))
        if 0 in places:
            return jnp.zeros((len(lhs), *places, kernel.shape[1]), lhs.dtype), kernel
        seen = [self._seen(lhs, at, places) for at in itertools.product(*map(range, window))]
        return jnp.concatenate(seen, axis=-1), kernel

    def image(self, y: jax.Array) -> jax.Array:
        """`(batch, *places, out features)` in the order of the output's axes."""
        out_spec = self.specs[2]
        order = (out_spec[0], *out_spec[2:], out_spec[1])
        return y.transpose([order.index(axis) for axis in range(y.ndim)])

    def _seen(self, lhs: jax.Array, at: tuple[int, ...], places: list[int]) -> jax.Array:
        """The input at one place of the window, for all window positions."""
        start = [step * dilation for step, dilation in zip(at, self.dilation, strict=True)]
        end = [
            first + (count - 1) * stride + 1
            for first, count, stride in zip(start, places, self.strides, strict=True)
        ]
        limits = (lhs.shape[0], *end, lhs.shape[-1])
        return jax.lax.slice(lhs, (0, *start, 0), limits, (1, *self.strides, 1))
