"""Averaging ranges over batches."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jqinject.core.calibration.ranges import ClippingRange
from jqinject.core.construction import check
from jqinject.core.construction.assign import assign, set_given
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import InnerModule
from jqinject.core.state.record import Part, RecordPart
from jqinject.core.state.variables import QuantStat, float_array
from jqinject.ops.choose import choose, no_change, shaped

Ends = tuple[jax.Array, ...]


class _How(NamedTuple):
    """How batches are averaged: static."""

    restart: bool
    momentum: float | None


def _mean(ends: Ends, count: jax.Array, sums: Ends) -> Ends:
    """The mean of all batches; without any, the present batch's ends."""
    divisor, some = jnp.maximum(count, 1), count > 0
    return tuple(choose(some, total / divisor, end) for total, end in zip(sums, ends, strict=True))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _averaged(how: _How, ends: Ends, count: jax.Array, sums: Ends) -> tuple[Ends, jax.Array, Ends, jax.Array]:
    """The mean, count and sums after one more batch, and whether it entered: not if it or a sum is non-finite."""
    grown = [_grown(how, total, end, count) for total, end in zip(sums, ends, strict=True)]
    entered = jnp.isfinite(grown[0]) & jnp.isfinite(grown[1])
    counted = (
        choose(entered, jnp.ones_like(count), count) if how.restart else count + entered.astype(jnp.float32)
    )
    kept = tuple(choose(entered, new, old) for new, old in zip(grown, sums, strict=True))
    return _mean(ends, counted, kept), counted, kept, entered


def _grown(how: _How, total: jax.Array, end: jax.Array, count: jax.Array) -> jax.Array:
    """The sum after one more batch; with a momentum, the new average times the new count."""
    if how.restart:
        return end
    if how.momentum is None:
        return choose(count <= check.MOST_STEPS, total + end, total)  # after that the counter stays
    average = choose(count > 0, total / jnp.maximum(count, 1.0), end)
    return ((1 - how.momentum) * average + how.momentum * end) * (count + 1)


def _averaged_jvp(how: _How, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (_, count, _), (dends, _, _) = primals, tangents
    found, counted, kept, entered = _averaged(how, *primals)
    # A batch that did not enter is the range only until one does.
    share = (entered | (counted == 0)).astype(jnp.float32)
    if how.momentum is not None and not how.restart:
        share = choose(count > 0, share * how.momentum, share) * counted
    divisor = jnp.maximum(counted, 1)
    changes = tuple(end if isinstance(end, SymbolicZero) else end / divisor * share for end in dends)
    still = jax.tree.map(no_change, (counted, kept, entered))
    return (found, counted, kept, entered), (changes, *still)


_averaged.defjvp(_averaged_jvp, symbolic_zeros=True)


@checked_arguments
class SimpleMovingAverage(InnerModule):
    """The mean of the ranges of all batches seen: `sum of ends / count`, the present batch included.

    With a `momentum` it is exponential instead: `mean <- (1 - momentum) * mean + momentum * batch`, from the
    first batch on.

    A batch with an end that is inf, nan or too large for the sum stays out. In evaluation before the first batch, the
    range is that of the given tensor.

    State: one `record`, float32, of `count`, `sum_of_max` and `sum_of_min`, the sums of the upper and lower ends. The
    mean of 2^24 batches is final.

    Attributes:
        settled: whether evaluation uses the mean alone, without measuring the given tensor. Set by `freeze`.

    Args:
        restart: start afresh at every batch, for a constant range.
        momentum: the weight of a new batch, in (0, 1]; None weighs all batches alike.

    Raises:
        ValueError: `momentum` is not in (0, 1].

    Source: Qwix's `SimpleMovingAverage`.

    Example:
        >>> mean = SimpleMovingAverage()
        >>> for high in (1.0, 3.0):
        ...     found = mean(ClippingRange(jnp.float32(high)), update=True)
        >>> found.high, mean.count[...]
        (Array(2., dtype=float32), Array(2., dtype=float32))
    """

    record: QuantStat
    count, sum_of_max, sum_of_min = Part(), Part(), Part()
    restart: bool = False
    momentum: float | None = None
    settled: bool = False

    def __init__(self, restart: bool = False, momentum: float | None = None) -> None:
        ends = {name: float_array(0.0) for name in ("sum_of_max", "sum_of_min")}
        assign(self, record=QuantStat({"count": float_array(0.0), **ends}))
        momentum = check.momentum(momentum, "SimpleMovingAverage", "momentum")
        set_given(self, restart=restart, momentum=momentum)

    def __call__(self, batch: ClippingRange, update: bool) -> ClippingRange:
        """The mean range.

        Args:
            batch: the range of the present batch, one number for each end.
            update: whether it enters.

        Returns:
            The range, shaped as `batch`; differentiable in `batch` where it entered.
        """
        held = self._sums()
        count, sums = self.count.get_value(), tuple(v.get_value() for v in held)
        ends = tuple(shaped(end, count.shape) for end in (batch.high, batch.lowest))
        if update:
            how = _How(self.restart, self.momentum)
            found, count, sums, _ = _averaged(how, ends, count, sums)
            self.count.set_value(count)
            for variable, value in zip(held, sums, strict=True):
                variable.set_value(value)
        else:
            found = _mean(ends, count, sums)
        high, low = (shaped(mean, batch.high.shape) for mean in found)
        return ClippingRange(high, None if batch.low is None else low)

    def mean(self, like: ClippingRange) -> ClippingRange:
        """The mean range, shaped as another one, which may be abstract; zeros if no batch has entered."""
        divisor = jnp.maximum(self.count.get_value(), 1)
        high, low = (total.get_value() / divisor for total in self._sums())
        shape = like.high.shape
        return ClippingRange(high.reshape(shape), None if like.low is None else low.reshape(shape))

    def reset(self) -> None:
        """Forget all batches."""
        for variable in (self.count, *self._sums()):
            variable.set_value(jnp.zeros_like(variable.get_value()))

    def _sums(self) -> tuple[RecordPart, ...]:
        return self.sum_of_max, self.sum_of_min
