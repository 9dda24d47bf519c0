"""Bounds on integer weights that keep a sum of products from overflowing its accumulator.

A signed accumulator of P bits holds -2**(P-1) .. 2**(P-1) - 1. An output is the sum of `q_i * x_i` over integer weights
q and integer inputs x of N bits. Two bounds keep it in range for all inputs:

* A2Q: `sum |q_i| <= (2**(P-1) - 1) / 2**(N - signed)`, because no input is larger than `2**(N - signed)`.
* A2Q+: the positive and the negative weights each sum to at most `(2**(P-1) - 1) / (2**N - 1)`: with unsigned inputs
  the two sums never add up, and with signed inputs the range of `2**N - 1` covers both. For weights with mean zero and
  unsigned inputs this allows about twice the l1-norm.

Source: I. Colbert, A. Pappalardo, J. Petri-Koenig, "A2Q: Accumulator-Aware Quantization with Guaranteed Overflow
Avoidance" (2023), and with Y. Umuroglu, "A2Q+: Improving Accumulator-Aware Weight Quantization" (2024).
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jqinject.ops import power, processes, ste

Bits = int | jax.Array
Sign = bool | jax.Array
_MARGIN = 1.0 - 2.0**-20  # more than the float32 roundings of one product


def get_upper_bound_on_l1_norm(
    accumulator_bit_width: Bits, input_bit_width: Bits, input_is_signed: Sign
) -> jax.Array:
    """The largest l1-norm of the integer weights of one output: `(2**(P-1) - 1) * 2**(signed - N)`.

    Args:
        accumulator_bit_width: P, the bits of the signed accumulator.
        input_bit_width: N, the bits of the inputs.
        input_is_signed: whether the inputs are signed.

    Returns:
        The bound, a float32 scalar.

    Example:
        >>> float(get_upper_bound_on_l1_norm(16, 8, input_is_signed=True))
        255.9921875
    """
    largest = power.exp2(jnp.float32(accumulator_bit_width) - 1.0) - 1.0
    return largest * power.exp2(jnp.float32(input_is_signed) - jnp.float32(input_bit_width))


def get_upper_bound_on_zero_centered_l1_norm(accumulator_bit_width: Bits, input_bit_width: Bits) -> jax.Array:
    """The same for weights with mean zero, for signed or unsigned inputs: `(2**P - 2) / (2**N - 1)`.

    Args:
        accumulator_bit_width: P, the bits of the signed accumulator.
        input_bit_width: N, the bits of the inputs.

    Returns:
        The bound, a float32 scalar.

    Example:
        >>> float(get_upper_bound_on_zero_centered_l1_norm(16, 8).round(3))
        256.9960021972656
    """
    return power.divide(power.exp2(accumulator_bit_width) - 2.0, power.exp2(input_bit_width) - 1.0)


def integer_budget(
    accumulator_bit_width: Bits, input_bit_width: Bits, input_is_signed: Sign, zero_centered: bool
) -> int | jax.Array:
    """The exact bound on the sum of integer magnitudes of one output, or, if `zero_centered`, of each sign.

    Args:
        accumulator_bit_width: P, at most 32.
        input_bit_width: N.
        input_is_signed: whether the inputs have a sign.
        zero_centered: the bound of A2Q+ instead of that of A2Q.

    Returns:
        A Python int for Python ints, else an int32 scalar.

    Example:
        >>> integer_budget(16, 8, True, False), integer_budget(16, 8, True, True)
        (255, 128)
    """
    bits, sign = input_bit_width, input_is_signed
    if isinstance(accumulator_bit_width, int) and isinstance(bits, int) and isinstance(sign, int):
        largest = 2 ** (accumulator_bit_width - 1) - 1
        return largest // (2**bits - 1 if zero_centered else 2 ** (bits - sign))
    bits, width, sign = (
        jnp.round(jnp.float32(x)).astype(jnp.int32) for x in (bits, accumulator_bit_width, sign)
    )
    # Intended: 2**31 wraps to -2**31, and one less to 2**31 - 1.
    largest = jnp.left_shift(jnp.int32(1), width - 1) - 1
    if zero_centered:
        return largest // jnp.maximum(jnp.left_shift(jnp.int32(1), bits) - 1, 1)
    return jnp.right_shift(largest, bits - sign)


@processes.one_program("axes", "zero_centered")
def within_budget(
    q: jax.Array, budget: ArrayLike, axes: tuple[int, ...], *, zero_centered: bool
) -> jax.Array:
    """Integers whose magnitudes sum to at most `budget` along `axes`; the gradient is that of the identity.

    Where they sum to more, all of them are scaled down by the excess and rounded towards zero; the others are
    unchanged.

    Args:
        q: integers, in float32.
        budget: the largest sum, see `integer_budget`.
        axes: the axes that are summed over.
        zero_centered: sum positive and negative integers separately.

    Returns:
        Integers of the shape of `q`, in float32.

    Example:
        >>> within_budget(jnp.array([6.0, -3.0, 1.0]), 5, (0,), zero_centered=False)
        Array([ 2., -1.,  0.], dtype=float32)
        >>> within_budget(jnp.array([6.0, -3.0, 1.0]), 7, (0,), zero_centered=True)
        Array([ 6., -3.,  1.], dtype=float32)
    """
    integers = jax.lax.stop_gradient(q)
    parts = (
        [jnp.maximum(integers, 0.0), jnp.maximum(-integers, 0.0)] if zero_centered else [jnp.abs(integers)]
    )
    factor = jnp.float32(1.0)
    for part in parts:
        rough = jnp.sum(part, axis=axes, keepdims=True)
        huge = rough > 1.05 * 2.0**30
        # int32 is exact up to 2**31; where it would wrap, the approximate float32 sum is certainly too large.
        exact = jnp.sum(jnp.minimum(part, 2.0**30).astype(jnp.int32), axis=axes, keepdims=True)
        total = jnp.where(huge, 2.0 * rough, exact.astype(jnp.float32))  # never below the true sum
        room = jnp.asarray(budget, jnp.float32) * _MARGIN / jnp.maximum(total, 1.0)
        factor = jnp.minimum(factor, jnp.where(huge | (exact > budget), room, 1.0))
    scaled = jnp.where(factor < 1.0, jnp.trunc(integers * factor), integers)
    return ste.with_gradient_of(q, scaled)
