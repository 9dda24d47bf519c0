"""Scales and zero points by half-quadratic optimization (HQQ), which weighs outliers less than a squared error.

The error `x - value` is split into a sparse part, found by shrinking it, and the rest, which the next scale or zero
point fits. Each round shrinks less (`beta` grows by `kappa`); the search ends at the first round without improvement of
`mean |x - value|`. Errors are added in a fixed order, where a device has them whole.
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import InitVar, dataclass, replace
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp

from jqinject.core import _protocols, check, component
from jqinject.core.statistics.search import SearchedStat, Trial, remember
from jqinject.core.statistics.statistic import finish, reduced
from jqinject.ops import clamps, processes
from jqinject.ops.power import divide, ordered_sum
from jqinject.ops.reductions import Over, Tensors, kth_smallest, map_tensors
from jqinject.ops.sharding import whole


@dataclass(frozen=True)
class _Sum:
    """The sum over an axis of the views of some tensors, without the axis; channels on several axes stay so.

    Attributes:
        view: how they are laid out.
        reduce_dim: the axis of the view, None for all.
        permute_dims: brings the channels first; a kernel's are added first, then inputs.
        in_order: whether they are added in the fixed order, else where they lie.
    """

    view: _protocols.View
    reduce_dim: int | None
    permute_dims: tuple[int, ...] | None
    in_order: bool

    def __call__(self, *tensors: jax.Array) -> jax.Array:
        dim = self.reduce_dim
        if not self.in_order:
            axes, parts = (None, tensors) if dim is None else reduced(self.view, dim, tensors)
            return finish(Over(axes).sum(parts), axes, False)
        if dim is None:
            return ordered_sum(jnp.concatenate([self._channels_first(whole(x)).reshape(-1) for x in tensors]))
        rows = jnp.moveaxis(jnp.concatenate([self.view(whole(x)) for x in tensors], dim), dim, -1)
        shape = jax.eval_shape(replace(self, in_order=False), *tensors).shape
        return jax.vmap(ordered_sum)(rows.reshape((-1, rows.shape[-1]))).reshape(shape)

    def _channels_first(self, x: jax.Array) -> jax.Array:
        last = x.ndim - 1
        if self.permute_dims is None or last < 1 or self.permute_dims[0] != last:
            return x
        return jnp.transpose(x, (last, last - 1, *range(last - 1)))


def shrink_lp(x: jax.Array, beta: jax.Array, lp_norm: float) -> jax.Array:
    """The sparse part of an error: `sign(x) * max(|x| - |x|^(p - 1) / beta, 0)`.

    Args:
        x: errors, float32.
        beta: larger values shrink less.
        lp_norm: p, above 0 and at most 1.

    Example:
        >>> shrink_lp(jnp.array([-4.0, 0.5, 0.0]), jnp.float32(1.0), 0.5)
        Array([-3.5,  0. ,  0. ], dtype=float32)
    """
    size = jnp.abs(x)
    taken = jnp.where(size > 0, jnp.power(jnp.where(size > 0, size, 1.0), lp_norm - 1), jnp.inf)
    return jnp.sign(x) * jnp.maximum(size - taken / beta, 0.0)


def masked_median(x: Tensors, mask: Tensors, over: Over) -> jax.Array:
    """The lower median of the masked elements; nan if there are none.

    Args:
        x: float32, of one or several tensors.
        mask: which elements count.
        over: the reduced axes.

    Example:
        >>> masked_median(jnp.array([4.0, 1.0, 9.0, 2.0]), jnp.array([True, True, False, True]), Over())
        Array(2., dtype=float32)
    """
    valid = map_tensors(lambda x, counts: counts & ~jnp.isnan(x), x, mask)
    count = over.sum(map_tensors(lambda counts: counts.astype(jnp.int32), valid))
    if over.count(x) == 0:
        return jnp.full(count.shape, jnp.nan, jnp.float32)
    sorted_last = map_tensors(lambda x, counts: jnp.where(counts, x, jnp.inf), x, valid)
    middle = kth_smallest(sorted_last, jnp.maximum(count - 1, 0) // 2 + 1, over)
    return jnp.where(count > 0, middle, jnp.nan)


Fit = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
#: Tensors, each with the result of a trial.
Tried = Sequence[tuple[jax.Array, Any]]


def half_quadratic(
    start: jax.Array, beta: jax.Array, kappa: float, iters: int, fitted: Fit
) -> tuple[jax.Array, jax.Array]:
    """The best candidate of a half-quadratic search, and beta after it.

    Args:
        start: the first candidate.
        beta: of the first round; larger values shrink less.
        kappa: growth factor of beta per round.
        iters: maximum number of rounds.
        fitted: from a candidate and beta to its mean error, and to the next candidate, which fits what shrinking its
            errors leaves. If errors have the shape of candidates, each number is searched, and ends, by itself; beta
            then has that shape too.
    """

    def go_on(state: tuple[jax.Array, ...]) -> jax.Array:
        step, improved = state[0], state[-1]
        return improved.any() & (step < iters)

    def one_round(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        step, candidate, best, least, beta, _ = state
        loss, following = fitted(candidate, beta)
        improved = loss < least
        old, new = (candidate, best, least, beta), (following, candidate, loss, beta * kappa)
        return step + 1, *(jnp.where(improved, *pair) for pair in zip(new, old, strict=True)), improved

    first = (jnp.int32(0), start, start, jnp.full_like(beta, jnp.inf), beta, jnp.ones_like(beta, jnp.bool_))
    _, _, best, _, beta, _ = jax.lax.while_loop(go_on, one_round, first)
    return best, beta


class HalfQuadraticOptimizer(SearchedStat):
    """The common loop of both searches, which differ in `next_candidate` and in the end of their arguments' names."""

    suffix: ClassVar[str]
    permute_dims: tuple[int, ...] | None

    def __post_init__(self, axis_name: Hashable) -> None:
        if axis_name is not None:
            raise ValueError(
                f"{type(self).__name__} adds errors in a stated order, on one device, got axis_name={axis_name!r}.\n"
                "  cure: a statistic or MSE, which take axis_name; or a sharded array in jit, without shard_map"
            )

    def _argument(self, name: str) -> Any:
        return getattr(self, f"hqo_{name}_{self.suffix}")

    @abstractmethod
    def next_candidate(self, candidate: jax.Array, beta: jax.Array, tried: Tried) -> jax.Array:
        """The candidate that fits the remainder of the last."""

    def search(self, trial: Trial, tensors: Sequence[jax.Array]) -> jax.Array:
        """The best candidate."""
        count = max(sum(tensor.size for tensor in tensors), 1)

        def fitted(candidate: jax.Array, beta: jax.Array) -> tuple[jax.Array, jax.Array]:
            tried = [(tensor, trial(tensor, candidate)) for tensor in tensors]
            errors = (self._added(None, jnp.abs(result.value - tensor)) for tensor, result in tried)
            return sum(errors, jnp.float32(0)) / count, self.next_candidate(candidate, beta, tried)

        arrays = {} if self.memory is None else self.memory.get_raw_value()
        beta = arrays.get("beta", jnp.float32(self._argument("beta")))
        kappa, iters = self._argument("kappa"), self._argument("iters")
        best, beta = half_quadratic(self._start(tensors), beta, kappa, iters, fitted)
        if self.memory is not None:
            self.memory.set_value({**arrays, "beta": beta})
        return best

    def _rest(self, x: jax.Array, value: jax.Array, beta: jax.Array) -> jax.Array:
        """A tensor without the sparse part of its error."""
        return x - shrink_lp(x - value, beta, self._argument("lp_norm"))

    def _added(self, reduce_dim: int | None, *tensors: jax.Array) -> jax.Array:
        added = _Sum(self.inner_stats_input_view_shape_impl, reduce_dim, self.permute_dims, in_order=True)
        return processes.on_one_device(added, replace(added, in_order=False), *tensors)


