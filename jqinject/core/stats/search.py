"""Searched statistics: candidate scales or zero points are tried on the actual quantizer.

A quantizer whose scale or zero point is searched (`facts.searches`) passes it a task as one more argument:

    scaling_impl(x, threshold, Search(quantizer))                 find the statistic with the least loss
    scaling_impl(x, threshold, Candidate(statistic))              use this statistic in its place: one trial

A search calls back what the quantizer would make of a tensor if the statistic were this or that:

    quantizer.try_scale(x, statistic)              -> QuantResult
    quantizer.try_zero_point(x, scale, statistic)  -> QuantResult     with the scale known

So the declared rounding, clamping, bit width and restriction take part in the search.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.core
import jax.numpy as jnp
from flax import nnx

from jqinject.core._protocols import Stat, View
from jqinject.core.construction.component import Component
from jqinject.core.facts import searches
from jqinject.core.state.variables import QuantStat, float_array
from jqinject.core.stats.in_place import in_place
from jqinject.core.view import OverSubChannelBlockView, blocks_of, cut_of
from jqinject.ops.devices.cut import Cut
from jqinject.ops.devices.mapped import check_same_places
from jqinject.ops.groups import join_groups

Trial = Callable[[jax.Array, jax.Array], Any]
"""(tensor, statistic) -> value, scale, zero point of the quantized tensor."""


class Triable(Protocol):
    """What a quantizer needs for its scale or zero point to be searched: trial quantization."""

    def try_scale(self, x: jax.Array, statistic: jax.Array, /) -> Any: ...
    def try_zero_point(self, x: jax.Array, scale: jax.Array, statistic: jax.Array, /) -> Any: ...


@dataclass(frozen=True)
class Search:
    """The task to search a statistic.

    Attributes:
        quantizer: on which candidates are tried.
        scale: its scale if the zero point is searched, else None.
    """

    quantizer: Triable
    scale: jax.Array | None = None


@dataclass(frozen=True)
class Candidate:
    """The task to use a candidate in place of the searched statistic.

    Attributes:
        statistic: the candidate; None means the start of the search.
    """

    statistic: jax.Array | None


Task = Search | Candidate | None


def scale_of(scaling: Any, x: jax.Array, threshold: Any, task: Task) -> jax.Array:
    """The scale of `x`; a searching scaling also gets the task."""
    return scaling(x, threshold, task) if searches(scaling) else scaling(x, threshold)


def zero_point_of(zero_point: Any, x: jax.Array, scale: jax.Array, bit_width: Any, task: Task) -> jax.Array:
    """The zero point of `x`; a searching component also gets the task."""
    return zero_point(x, scale, bit_width, task) if searches(zero_point) else zero_point(x, scale, bit_width)


class SearchedStat(Component):
    """A statistic that is searched by trying candidates; without gradient.

    It takes unviewed tensors and applies its own view, so that losses are measured on whole quantized tensors. Several
    tensors that share a quantizer are searched together.

    Attributes:
        init_op: the statistic that the search starts from.
        view: its view of tensors.
        reduce_dim: the axis of the view that shares a result, None for all.
        memory: the last result, if a neighbour's next search continues from it; else None.
    """

    searches: ClassVar[bool] = True
    init_op: Stat
    view: View
    reduce_dim: int | None
    memory: QuantStat | None = None

    @abstractmethod
    def search(self, trial: Trial, tensors: Sequence[jax.Array]) -> jax.Array:
        """The result of the search; `self` is a copy, so only `_memory_after` keeps what it sets."""

    def __call__(self, x: jax.Array, task: Task = None) -> jax.Array:
        """The statistic of `x`, float32."""
        return self.of([x], task)

    def of(self, tensors: Sequence[jax.Array], task: Task) -> jax.Array:
        """The statistic of several tensors together, float32."""
        groups = [_in_groups(tensor, self.view) for tensor in tensors]
        if blocks_of(self.view, tensors[0]) is not None:
            raise ValueError(
                f"{type(self).__name__} searches a scale for each group along one axis, not for blocks over two axes.\n"
                "  cure: group_size = an int; or a statistic that is not searched, such as scaling_stats_op = 'max'"
            )
        return self._result(groups, task, lambda search: self._run(search, groups))

    def gated(self, x: jax.Array, active: jax.Array, task: Task) -> jax.Array:
        """The statistic of `x` if `active`, else an arbitrary number, at no cost."""
        known = not isinstance(active, jax.core.Tracer)
        if known and bool(active):
            return self.of([x], task)

        def run(search: Search) -> tuple[jax.Array, Any]:
            shapes = jax.eval_shape(lambda: self._run(search, [x]))
            check_same_places(shapes, jnp.asarray(active))
            idle = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            if known:
                return idle[0], self._memory_state()
            found, kept = jax.lax.cond(active, lambda: self._run(search, [x]), lambda: idle)
            before = self._memory_state()
            return found, jax.tree.map(lambda new, old: jnp.where(active, new, old), kept, before)

        return self._result([x], task, run)

    def _result(
        self, tensors: Sequence[jax.Array], task: Task, run: Callable[[Search], tuple[jax.Array, Any]]
    ) -> jax.Array:
        if isinstance(task, Candidate):
            return self._start(tensors, self.memory) if task.statistic is None else task.statistic
        if task is None:
            raise ValueError(
                f"{type(self).__name__} tries its result on the quantizer that it serves, and was called by none.\n"
                "  cure: use it as scaling_stats_impl or zero_point_stats_impl of a quantizer; a tensor_quant of your "
                "own calls scaling_impl(x, threshold, jqinject.core.Search(self))"
            )
        found, kept = run(task)
        for variable, value in zip(self._memories(), kept, strict=True):
            variable.set_value(value)
        return jax.lax.stop_gradient(found)

    def _run(self, search: Search, tensors: Sequence[jax.Array]) -> tuple[jax.Array, Any]:
        graphdef, state = nnx.split((search.quantizer, self), graph=True)
        cuts = tuple(cut_of(self.view, x) for x in tensors)
        detached = jax.tree.map(jax.lax.stop_gradient, (state, tuple(tensors), search.scale))
        return _search(graphdef, cuts, *detached)

    def _start(self, tensors: Sequence[jax.Array], memory: QuantStat | None = None) -> jax.Array:
        """Where the search starts, or the result remembered in `memory`."""
        floats = [tensor.astype(jnp.float32) for tensor in tensors]
        several = tuple(floats) if len(floats) > 1 else floats[0]
        stat, viewed = in_place(self.init_op, self.view, several, self.reduce_dim or 0)
        shape = jax.eval_shape(lambda x: self.init_op(self.view(x)), floats[0]).shape
        init = stat(viewed).reshape(shape)
        if memory is None:
            return init
        last = memory.get_value().reshape(init.shape)
        return jnp.where(jnp.isnan(last), init, last)

    def _remember(self, shape: tuple[int, ...] | None) -> None:
        if shape is not None:
            self.memory = QuantStat(float_array(float("nan"), shape))

    def _memories(self) -> list[QuantStat]:
        return [] if self.memory is None else [self.memory]

    def _memory_state(self) -> list[jax.Array]:
        return [variable.get_value() for variable in self._memories()]


def _in_groups(x: jax.Array, view: View) -> jax.Array:
    """A tensor with its groups as two axes, as the quantizer returns it; unchanged without groups."""
    in_two = isinstance(view, OverSubChannelBlockView) and cut_of(view, x) is None
    return view(x) if in_two else x


@partial(jax.jit, static_argnums=(0, 1))
def _search(
    graphdef: Any,
    cuts: tuple[Cut | None, ...],
    state: Any,
    tensors: tuple[jax.Array, ...],
    scale: jax.Array | None,
) -> tuple[jax.Array, list[jax.Array]]:
    """One search, compiled once for quantizers of the same structure."""

    def trial(tensor: jax.Array, statistic: jax.Array) -> Any:
        quantizer, _ = _copy(graphdef, state)  # a copy for each trial: its state changes are discarded
        cut = next(cut for cut, other in zip(cuts, tensors, strict=True) if other is tensor)
        if scale is None:
            found = quantizer.try_scale(tensor, statistic)
        else:
            found = quantizer.try_zero_point(tensor, scale, statistic)
        return found if cut is None else _laid_like(tensor, found, cut)

    _, stat = _copy(graphdef, state)
    found = stat.search(trial, tensors)
    if stat.memory is not None:
        stat.memory.set_value(found.reshape(stat.memory.get_value().shape))
    return found, stat._memory_state()


class _Tried(NamedTuple):
    """The part of a trial's result that searches read."""

    value: jax.Array
    scale: jax.Array
    zero_point: jax.Array


def _laid_like(x: jax.Array, found: Any, cut: Cut) -> Any:
    """A grouped trial result, in the shape of the tensor."""
    joined = found.value.ndim == x.ndim
    value = found.value if joined else join_groups(found.value, cut.axis, x.shape[cut.axis])
    scale, zero_point = (cut.spread(number, x) for number in (found.scale, found.zero_point))
    return _Tried(value, scale, zero_point)


def _copy(graphdef: Any, state: Any) -> Any:
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf, state))
