"""The base of statistics, measured where the tensor lies, without moving it.

A statistic has two phases, the measurement and its derivative, so that one that is switched off at run time leaves no
computation of a gradient behind. It reduces the axes of the tensor that are behind the axis of a view, which saves the
view: a transposition, and for sharded tensors a gather. One of blocks over two axes is made from that of groups along
one.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, cast

import jax
import jax.core
import jax.numpy as jnp

from jqinject.core._protocols import View, takes_axes, takes_cut
from jqinject.core.component import frozen_value
from jqinject.core.views import Blocks, MergingView, blocks_of, cut_of
from jqinject.ops import groups, sharding, ste
from jqinject.ops.cut import Cut, warn_if_gathered
from jqinject.ops.reductions import Axes, Measured, Over, Tensors, map_tensors, parts_of


class TwoPhaseStat(ABC):
    """A statistic in parts: `measure` reduces, `statistic` continues from the measurement, and `locate` and `change`
    are its derivative with respect to the tensor.

    Called as a whole it is an ordinary differentiable statistic in float32. In parts, only `measure`, and `locate` in
    the derivative, have to run under `jax.lax.cond`; `change` is elementwise and gets fused. Derivative-only parts run
    only under differentiation.

    The statistic of an empty tensor is that of one zero. nan and inf propagate.

    A frozen dataclass that reduces by `over` and ends with `finished` is computed where a sharded tensor lies; any
    other statistic of your own may gather it (`GatheredWarning`).

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class MeanMagnitude(TwoPhaseStat):
        ...     stats_reduce_dim: Any = None
        ...     def measure(self, x):
        ...         return self.over.sum(jnp.abs(x)) / self.over.count(x)
        ...     def change(self, dx, x, measured, located):
        ...         return self.over.sum(jnp.sign(x) * dx) / self.over.count(x)
        ...     def statistic(self, measured):
        ...         return self.finished(measured)
        >>> jax.value_and_grad(MeanMagnitude())(jnp.array([1.0, -3.0]))
        (Array(2., dtype=float32), Array([ 0.5, -0.5], dtype=float32))

    Attributes:
        signed: whether the statistic can be negative; power-of-two and logarithmic scales refuse those.
        takes_several: whether it also takes a tuple of tensors, for one statistic of all; otherwise, tensors of layers
            that share a quantizer are joined first.
        takes_cut: whether `stats_reduce_dim` may be a `Cut`: an axis in groups that cross shards, as `over` takes it.
        stats_reduce_dim: the axis or axes to reduce, None for the whole tensor.
        keepdim: whether the reduced axis is kept with size 1.
        factor: multiplies the statistic.
        axis_name: a mapped axis (of `shard_map`, `pmap` or `vmap`) that the tensor is spread over, or a tuple of them;
            the statistic is then that of the whole tensor. Otherwise, each shard has its own.
    """

    signed: ClassVar[bool] = False
    takes_several: ClassVar[bool] = False
    takes_cut: ClassVar[bool] = True
    stats_reduce_dim: Axes
    keepdim: Any = False
    factor: Any = 1.0
    axis_name: Any = None

    @cached_property
    def over(self) -> Over:
        """What is reduced."""
        return Over(self.stats_reduce_dim, sharding.names_of(self.axis_name))

    @property
    def never_negative(self) -> bool:
        """Whether the statistic is never negative."""
        return not self.signed

    @property
    def measure_has_derivative(self) -> bool:
        """Whether second derivatives go through `measure` as JAX does: equal elements then share evenly."""
        return False

    @property
    def takes_axes(self) -> bool:
        """Whether it can reduce other axes: a dataclass can be copied with others."""
        return is_dataclass(self)

    @abstractmethod
    def measure(self, x: Any) -> Any:
        """The reduction: float32 tensor -> a few small float arrays (a pytree)."""

    @abstractmethod
    def statistic(self, measured: Measured) -> Any:
        """The statistic as a differentiable function of what was measured; finite for zeros."""

    def locate(self, x: jax.Array, measured: Measured) -> Any:
        """What else `change` needs: a few small arrays."""
        return ()

    def change(self, dx: Tensors, x: jax.Array, measured: Measured, located: Measured) -> Any:
        """How the measurement changes if `x` changes by `dx`: linear in `dx`, structured like `measured`.

        By default, as JAX differentiates `measure`.
        """
        return jax.jvp(self.measure, (x,), (dx,))[1]

    def changed(self, dx: Tensors, x: Any, measured: Measured) -> Any:
        """How the measurement changes, where it is not made under a condition: both parts of the derivative."""
        return self.change(dx, x, measured, self.locate(x, measured))

    def finished(self, measured: Measured) -> jax.Array:
        """What `over` reduced to one array, times `factor`, without the reduced axis unless `keepdim`; of groups, one
        number for each.
        """
        (stat,) = jax.tree.leaves(measured)
        if self.factor != 1:
            stat = self.factor * stat
        axes = self.stats_reduce_dim
        if axes is None or (self.keepdim and not isinstance(axes, Cut)):
            return stat
        return finish(stat, axes, self.keepdim)

    def along(self, axes: Axes) -> "TwoPhaseStat":
        """The statistic over other axes, up to its shape."""
        keepdim = {"keepdim": True} if any(f.name == "keepdim" for f in fields(cast(Any, self))) else {}
        return replace(cast(Any, self), stats_reduce_dim=axes, **keepdim)

    def measured(self, x: Tensors, active: jax.Array | None = None, detached: bool = False) -> Any:
        """The measurement, as a differentiable function of `x` unless `detached`.

        If `active` is given and false, they are arbitrary numbers, at no cost.
        """
        if isinstance(x, tuple):
            x = tuple(part.astype(jnp.float32) for part in x if part.size) or x[0]
        first = x[0] if isinstance(x, tuple) else (x := jnp.asarray(x, jnp.float32))
        shape = _least_shape(self.stats_reduce_dim, first.shape)
        if shape != first.shape:
            x = jnp.zeros(shape, jnp.float32)
        return self.measure(x) if detached else _measured(self, x, active)

    def __call__(self, x: Tensors) -> jax.Array:
        """The statistic of `x`, float32."""
        return self.statistic(self.measured(x))


@frozen_value
class Reduction(TwoPhaseStat):
    """Base of the statistics of this package, which are compared by value; of several tensors too.

    Attributes:
        needs_axis: whether it works over channels, not over a whole tensor.
    """

    takes_several: ClassVar[bool] = True
    needs_axis: ClassVar[bool] = False
    axis_name: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.needs_axis and self.stats_reduce_dim is None:
            raise ValueError(
                f"{type(self).__name__} works over channels: give stats_reduce_dim (1 with OverOutputChannelView). "
                "For one statistic of the whole tensor use AbsMax or AbsAve."
            )

    statistic = TwoPhaseStat.finished


@ste.custom_jvp(0)
def _measured(stat: TwoPhaseStat, x: Tensors, active: jax.Array | None) -> Any:
    return stat.measure(x) if active is None else where_active(active, stat.measure, x)


@_measured.defjvp
def _(stat: TwoPhaseStat, primals: ste.Primals, tangents: ste.Tangents) -> tuple[Any, Any]:
    (x, active), (dx, _) = primals, tangents
    if active is None:
        measured = stat.measure(x) if stat.measure_has_derivative else _measured(stat, x, active)
        return measured, stat.changed(dx, x, measured)
    measured = _measured(stat, x, active)
    return measured, stat.change(dx, x, measured, where_active(active, stat.locate, x, measured))


def where_active(active: jax.Array | bool | None, function: Callable[..., Any], *arguments: object) -> Any:
    """The function's result if `active`, which may be traced, else zeros; None is true."""
    is_known = not isinstance(active, jax.core.Tracer)
    if active is None or (is_known and bool(active)):
        return function(*arguments)
    shapes = jax.eval_shape(function, *arguments)
    sharding.check_same_places(shapes, jnp.asarray(active))
    idle = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return idle if is_known else jax.lax.cond(active, function, lambda *_: idle, *arguments)


