"""Statistics that are searched: a scale or zero point is tried on the quantizer that it will serve.

A quantizer calls its scale and its zero point within `searching(self)`. A statistic that searches finds the quantizer
there, and what it would make of a tensor if the statistic were this or that:

    quantizer.try_scale(x, statistic)              -> QuantResult     while the scale is looked for
    quantizer.try_zero_point(x, scale, statistic)  -> QuantResult     while the zero point is, the scale being known

Within such a trial (`given`) the statistic that is tried stands for every searched one. So whatever a user declares
of rounding, clamping, bit width or restriction takes part in the search.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.core
import jax.numpy as jnp
from flax import nnx

from jqinject.core._protocols import QuantResult, Stat, View
from jqinject.core.construction.component import Component
from jqinject.core.state.variables import QuantStat, float_array
from jqinject.core.stats.in_place import in_place
from jqinject.core.view import OverSubChannelBlockView, cut_of
from jqinject.ops.devices.cut import Cut
from jqinject.ops.groups import join_groups

Trial = Callable[[jax.Array, jax.Array], Any]
"""(tensor, statistic) -> value, scale, zero point of the quantized tensor."""


class Triable(Protocol):
    """What a quantizer needs for its scale or zero point to be searched: what it would make of a tensor."""

    def try_scale(self, x: jax.Array, statistic: jax.Array, /) -> Any: ...
    def try_zero_point(self, x: jax.Array, scale: jax.Array, statistic: jax.Array, /) -> Any: ...


@dataclass(frozen=True)
class _Searching:
    """Whose scale is being made; or, where `scale` is known, whose zero point."""

    quantizer: Any
    scale: jax.Array | None


@dataclass(frozen=True)
class _Given:
    """A trial: what stands for the searched statistic, None for what it starts from."""

    statistic: jax.Array | None


_WORK: ContextVar[_Searching | _Given | None] = ContextVar("jqinject_search", default=None)


@contextmanager
def searching(quantizer: Triable, scale: jax.Array | None = None) -> Iterator[None]:
    """While this lasts, statistics may be searched on a quantizer; within a trial nothing changes.

    Args:
        quantizer: the `nnx.Module` whose scale or zero point is being made.
        scale: its scale, where the zero point is being made.
    """
    if isinstance(_WORK.get(), _Given):
        yield
        return
    token = _WORK.set(_Searching(quantizer, scale))
    try:
        yield
    finally:
        _WORK.reset(token)


@contextmanager
def given(statistic: jax.Array | None) -> Iterator[None]:
    """While this lasts, searched statistics are this one (None: what they start from), and nothing is searched."""
    token = _WORK.set(_Given(statistic))
    try:
        yield
    finally:
        _WORK.reset(token)


def in_trial() -> bool:
    """Whether a trial is going on."""
    return isinstance(_WORK.get(), _Given)


class SearchedStat(Component):
    """A statistic that is found by trying it; without gradient.

    It sees tensors as they are and lays them out by a view of its own, so that the losses of candidates can be taken of
    whole quantized tensors. Several tensors that share a quantizer are searched together.

    Attributes:
        init_op: the statistic that the search starts from.
        view: how it lays tensors out.
        reduce_dim: the axis of the view that shares a result, None for all.
        memory: the last result, where the next search of a neighbour goes on from it; else None.
    """

    init_op: Stat
    view: View
    reduce_dim: int | None
    memory: QuantStat | None = None

    @abstractmethod
    def search(self, trial: Trial, tensors: Sequence[jax.Array]) -> jax.Array:
        """The result of the search; `self` is a copy, so what it sets is kept by `_memory_after` only."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """The statistic of `x`, float32."""
        return self.of([x])

    def of(self, tensors: Sequence[jax.Array]) -> jax.Array:
        """The statistic of several tensors together, float32."""
        groups = [_in_groups(tensor, self.view) for tensor in tensors]
        return self._result(groups, lambda work: self._run(work, groups))

    def gated(self, x: jax.Array, active: jax.Array) -> jax.Array:
        """The statistic of `x` where `active`, else a number without meaning, at no cost."""
        known = not isinstance(active, jax.core.Tracer)
        if known and bool(active):
            return self.of([x])

        def run(work: _Searching) -> tuple[jax.Array, Any]:
            shapes = jax.eval_shape(lambda: self._run(work, [x]))
            idle = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            if known:
                return idle[0], self._memory_state()
            found, kept = jax.lax.cond(active, lambda: self._run(work, [x]), lambda: idle)
            before = self._memory_state()
            return found, jax.tree.map(lambda new, old: jnp.where(active, new, old), kept, before)

        return self._result([x], run)

    def _result(
        self, tensors: Sequence[jax.Array], run: Callable[[_Searching], tuple[jax.Array, Any]]
    ) -> jax.Array:
        work = _WORK.get()
        if isinstance(work, _Given):
            return self._start(tensors) if work.statistic is None else work.statistic
        if work is None:
            raise ValueError(
                f"{type(self).__name__} tries its result on the quantizer that it serves, and was called by none.\n"
                "  cure: use it as scaling_stats_impl or zero_point_stats_impl of a quantizer; a tensor_quant of your "
                "own calls its scaling_impl within jqinject.core.searching(self)"
            )
        found, kept = run(work)
        for variable, value in zip(self._memories(), kept, strict=True):
            variable.set_value(value)
        return jax.lax.stop_gradient(found)

    def _run(self, work: _Searching, tensors: Sequence[jax.Array]) -> tuple[jax.Array, Any]:
        graphdef, state = nnx.split((work.quantizer, self), graph=True)
        cuts = tuple(cut_of(self.view, x) for x in tensors)
        detached = jax.tree.map(jax.lax.stop_gradient, (state, tuple(tensors), work.scale))
        return _search(graphdef, cuts, *detached)

    def _start(self, tensors: Sequence[jax.Array]) -> jax.Array:
        """Where the search starts; outside of it, the last result where one is remembered."""
        floats = [tensor.astype(jnp.float32) for tensor in tensors]
        several = tuple(floats) if len(floats) > 1 else floats[0]
        stat, viewed = in_place(self.init_op, self.view, several, self.reduce_dim or 0)
        shape = jax.eval_shape(lambda x: self.init_op(self.view(x)), floats[0]).shape
        init = stat(viewed).reshape(shape)
        if self.memory is None or not in_trial():
            return init
        last = self.memory.get_value().reshape(init.shape)
        return jnp.where(jnp.isnan(last), init, last)

    def _remember(self, shape: tuple[int, ...] | None) -> None:
        if shape is not None:
            self.memory = QuantStat(float_array(float("nan"), shape))

    def _memories(self) -> list[QuantStat]:
        return [] if self.memory is None else [self.memory]

    def _memory_state(self) -> list[jax.Array]:
        return [variable.get_value() for variable in self._memories()]


def _in_groups(x: jax.Array, view: View) -> jax.Array:
    """A tensor with its groups as two axes, as the quantizer returns it; any other as it is."""
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
        quantizer, _ = _copy(graphdef, state)  # one for each trial: what state it moves is forgotten
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


def _laid_like(x: jax.Array, found: Any, cut: Cut) -> Any:
    """A trial's result in groups, in the shape of the tensor."""
    value = join_groups(found.value, cut.axis, x.shape[cut.axis])
    scale, zero_point = (cut.spread(number, x) for number in (found.scale, found.zero_point))
    return QuantResult(value, scale, zero_point, found.bit_width)


def _copy(graphdef: Any, state: Any) -> Any:
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf, state))
