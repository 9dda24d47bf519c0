"""Sources that measure the given tensor, or the parameters of all layers that share a quantizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.core
import jax.numpy as jnp
from flax import nnx

from jqinject.core import check
from jqinject.core._protocols import Factors, Stat, View
from jqinject.core.component import assign, set_given, set_view
from jqinject.core.memory.source import (
    EMPTY,
    AffineRescaling,
    Domain,
    Number,
    Source,
    affine_rescaling,
    rescaled_value,
)
from jqinject.core.state import QuantParam, QuantStat, float_array
from jqinject.core.statistics.search import Task
from jqinject.core.statistics.statistic import in_place, statistic_of
from jqinject.core.views import cut_of
from jqinject.ops.clamp import all_finite
from jqinject.ops.reductions import parts_of
from jqinject.ops.sharding import sharded_as
from jqinject.ops.ste import with_gradient_of

Broadcastable = Callable[[jax.Array, tuple[int, ...]], jax.Array]


@dataclass(frozen=True)
class _Tracking:
    """How parameters are joined, and the shape of their statistic: static, compared by value.

    Attributes:
        concat_dim: the axis along which views of several parameters are joined.
        shape: of the statistic.
        shape_name: its name in error messages.
    """

    concat_dim: int
    shape: tuple[int, ...]
    shape_name: str


class FromParameter(Source):
    """Abstract: the statistic of the weight that is quantized, or of all weights that share the quantizer.

    If it `fills`, its parameter `value` is filled from the statistic at the first call in training mode, which sets
    `init_done` to 1. Before that, evaluation mode computes the same number and stores nothing. A non-finite statistic
    fills nothing.

    A single tracked parameter is not kept: every call passes its value, and a second reference to a layer's kernel
    would tie the two. Several are kept as the layers' own Variables, so that their shared gradient reaches every layer.

    Args:
        stats: the statistic.
        view: its view.
        concat_dim: axis along which the views of several parameters are joined.
        tracked: `nnx.Variable`s, or arrays if built by hand (kept without gradient).
        shape: of the statistic.
        affine_init: initial factor and shift of a learned affine map; None omits it.
        of: "scaling" or "zero_point": prefix of the user's arguments.
        force_parameter: also keep a single parameter, used when called with None.

    Raises:
        ValueError: for a shift without a factor, or `force_parameter` without a parameter.
    """

    fills: ClassVar[bool] = False
    tracking: _Tracking
    value: QuantParam | None = None
    init_done: QuantStat | None = None
    use_running_average: bool
    affine_rescaling: AffineRescaling | None = None
    tracked_parameters: nnx.List[nnx.Variable[Any]] | None = None

    def __init__(
        self,
        stats: Stat,
        view: View,
        concat_dim: int,
        tracked: Iterable[Any],
        shape: tuple[int, ...],
        affine_init: tuple[float | None, float | None],
        *,
        of: str,
        force_parameter: bool = False,
    ) -> None:
        where, shape_name = type(self).__name__, f"{of}_shape"
        self._take(stats, view)
        assign(self, tracking=_Tracking(concat_dim, check.shape(shape, where, shape_name), shape_name))
        set_given(
            self,
            tracked_parameters=_kept(list(tracked), force_parameter, where),
            affine_rescaling=affine_rescaling(self.tracking.shape, affine_init, where, of),
        )
        if self.fills:
            value = QuantParam(float_array(EMPTY[of], self.tracking.shape))
            assign(self, value=value, init_done=QuantStat(float_array(0.0)), use_running_average=False)

    set_view = set_view

    def unfilled(self) -> tuple[str, ...]:
        """See `Source`."""
        return () if self.init_done is None or self.init_done.get_value().any() else ("value",)

    def number(self, x: Any, domain: Domain, task: Task = None) -> Number:
        """The statistic, its affine map, or the parameter filled from that."""
        if self.value is not None and self.init_done is not None:
            return Number(stored=self._filled(self.value, self.init_done, x, domain, task))
        stat = self.statistic(x, task)
        return Number(stat) if self.affine_rescaling is None else Number(stored=self._mapped(stat, domain))

    def _filled(
        self, value: QuantParam, init_done: QuantStat, x: Any, domain: Domain, task: Task
    ) -> jax.Array:
        """The parameter, or what will fill it; with the gradient of the parameter."""
        done = init_done.get_value() > 0
        learned = value.get_value()

        def first() -> jax.Array:
            return sharded_as(self._mapped(self.statistic(x, task), domain), learned)

        if not isinstance(done, jax.core.Tracer):
            fresh = learned if bool(done) else first()
        else:
            fresh = jax.lax.cond(done, lambda: jnp.ones_like(learned), first)
        current = jax.lax.stop_gradient(jnp.where(done, learned, fresh))
        if not self.use_running_average:
            keep = jnp.logical_or(done, all_finite(current))
            # A shared quantizer is called once per weight: the gradient of every call goes to the parameter.
            filled = jnp.where(keep, current, jax.lax.stop_gradient(learned))
            value.set_value(with_gradient_of(learned, filled))
            init_done.set_value(keep.astype(jnp.float32))
        return with_gradient_of(learned, current)

    def statistic(self, x: Any, task: Task) -> jax.Array:
        """The statistic of `x`, or of the tracked parameters."""
        tracked, tracking = self.tracked_parameters, self.tracking
        view: Any = self.view
        if tracked is not None and (len(tracked) > 1 or x is None):
            x = tuple(variable.get_value().astype(jnp.float32) for variable in reversed(tracked))
            if not self.searches:
                _check_joint(tracked, [jax.eval_shape(view, part) for part in x], tracking.concat_dim, self)
        elif x is None:
            raise TypeError(
                f"{type(self).__name__} needs a tensor: call it with the weight, or build it with force_parameter=True."
            )
        else:
            x = x.astype(jnp.float32)
        stats: Any = self.stats
        stat = (
            stats.of(parts_of(x), task)
            if self.searches
            else statistic_of(stats, view, x, tracking.concat_dim)
        )
        if stat.shape == tracking.shape:
            return stat
        return check.statistic_shape(stat, tracking.shape, type(self).__name__, tracking.shape_name)

    def complete_state(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Translate a checkpoint's entries for this component: a `value` without `init_done` is filled.

        Args:
            entries: variable name -> array, as found in the checkpoint.

        Returns:
            The entries to load.
        """
        completed = super().complete_state(entries)
        if self.fills and "value" in completed and "init_done" not in completed:
            completed["init_done"] = float_array(1.0)
        return completed

    def rescaled(self, factors: Factors) -> dict[str, jax.Array]:
        """See `Rescales`."""
        return {} if self.value is None else rescaled_value(self, self.value, factors)

    def _mapped(self, stat: jax.Array, domain: Domain) -> jax.Array:
        stored = domain.to_stored(domain.clamped(stat))
        return stored if self.affine_rescaling is None else self.affine_rescaling(stored)


