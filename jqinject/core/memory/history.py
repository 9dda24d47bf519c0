"""The memory that delayed scaling keeps: a statistic of each of the last steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jqinject.core import check
from jqinject.ops.clamp import choose

REDUCTIONS = ("max", "most_recent")


@dataclass(frozen=True)
class History:
    """Remember a statistic of each of the last `length` steps, and reduce them to one.

    A policy: static, compared by value. The steps are an array of shape `(length, *shape)`; a stack of layers (built
    under `nnx.vmap`) has further axes in front, so axes are counted from the back. Element 0 is the newest, then come
    the last element and so on backwards to the oldest, element 1. (Flax's layout: roll by -1, then write element 0.)

    Args:
        length: the steps remembered.
        reduce: what they are reduced to: their "max", or the "most_recent".
        keeps_infinite: let inf and nan in, as TransformerEngine does: the scale then stays as it is until the step is
            forgotten. Otherwise a statistic that is not finite leaves the history unchanged.
        rank: how many axes one statistic has.

    Raises:
        TypeError: `length` is not an integer.
        ValueError: it is below 1 or above 2**20, or `reduce` is neither of the two.

    Source: Flax's `fp8_ops`; TransformerEngine's `DelayedScaling`.

    Example:
        >>> history, steps = History(length=3), jnp.zeros(3)
        >>> for amax in (5.0, float("inf"), 2.0):
        ...     steps, entered = history.push(steps, jnp.float32(amax))
        >>> steps, history.reduced(steps), history.newest(steps)
        (Array([2., 0., 5.], dtype=float32), Array(5., dtype=float32), Array(2., dtype=float32))
    """

    length: int = 1024
    reduce: str = "max"
    keeps_infinite: bool = False
    rank: int = 0

    def __post_init__(self) -> None:
        where, name = "AmaxScaling", "amax_history_length"
        if check.integer(self.length, where, name) < 1:
            raise ValueError(
                f"{where}: {name} must be at least 1, got {self.length!r}. For a scale from the tensor itself, "
                "without a history, use delayed = False (the ...Current quantizers)."
            )
        check.between(-math.inf, 2**20)(self.length, where, name)
        check.flag(self.keeps_infinite, where, "keeps_infinite")
        if self.reduce not in REDUCTIONS:
            raise ValueError(
                f"{where}: amax_compute_algo must be one of {', '.join(map(repr, REDUCTIONS))}, got {self.reduce!r}"
            )

    def newest(self, steps: jax.Array) -> jax.Array:
        """Return the statistic of the last step."""
        return jax.lax.index_in_dim(steps, 0, -1 - self.rank, keepdims=False)

    def reduced(self, steps: jax.Array) -> jax.Array:
        """Return what the steps are reduced to; 0 before the first."""
        return self.newest(steps) if self.reduce == "most_recent" else jnp.max(steps, axis=-1 - self.rank)

    def push(self, steps: jax.Array, statistic: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the steps after one more, which replaces the oldest, and whether it entered.

        Args:
            steps: the steps.
            statistic: the step's, float32; per channel, the channels enter together or not at all. -inf never enters.
        """
        axis = steps.ndim - 1 - self.rank
        channels = tuple(range(axis, statistic.ndim))
        enters = statistic != -jnp.inf if self.keeps_infinite else jax.lax.is_finite(statistic)
        enters = jnp.all(enters, axis=channels) if channels else enters
        older = [
            jax.lax.slice_in_dim(steps, start, stop, axis=axis)
            for start, stop in ((2, self.length), (0, 1))
            if start < stop and self.length > 1
        ]
        rolled = jax.lax.concatenate([jnp.expand_dims(statistic, axis), *older], axis)
        spread = enters.reshape(*enters.shape, *(1,) * (steps.ndim - enters.ndim)) if enters.ndim else enters
        return choose(spread, rolled, steps), enters
