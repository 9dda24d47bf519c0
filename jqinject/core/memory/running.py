"""Sources collected at run time: batch statistics, averaged and then perhaps learned."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.core import check
from jqinject.core._protocols import Stat, View
from jqinject.core.component import assign, set_given, set_view
from jqinject.core.memory.source import (
    EMPTY,
    AffineRescaling,
    Collection,
    DefaultMomentum,
    Domain,
    Number,
    Source,
    affine_rescaling,
)
from jqinject.core.state import QuantParam, QuantStat, all_counted, float_array
from jqinject.core.statistics.search import Task
from jqinject.core.statistics.statistic import gated_statistic_of, statistic_of
from jqinject.ops.clamp import all_finite, choose, no_change
from jqinject.ops.reductions import running_mean


class _Averaged(Source):
    """Abstract: averages batch statistics.

    An empty batch is treated as in evaluation. A non-finite statistic is used for its own batch, but neither averaged
    nor counted.

    Args:
        stats: the statistic.
        view: the view that it is taken of; None for the class's default.
        steps: how many batches are collected.
        momentum: weight of the newest batch, in (0, 1]; None for the cumulative mean.
        shape: of the statistic.
        of: "scaling" or "zero_point": prefix of the user's arguments.
    """

    collection: Collection
    counter: QuantStat
    use_running_average: bool

    def __init__(
        self, stats: Stat, view: View, steps: int, momentum: Any, shape: tuple[int, ...], *, of: str
    ) -> None:
        where, named = type(self).__name__, not isinstance(momentum, DefaultMomentum)
        self._take(stats, view)
        assign(
            self,
            collection=Collection(
                steps,
                check.momentum(momentum, where, f"{of}_stats_momentum"),
                check.shape(shape, where, f"{of}_shape"),
                f"{of}_shape",
                named,
            ),
            counter=QuantStat(float_array(0.0)),
            use_running_average=False,
        )

    set_view = set_view

    def _shaped(self, stat: jax.Array) -> jax.Array:
        collection = self.collection
        if stat.shape == collection.shape:
            return stat
        return check.statistic_shape(stat, collection.shape, type(self).__name__, collection.shape_name)

    def has_range(self) -> bool | None:
        """Whether a batch has entered; see `StaticRange`."""
        return all_counted(self.counter.get_value())

    def begin_calibration(self) -> None:
        """Restart the average, for any number of batches."""
        self.collection = replace(self.collection, calibrates=True)
        self.counter.set_value(jnp.zeros_like(self.counter.get_value()))
        self.use_running_average = False

    def end_calibration(self) -> None:
        """Continue as in training."""
        self.collection = replace(self.collection, calibrates=False)


class Running(_Averaged):
    """Abstract: the statistic of the batch in training, its running mean in evaluation.

    Args:
        affine_init: initial factor and shift of a learned affine map; None omits it.
        arguments: see the base; without the steps.
    """

    running_stats: QuantStat
    affine_rescaling: AffineRescaling | None = None

    def __init__(
        self,
        stats: Stat,
        view: View,
        momentum: Any,
        shape: tuple[int, ...],
        affine_init: tuple[float | None, float | None],
        *,
        of: str,
    ) -> None:
        super().__init__(stats, view, 0, momentum, shape, of=of)
        shape = self.collection.shape
        assign(self, running_stats=QuantStat(float_array(1.0, shape)))
        set_given(self, affine_rescaling=affine_rescaling(shape, affine_init, type(self).__name__, of))

    def number(self, x: jax.Array, domain: Domain, task: Task = None) -> Number:
        """The statistic, or its affine map; updates the running one in training mode."""
        settled = self.use_running_average or x.size == 0
        stat = self.running_stats.get_value() if settled else self._of_batch(x, task)
        if self.affine_rescaling is None:
            return Number(stat)
        return Number(stored=self.affine_rescaling(domain.to_stored(domain.clamped(stat))))

    def _of_batch(self, x: jax.Array, task: Task) -> jax.Array:
        stats: Any = self.stats
        x = x.astype(jnp.float32)
        stat = self._shaped(
            stats(x, task) if self.searches else statistic_of(stats, self.view, x, of_parameter=False)
        )
        found = jax.lax.stop_gradient(stat)
        counts = all_finite(found)
        before, steps = self.running_stats.get_value(), self.counter.get_value()
        self.running_stats.set_value(
            choose(counts, running_mean(before, found, steps, self.collection.weight), before)
        )
        self.counter.set_value(steps + counts.astype(jnp.float32))
        return stat

    def complete_state(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Translate a checkpoint's entries for this component: running statistics without a counter count as collected.

        Args:
            entries: variable name -> array, as found in the checkpoint.

        Returns:
            The entries to load.
        """
        completed = super().complete_state(entries)
        if "running_stats" in completed and "counter" not in completed:
            completed["counter"] = float_array(1.0)
        return completed


