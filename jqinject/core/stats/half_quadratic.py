"""Statistics by half-quadratic optimization (HQQ): see `half_quadratic_search`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.core._protocols import BitWidth, IntScalingImpl, Stat, View
from jqinject.core.construction import check
from jqinject.core.construction.assign import assign, set_given
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.state.variables import QuantStat, float_array
from jqinject.core.stats.divisible_sum import divisible_sum
from jqinject.core.stats.half_quadratic_search import Rounds, half_quadratic, masked_median, shrink_lp
from jqinject.core.stats.in_place import reduced
from jqinject.core.stats.search import SearchedStat, Trial
from jqinject.core.stats.two_phase import finish
from jqinject.ops.clamp import signed_clamp_min_ste
from jqinject.ops.devices.over import Over, each
from jqinject.ops.power import divide


def _refuse_mapped(axis_name: Any, where: str) -> None:
    if axis_name is not None:
        raise ValueError(
            f"{where} adds errors in a stated order, on one device, got axis_name={axis_name!r}.\n"
            "  cure: a statistic or MSE, which take axis_name; or a sharded array in jit, without shard_map"
        )


class HalfQuadraticOptimizer(SearchedStat):
    """The common loop of both searches, which differ in `next_candidate`."""

    rounds: Rounds
    annealed: QuantStat | None = None
    permute_dims: tuple[int, ...] | None = None

    def _set_rounds(self, beta: Any, kappa: Any, lp_norm: Any, iters: Any, where: str, suffix: str) -> None:
        for name, number in (("beta", beta), ("kappa", kappa), ("lp_norm", lp_norm)):
            if not float(number) > 0:
                raise ValueError(f"{where}: hqo_{name}_{suffix} must be above 0, got {number!r}")
        count = check.at_least(iters, 1, where, f"hqo_iters_{suffix}")
        assign(self, rounds=Rounds(float(beta), float(kappa), float(lp_norm), count))

    @abstractmethod
    def next_candidate(
        self, candidate: jax.Array, beta: jax.Array, tensors: Sequence[jax.Array], results: Sequence[Any]
    ) -> jax.Array:
        """The candidate that fits the remainder of the last."""

    def search(self, trial: Trial, tensors: Sequence[jax.Array]) -> jax.Array:
        """The best candidate."""
        count = max(sum(tensor.size for tensor in tensors), 1)

        def fitted(candidate: jax.Array, beta: jax.Array) -> tuple[jax.Array, jax.Array]:
            results = [trial(tensor, candidate) for tensor in tensors]
            errors = [jnp.abs(result.value - tensor) for result, tensor in zip(results, tensors, strict=True)]
            loss = sum((self._added(None, error) for error in errors), jnp.float32(0)) / count
            return loss, self.next_candidate(candidate, beta, tensors, results)

        beta = jnp.float32(self.rounds.beta) if self.annealed is None else self.annealed.get_value()
        best, beta = half_quadratic(self._start(tensors), beta, self.rounds, fitted)
        if self.annealed is not None:
            self.annealed.set_value(beta)
        return best

    def _memories(self) -> list[QuantStat]:
        return [*super()._memories(), *([] if self.annealed is None else [self.annealed])]

    def _sparse(self, error: jax.Array, beta: jax.Array) -> jax.Array:
        return shrink_lp(error, beta, self.rounds.lp_norm)

    def _added(self, reduce_dim: int | None, *tensors: jax.Array) -> jax.Array:
        return divisible_sum(tensors, self.view, reduce_dim, self.permute_dims)


@checked_arguments
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

    int_scaling_impl: IntScalingImpl
    bit_width_impl: BitWidth
    scaling_min_val: float | None = None

    def __init__(
        self,
        hqo_init_op_scale: Stat,
        inner_stats_input_view_shape_impl: View,
        int_scaling_impl: IntScalingImpl,
        bit_width_impl: BitWidth,
        scaling_min_val: float | None = None,
        stats_reduce_dim: int | None = None,
        permute_dims: Sequence[int] | None = None,
        hqo_beta_scale: float = 1e5,
        hqo_kappa_scale: float = 1.01,
        hqo_lp_norm_scale: float = 0.7,
        hqo_iters_scale: int = 1000,
        axis_name: Any = None,
    ) -> None:
        where = "HalfQuadraticOptimizerScale"
        _refuse_mapped(axis_name, where)
        assign(
            self,
            init_op=hqo_init_op_scale,
            view=inner_stats_input_view_shape_impl,
            reduce_dim=stats_reduce_dim,
            int_scaling_impl=int_scaling_impl,
            bit_width_impl=bit_width_impl,
        )
        set_given(
            self,
            scaling_min_val=check.minimum(scaling_min_val, where, "scaling_min_val"),
            permute_dims=None if permute_dims is None else tuple(permute_dims),
        )
        self._set_rounds(hqo_beta_scale, hqo_kappa_scale, hqo_lp_norm_scale, hqo_iters_scale, where, "scale")

    def next_candidate(
        self, candidate: jax.Array, beta: jax.Array, tensors: Sequence[jax.Array], results: Sequence[Any]
    ) -> jax.Array:
        """The median of the scales that fit each integer."""
        rests, integers = [], []
        for x, result in zip(tensors, results, strict=True):
            rests.append(x - self._sparse(x - result.value, beta))
            integers.append(jnp.round(result.value / result.scale) - result.zero_point)
        axes, rest = reduced(self.view, self.reduce_dim, tuple(rests))
        _, integer = reduced(self.view, self.reduce_dim, tuple(integers))
        counts = each(lambda rest, integer: (rest != 0) & (integer != 0), rest, integer)
        ratio = each(lambda rest, integer: rest / jnp.where(integer != 0, integer, 1.0), rest, integer)
        found = finish(masked_median(ratio, counts, Over(axes)), axes, True).reshape(candidate.shape)
        if self.scaling_min_val:
            found = signed_clamp_min_ste(found, self.scaling_min_val)
        found = found * self.int_scaling_impl(self.bit_width_impl())
        return jnp.where(jnp.isfinite(found), found, candidate)


@checked_arguments
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

    def __init__(
        self,
        hqo_init_op_zp: Stat,
        inner_stats_input_view_shape_impl: View,
        stats_reduce_dim: int | None = None,
        permute_dims: Sequence[int] | None = None,
        hqo_beta_zp: float = 1.0,
        hqo_kappa_zp: float = 1.01,
        hqo_lp_norm_zp: float = 0.5,
        hqo_iters_zp: int = 1000,
        memory_shape: Sequence[int] | None = None,
        axis_name: Any = None,
    ) -> None:
        where = "HalfQuadraticOptimizerZeroPoint"
        _refuse_mapped(axis_name, where)
        assign(
            self,
            init_op=hqo_init_op_zp,
            view=inner_stats_input_view_shape_impl,
            reduce_dim=stats_reduce_dim,
        )
        set_given(
            self,
            permute_dims=None if permute_dims is None else tuple(permute_dims),
        )
        self._set_rounds(hqo_beta_zp, hqo_kappa_zp, hqo_lp_norm_zp, hqo_iters_zp, where, "zp")
        if memory_shape is not None:
            self._remember(tuple(memory_shape))
            self.annealed = QuantStat(float_array(self.rounds.beta))

    def next_candidate(
        self, candidate: jax.Array, beta: jax.Array, tensors: Sequence[jax.Array], results: Sequence[Any]
    ) -> jax.Array:
        """The mean of the remainder after each integer's value."""
        left = []
        for x, result in zip(tensors, results, strict=True):
            scale = jnp.broadcast_to(result.scale, result.value.shape)
            integers = divide(result.value, scale) + result.zero_point
            left.append(x - self._sparse(x - result.value, beta) - integers * scale)
        axes, parts = reduced(self.view, self.reduce_dim, tuple(left))
        means = self._added(self.reduce_dim, *left) / max(Over(axes).count(parts), 1)
        return means.reshape(candidate.shape)
