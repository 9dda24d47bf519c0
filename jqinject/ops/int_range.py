"""Integer ranges of a bit width.

| signed | narrow_range | min_int        | max_int        | b = 8       | b = 4      |
|--------|--------------|----------------|----------------|-------------|------------|
| yes    | no           | -2**(b-1)      | 2**(b-1) - 1   | -128 .. 127 | -8 .. 7    |
| yes    | yes          | -2**(b-1) + 1  | 2**(b-1) - 1   | -127 .. 127 | -7 .. 7    |
| no     | no           | 0              | 2**b - 1       | 0 .. 255    | 0 .. 15    |
| no     | yes          | 0              | 2**b - 2       | 0 .. 254    | 0 .. 14    |
"""

from __future__ import annotations

from typing import overload

import jax
import jax.numpy as jnp

from jqinject.ops.power import exp2


def _power(exponent: int | jax.Array) -> int | jax.Array:
    return 2**exponent if isinstance(exponent, int) else exp2(exponent)


@overload
def max_int(signed: bool, narrow_range: bool, bit_width: int) -> int: ...
@overload
def max_int(signed: bool, narrow_range: bool, bit_width: jax.Array) -> jax.Array: ...
@overload
def max_int(signed: bool, narrow_range: bool, bit_width: int | jax.Array) -> int | jax.Array: ...
def max_int(signed: bool, narrow_range: bool, bit_width: int | jax.Array) -> int | jax.Array:
    """Largest integer of `bit_width` bits: `2**(b-1) - 1` signed, `2**b - 1` unsigned, one less if also
    narrow.

    Args:
        signed: whether the integers have a sign.
        narrow_range: leave out one value, the largest when unsigned (the smallest when signed).
        bit_width: b; a Python int gives a Python int, an array a float32 array that is differentiable in b.

    Returns:
        The largest integer.

    Example:
        >>> max_int(True, True, 8), max_int(False, False, 8), max_int(False, True, 8)
        (127, 255, 254)
    """
    if signed:
        return _power(bit_width - 1) - 1
    return _power(bit_width) - (2 if narrow_range else 1)


@overload
def min_int(signed: bool, narrow_range: bool, bit_width: int) -> int: ...
@overload
def min_int(signed: bool, narrow_range: bool, bit_width: jax.Array) -> jax.Array: ...
@overload
def min_int(signed: bool, narrow_range: bool, bit_width: int | jax.Array) -> int | jax.Array: ...
def min_int(signed: bool, narrow_range: bool, bit_width: int | jax.Array) -> int | jax.Array:
    """Smallest integer of `bit_width` bits: `-2**(b-1)` signed, one more if also narrow, 0 unsigned.

    Args:
        signed: whether the integers have a sign.
        narrow_range: leave out the smallest value, so that the range is symmetric.
        bit_width: b; a Python int gives a Python int, an array a float32 array that is differentiable in b.

    Returns:
        The smallest integer.

    Example:
        >>> min_int(True, True, 8), min_int(True, False, 8), min_int(False, False, 8)
        (-127, -128, 0)
    """
    if signed:
        return -_power(bit_width - 1) + (1 if narrow_range else 0)
    return 0 if isinstance(bit_width, int) else jnp.zeros_like(bit_width)