def _kept(tracked: list[Any], force_parameter: bool, where: str) -> nnx.List[nnx.Variable[Any]] | None:
    if force_parameter and not tracked:
        raise ValueError(
            f"{where}: force_parameter=True needs a parameter in tracked_parameter_list, got none."
        )
    if len(tracked) < 2 and not force_parameter:
        return None
    return nnx.List([p if isinstance(p, nnx.Variable) else QuantStat(jnp.asarray(p)) for p in tracked])


def _check_joint(tracked: Any, views: list[Any], concat_dim: int, source: FromParameter) -> None:
    """Refuse views that cannot be joined along an axis."""
    if len({v.shape[:concat_dim] + v.shape[concat_dim:][1:] for v in views}) > 1:
        shapes = [tuple(variable.get_value().shape) for variable in tracked]
        raise ValueError(
            f"{type(source).__name__}: parameters of shapes {shapes} share one quantizer, but their views "
            f"{[v.shape for v in reversed(views)]} cannot be joined along axis {concat_dim}. Layers that share a scale "
            "per channel need the same number of output channels; use a scale per tensor, or two quantizers."
        )


class Dynamic(Source):
    """Abstract: the statistic of the given tensor, in training and evaluation. No state.

    Args:
        stats: the statistic.
        view: its view.
        broadcastable: function of the statistic and the tensor's shape that returns the statistic in a shape that
            broadcasts; None leaves it unchanged, with trailing axes of size 1 if needed (rows of a matrix).
        in_groups: whether the view cuts the tensor into groups, and the statistic has the grouped shape.
    """

    is_dynamic = True
    broadcastable: Broadcastable | None = None
    in_groups: bool = False

    def __init__(
        self, stats: Stat, view: View, broadcastable: Broadcastable | None = None, in_groups: bool = False
    ) -> None:
        self._take(stats, view)
        set_given(self, broadcastable=broadcastable, in_groups=in_groups)

    def number(self, x: jax.Array, domain: Domain, task: Task = None) -> Number:
        """The statistic, in a shape that broadcasts."""
        stats: Any = self.stats
        view: Any = self.view
        x = x.astype(jnp.float32)
        if self.in_groups and not self.searches:
            return Number(_of_groups(stats, view, x))
        stat = stats(view(x), task) if self.searches else stats(view(x))
        if self.broadcastable is not None:
            return Number(self.broadcastable(stat, x.shape))
        if self.in_groups or stat.ndim in (0, x.ndim):
            return Number(stat)
        return Number(stat.reshape((*x.shape[:-1], 1)))


def _of_groups(stat: Stat, view: View, x: jax.Array) -> jax.Array:
    """`stat(view(x))` of a view that cuts groups, with 1 along the elements of a group."""
    found, laid = in_place(stat, view, x)
    cut = cut_of(view, x) if laid.ndim == x.ndim else None
    return found(laid) if cut is None else jnp.expand_dims(found(laid), cut.axis + 1)
