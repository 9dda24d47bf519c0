"""A sum in a fixed order of additions, so that its rounding is the same everywhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp

LANES = 8
ROWS = 4
STEP = 16
ORDERED = 2**15  # larger arrays are added in whatever order is fastest


def cascade_sum(x: jax.Array) -> jax.Array:
    """The sum of all elements, in the order in which torch adds a contiguous vector on one core.

    It uses 8 lanes, 4 rows at a time, and adds sixteen of them before each sum moves up a level. So an iteration that
    stops when rounding hides an improvement stops at the same step as in torch. From 32768 elements on, the order is
    XLA's.

    Args:
        x: numbers, float32, any shape.

    Returns:
        A float32 scalar.

    Example:
        >>> float(cascade_sum(jnp.arange(100.0)))
        4950.0
    """
    flat = x.reshape(-1)
    if flat.size >= ORDERED:
        return jnp.sum(flat)
    vectors = flat.size // LANES
    rest = flat[vectors * LANES :]
    lanes = flat[: vectors * LANES].reshape(vectors, LANES)
    whole = vectors // ROWS * ROWS
    rows = _levels(lanes[:whole].reshape(-1, ROWS, LANES))
    by_lane = rows[0]
    for vector in (*lanes[whole:], *rows[1:]):
        by_lane = by_lane + vector
    total = jnp.zeros((), x.dtype)
    for number in (*rest, *by_lane):
        total = total + number
    return total


def _levels(rows: jax.Array) -> jax.Array:
    """Add sixteen rows, then sixteen such sums, and so on; the remainder at each level comes last."""
    blocks = rows.shape[0] // STEP
    total = _one_by_one(rows[blocks * STEP :])
    if not blocks:
        return total
    sums = _one_by_one(jnp.swapaxes(rows[: blocks * STEP].reshape(blocks, STEP, ROWS, LANES), 0, 1))
    return total + _levels(sums)


def _one_by_one(rows: jax.Array) -> jax.Array:
    total = jnp.zeros(rows.shape[1:], rows.dtype)
    for row in rows:
        total = total + row
    return total
