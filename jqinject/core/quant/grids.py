"""The numbers that a calibrated quantizer rounds to: integers or minifloats, at a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core._protocols import Rounding
from jqinject.ops.fake_quant import Steps, bounded
from jqinject.ops.minifloats.float8_cast import FLOAT8_DTYPES, to_float8
from jqinject.ops.minifloats.float_format import FloatFormat
from jqinject.ops.minifloats.float_grid import float_steps, from_float_steps, to_float_grid
from jqinject.ops.ste import nearest


class Grid(Protocol):
    """Numbers at a scale (and zero point). Without derivatives."""

    def nearest(self, x: jax.Array, scale: jax.Array, *zero_point: jax.Array) -> Any:
        """The number nearest to each of `x`, float32; with a payload both."""
        ...

    def rounded(self, rounding: Rounding, x: jax.Array, scale: jax.Array, *zero_point: jax.Array) -> Any:
        """As `nearest`, rounded by a component."""
        ...


@dataclass(frozen=True)
class IntegerGrid:
    """Integers from `low` to `high`: static, equal by value.

    Attributes:
        low, high: the ends.
        centered: whether the zero point is 0.
        payload: the dtype in which the integers are returned beside the value; None for none.
        repeated: whether a scale is repeated for each number that has it.
    """

    low: float
    high: float
    centered: bool
    payload: np.dtype | None
    repeated: bool = False

    def nearest(self, x: jax.Array, scale: jax.Array, *zero_point: jax.Array) -> Any:
        """See `Grid`."""
        return self._by(nearest, x, scale, *zero_point)

    def rounded(self, rounding: Rounding, x: jax.Array, scale: jax.Array, *zero_point: jax.Array) -> Any:
        """See `Grid`."""
        return self._by(rounding, x, scale, *zero_point)

    def _by(self, rounding: Rounding, x: jax.Array, scale: jax.Array, zero_point: jax.Array) -> Any:
        how = Steps(
            rounding,
            centered=self.centered,
            by_reciprocal=self.centered,
            repeated=self.repeated,
            payload=self.payload,
        )
        return how.quantized(x, scale, zero_point, jnp.float32(self.low), jnp.float32(self.high))


@dataclass(frozen=True)
class MinifloatGrid:
    """Numbers of a minifloat: static, equal by value.

    Attributes:
        form: the format.
        dtype: of the tensor that is quantized.
    """

    form: FloatFormat
    dtype: np.dtype

    def nearest(self, x: jax.Array, scale: jax.Array, *zero_point: jax.Array) -> jax.Array:
        """See `Grid`."""
        if self.form.dtype in FLOAT8_DTYPES:
            return self._floats(to_float8(x, scale, self.form.dtype).astype(jnp.float32), scale)
        return self.rounded(nearest, x, scale)

    def rounded(
        self, rounding: Rounding, x: jax.Array, scale: jax.Array, *zero_point: jax.Array
    ) -> jax.Array:
        """See `Grid`."""
        form = self.form
        steps = to_float_grid(float_steps(x, scale), form.mantissa_bit_width, form.bias, rounding)
        return self._floats(bounded(steps, jnp.float32(-form.max_value), jnp.float32(form.max_value)), scale)

    def _floats(self, steps: jax.Array, scale: jax.Array) -> jax.Array:
        return from_float_steps(steps, scale, self.dtype).astype(jnp.float32)