def finish(stat: jax.Array, axis: Axes, keepdim: bool) -> jax.Array:
    """Drop the reduced axis unless it is to be kept; a grouped axis keeps one number per group."""
    if isinstance(axis, Cut):
        return stat if axis.spreads else axis.one_each(stat)
    return stat if axis is None or keepdim else jnp.squeeze(stat, axis)


@lru_cache(maxsize=1024)
def _least_shape(axis: Axes, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor, or of the zeros in its place where a statistic would have no elements."""
    if axis is None:
        return shape if math.prod(shape) else (1,)
    if isinstance(axis, Cut):
        return shape
    axes = axis if isinstance(axis, tuple) else (axis,)
    if axes and not -len(shape) <= min(axes) <= max(axes) < len(shape):
        raise ValueError(
            f"stats_reduce_dim={axis} is not an axis of the viewed tensor of shape {shape}. Over the whole tensor "
            "use stats_reduce_dim=None; over channels a view that keeps them, such as OverOutputChannelView."
        )
    reduced = {place % len(shape) for place in axes}
    if all(shape[place] for place in reduced):
        return shape
    return tuple(1 if place in reduced else size for place, size in enumerate(shape))


@dataclass(frozen=True)
class OverBlocks:
    """The statistic of each block of a tensor in groups, once for each group of the block.

    Args:
        stats: the statistic of a group, which keeps the reduced axis.
        blocks: where they lie; zeros fill up the last.

    Raises:
        ValueError: (when called) a block does not fit, and is not to be filled up.

    Example:
        >>> from jqinject.core import AbsMax
        >>> x = jnp.arange(8.0).reshape(1, 2, 4)  # one group of two, and four beside
        >>> OverBlocks(AbsMax(stats_reduce_dim=1, keepdim=True), Blocks(2, axis=2, elements=1))(x).tolist()
        [[[5.0, 5.0, 7.0, 7.0]]]
    """

    stats: Any
    blocks: Blocks

    def __call__(self, x: jax.Array) -> jax.Array:
        """The statistic of a tensor in groups, float32, with 1 along the elements of a group."""
        elements, axis, length = self.blocks.elements, self.blocks.axis, x.shape[self.blocks.axis]
        if not self.blocks.padding:
            groups.check_divides(length, self.blocks.width, "a quantizer in blocks, along their second axis,")
        width = groups.fitting_size(self.blocks.width, length)
        cut = groups.split_groups(x, width, axis)
        inner = groups.elements_axis(axis)
        first = elements + (elements > axis)
        if takes_axes(self.stats):
            stat = self.stats.along((first, inner))(cut)
        else:  # the two axes of a block become one, in place of a group's elements
            at = first - (inner < first)
            joined = jnp.moveaxis(cut, inner, at + 1)
            shape = (*joined.shape[:at], joined.shape[at] * joined.shape[at + 1], *joined.shape[at + 2 :])
            stat = self.stats(joined.reshape(shape))
        shape = tuple(1 if place in (first, inner) else size for place, size in enumerate(cut.shape))
        return groups.spread_groups(jnp.reshape(stat, shape), width, axis, length)


CURE = "a dataclass that derives from jqinject.core.TwoPhaseStat, whose docstring has an example"
JOINS = f"{CURE}, with takes_several = True; or a quantizer for each layer"


def reduced_axes(view: View, reduce_dim: Axes, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The axes of a tensor that make up an axis of its view.

    Args:
        view: the view.
        reduce_dim: an axis of the view; None for all.
        shape: of the tensor.

    Returns:
        The axes, in the order of the view; None if it does more than merge axes, or reorders the others.

    Example:
        >>> from jqinject.core.views import OverOutputChannelView
        >>> reduced_axes(OverOutputChannelView(permute_dims=(3, 2, 0, 1)), 1, (3, 3, 8, 16))
        (2, 0, 1)
    """
    if not isinstance(view, MergingView) or isinstance(reduce_dim, tuple | Cut):
        return None
    merged = view.merged(shape)
    if reduce_dim is None:
        return tuple(axis for axes in merged for axis in axes)
    if not -len(merged) <= reduce_dim < len(merged):
        return None
    reduced = merged[reduce_dim]
    remaining = [axis for axes in merged for axis in axes if axis not in reduced]
    return reduced if remaining == sorted(remaining) else None


@lru_cache(maxsize=1024)
def as_it_lies(stat: Any, view: View, shape: tuple[int, ...]) -> Any:
    """A statistic of the tensor equal to `stat` of its view; None if the view is needed, or zeros are for the tensor.

    Args:
        stat: the statistic: a value.
        view: the view: a value.
        shape: of the tensor.
    """
    axes = reduced_axes(view, stat.stats_reduce_dim, shape) if takes_axes(stat) and math.prod(shape) else None
    if axes is None:
        return None
    return stat if stat.stats_reduce_dim in (None, axes) else stat.along(axes)


def reduced(view: View, reduce_dim: Axes, x: Tensors) -> tuple[Axes, Tensors]:
    """What to reduce for a statistic of views: axes of the tensors themselves, if possible.

    Args:
        view: the view.
        reduce_dim: an axis of it; None for all.
        x: one tensor, or several with a common statistic.

    Returns:
        The axes to reduce, None for all, and tensors; else `reduce_dim` and views.
    """
    parts = parts_of(x)
    places = {
        in_groups(view, reduce_dim, part) or reduced_axes(view, reduce_dim, part.shape) for part in parts
    }
    if None in places:
        return reduce_dim, map_tensors(view, x)
    if reduce_dim is None:
        return None, x
    axes: Axes = next(iter(places))
    like = {part.shape if isinstance(axes, Cut) else part.ndim for part in parts}
    return (axes, x) if len(places) == len(like) == 1 else (reduce_dim, map_tensors(view, x))


def in_groups(view: View, reduce_dim: Axes, x: jax.Array) -> Cut | None:
    """The groups of a view, if their elements, and perhaps whole axes beside, are reduced and may cross shards."""
    cut = cut_of(view, x)
    if cut is None or reduce_dim is None or isinstance(reduce_dim, Cut):
        return None
    axes = {axis % (x.ndim + 1) for axis in (reduce_dim if isinstance(reduce_dim, tuple) else (reduce_dim,))}
    inner = cut.axis + 1
    if inner not in axes or cut.axis in axes:
        return None
    return replace(cut, beside=tuple(sorted(axis - (axis > inner) for axis in axes - {inner})))


def in_place(stat: Any, view: Any, x: Tensors, join: int = 0, of_parameter: bool = True) -> tuple[Any, Any]:
    """A statistic and its argument for `stat(view(x))`, up to its shape.

    Several tensors are reduced one by one if the statistic can combine them, else joined. A `GatheredWarning` is raised
    if the statistic cannot be taken of sharded tensors where they lie.

    Args:
        stat: the statistic.
        view: the view.
        x: the tensor, float32, or several.
        join: the axis along which several views are joined.
        of_parameter: whether the tensor is a parameter. Activations are sharded along their first axis, as a rule, so
            that merging their axes gathers nothing.

    Raises:
        ValueError: several tensors share blocks.
    """
    blocks = blocks_of(view, parts_of(x)[0])
    if blocks is not None and isinstance(x, tuple):
        raise ValueError(
            f"blocks of {view.group_size} x {blocks.width} belong to one tensor, got {len(x)} that share a quantizer.\n"
            "  cure: a quantizer for each layer, or groups along one axis (group_size = an int)"
        )
    stat = stat if blocks is None else OverBlocks(stat, blocks)
    takes = takes_axes(stat)
    if isinstance(x, tuple) and not (takes and stat.takes_several and stat.stats_reduce_dim in (None, join)):
        why = "joins the weights of several layers"
        viewed = [view(with_gather_warning(stat, part, range(part.ndim), why, JOINS)) for part in x]
        return stat, jnp.concatenate(viewed, join)
    crosses = any(cut_of(view, part) is not None for part in parts_of(x))
    if not takes or (crosses and not takes_cut(stat)):
        return stat, map_tensors(lambda part: view(_told_of_view(stat, view, part, of_parameter)), x)
    axes, tensors = reduced(view, stat.stats_reduce_dim, x)
    return (stat if axes == stat.stats_reduce_dim else stat.along(axes)), tensors


def _told_of_view(stat: object, view: View, x: jax.Array, of_parameter: bool) -> jax.Array:
    """A tensor that is about to be viewed for a statistic that cannot be taken of it where it lies."""
    cut = cut_of(view, x)
    if cut is not None:
        why = f"needs groups of {cut.size}, which cross shards"
        return with_gather_warning(stat, x, (cut.axis,), why, CURE)
    if not (of_parameter and isinstance(view, MergingView)):
        return x
    merged = [[axis for axis in axes if x.shape[axis] > 1] for axes in view.merged(x.shape)]
    later = [axis for axes in merged for axis in axes[1:]]
    return with_gather_warning(stat, x, later, "merges axes of the tensor", CURE)


def with_gather_warning(
    component: object, x: jax.Array, axes: Sequence[int], why: str, cure: str
) -> jax.Array:
    """`x`, of which a `GatheredWarning` says that it is gathered for a component if it is sharded along some axes."""
    along = f"axis {axes[0]}" if len(axes) == 1 else f"one of its axes {tuple(axes)}"
    where = f"a tensor of shape {x.shape} is gathered for it if it is sharded along {along}"
    message = f"{type(component).__name__} {why}: {where}.\n  cure: {cure}"
    return warn_if_gathered(x, axes, message)


def statistic_of(
    stat: Any, view: Any, x: Tensors, join: int = 0, of_parameter: bool = True, active: Any = None
) -> jax.Array:
    """`stat(view(x))`, up to its shape.

    Args:
        stat: the statistic, not a searched one; a `TwoPhaseStat` leaves no gradient computation behind when idle.
        view: the view.
        x: the tensor, float32, or several with a common statistic.
        join: the axis along which several views are joined.
        of_parameter: see `in_place`.
        active: bool scalar, traced or not: if false, the result is an arbitrary number, computed at no cost.
    """
    if active is not None and not isinstance(active, jax.core.Tracer) and bool(active):
        active = None
    if isinstance(stat, TwoPhaseStat) and isinstance(view, MergingView) and isinstance(x, jax.Array):
        lies = as_it_lies(stat, view, x.shape)
        if lies is not None:
            return lies.statistic(_measured(lies, x, active))
    stat, x = in_place(stat, view, x, join, of_parameter)
    if isinstance(stat, TwoPhaseStat):
        return stat.statistic(stat.measured(x, active))
    return where_active(active, stat, x)
