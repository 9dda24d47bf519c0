"""Ranges that the steps of a loop share: a batch enters them once, by the largest range over its steps.

Steps through layers have ranges of their own (`nested`). Steps through time share one, because there may be as many of
them as there are rows in a batch. Each step updates the range from what it was before the loop; of the results, the
widest one leaves the loop.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core import QuantParam, QuantStat

LOWER_ENDS = ("sum_of_min", "low")


def restarted(before: Any, state: Any) -> Any:
    """Return the state of quantizers that a step begins with.

    Args:
        before: their state before the loop, whose ranges each step begins with.
        state: their state after the step before it, whose random streams go on.
    """

    def begun(old: Any, new: Any) -> Any:
        return new.replace(old.get_raw_value()) if _is_range(new) else new

    return jax.tree.map(begun, before, state, is_leaf=_is_variable)


def largest(is_first: jax.Array, widest: Any, state: Any) -> Any:
    """Return the state of quantizers with the larger of two ranges each.

    Args:
        is_first: whether `state` is that of the first step, and `widest` that before the loop.
        widest: their state with the largest ranges of the steps before.
        state: their state after a step.
    """

    def joined(path: Any, old: Any, new: Any) -> Any:
        if not _is_range(new):
            return new
        names = jax.tree_util.keystr(path, simple=True, separator=".")

        def larger(path: Any, old: jax.Array, new: jax.Array) -> jax.Array:
            if any(key.key in LOWER_ENDS for key in path):
                wider = new < old
            else:
                wider = jnp.abs(new) > jnp.abs(old) if "zero_point" in names else new > old
            return jnp.where(is_first | wider, new, old)

        value = jax.tree.map_with_path(larger, old.get_raw_value(), new.get_raw_value())
        return new.replace(value)

    return jax.tree.map_with_path(joined, widest, state, is_leaf=_is_variable)


def _is_range(x: Any) -> bool:
    return isinstance(x, QuantStat | QuantParam)


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)
