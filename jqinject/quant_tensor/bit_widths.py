"""Bit widths: a Python int while constant, a float32 array once learned.

The functions here keep the kind: Python ints in, a Python int out, computed exactly; any array in, a float32
array out whose gradient passes straight through the ceiling.
"""

import jax
import jax.numpy as jnp

from jqinject.ops.power import log2, max_int, min_int
from jqinject.ops.ste import with_gradient_of

BitWidth = int | jax.Array


def ceil_log2(span: int | jax.Array) -> BitWidth:
    """ceil(log2(span)): the bits needed to distinguish `span` numbers.

    Args:
        span: a count, at least 1. A Python int, or an array for learned bit widths.

    Returns:
        A Python int for an int; else a float32 array, straight-through in the backward pass.

    Example:
        >>> ceil_log2(510)
        9
        >>> ceil_log2(512)
        9
    """
    if isinstance(span, int):
        return (span - 1).bit_length()
    span = jnp.asarray(span, jnp.float32)
    # span = mantissa * 2^exponent with 1/2 <= mantissa < 1: correct even if log2 would round down to an integer.
    mantissa, exponent = jnp.frexp(span)
    exact = exponent.astype(jnp.float32) - (mantissa == 0.5).astype(jnp.float32)
    return with_gradient_of(log2(span), exact)


def sum_bit_width(a: BitWidth, a_signed: bool, b: BitWidth, b_signed: bool) -> BitWidth:
    """Bits of the sum of two integers: ceil(log2((max_a + max_b) - (min_a + min_b))).

    Example:
        >>> sum_bit_width(8, True, 8, True)
        9
    """
    a, b = same_kind(a, b)
    largest = max_int(a_signed, narrow_range=False, bit_width=a) + max_int(
        b_signed, narrow_range=False, bit_width=b
    )
    smallest = min_int(a_signed, narrow_range=False, bit_width=a) + min_int(
        b_signed, narrow_range=False, bit_width=b
    )
    return ceil_log2(largest - smallest)


def product_sum_bit_width(terms: int, *bit_widths: BitWidth) -> BitWidth:
    """Bits of the sum of `terms` products of one integer of every width: ceil(log2(terms * prod(2^b - 1))).

    With one width this is a sum (average pooling), with two a contraction (linear, convolution). The bound
    counts unsigned magnitudes, so it also covers operands that are corrected by a zero point inside their
    range.

    Args:
        terms: how many products are added up, for a convolution the input channels of one group times the
            kernel's area.
        *bit_widths: the width of every factor.

    Returns:
        At least 1; a Python int if every width is one.

    Example:
        >>> product_sum_bit_width(64, 8, 4)
        18
    """
    span: int | jax.Array = terms
    for bits in same_kind(*bit_widths):
        span = span * max_int(signed=False, narrow_range=False, bit_width=bits)
    bits = ceil_log2(span)
    return max(1, bits) if isinstance(bits, int) else bits


def same_kind(*bit_widths: BitWidth) -> tuple[BitWidth, ...]:
    """The widths unchanged if all are Python ints, else all as float32 arrays."""
    if all(isinstance(bits, int) for bits in bit_widths):
        return bit_widths
    return tuple(jnp.asarray(bits, jnp.float32) for bits in bit_widths)


def larger(a: BitWidth, b: BitWidth) -> BitWidth:
    """The larger of two widths; `a` (and its gradient) if they are equal.

    Example:
        >>> larger(4, 9)
        9
    """
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    left, right = same_kind(a, b)
    return jnp.where(jnp.asarray(right) > jnp.asarray(left), right, left)
