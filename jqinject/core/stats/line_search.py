"""Searches for the least loss between two bounds, for many numbers in parallel, under `jax.jit`.

Candidates are tried one at a time (`jax.lax.scan`), so that only one quantized copy of the tensor exists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Loss = Callable[[jax.Array], jax.Array]


class SearchResult(NamedTuple):
    """The best candidate of each search.

    Attributes:
        candidate: float32, the shape of the bounds.
        loss: its loss, the same shape.
    """

    candidate: jax.Array
    loss: jax.Array


def grid_search(low: jax.Array, high: jax.Array, loss: Loss, tries: int) -> SearchResult:
    """The best of `tries` equidistant candidates, including `low` and `high`; the lowest of equals.

    Args:
        low: lower bounds, float32.
        high: upper bounds, the same shape.
        loss: candidates -> losses of the same shape.
        tries: number of candidates, at least 2.

    Example:
        >>> grid_search(jnp.float32(0), jnp.float32(4), lambda c: (c - 2.9) ** 2, 5).candidate
        Array(3., dtype=float32)
    """

    def try_one(best: SearchResult, fraction: jax.Array) -> tuple[SearchResult, None]:
        candidate = low + (high - low) * fraction
        found = loss(candidate)
        better = found < best.loss
        return SearchResult(
            jnp.where(better, candidate, best.candidate), jnp.where(better, found, best.loss)
        ), None

    fractions = np.linspace(1.0 / (tries - 1), 1.0, tries - 1).astype(np.float32)
    return jax.lax.scan(try_one, SearchResult(low, loss(low)), jnp.asarray(fractions))[0]


def fibonacci_search(low: jax.Array, high: jax.Array, loss: Loss, tries: int) -> SearchResult:
    """The minimum of a unimodal loss, by Fibonacci search.

    Args:
        low: lower bounds, float32.
        high: upper bounds, the same shape.
        loss: candidates -> losses of the same shape.
        tries: number of intervals, at least 2; each but the first evaluates two losses.

    Example:
        >>> found = fibonacci_search(jnp.float32(0), jnp.float32(4), lambda c: (c - 2.9) ** 2, 20)
        >>> round(float(found.candidate), 2)
        2.9
    """
    numbers = [0.0, 1.0]
    while len(numbers) <= tries:
        numbers.append(numbers[-1] + numbers[-2])
    shrink = [numbers[tries - i] / numbers[tries - i + 2] for i in range(2, tries + 1)]
    zero = jnp.zeros_like(low)

    def narrow(state: tuple[jax.Array, ...], factor: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        left, right, step = state[:3]
        length = right - left
        crossed = step > length / 2
        first, second = (
            jnp.where(crossed, right - step, left + step),
            jnp.where(crossed, left + step, right - step),
        )
        losses = loss(first), loss(second)
        right = jnp.where(losses[0] <= losses[1], second, right)
        left = jnp.where(losses[0] >= losses[1], first, left)
        step = factor * jnp.where(losses[0] != losses[1], length, right - left)
        return (left, right, step, first, second, *losses), None

    start = (low, high, jnp.float32(shrink[0]) * (high - low), low, low, zero, zero)
    end, _ = jax.lax.scan(narrow, start, jnp.asarray(shrink, jnp.float32))
    _, _, _, first, second, loss_first, loss_second = end
    best = jnp.where(loss_first <= loss_second, first, second)
    return SearchResult(best, jnp.minimum(loss_first, loss_second))


LINE_SEARCHES: dict[str, Callable[[jax.Array, jax.Array, Loss, int], SearchResult]] = {
    "grid": grid_search,
    "fibonacci": fibonacci_search,
}
