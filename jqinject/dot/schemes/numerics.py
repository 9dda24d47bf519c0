"""Number formats of an operand: which numbers a scaled operand can become, and what its gradient sees of that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.ops.minifloats.float8_cast import float8_dtype, float8_max, to_float8

MAX_INT_BITS = 22  # float32, in which numbers are rounded, holds no more whole numbers


@checked_arguments
@dataclass(frozen=True)
class IntNumerics:
    """Symmetric integers of `bits` bits.

    | preserve_zero | preserve_max_val | the bound of the calibration becomes | 8 bits |
    |---|---|---|---|
    | no | no | `2^(bits-1)`, the far edge of the last bucket | 128 |
    | no | yes | `2^(bits-1) - 0.5`, its centre | 127.5 |
    | yes | no | `2^(bits-1) - 0.5`, its far edge | 127.5 |
    | yes | yes | `2^(bits-1) - 1`, its centre | 127 |

    With `preserve_zero` numbers are whole, rounded to nearest with ties to even, and -2^(bits-1) is not used. Without,
    they are the halves between whole numbers, so that zero becomes one of +-0.5, and the payload is a float.

    Args:
        bits: at least 2.
        preserve_zero: whether 0 is one of the numbers.
        preserve_max_val: whether the bound falls on the centre of the last bucket instead of its edge.
        clip: whether numbers out of range are clipped.
        clip_gradient: whether the gradient of a number that was clipped is 0.

    Raises:
        ValueError: `bits` is below 2 or above 22.
        TypeError: `bits` is no int.

    Source: AQT's `IntSymmetric`.

    Example:
        >>> int4 = IntNumerics(4)
        >>> int4.bound, int4.encode(jnp.array([-9.0, 2.5, 3.5]))
        (7.5, Array([-7, 2, 4], dtype=int4))
    """

    bits: int
    preserve_zero: bool = True
    preserve_max_val: bool = False
    clip: bool = True
    clip_gradient: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or isinstance(self.bits, bool):
            raise TypeError(
                f"IntNumerics: bits must be an int, got {self.bits!r}. 8-bit floats are written 'e4m3' or 'e5m2', no "
                "quantization None"
            )
        if not 2 <= self.bits <= MAX_INT_BITS:
            raise ValueError(
                f"IntNumerics: bits must be from 2 to {MAX_INT_BITS}, got {self.bits}. One bit is a sign: "
                "BinaryQuant in a layer's weight_quant does that"
            )

    @property
    def edge(self) -> float:
        """The far edge of the last bucket."""
        return 2.0 ** (self.bits - 1) - (0.5 if self.preserve_zero else 0.0)

    @property
    def bound(self) -> float:
        """The number that the calibration's bound becomes."""
        return self.edge - 0.5 if self.preserve_max_val else self.edge

    @property
    def dtype(self) -> Any:
        """The narrowest dtype that backends contract; None where numbers are kept as floats."""
        if not self.preserve_zero or self.bits > 8:
            return None
        return jnp.dtype(jnp.int4 if self.bits == 4 else jnp.int8)

    def encode(self, steps: jax.Array, noise: jax.Array | None = None) -> jax.Array:
        """Numbers of the format for an operand counted in steps.

        Args:
            steps: float32, the operand over its scale.
            noise: added before rounding, within half a step.
        """
        if noise is not None:
            steps = steps + noise
        if self.clip:
            steps = jnp.clip(steps, -(self.edge - 0.5), self.edge - 0.5)
        if not self.preserve_zero:
            return jnp.floor(steps) + 0.5
        whole = jax.lax.round(steps, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
        return whole if self.dtype is None else whole.astype(self.dtype)

    def passes_gradient(self, steps: jax.Array) -> jax.Array | None:
        """Where the gradient passes; None for everywhere."""
        return jnp.abs(steps) <= self.edge - 0.5 if self.clip_gradient else None


@checked_arguments
@dataclass(frozen=True)
class Float8Numerics:
    """8-bit floats, saturating, rounded to nearest with ties to even.

    Args:
        dtype: the 8-bit float dtype.
        clip_gradient: whether the gradient of a number beyond the largest, which saturates, is 0.

    Raises:
        TypeError: `dtype` is no 8-bit float.

    Differs from AQT: there the gradient of 8-bit floats passes everywhere.

    Example:
        >>> Float8Numerics(jnp.float8_e4m3fn).bound
        448.0
    """

    dtype: Any
    clip_gradient: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", float8_dtype(self.dtype, "Float8Numerics"))

    @property
    def bound(self) -> float:
        """The number that the calibration's bound becomes: the largest of the format."""
        return float8_max(self.dtype)

    def encode(self, steps: jax.Array, noise: jax.Array | None = None) -> jax.Array:
        """The payload of an operand counted in steps.

        Args:
            steps: float32, the operand over its scale.
            noise: within half a unit in the last place of each number; it decides between the two neighbours.
        """
        if noise is not None:
            bits = jnp.finfo(self.dtype).nmant
            # A unit in the last place of each number: its power of two, over 2^bits.
            _, exponent = jnp.frexp(steps)
            smallest = jnp.finfo(self.dtype).minexp
            unit = jnp.exp2(jnp.maximum(exponent - 1, smallest).astype(steps.dtype) - bits)
            # Whole units, not numbers that are rounded again: below a power of two the next number is nearer.
            drawn = jnp.floor(steps / unit + (noise + 0.5)) * unit
            steps = jnp.where(jnp.abs(steps) < self.bound, drawn, steps)  # what is beyond saturates
        return to_float8(steps, jnp.ones((), steps.dtype), self.dtype)

    def passes_gradient(self, steps: jax.Array) -> jax.Array | None:
        """Where the gradient passes; None for everywhere."""
        return jnp.abs(steps) <= self.bound if self.clip_gradient else None


Numerics = IntNumerics | Float8Numerics
FLOAT8_NAMES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


def is_integer(payload: jax.Array) -> bool:
    """Whether these are whole numbers of an integer dtype."""
    return jnp.issubdtype(payload.dtype, jnp.integer)


def is_float8(payload: jax.Array) -> bool:
    """Whether these are 8-bit floats."""
    return payload.dtype.itemsize == 1 and jnp.issubdtype(payload.dtype, jnp.floating)
