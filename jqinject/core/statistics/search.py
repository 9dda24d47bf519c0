"""Statistics searched for: the one whose quantizer makes the least error.

A quantizer whose scale or zero point is searched (`facts.searches`) passes it a task as one more argument:

    scaling_impl(x, threshold, Search(quantizer))                 find the statistic with the least loss
    scaling_impl(x, threshold, Candidate(statistic))              use this statistic in its place: one trial

A search calls back what the quantizer would make of a tensor with a candidate, by `quantizer.try_candidate`, so that
the declared rounding, clamping, bit width and restriction take part. Candidates are tried one at a time
(`jax.lax.scan`), for many numbers in parallel: only one quantized copy of the tensor exists.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import check, component
from jqinject.core._protocols import Stat, Threshold, View, searches
from jqinject.core.state import QuantStat, float_array
from jqinject.core.statistics.exact_scale import least_squares_scales, levels_of
from jqinject.core.statistics.statistic import finish, reduced, statistic_of, where_active
from jqinject.core.views import OverSubChannelBlockView, blocks_of, cut_of
from jqinject.ops import groups, reductions, sharding
from jqinject.ops.cut import Cut

Loss = Callable[[jax.Array], jax.Array]


#: The best candidate of each search and its loss, of the shape of the bounds.
Best = tuple[jax.Array, jax.Array]


def least_of(start: Best, candidate: Loss, loss: Loss, fractions: jax.Array) -> Best:
    """The best of `start` and of the candidates at some fractions, tried one at a time; the first of equals."""

    def try_one(best: Best, fraction: jax.Array) -> tuple[Best, None]:
        tried = candidate(fraction)
        error = loss(tried)
        better = error < best[1]
        return (jnp.where(better, tried, best[0]), jnp.where(better, error, best[1])), None

    return jax.lax.scan(try_one, start, fractions)[0]


def grid_search(low: jax.Array, high: jax.Array, loss: Loss, tries: int) -> Best:
    """The best of `tries` equidistant candidates, including `low` and `high`; the lowest of equals.

    Args:
        low: lower bounds, float32.
        high: upper bounds, the same shape.
        loss: candidates -> losses of the same shape.
        tries: number of candidates, at least 2.

    Example:
        >>> grid_search(jnp.float32(0), jnp.float32(4), lambda c: (c - 2.9) ** 2, 5)[0]
        Array(3., dtype=float32)
    """
    fractions = np.linspace(1.0 / (tries - 1), 1.0, tries - 1).astype(np.float32)
    start = (low, loss(low))
    return least_of(start, lambda fraction: low + (high - low) * fraction, loss, jnp.asarray(fractions))


def fibonacci_search(low: jax.Array, high: jax.Array, loss: Loss, tries: int) -> Best:
    """The minimum of a unimodal loss, by Fibonacci search.

    Args:
        low: lower bounds, float32.
        high: upper bounds, the same shape.
        loss: candidates -> losses of the same shape.
        tries: number of intervals, at least 2; each but the first evaluates two losses.

    Example:
        >>> candidate, loss = fibonacci_search(jnp.float32(0), jnp.float32(4), lambda c: (c - 2.9) ** 2, 20)
        >>> round(float(candidate), 2)
        2.9
    """
    numbers = [0.0, 1.0]
    while len(numbers) <= tries:
        numbers.append(numbers[-1] + numbers[-2])
    shrink = [numbers[tries - i] / numbers[tries - i + 2] for i in range(2, tries + 1)]
    zero = jnp.zeros_like(low)

    def narrow(state: tuple[jax.Array, ...], factor: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        left, right, step = state[:3]
        length = right - left
        crossed = step > length / 2
        low, high = left + step, right - step
        first, second = jnp.where(crossed, high, low), jnp.where(crossed, low, high)
        losses = loss(first), loss(second)
        right = jnp.where(losses[0] <= losses[1], second, right)
        left = jnp.where(losses[0] >= losses[1], first, left)
        step = factor * jnp.where(losses[0] != losses[1], length, right - left)
        return (left, right, step, first, second, *losses), None

    start = (low, high, jnp.float32(shrink[0]) * (high - low), low, low, zero, zero)
    end, _ = jax.lax.scan(narrow, start, jnp.asarray(shrink, jnp.float32))
    _, _, _, first, second, loss_first, loss_second = end
    return jnp.where(loss_first <= loss_second, first, second), jnp.minimum(loss_first, loss_second)


LINE_SEARCHES = {"grid": grid_search, "fibonacci": fibonacci_search}
SEARCHES = sorted((*LINE_SEARCHES, "exact"))
OF_SEARCHES = check.among(SEARCHES, f"one of {SEARCHES}")
#: What the exact search also tries, times its start: scales that are powers of two have no others.
HALVES = (2.0, 1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125)

#: (tensor, statistic) -> value, scale, zero point of the quantized tensor.
Trial = Callable[[jax.Array, jax.Array], Any]


@dataclass(frozen=True)
class Search:
    """The task to search a statistic.

    Attributes:
        quantizer: on which candidates are tried, by `try_candidate(x, candidate)`.
        scale: its scale if the zero point is searched, else None.
    """

    quantizer: Any
    scale: jax.Array | None = None


@dataclass(frozen=True)
class Candidate:
    """The task to use a candidate in place of the searched statistic.

    Attributes:
        statistic: the candidate; None means the start of the search.
        scale: the scale, if the candidate is for the zero point, else None.
    """

    statistic: jax.Array | None
    scale: jax.Array | None = None


Task = Search | Candidate | None


def scale_of(scaling: Any, x: jax.Array, threshold: Threshold, task: Task) -> jax.Array:
    """The scale of `x`; a searching scaling also gets the task."""
    return scaling(x, threshold, task) if searches(scaling) else scaling(x, threshold)


def zero_point_of(zero_point: Any, x: jax.Array, scale: jax.Array, bit_width: Any, task: Task) -> jax.Array:
    """The zero point of `x`; a searching component also gets the task."""
    return zero_point(x, scale, bit_width, task) if searches(zero_point) else zero_point(x, scale, bit_width)


class SearchedStat(component.Component):
    """A statistic that is searched by trying candidates; without gradient.

    It takes unviewed tensors and applies its own view, so that losses are measured on whole quantized tensors. Several
    tensors that share a quantizer are searched together.

    Attributes:
        init_op: the name of the attribute that holds the statistic that the search starts from.
        inner_stats_input_view_shape_impl: its view of tensors.
        stats_reduce_dim: the axis of the view that shares a result, None for all.
        memory: a record of the last result (`last`), and of what else a neighbour's next search continues from; None if
            none does.
    """

    searches: ClassVar[bool] = True
    init_op: ClassVar[str]
    inner_stats_input_view_shape_impl: View
    stats_reduce_dim: int | None
    memory: QuantStat | None = None

    @abstractmethod
    def search(self, trial: Trial, tensors: Sequence[jax.Array]) -> jax.Array:
        """The result of the search; `self` is a copy, of which only the memory is kept."""

    def __call__(self, x: reductions.Tensors, task: Task = None, active: Any = None) -> jax.Array:
        """The statistic of `x`, or of several tensors together, float32.

        Args:
            x: the tensor, or a tuple of those with a common statistic.
            task: what is asked for.
            active: bool scalar, traced or not: if false, the result is an arbitrary number, at no cost.
        """
        tensors = list(reductions.parts_of(x))
        view = self.inner_stats_input_view_shape_impl
        if blocks_of(view, tensors[0]) is not None:
            raise ValueError(
                f"{type(self).__name__} searches a scale for each group along one axis, not for blocks over two axes.\n"
                "  cure: group_size = an int; or a statistic that is not searched, such as scaling_stats_op = 'max'"
            )
        cuts = tuple(cut_of(view, x) for x in tensors)
        if isinstance(view, OverSubChannelBlockView):  # groups as two axes, as the quantizer returns them
            tensors = [view(x) if cut is None else x for x, cut in zip(tensors, cuts, strict=True)]
        if isinstance(task, Candidate):
            return self._start(tensors, self.memory) if task.statistic is None else task.statistic
        if task is None:
            raise ValueError(
                f"{type(self).__name__} tries its result on the quantizer that it serves, and was called by none.\n"
                "  cure: use it as scaling_stats_impl or zero_point_stats_impl of a quantizer; a tensor_quant of your "
                "own calls scaling_impl(x, threshold, jqinject.core.Search(self))"
            )

        def search() -> tuple[jax.Array, dict[str, jax.Array]]:
            graphdef, state = nnx.split((task.quantizer, self), graph=True)
            detached = jax.tree.map(jax.lax.stop_gradient, (state, tuple(tensors), task.scale))
            return _search(graphdef, cuts, *detached)

        best, after = where_active(active, search)
        if self.memory is not None:
            before = self.memory.get_raw_value()
            if active is not None:
                after = jax.tree.map(partial(jnp.where, active), after, before)
            self.memory.set_value(after)
        return jax.lax.stop_gradient(best)

    def _start(self, tensors: Sequence[jax.Array], memory: QuantStat | None = None) -> jax.Array:
        """Where the search starts, or the result remembered in `memory`."""
        view, stat = self.inner_stats_input_view_shape_impl, getattr(self, self.init_op)
        first, *others = (tensor.astype(jnp.float32) for tensor in tensors)
        joined = (first, *others) if others else first
        init = statistic_of(stat, view, joined, self.stats_reduce_dim or 0)
        init = init.reshape(jax.eval_shape(lambda x: stat(view(x)), first).shape)
        if memory is None:
            return init
        last = memory.get_raw_value()["last"].reshape(init.shape)
        return jnp.where(jnp.isnan(last), init, last)

    def _reduced(self, tensors: Any) -> tuple[Any, Any]:
        """The axes that share a result, and what they are the axes of."""
        return reduced(self.inner_stats_input_view_shape_impl, self.stats_reduce_dim, tensors)


def remember(stat: Any, shape: Sequence[int] | None, **more: float) -> None:
    """Let a neighbour's next search continue from the last result, of this shape; None remembers nothing.

    Args:
        stat: the statistic.
        shape: of the result.
        more: what else it continues from, with initial numbers.
    """
    if shape is not None:
        numbers = {name: float_array(number) for name, number in more.items()}
        stat.memory = QuantStat({"last": float_array(float("nan"), tuple(shape)), **numbers})


@partial(jax.jit, static_argnums=(0, 1))
def _search(
    graphdef: Any,
    cuts: tuple[Cut | None, ...],
    state: nnx.State[Any, Any],
    tensors: tuple[jax.Array, ...],
    scale: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One search, compiled once for quantizers of the same structure."""

    def copies() -> Any:
        return nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf, state))

    def trial(tensor: jax.Array, statistic: jax.Array) -> Any:
        quantizer, _ = copies()  # for each trial: its state changes are discarded
        cut = next(cut for cut, part in zip(cuts, tensors, strict=True) if part is tensor)
        result = quantizer.try_candidate(tensor, Candidate(statistic, scale))
        if cut is None:
            return result
        value = result.value  # in the shape of the tensor
        if value.ndim != tensor.ndim:
            value = groups.join_groups(value, cut.axis, tensor.shape[cut.axis])
        numbers = jax.tree.map(lambda x: cut.spread(x, tensor), (result.scale, result.zero_point))
        return SimpleNamespace(value=value, scale=numbers[0], zero_point=numbers[1], grid=result.grid)

    _, stat = copies()
    best = stat.search(trial, tensors)
    if stat.memory is None:
        return best, {}
    arrays = stat.memory.get_raw_value()
    return best, {**arrays, "last": best.reshape(arrays["last"].shape)}


