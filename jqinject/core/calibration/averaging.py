"""One range from those of many batches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core.calibration.ranges import ClippingRange
from jqinject.core.construction import check
from jqinject.core.construction.assign import assign, set_given
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.state.record import Part, RecordPart
from jqinject.core.state.variables import QuantStat, float_array, int_array


@checked_arguments
class SimpleMovingAverage(nnx.Module):
    """The mean of the ranges of all batches seen: `sum of ends / count`, the present batch included.

    With a `momentum` it is the exponential one instead: `mean <- (1 - momentum) * mean + momentum * batch`, from the
    first batch on.

    A batch with an end that is inf or nan, or too large for the sum, stays out. Before the first batch, in evaluation,
    the range is that of the tensor at hand.

    State: one `record` of `count`, int32, `sum_of_max` and `sum_of_min`, the sums of the upper and lower ends, float32.

    Attributes:
        settled: whether evaluation goes by the mean alone: nothing is computed of the tensor at hand. `freeze` sets it.

    Args:
        restart: start from empty at every batch, for a range that does not change.
        momentum: the weight of a new batch, in (0, 1]; None weighs all batches alike.

    Raises:
        ValueError: `momentum` is not in (0, 1].

    Source: Qwix's `SimpleMovingAverage`.

    Example:
        >>> mean = SimpleMovingAverage()
        >>> for high in (1.0, 3.0):
        ...     found = mean(ClippingRange(jnp.float32(high)), update=True)
        >>> found.high, mean.count[...]
        (Array(2., dtype=float32), Array(2, dtype=int32))
    """

    record: QuantStat
    count, sum_of_max, sum_of_min = Part(), Part(), Part()
    restart: bool = False
    momentum: float | None = None
    settled: bool = False

    def __init__(self, restart: bool = False, momentum: float | None = None) -> None:
        ends = {name: float_array(0.0) for name in ("sum_of_max", "sum_of_min")}
        assign(self, record=QuantStat({"count": int_array(0), **ends}))
        momentum = check.momentum(momentum, "SimpleMovingAverage", "momentum")
        set_given(self, restart=restart, momentum=momentum)

    def __call__(self, batch: ClippingRange, update: bool) -> ClippingRange:
        """The mean range.

        Args:
            batch: the range of the present batch, one number for each end.
            update: whether it enters.

        Returns:
            The range, of the shape of `batch`; differentiable with regard to `batch` where it entered.
        """
        ends = (batch.high, batch.lowest)
        shape = ends[0].shape
        held = self._sums()
        count, sums = self.count.get_value(), [v.get_value() for v in held]
        if update:
            flat = [end.reshape(count.shape) for end in ends]
            before = jnp.zeros_like(count) if self.restart else count
            grown = [self._grown(total, end, before) for total, end in zip(sums, flat, strict=True)]
            # Finite ends may still overflow their sum.
            entered = jnp.all(jnp.isfinite(jnp.stack([*flat, *grown])), axis=0)
            count = jnp.where(entered, before + 1, count)
            sums = [jnp.where(entered, new, old) for new, old in zip(grown, sums, strict=True)]
            self.count.set_value(count)
            for variable, value in zip(held, sums, strict=True):
                variable.set_value(jax.lax.stop_gradient(value))
        divisor = jnp.maximum(count, 1).astype(jnp.float32)
        found = [
            jnp.where(count > 0, total / divisor, end.reshape(total.shape)).reshape(shape)
            for total, end in zip(sums, ends, strict=True)
        ]
        return ClippingRange(found[0], None if batch.low is None else found[1])

    def _grown(self, total: jax.Array, end: jax.Array, count: jax.Array) -> jax.Array:
        """The sum with one batch more; for a momentum, the new average times the new count."""
        held = count.astype(jnp.float32)
        if self.momentum is None:
            return jnp.where(held > 0, total, 0.0) + end
        average = jnp.where(held > 0, total / jnp.maximum(held, 1.0), end)
        return ((1 - self.momentum) * average + self.momentum * end) * (held + 1)

    def mean(self, like: ClippingRange) -> ClippingRange:
        """The mean range, in the form of another one, which may be abstract; zeros where no batch has entered."""
        divisor = jnp.maximum(self.count.get_value(), 1).astype(jnp.float32)
        high, low = (total.get_value() / divisor for total in self._sums())
        shape = like.high.shape
        return ClippingRange(high.reshape(shape), None if like.low is None else low.reshape(shape))

    def reset(self) -> None:
        """Forget all batches."""
        for variable in (self.count, *self._sums()):
            variable.set_value(jnp.zeros_like(variable.get_value()))

    def _sums(self) -> tuple[RecordPart, ...]:
        return self.sum_of_max, self.sum_of_min
