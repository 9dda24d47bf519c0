"""Grids that round to nearest, as solvers and calibrated quantizers ask for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core._protocols import Rounding
from jqinject.core.statistics.ranges import ClippingRange
from jqinject.ops.clamp import bounded, within_range
from jqinject.ops.fake_quant import Steps
from jqinject.ops.float8_cast import FLOAT8_DTYPES, to_float8
from jqinject.ops.float_grid import FloatGrid
from jqinject.ops.minifloat import float_steps, from_float_steps, to_float_grid
from jqinject.ops.ste import nearest, with_gradient_of


class Grid(Protocol):
    """A scaled grid, possibly with a zero point; not differentiable."""

    def nearest(self, x: jax.Array, scale: jax.Array, *zero_point: Any) -> Any:
        """`x` rounded to nearest, float32; with a payload, both."""
        ...

    def rounded(self, rounding: Rounding, x: jax.Array, scale: jax.Array, *zero_point: Any) -> Any:
        """Like `nearest`, with a rounding component."""
        ...


@dataclass(frozen=True)
class IntegerGrid:
    """Integers from `low` to `high`: static, equal by value.

    Attributes:
        low, high: the ends.
        centered: whether the zero point is 0.
        payload: the dtype in which the integers are also returned; None does not return them.
        repeated: whether the scale is repeated for each number.
        divides: whether numbers are divided by the scale, instead of multiplied by its reciprocal.
    """

    low: float
    high: float
    centered: bool
    payload: np.dtype | None
    repeated: bool = False
    divides: bool = False

    def nearest(self, x: jax.Array, scale: jax.Array, *zero_point: Any) -> Any:
        """See `Grid`."""
        return self._by(nearest, x, scale, *zero_point)

    def rounded(self, rounding: Rounding, x: jax.Array, scale: jax.Array, *zero_point: Any) -> Any:
        """See `Grid`."""
        return self._by(rounding, x, scale, *zero_point)

    def _by(
        self, rounding: Rounding, x: jax.Array, scale: jax.Array, zero_point: jax.Array | None = None
    ) -> Any:
        how = Steps(
            rounding,
            by_reciprocal=self.centered and not self.divides,
            repeated=self.repeated,
            payload=self.payload,
        )
        low: Any = np.float32(self.low)
        high: Any = np.float32(self.high)
        return how.quantized(x, scale, None if self.centered else zero_point, low, high)


@dataclass(frozen=True)
class MinifloatGrid:
    """Numbers of a minifloat: static, equal by value.

    Attributes:
        form: the format.
        dtype: of the tensor that is quantized.
    """

    form: FloatGrid
    dtype: np.dtype

    def nearest(self, x: jax.Array, scale: jax.Array, *zero_point: Any) -> jax.Array:
        """See `Grid`."""
        if self.form.dtype in FLOAT8_DTYPES:
            return self._floats(to_float8(x, scale, self.form.dtype).astype(jnp.float32), scale)
        return self.rounded(nearest, x, scale)

    def rounded(self, rounding: Rounding, x: jax.Array, scale: jax.Array, *zero_point: Any) -> jax.Array:
        """See `Grid`."""
        form = self.form
        steps = to_float_grid(float_steps(x, scale), form.mantissa_bit_width, form.exponent_bias, rounding)
        return self._floats(bounded(steps, jnp.float32(-form.largest), jnp.float32(form.largest)), scale)

    def _floats(self, steps: jax.Array, scale: jax.Array) -> jax.Array:
        return from_float_steps(steps, scale, self.dtype).astype(jnp.float32)


def on_grid(
    grid: Grid,
    rounding: Rounding | None,
    x: jax.Array,
    found: ClippingRange,
    where: tuple[jax.Array, ...],
    clip_gradient: bool,
    to_range: bool,
) -> Any:
    """`x` on a grid, with the gradient of clipping it to the range.

    Args:
        grid: the numbers, and the payload to keep.
        rounding: how to round; None for nearest.
        x: float32.
        found: the range.
        where: scale, and zero point, of the grid.
        clip_gradient: whether the gradient of `x` stops where it is clipped.
        to_range: whether the range then gets that gradient.
    """
    if rounding is None and clip_gradient:
        return within_range(grid.nearest, x, found.high, found.low, *where, to_range=to_range)
    fixed = jax.tree.map(jax.lax.stop_gradient, (x, *where))
    made = grid.nearest(*fixed) if rounding is None else grid.rounded(rounding, *fixed)
    if clip_gradient:
        return within_range(_made, x, found.high, found.low, made, to_range=to_range)
    return (with_gradient_of(x, made[0]), made[1]) if isinstance(made, tuple) else with_gradient_of(x, made)


def _made(x: jax.Array, made: Any) -> Any:
    return made


def minifloat_dtype(dtype: Any) -> np.dtype:
    """The NumPy dtype of a minifloat, from anything that names it."""
    form = FloatGrid.of_dtype(dtype)
    assert form.dtype is not None, "read from a dtype"
    return form.dtype
