"""The memory that remembers nothing: the statistic of the given tensor, in a shape that broadcasts against it."""

from __future__ import annotations

import jax
import jax.core
import jax.numpy as jnp

from jqinject.core.memory.memory import Memory
from jqinject.core.statistics.search import Task
from jqinject.core.statistics.statistic import in_place
from jqinject.core.views import cut_of


class Dynamic(Memory):
    """Abstract: the statistic of the given tensor, in training and evaluation. No state."""

    is_dynamic = True

    def statistic(self, x: jax.Array, task: Task = None, active: jax.Array | None = None) -> jax.Array:
        """The statistic, in a shape that broadcasts with the tensor; of groups, with 1 along a group's elements."""
        stats, view, x = self.stats, self.view, x.astype(jnp.float32)
        if self.in_groups and not self.searches:
            stats, viewed = in_place(stats, view, x)
            cut = cut_of(view, x) if viewed.ndim == x.ndim else None
            return stats(viewed) if cut is None else jnp.expand_dims(stats(viewed), cut.axis + 1)
        stat = stats(view(x), task) if self.searches else stats(view(x))
        if self.broadcastable is not None:
            return self.broadcastable(stat, x.shape)
        # Rows of a matrix have one number each.
        broadcasts = self.in_groups or stat.ndim in (0, x.ndim)
        return stat if broadcasts else stat.reshape((*x.shape[:-1], 1))
