"""Scales and zero points by half-quadratic optimization (HQQ), which weighs outliers less than a squared error.

The error `x - value` is split into a sparse part, found by shrinking it, and the rest, which the next scale or zero
point fits. Each round shrinks less (`beta` grows by `kappa`); the search ends at the first round without improvement of
`mean |x - value|`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jqinject.ops.devices.over import Over, Tensors, each
from jqinject.ops.stats import kth_smallest


@dataclass(frozen=True)
class Rounds:
    """Parameters of the search: static, compared by value.

    Attributes:
        beta: at the start; larger values shrink less.
        kappa: growth factor of beta per round.
        lp_norm: p of the error norm.
        iters: maximum number of rounds.
    """

    beta: float
    kappa: float
    lp_norm: float
    iters: int


class _State(NamedTuple):
    step: jax.Array
    candidate: jax.Array
    best: jax.Array
    loss: jax.Array
    beta: jax.Array
    improved: jax.Array


def shrink_lp(x: jax.Array, beta: jax.Array, lp_norm: float) -> jax.Array:
    """The sparse part of an error: `sign(x) * max(|x| - |x|^(p - 1) / beta, 0)`.

    Args:
        x: errors, float32.
        beta: larger values shrink less.
        lp_norm: p, above 0 and at most 1.

    Example:
        >>> shrink_lp(jnp.array([-4.0, 0.5, 0.0]), jnp.float32(1.0), 0.5)
        Array([-3.5,  0. ,  0. ], dtype=float32)
    """
    size = jnp.abs(x)
    taken = jnp.where(size > 0, jnp.power(jnp.where(size > 0, size, 1.0), lp_norm - 1), jnp.inf)
    return jnp.sign(x) * jnp.maximum(size - taken / beta, 0.0)


def masked_median(x: Tensors, mask: Tensors, over: Over) -> jax.Array:
    """The lower median of the masked elements; nan if there are none.

    Args:
        x: float32, of one or several tensors.
        mask: which elements count.
        over: the reduced axes.

    Example:
        >>> masked_median(jnp.array([4.0, 1.0, 9.0, 2.0]), jnp.array([True, True, False, True]), Over())
        Array(2., dtype=float32)
    """
    valid = each(lambda x, counts: counts & ~jnp.isnan(x), x, mask)
    count = over.sum(each(lambda counts: counts.astype(jnp.int32), valid))
    if over.count(x) == 0:
        return jnp.full(count.shape, jnp.nan, jnp.float32)
    sorted_last = each(lambda x, counts: jnp.where(counts, x, jnp.inf), x, valid)
    middle = kth_smallest(sorted_last, jnp.maximum(count - 1, 0) // 2 + 1, over)
    return jnp.where(count > 0, middle, jnp.nan)


def half_quadratic(
    start: jax.Array,
    beta: jax.Array,
    rounds: Rounds,
    fitted: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
    """The best candidate of a half-quadratic search, and beta after it.

    Args:
        start: the first candidate.
        beta: of the first round.
        rounds: the parameters; `beta` and `lp_norm` are not read.
        fitted: from a candidate and beta to its mean error, and to the next candidate, which fits what shrinking its
            errors leaves. If errors have the shape of candidates, each number is searched, and ends, by itself; beta
            then has that shape too.
    """

    def go_on(state: _State) -> jax.Array:
        return state.improved.any() & (state.step < rounds.iters)

    def one_round(state: _State) -> _State:
        loss, following = fitted(state.candidate, state.beta)
        improved = loss < state.loss
        return _State(
            state.step + 1,
            jnp.where(improved, following, state.candidate),
            jnp.where(improved, state.candidate, state.best),
            jnp.where(improved, loss, state.loss),
            jnp.where(improved, state.beta * rounds.kappa, state.beta),
            improved,
        )

    first = _State(
        jnp.int32(0), start, start, jnp.full_like(beta, jnp.inf), beta, jnp.ones_like(beta, jnp.bool_)
    )
    end = jax.lax.while_loop(go_on, one_round, first)
    return end.best, end.beta
