"""A sum in a stated order of additions, so that its rounding is the same wherever it is computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp

LANES = 8
ROWS = 4
STEP = 16
ORDERED = 2**15  # larger arrays are added by whatever order is fastest


def cascade_sum(x: jax.Array) -> jax.Array:
    """The sum of all elements, in the order in which torch adds a contiguous vector on one core.

    In 8 lanes, 4 rows at a time, sixteen and sixteen of them before they are added to what there is. An iteration that
    ends where rounding hides an improvement ends at the same step then. From 32768 elements on the order is XLA's.

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
    """Sixteen rows are added up, then sixteen such sums, and so on; what is left over at each level comes last."""
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
