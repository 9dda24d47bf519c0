"""State shared by scales and zero points that are first collected from statistics and then learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jqinject.core.construction import check
from jqinject.core.state.variables import QuantParam, QuantStat, float_array, int_array
from jqinject.ops.choose import choose
from jqinject.ops.devices.processes import on_host
from jqinject.ops.stats import running_mean
from jqinject.quant_tensor import is_concrete

ToStored = Callable[[jax.Array], jax.Array]
EVERY_STEP = 2**31 - 2  # the counter, an int32, goes one further


class DefaultMomentum(float):
    """A momentum that nobody named: calibration takes the mean in its place."""


DEFAULT_MOMENTUM = DefaultMomentum(0.1)


@dataclass(frozen=True)
class Collection:
    """How a statistic is collected: static, equal by value.

    Attributes:
        steps: training calls with a finite statistic before the parameter takes over.
        momentum: weight of the newest statistic in the running one; None for the cumulative mean.
        shape: shape of statistic, buffer and parameter.
        named: whether somebody chose the momentum; calibration takes the cumulative mean otherwise.
        calibrates: whether it is a calibration's: as many steps as there are batches.
    """

    steps: int
    momentum: float | None
    shape: tuple[int, ...]
    named: bool
    calibrates: bool = False

    @classmethod
    def of(cls, steps: int, momentum: Any, shape: tuple[int, ...], where: str, name: str) -> Collection:
        """With a momentum of the user's, which is called `name` in `where`.

        Raises:
            ValueError: it is out of range.
        """
        checked = check.momentum(momentum, where, name)
        return cls(steps, checked, shape, named=not isinstance(momentum, DefaultMomentum))

    @property
    def limit(self) -> int:
        """The number of steps that are collected now."""
        return EVERY_STEP if self.calibrates else self.steps

    def mean(self, before: jax.Array, stat: jax.Array, count: jax.Array) -> jax.Array:
        """The running statistic with one more in it."""
        momentum = self.momentum if self.named or not self.calibrates else None
        return running_mean(before, stat, count, momentum)

    def of_calibration(self, calibrates: bool) -> Collection:
        """The same in a calibration, or out of it."""
        return replace(self, calibrates=calibrates)


def all_counted(counter: Any) -> bool:
    """Whether a counter (of every layer of a stack) is above 0; True where it cannot be known: traced, abstract."""
    return not has_numbers(counter) or bool(np.all(on_host(counter) > 0))


def has_numbers(array: Any) -> bool:
    """Whether an array can be read: it is neither traced nor abstract."""
    return isinstance(array, jax.Array | np.ndarray) and is_concrete(array)


def all_finite(x: jax.Array) -> jax.Array:
    """Whether every number is finite: a bool scalar."""
    finite = jnp.isfinite(x)
    return jnp.all(finite) if x.ndim else finite


def update_running(
    running: QuantStat, counter: QuantStat, stat: jax.Array, collection: Collection
) -> jax.Array:
    """Move a running statistic by one step; a statistic that is not finite does not count.

    Returns:
        The new number of steps counted (the counter Variable is left to the caller).
    """
    stat = jax.lax.stop_gradient(stat)
    counts = all_finite(stat)
    before, steps = running.get_value(), counter.get_value()
    running.set_value(choose(counts, collection.mean(before, stat, steps), before))
    return steps + counts.astype(jnp.int32)


def collect(
    value: QuantParam,
    buffer: QuantStat,
    counter: QuantStat,
    stat: jax.Array,
    collecting: jax.Array,
    collection: Collection,
    to_stored: ToStored,
) -> jax.Array:
    """One training call of a collected parameter; moves the state.

    While `counter < steps` the buffer follows the statistic. The next call (`counter == steps`) moves the
    buffer into the parameter (the buffer then holds the same number, in the learned domain), and from then on
    (`counter == steps + 1`) nothing moves here.

    Args:
        value: the parameter.
        buffer: the running statistic.
        counter: calls counted so far.
        stat: the statistic of this batch; any number when not collecting.
        collecting: whether `counter < steps`.
        collection: steps and momentum.
        to_stored: from the statistic to the domain in which the parameter is learned.

    Returns:
        The parameter's value after the call; its gradient goes to the parameter.
    """
    held = buffer.get_value()
    state = value.get_value(), held, to_stored(held), counter.get_value()
    # A quantizer may be called several times in one forward pass: every call's gradient goes to the parameter.
    kept, moved, counted = _collected(collection, stat, collecting, *state)
    buffer.set_value(moved)
    counter.set_value(counted)
    value.set_value(kept)
    return kept


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
    moved = choose(counts, collection.mean(held, stat, steps), held)
    counted = choose(collecting, steps + counts.astype(jnp.int32), jnp.int32(collection.limit + 1))
    return choose(handing_over, stored, learned), choose(handing_over, stored, moved), counted


def _collected_jvp(collection: Collection, primals: Any, tangents: Any) -> tuple[Any, Any]:
    found = _collected(collection, *primals)
    return found, (tangents[2], *(no_change(part) for part in found[1:]))


_collected.defjvp(_collected_jvp, symbolic_zeros=True)


def no_change(x: jax.Array) -> SymbolicZero:
    """The tangent of state, which carries no gradient from call to call."""
    return SymbolicZero(jax.typeof(x).to_tangent_aval())


def collected_value(
    value: QuantParam, buffer: QuantStat, counter: QuantStat, collection: Collection, to_stored: ToStored
) -> jax.Array:
    """The parameter as evaluation sees it: made from the buffer until training fills it. Moves nothing."""
    still_collecting = counter.get_value() <= collection.limit
    return jnp.where(still_collecting, to_stored(buffer.get_value()), value.get_value())


def finish_collection(
    value: QuantParam, buffer: QuantStat, counter: QuantStat, collection: Collection, to_stored: ToStored
) -> None:
    """Move the buffer into the parameter now, if that has not happened yet."""
    final = collected_value(value, buffer, counter, collection, to_stored)
    value.set_value(final)
    buffer.set_value(final)
    counter.set_value(int_array(collection.steps + 1))


def settle_collection(
    value: QuantParam, buffer: QuantStat, counter: QuantStat, collection: Collection, to_stored: ToStored
) -> jax.Array:
    """Move the buffer into the parameter if the last statistic has just been collected.

    Returns:
        Whether it was: a bool scalar.
    """
    due = counter.get_value() == collection.limit
    collected = jax.lax.stop_gradient(to_stored(buffer.get_value()))
    value.set_value(jnp.where(due, collected, jax.lax.stop_gradient(value.get_value())))
    buffer.set_value(jnp.where(due, collected, buffer.get_value()))
    counter.set_value(jnp.where(due, jnp.int32(collection.limit + 1), counter.get_value()))
    return due


def end_calibration(
    value: QuantParam, buffer: QuantStat, counter: QuantStat, collection: Collection, to_stored: ToStored
) -> None:
    """Move the buffer into the parameter, of each layer (of a stack) that saw data; `counter` ends the collection."""
    seen = counter.get_value() > 0
    filled = seen.reshape(*seen.shape, *(1,) * (value.ndim - seen.ndim))
    final = to_stored(buffer.get_value())
    for variable in (value, buffer):
        variable.set_value(jnp.where(filled, final, variable.get_value()))
    counter.set_value(jnp.where(seen, jnp.int32(collection.steps + 1), 0))


def collection_defaults(
    entries: dict[str, Any],
    collection: Collection,
    to_stored: ToStored,
    from_stored: ToStored,
    initial: float,
) -> dict[str, Any]:
    """Checkpoint entries of a collected parameter, completed.

    | given                     | means                                                                  |
    |---------------------------|------------------------------------------------------------------------|
    | nothing                   | nothing                                                                |
    | `running_stats`           | statistics of a run without parameter: they become the `value`         |
    | `value` without `counter` | collection is over                                                     |
    | `value`, `counter`        | the buffer is what the value says                                      |
    | `buffer`, `counter`       | collection goes on; `value` is not filled yet                          |
    | `stats. ...`              | what the statistic itself keeps                                        |
    """
    own = ("value", "buffer", "counter")
    known = {name: entry for name, entry in entries.items() if name in own or name.startswith("stats.")}
    for name in ("running_stats", "runtime_stats.running_stats"):
        if name in entries and "value" not in known:
            known["value"] = to_stored(jnp.abs(jnp.asarray(entries[name]).astype(jnp.float32)))
            known.pop("counter", None)
    if "value" in known and "counter" not in known:
        known["counter"] = int_array(collection.steps + 1)
    if "value" in known and "buffer" not in known:
        stored = jnp.asarray(known["value"]).astype(jnp.float32)
        read = from_stored(stored)  # a learned scale may have a sign, a statistic has none
        known["buffer"] = jnp.where(known["counter"] > collection.steps, to_stored(read), read)
    if "buffer" in known and "value" not in known:
        known["value"] = float_array(initial, collection.shape)
    return known