@component.component
class MSE(SearchedStat):
    """The candidate with the least `sum (x - quantized(x))^2`, over the tensor or over each channel or group.

    Candidates lie between `init / mse_iters` and `init = mse_init_op(view(x))`. Each is tried on the actual quantizer.
    No gradient flows through the search. The exact search asks for no candidates: it computes the best scale of all
    (`jqinject.core.least_squares_scales`), for grids of at most 8 bits that are rounded to nearest. Where scales are
    restricted (powers of two), it tries what lies next to it, and `init` times powers of two.

    Args:
        mse_init_op: the statistic that the search starts from.
        inner_stats_input_view_shape_impl: the view of `x`, over which squared errors are summed.
        mse_iters: number of candidates.
        stats_reduce_dim: the axis of the view that shares a result, None for all.
        mse_search_method: "grid" (candidates at equal distances), "fibonacci" (intervals that shrink) or "exact".
        bipolar_search: also search negative candidates, half of `mse_iters` each.
        memory_shape: shape of the remembered last result, used by the scale search of the next batch; None remembers
            nothing.
        axis_name: a mapped axis that the tensor is spread over, or a tuple of them; squared errors are summed over it.

    Raises:
        TypeError: `mse_iters` is not an int.
        ValueError: too few candidates, or an unknown method; "exact" with an axis name; (when called) no quantizer is
            searching; "exact" for a zero point, or with one that is not 0, or on a grid of more than 8 bits.

    Source: Brevitas. Differs from Brevitas: it calls the quantizer, not the proxy, so a layer's activation function is
    not applied twice; trials keep only their result; layers that share a quantizer are tried one by one in their own
    shapes.

    Example:
        >>> from jqinject.core import (
        ...     AbsMax, BitWidthConst, IntQuant, IntScaling, OverTensorView, RescalingIntQuant,
        ...     StatsFromParameterScaling, ZeroZeroPoint,
        ... )
        >>> stat = MSE(AbsMax(), OverTensorView(), mse_iters=20, mse_search_method="grid")
        >>> quant = RescalingIntQuant(
        ...     IntQuant(True, True), StatsFromParameterScaling(stat, lambda x: x), IntScaling(True, True),
        ...     ZeroZeroPoint(), BitWidthConst(2),
        ... )
        >>> round(float(quant(jnp.array([1.0, -1.0, 0.9, 1.1, -2.0])).scale), 1)
        1.2
    """

    init_op: ClassVar[str] = "mse_init_op"
    mse_init_op: Annotated[Stat, check.component]
    inner_stats_input_view_shape_impl: View
    mse_iters: int = 20
    stats_reduce_dim: int | None = None
    mse_search_method: Annotated[str, OF_SEARCHES] = "fibonacci"
    bipolar_search: bool = False
    memory_shape: InitVar[Sequence[int] | None] = None
    axis_name: Any = None

    def __post_init__(self, memory_shape: Sequence[int] | None) -> None:
        check.between(4 if self.bipolar_search else 2, np.inf)(self.mse_iters, "MSE", "mse_iters")
        remember(self, memory_shape)
        if self.mse_search_method == "exact" and self.axis_name is not None:
            raise ValueError(
                f"MSE: the exact search sorts a tensor on one device, got axis_name={self.axis_name!r}.\n"
                "  cure: mse_search_method = 'grid'; or a sharded array in jit, without shard_map"
            )

    def search(self, trial: Trial, tensors: Sequence[jax.Array]) -> jax.Array:
        """The best candidate."""
        init = self._start(tensors)
        base = init / self.mse_iters
        low, high = jnp.minimum(base, init), jnp.maximum(base, init)

        def loss(candidate: jax.Array) -> jax.Array:
            errors = (self._error(tensor, trial(tensor, candidate).value) for tensor in tensors)
            return sum((error.reshape(init.shape) for error in errors), 0.0 * init)

        if self.mse_search_method == "exact":
            return self._exact(trial, tensors, init, loss) if sum(x.size for x in tensors) else init
        line_search = LINE_SEARCHES[self.mse_search_method]
        tries = self.mse_iters // 2 if self.bipolar_search else self.mse_iters
        best, least = line_search(low, high, loss, tries)
        if not self.bipolar_search:
            return best
        negative, error = line_search(-high, -low, loss, tries)
        # A negative candidate that a restriction refuses has a nan loss.
        return jnp.where(error < least, negative, best)

    def _exact(self, trial: Trial, tensors: Sequence[jax.Array], init: jax.Array, loss: Loss) -> jax.Array:
        """The candidate whose scale is the best of all."""
        results = [trial(tensor, init) for tensor in tensors]
        if any(result.zero_point is not None for result in results):
            raise ValueError(
                "MSE: the exact search is of a scale without zero point, and this quantizer has one.\n"
                "  cure: mse_search_method = 'grid'; or a symmetric quantizer"
            )
        scales = [jnp.broadcast_to(x.scale, tensor.shape) for x, tensor in zip(results, tensors, strict=True)]
        x, levels = self._rows(tensors), levels_of(results[0].grid)
        unit = init.reshape(-1) / self._rows(scales)[:, 0]
        signs = (1.0, -1.0) if self.bipolar_search else (1.0,)
        best = [(sign * unit * least_squares_scales(sign * x, levels)).reshape(init.shape) for sign in signs]
        candidates = jnp.stack([*best, *(sign * half * init for sign in signs for half in HALVES)])
        return least_of((init, loss(init)), lambda candidate: candidate, loss, candidates)[0]

    def _rows(self, tensors: Sequence[jax.Array]) -> jax.Array:
        """The numbers that share a result as rows, float32."""
        view, dim = self.inner_stats_input_view_shape_impl, self.stats_reduce_dim
        viewed = [view(sharding.whole(x.astype(jnp.float32))) for x in tensors]
        if dim is None:
            return jnp.concatenate([x.reshape(-1) for x in viewed])[None]
        rows = jnp.moveaxis(jnp.concatenate(viewed, dim), dim, -1)
        return rows.reshape(-1, rows.shape[-1])

    def _error(self, x: jax.Array, value: jax.Array) -> jax.Array:
        squares = jnp.square(x.astype(jnp.float32) - value.astype(jnp.float32))
        axes, viewed = (None, squares) if self.stats_reduce_dim is None else self._reduced(squares)
        return finish(reductions.Over(axes, sharding.names_of(self.axis_name)).sum(viewed), axes, True)