@component.component
class HalfQuadraticOptimizerScale(HalfQuadraticOptimizer):
    """A scale by half-quadratic optimization: the median of `(x - sparse error) / integer`, times the integer steps.

    Args:
        hqo_init_op_scale: the statistic that the search starts from.
        inner_stats_input_view_shape_impl: how `x` is laid out.
        scaling_min_val: the least scale.
        stats_reduce_dim: the axis of the view that shares a scale, None for all.
        permute_dims: brings the channels first, as for the view: the order in which errors are added.
        int_scaling_impl: how many integer steps the scaled value spans.
        bit_width_impl: the bit width.
        hqo_beta_scale: initial beta; larger values shrink less.
        hqo_kappa_scale: growth factor of beta per round.
        hqo_lp_norm_scale: p of the error norm.
        hqo_iters_scale: maximum number of rounds.
        axis_name: not supported: errors are added in a stated order, on one device.

    Raises:
        TypeError: `hqo_iters_scale` is not an int.
        ValueError: a number that must be positive is not; an `axis_name`; (when called) no quantizer is searching.

    Source: HQQ (Badri and Shaji, 2023), as in Brevitas. Differs from Brevitas: the tensor is quantized in its own
    shape, so that convolutions work per channel; a loss of nan ends the search.
    """

    suffix: ClassVar[str] = "scale"
    init_op: ClassVar[str] = "hqo_init_op_scale"
    hqo_init_op_scale: Annotated[_protocols.Stat, check.component]
    inner_stats_input_view_shape_impl: _protocols.View
    int_scaling_impl: _protocols.IntScalingImpl
    bit_width_impl: _protocols.BitWidth
    scaling_min_val: check.NonNegative | None = None
    stats_reduce_dim: int | None = None
    permute_dims: tuple[int, ...] | None = None
    hqo_beta_scale: check.Positive = 1e5
    hqo_kappa_scale: check.Positive = 1.01
    hqo_lp_norm_scale: check.Positive = 0.7
    hqo_iters_scale: check.Count = 1000
    axis_name: InitVar[Any] = None

    def next_candidate(self, candidate: jax.Array, beta: jax.Array, tried: Tried) -> jax.Array:
        """The median of the scales that fit each integer."""
        rests, integers = [], []
        for x, result in tried:
            rests.append(self._rest(x, result.value, beta))
            steps = jnp.round(result.value / result.scale)
            integers.append(steps if result.zero_point is None else steps - result.zero_point)
        axes, rest = self._reduced(tuple(rests))
        _, integer = self._reduced(tuple(integers))
        counts = map_tensors(lambda rest, integer: (rest != 0) & (integer != 0), rest, integer)
        ratio = map_tensors(lambda rest, integer: rest / jnp.where(integer != 0, integer, 1.0), rest, integer)
        scale = finish(masked_median(ratio, counts, Over(axes)), axes, True).reshape(candidate.shape)
        if self.scaling_min_val:
            scale = clamps.signed_clamp_min_ste(scale, self.scaling_min_val)
        scale = scale * self.int_scaling_impl(self.bit_width_impl())
        return jnp.where(jnp.isfinite(scale), scale, candidate)


