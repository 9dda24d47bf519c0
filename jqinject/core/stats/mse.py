"""The statistic with the least squared quantization error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.core._protocols import Stat, View
from jqinject.core.construction import check
from jqinject.core.construction.assign import assign
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.stats.in_place import reduced
from jqinject.core.stats.line_search import LINE_SEARCHES, SearchResult
from jqinject.core.stats.search import SearchedStat, Trial
from jqinject.core.stats.two_phase import finish
from jqinject.ops.devices.mapped import names_of
from jqinject.ops.devices.over import Over


@checked_arguments
@dataclass(frozen=True)
class MSEUniformStepBase:
    """One end of a search: the initial statistic divided by the number of candidates.

    Args:
        mse_iters: number of candidates.

    Example:
        >>> float(MSEUniformStepBase(20)(jnp.float32(5.0)))
        0.25
    """

    mse_iters: int

    def __post_init__(self) -> None:
        check.at_least(self.mse_iters, 1, "MSEUniformStepBase", "mse_iters")

    def __call__(self, init: jax.Array) -> jax.Array:
        """`init / mse_iters`."""
        return init / self.mse_iters


@checked_arguments
class MSE(SearchedStat):
    """The candidate with the least `sum (x - quantized(x))^2`, over the tensor or over each channel or group.

    Candidates lie between `mse_base_op(init)` and `init = mse_init_op(view(x))`. Each is tried on the actual quantizer.
    No gradient flows through the search.

    Args:
        mse_init_op: the statistic that the search starts from.
        inner_stats_input_view_shape_impl: the view of `x`, over which squared errors are summed.
        mse_iters: number of candidates.
        mse_base_op: the other end of the search, from `init`; None means `init / mse_iters`.
        stats_reduce_dim: the axis of the view that shares a result, None for all.
        mse_search_method: "grid" (candidates at equal distances) or "fibonacci" (intervals that shrink).
        bipolar_search: also search negative candidates, half of `mse_iters` each.
        memory_shape: shape of the remembered last result, used by the scale search of the next batch; None remembers
            nothing.
        axis_name: a mapped axis that the tensor is spread over, or a tuple of them; squared errors are summed over it.

    Raises:
        TypeError: `mse_iters` is not an int.
        ValueError: too few candidates, or an unknown method; (when called) no quantizer is searching.

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

    def __init__(
        self,
        mse_init_op: Stat,
        inner_stats_input_view_shape_impl: View,
        mse_iters: int = 20,
        mse_base_op: Callable[[jax.Array], jax.Array] | None = None,
        stats_reduce_dim: int | None = None,
        mse_search_method: str = "fibonacci",
        bipolar_search: bool = False,
        memory_shape: Sequence[int] | None = None,
        axis_name: Any = None,
    ) -> None:
        if mse_search_method not in LINE_SEARCHES:
            raise ValueError(
                f"MSE: mse_search_method must be one of {sorted(LINE_SEARCHES)}, got {mse_search_method!r}"
            )
        least = 4 if bipolar_search else 2
        assign(
            self,
            init_op=mse_init_op,
            view=inner_stats_input_view_shape_impl,
            reduce_dim=stats_reduce_dim,
            iters=check.at_least(mse_iters, least, "MSE", "mse_iters"),
            base_op=mse_base_op or MSEUniformStepBase(mse_iters),
            method=mse_search_method,
            bipolar=bool(bipolar_search),
        )
        if axis_name is not None:
            self.axis_name = axis_name
        self._remember(memory_shape if memory_shape is None else tuple(memory_shape))

    iters: int
    base_op: Any
    method: str
    bipolar: bool
    axis_name: Any = None

    def search(self, trial: Trial, tensors: Sequence[jax.Array]) -> jax.Array:
        """The best candidate."""
        init = self._start(tensors)
        base = self.base_op(init)
        low, high = jnp.minimum(base, init), jnp.maximum(base, init)

        def loss(candidate: jax.Array) -> jax.Array:
            errors = (self._error(tensor, trial(tensor, candidate).value) for tensor in tensors)
            return sum((error.reshape(init.shape) for error in errors), 0.0 * init)

        tries = self.iters // 2 if self.bipolar else self.iters
        best = self._between(low, high, loss, tries)
        if self.bipolar:
            negative = self._between(-high, -low, loss, tries)
            # A negative candidate that a restriction refuses has a nan loss.
            return jnp.where(negative.loss < best.loss, negative.candidate, best.candidate)
        return best.candidate

    def _between(self, low: jax.Array, high: jax.Array, loss: Any, tries: int) -> SearchResult:
        return LINE_SEARCHES[self.method](low, high, loss, tries)

    def _error(self, x: jax.Array, value: jax.Array) -> jax.Array:
        squares = jnp.square(x.astype(jnp.float32) - value.astype(jnp.float32))
        if self.reduce_dim is None:
            return Over(None, names_of(self.axis_name)).sum(squares)
        axes, viewed = reduced(self.view, self.reduce_dim, squares)
        return finish(Over(axes, names_of(self.axis_name)).sum(viewed), axes, True)
