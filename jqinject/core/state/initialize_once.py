"""Parameters that are filled once, from a statistic, at the first call in training mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from jqinject.core.state.collect import all_finite
from jqinject.core.state.variables import QuantParam, QuantStat, int_array
from jqinject.ops.devices.explicit_axes import sharded_as
from jqinject.ops.ste import with_gradient_of


def initialize_once(
    value: QuantParam, init_done: QuantStat, initial: Callable[[], jax.Array], store: bool
) -> jax.Array:
    """The parameter, or until it is filled what fills it; with the gradient of the parameter.

    Args:
        value: the parameter.
        init_done: 0 until it is filled, then 1.
        initial: function that computes what fills it; it runs only where needed.
        store: whether to fill it now (training mode).

    Returns:
        The value in use.
    """
    done = init_done.get_value() > 0
    learned = value.get_value()

    def first() -> jax.Array:
        return sharded_as(initial(), learned)

    if not isinstance(done, jax.core.Tracer):
        fresh = learned if bool(done) else first()
    else:
        fresh = jax.lax.cond(done, lambda: jnp.ones_like(learned), first)
    current = jax.lax.stop_gradient(jnp.where(done, learned, fresh))
    if store:
        keep = jnp.logical_or(done, all_finite(current))
        # A shared quantizer is called once for each weight: every call's gradient goes to the parameter.
        value.set_value(with_gradient_of(learned, jnp.where(keep, current, jax.lax.stop_gradient(learned))))
        init_done.set_value(keep.astype(jnp.int32))
    return with_gradient_of(learned, current)


def initialization_defaults(entries: dict[str, Any]) -> dict[str, Any]:
    """Entries of a parameter that is filled once: a `value` without `init_done` counts as filled."""
    completed = dict(entries)
    if "value" in completed and "init_done" not in completed:
        completed["init_done"] = int_array(1)
    return completed