@component.component
class HalfQuadraticOptimizerZeroPoint(HalfQuadraticOptimizer):
    """A zero point by half-quadratic optimization: the mean of `x - sparse error - integer * scale`.

    Args:
        hqo_init_op_zp: the statistic that the search starts from.
        inner_stats_input_view_shape_impl: how `x` is laid out.
        stats_reduce_dim: the axis of the view that shares a zero point, None for all.
        permute_dims: brings the channels first, as for the view: the order in which errors are added.
        hqo_beta_zp: initial beta; larger values shrink less.
        hqo_kappa_zp: growth factor of beta per round.
        hqo_lp_norm_zp: p of the error norm.
        hqo_iters_zp: maximum number of rounds.
        axis_name: not supported: errors are added in a stated order, on one device.
        memory_shape: given for successive batches: beta keeps growing across them, and the last result is remembered in
            this shape.

    Raises:
        TypeError: `hqo_iters_zp` is not an int.
        ValueError: a number that must be positive is not; an `axis_name`; (when called) no quantizer is searching.

    Source: HQQ (Badri and Shaji, 2023), as in Brevitas. Differs from Brevitas: the tensor is quantized in its own
    shape, so that convolutions work per channel; a loss of nan ends the search; groups that do not fill the axis are
    searched too (there: 0 / 0 in the padding, and the start is returned).
    """

    suffix: ClassVar[str] = "zp"
    init_op: ClassVar[str] = "hqo_init_op_zp"
    hqo_init_op_zp: Annotated[_protocols.Stat, check.component]
    inner_stats_input_view_shape_impl: _protocols.View
    stats_reduce_dim: int | None = None
    permute_dims: tuple[int, ...] | None = None
    hqo_beta_zp: check.Positive = 1.0
    hqo_kappa_zp: check.Positive = 1.01
    hqo_lp_norm_zp: check.Positive = 0.5
    hqo_iters_zp: check.Count = 1000
    memory_shape: InitVar[Sequence[int] | None] = None
    axis_name: InitVar[Any] = None

    def __post_init__(self, memory_shape: Sequence[int] | None, axis_name: Hashable) -> None:
        super().__post_init__(axis_name)
        remember(self, memory_shape, beta=self.hqo_beta_zp)

    def next_candidate(self, candidate: jax.Array, beta: jax.Array, tried: Tried) -> jax.Array:
        """The mean of the remainder after each integer's value."""
        left = []
        for x, result in tried:
            scale = jnp.broadcast_to(result.scale, result.value.shape)
            integers = divide(result.value, scale) + result.zero_point
            left.append(self._rest(x, result.value, beta) - integers * scale)
        axes, parts = self._reduced(tuple(left))
        means = self._added(self.stats_reduce_dim, *left) / max(Over(axes).count(parts), 1)
        return means.reshape(candidate.shape)