class Collected(_Averaged):
    """Abstract: the statistic of the batch for N training calls, then a parameter that starts at their average.

    | training call | number                  | state                                                        |
    |---------------|-------------------------|--------------------------------------------------------------|
    | 1 .. N        | the batch's statistic   | `buffer` follows it; `counter` + 1                           |
    | N + 1         | `value`                 | `value` is filled from `buffer`, which holds the same number |
    | later         | `value`                 | nothing moves; `value` is learned                            |

    In evaluation it is made from `buffer` until `value` is filled; no state changes. The statistic is computed only
    while collecting.
    """

    value: QuantParam
    buffer: QuantStat
    empty: float = 1.0

    def __init__(
        self, stats: Stat, view: View, steps: int, momentum: Any, shape: tuple[int, ...], *, of: str
    ) -> None:
        super().__init__(stats, view, steps, momentum, shape, of=of)
        empty, shape = EMPTY[of], self.collection.shape
        assign(self, value=QuantParam(float_array(empty, shape)), buffer=QuantStat(float_array(empty, shape)))
        set_given(self, empty=empty)

    def unfilled(self) -> tuple[str, ...]:
        """See `Source`."""
        return ("value",) if (self.counter.get_value() <= self.collection.limit).all() else ()

    def number(self, x: jax.Array, domain: Domain, task: Task = None) -> Number:
        """Statistic and parameter, one of which is used; collects and hands over in training mode."""
        if self.use_running_average or x.size == 0:
            return Number(stored=self._settled(domain))
        limit, steps, held = self.collection.limit, self.counter.get_value(), self.buffer.get_value()
        collecting = steps < limit
        stats: Any = self.stats
        x = x.astype(jnp.float32)
        if self.searches:
            found = stats.gated(x, collecting, task)
        else:
            found = gated_statistic_of(stats, self.view, x, collecting)
        found = found if found.shape == self.collection.shape else self._shaped(found)
        stat = domain.clamped(found)
        state = self.value.get_value(), held, domain.to_stored(held), steps
        # A quantizer may be called several times in a forward pass: the gradient of every call goes to the parameter.
        kept, moved, counted = _collected(self.collection, stat, collecting, *state)
        self.buffer.set_value(moved)
        self.counter.set_value(counted)
        self.value.set_value(kept)
        return Number(stat, kept, collecting)

    def _begin(self, domain: Domain, collected: float) -> None:
        """Count a statistic as collected."""
        stored = domain.to_stored(float_array(collected, self.collection.shape))
        self.value.set_value(stored)
        self.buffer.set_value(stored)
        self.counter.set_value(float_array(self.collection.steps + 1))

    def _settled(self, domain: Domain) -> jax.Array:
        """The parameter in evaluation: made from the buffer until training fills it. Changes no state."""
        still_collecting = self.counter.get_value() <= self.collection.limit
        return jnp.where(still_collecting, domain.to_stored(self.buffer.get_value()), self.value.get_value())

    def _finish(self, domain: Domain) -> None:
        """Move the buffer into the parameter, unless already done."""
        final = self._settled(domain)
        self.value.set_value(final)
        self.buffer.set_value(final)
        self.counter.set_value(float_array(self.collection.steps + 1))

    def _settle(self, domain: Domain) -> jax.Array:
        """Move the buffer into the parameter if the last statistic was just collected; returns whether it was."""
        limit, held, count = self.collection.limit, self.buffer.get_value(), self.counter.get_value()
        due = count == limit
        collected = jax.lax.stop_gradient(domain.to_stored(held))
        self.value.set_value(jnp.where(due, collected, jax.lax.stop_gradient(self.value.get_value())))
        self.buffer.set_value(jnp.where(due, collected, held))
        self.counter.set_value(jnp.where(due, jnp.float32(limit + 1), count))
        return due

    def _end_calibration(self, domain: Domain) -> None:
        """Move the buffer into the parameter, for each layer (of a stack) that saw data."""
        super().end_calibration()
        count = self.counter.get_value()
        seen = count > 0
        filled = seen.reshape(*seen.shape, *(1,) * (self.value.ndim - seen.ndim))
        final = domain.to_stored(self.buffer.get_value())
        for variable in (self.value, self.buffer):
            variable.set_value(jnp.where(filled, final, variable.get_value()))
        self.counter.set_value(jnp.where(seen, jnp.float32(self.collection.steps + 1), 0))

    def _completed(self, entries: dict[str, Any], domain: Domain) -> dict[str, Any]:
        """Checkpoint entries, completed.

        | given                     | means                                                              |
        |---------------------------|--------------------------------------------------------------------|
        | nothing                   | nothing                                                            |
        | `running_stats`           | statistics of a run without parameter: they become the `value`     |
        | `value` without `counter` | collection is over                                                 |
        | `value`, `counter`        | the buffer is what the value says                                  |
        | `buffer`, `counter`       | collection goes on; `value` is not filled yet                      |
        | `stats. ...`, `rule. ...` | what the statistic and the rule keep                               |
        """
        steps, found = self.collection.steps, super().complete_state(entries)
        own = ("value", "buffer", "counter", "stats", "rule", "int_quant")
        known = {name: entry for name, entry in found.items() if name.partition(".")[0] in own}
        for name in ("running_stats", "runtime_stats.running_stats"):
            if name in found and "value" not in known:
                stat = jnp.abs(jnp.asarray(found[name]).astype(jnp.float32))
                known["value"] = domain.to_stored(domain.clamped(stat))
                known.pop("counter", None)
        if "value" in known and "counter" not in known:
            known["counter"] = float_array(steps + 1)
        if "value" in known and "buffer" not in known:
            stored = jnp.asarray(known["value"]).astype(jnp.float32)
            read = domain.from_stored(stored)  # a learned scale may be negative, a statistic is not
            kept = domain.to_stored(domain.clamped(read))
            known["buffer"] = jnp.where(known["counter"] > steps, kept, read)
        if "buffer" in known and "value" not in known:
            known["value"] = float_array(self.empty, self.collection.shape)
        return known


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _collected(
    collection: Collection,
    stat: jax.Array,
    collecting: jax.Array,
    learned: jax.Array,
    held: jax.Array,
    stored: jax.Array,
    steps: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Parameter, buffer and counter after a call."""
    handing_over = steps == collection.limit
    counts = collecting & all_finite(stat)
    moved = choose(counts, running_mean(held, stat, steps, collection.weight), held)
    counted = choose(collecting, steps + counts.astype(jnp.float32), jnp.float32(collection.limit + 1))
    return choose(handing_over, stored, learned), choose(handing_over, stored, moved), counted


def _collected_jvp(collection: Collection, primals: Any, tangents: Any) -> tuple[Any, Any]:
    found = _collected(collection, *primals)
    return found, (tangents[2], *(no_change(part) for part in found[1:]))


_collected.defjvp(_collected_jvp, symbolic_zeros=True)
