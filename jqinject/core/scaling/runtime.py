"""Scales made from statistics of what flows through at run time: activations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core._protocols import Restrict, Stat, View
from jqinject.core.construction import check
from jqinject.core.construction.assign import assign, set_given
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.restrict_val import FloatRestrictValue
from jqinject.core.scaling._affine import AffineRescaling, affine_rescaling
from jqinject.core.scaling._restricted import (
    RestrictedScaling,
    clamp_scale,
    clamp_statistic,
    divides_only,
    scale_of_statistic,
    scale_of_stored,
)
from jqinject.core.state.collect import (
    DEFAULT_MOMENTUM,
    Collection,
    all_counted,
    collect,
    collected_value,
    collection_defaults,
    end_calibration,
    finish_collection,
    settle_collection,
    update_running,
)
from jqinject.core.state.variables import QuantParam, QuantStat, float_array, int_array
from jqinject.core.stats.layout import gated_statistic, statistic_and_input
from jqinject.core.view import OverBatchOverTensorView
from jqinject.ops.choose import choose
from jqinject.ops.power import divide


@checked_arguments
class RuntimeStatsScaling(RestrictedScaling, nnx.Module):
    """The statistic of the batch in training, its running mean in evaluation: `s = restrict(stat) /
    threshold`.

    As batch normalization does. State: `running_stats`, and `counter`, the number of batches in it. An empty
    batch is no statistic: it is treated as in evaluation.

    Differs from Brevitas: a statistic that is not finite scales its own batch but does not enter the running
    mean; a statistic below 2**-64 counts as 2**-64.

    Args:
        scaling_stats_impl: the statistic.
        scaling_stats_input_view_shape_impl: the view it is taken of; None means `OverBatchOverTensorView()`.
        scaling_shape: shape of the scale.
        scaling_affine_rescaling_init: initial factor of a learned affine map; None for none.
        scaling_affine_shifting_init: its initial shift; None for none.
        restrict_scaling_impl: which values are allowed; None means `FloatRestrictValue()`.
        restrict_threshold_impl: likewise for the threshold; None means as `restrict_scaling_impl`.
        restrict_scale_threshold_impl: applied to the quotient; None means nothing.
        scaling_stats_momentum: weight of the newest batch, in (0, 1]; None for the cumulative mean, which calibration
            takes too unless a momentum is named.
        scaling_min_val: the least value before the division.

    Raises:
        ValueError: for a momentum out of range, a shift without a factor, or a wrong `scaling_shape` (at the
            call).

    Example:
        >>> from jqinject.core.stats import AbsMax
        >>> scaling = RuntimeStatsScaling(AbsMax(), scaling_stats_momentum=0.5)
        >>> float(scaling(jnp.array([[1.0, -3.0]]))), float(scaling(jnp.array([[1.0, -5.0]])))
        (3.0, 5.0)
        >>> scaling.use_running_average = True
        >>> float(scaling(jnp.array([[1.0, -9.0]])))
        4.0
    """

    view: View = OverBatchOverTensorView()
    restrict_scaling_impl: Restrict = FloatRestrictValue()
    restrict_threshold_impl: Restrict | None = None
    restrict_scale_threshold_impl: Restrict | None = None
    affine_rescaling: AffineRescaling | None = None
    scaling_min_val: float | None = None

    def __init__(
        self,
        scaling_stats_impl: Stat,
        scaling_stats_input_view_shape_impl: View | None = None,
        scaling_shape: tuple[int, ...] = (),
        scaling_affine_rescaling_init: float | None = None,
        scaling_affine_shifting_init: float | None = None,
        restrict_scaling_impl: Restrict | None = None,
        restrict_threshold_impl: Restrict | None = None,
        restrict_scale_threshold_impl: Restrict | None = None,
        scaling_stats_momentum: float | None = DEFAULT_MOMENTUM,
        scaling_min_val: float | None = None,
    ) -> None:
        where = "RuntimeStatsScaling"
        shape = check.shape(scaling_shape, where, "scaling_shape")
        self.collection = Collection.of(0, scaling_stats_momentum, shape, where, "scaling_stats_momentum")
        self.stats = scaling_stats_impl
        self.running_stats = QuantStat(float_array(1.0, shape))
        self.counter = QuantStat(int_array(0))
        self.use_running_average = False
        set_given(
            self,
            view=scaling_stats_input_view_shape_impl,
            restrict_scaling_impl=restrict_scaling_impl,
            restrict_threshold_impl=restrict_threshold_impl,
            restrict_scale_threshold_impl=restrict_scale_threshold_impl,
            affine_rescaling=affine_rescaling(
                shape, scaling_affine_rescaling_init, scaling_affine_shifting_init, where, "scaling"
            ),
            scaling_min_val=check.minimum(scaling_min_val, where, "scaling_min_val"),
        )

    def __call__(self, x: jax.Array, threshold: Any = None) -> jax.Array:
        """The scale, float32; moves the running statistic in training mode."""
        settled = self.use_running_average or x.size == 0
        stat = self.running_stats.get_value() if settled else self._batch_statistic(x)
        if self.affine_rescaling is None:
            return scale_of_statistic(self, stat, threshold, self.stats)
        stored = self.restrict_scaling_impl.restrict_init_tensor(clamp_scale(stat, self.scaling_min_val))
        return scale_of_stored(self, self.affine_rescaling(stored), threshold)

    def _batch_statistic(self, x: jax.Array) -> jax.Array:
        stat_impl, viewed = statistic_and_input(self.stats, self.view, x.astype(jnp.float32))
        stat = check.statistic_shape(stat_impl(viewed), self.collection.shape, "RuntimeStatsScaling")
        counted = update_running(self.running_stats, self.counter, stat, self.collection)
        self.counter.set_value(counted)
        return stat

    def has_range(self) -> bool | None:
        """Whether a batch has entered the running statistic; see `StaticRange`."""
        return all_counted(self.counter.get_value())

    def begin_calibration(self) -> None:
        """From now on average batches anew."""
        self.collection = self.collection.of_calibration(True)
        self.counter.set_value(jnp.zeros_like(self.counter.get_value()))
        self.use_running_average = False

    def end_calibration(self) -> None:
        """Go on as in training."""
        self.collection = self.collection.of_calibration(False)

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Switch between training and evaluation.

        Args:
            use_running_average: evaluation: use the running statistic; None keeps what is set.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def complete_state(self, entries: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint's entries for this component mean: running statistics without a counter have been
        moved.

        Args:
            entries: variable name -> array, as found in the checkpoint.

        Returns:
            The entries to load.
        """
        completed = dict(entries)
        if "running_stats" in completed and "counter" not in completed:
            completed["counter"] = int_array(1)
        return completed


@checked_arguments
class ParameterFromRuntimeStatsScaling(RestrictedScaling, nnx.Module):
    """A scale that is collected from statistics first, and learned after.

    | training call | scale                                           | state                               |
    |---------------|-------------------------------------------------|-------------------------------------|
    | 1 .. N        | the batch's statistic / threshold, unrestricted | `buffer` follows it; `counter` + 1  |
    | N + 1         | restrict(value) / threshold                     | `value` is filled from `buffer`     |
    | later         | restrict(value) / threshold                     | nothing moves; `value` is learned   |

    In evaluation mode the scale is made from `buffer` (1.0 before any training) until `value` is filled, and
    from `value` after; nothing moves. The statistic runs only while it is collected. An empty batch is no
    statistic: it is treated as in evaluation.

    Differs from Brevitas: in evaluation the least value is applied before the division, as in training; a
    statistic that is not finite scales its own batch but is neither collected nor counted; a statistic below
    2**-64 counts as 2**-64.

    Args:
        collect_stats_steps: N, at least 1.
        scaling_stats_impl: the statistic.
        scaling_stats_input_view_shape_impl: the view it is taken of; None means `OverBatchOverTensorView()`.
        scaling_shape: shape of the scale.
        restrict_scaling_impl: which values are allowed; None means `FloatRestrictValue()`.
        restrict_threshold_impl: likewise for the threshold; None means as `restrict_scaling_impl`.
        restrict_scale_threshold_impl: applied to the quotient; None means nothing.
        scaling_stats_momentum: weight of the newest batch, in (0, 1]; None for the cumulative mean, which calibration
            takes too unless a momentum is named.
        scaling_min_val: the least value before the division.

    Raises:
        TypeError: when `collect_stats_steps` is not an int.
        ValueError: when it is less than 1, the momentum is out of range, or `scaling_shape` is wrong (at the
            call).

    Example:
        >>> from jqinject.core.stats import AbsMax
        >>> scaling = ParameterFromRuntimeStatsScaling(1, AbsMax())
        >>> [float(scaling(jnp.array([[1.0, -top]]))) for top in (3.0, 5.0, 9.0)]
        [3.0, 3.0, 3.0]
    """

    collection: Collection
    stats: Stat
    value: QuantParam
    buffer: QuantStat
    counter: QuantStat
    use_running_average: bool
    view: View = OverBatchOverTensorView()
    restrict_scaling_impl: Restrict = FloatRestrictValue()
    restrict_threshold_impl: Restrict | None = None
    restrict_scale_threshold_impl: Restrict | None = None
    scaling_min_val: float | None = None

    def __init__(
        self,
        collect_stats_steps: int,
        scaling_stats_impl: Stat,
        scaling_stats_input_view_shape_impl: View | None = None,
        scaling_shape: tuple[int, ...] = (),
        restrict_scaling_impl: Restrict | None = None,
        restrict_threshold_impl: Restrict | None = None,
        restrict_scale_threshold_impl: Restrict | None = None,
        scaling_stats_momentum: float | None = DEFAULT_MOMENTUM,
        scaling_min_val: float | None = None,
    ) -> None:
        where = "ParameterFromRuntimeStatsScaling"
        shape = check.shape(scaling_shape, where, "scaling_shape")
        steps = check.positive_steps(collect_stats_steps, where)
        assign(
            self,
            collection=Collection.of(steps, scaling_stats_momentum, shape, where, "scaling_stats_momentum"),
            stats=scaling_stats_impl,
            value=QuantParam(float_array(1.0, shape)),
            buffer=QuantStat(float_array(1.0, shape)),
            counter=QuantStat(int_array(0)),
            use_running_average=False,
        )
        set_given(
            self,
            view=scaling_stats_input_view_shape_impl,
            restrict_scaling_impl=restrict_scaling_impl,
            restrict_threshold_impl=restrict_threshold_impl,
            restrict_scale_threshold_impl=restrict_scale_threshold_impl,
            scaling_min_val=check.minimum(scaling_min_val, where, "scaling_min_val"),
        )

    def __call__(self, x: jax.Array, threshold: Any = None) -> jax.Array:
        """The scale, float32; collects and hands over in training mode."""
        to_stored = self.restrict_scaling_impl.restrict_init_tensor
        state = (self.value, self.buffer, self.counter)
        if self.use_running_average or x.size == 0:
            return scale_of_stored(self, collected_value(*state, self.collection, to_stored), threshold)
        collecting = self.counter.get_value() < self.collection.limit
        stat = gated_statistic(*statistic_and_input(self.stats, self.view, x.astype(jnp.float32)), collecting)
        stat = check.statistic_shape(stat, self.collection.shape, "ParameterFromRuntimeStatsScaling")
        stat = clamp_statistic(stat, self.scaling_min_val, self.stats)
        stored = collect(*state, stat, collecting, self.collection, to_stored)
        if divides_only(self, self.stats):
            return scale_of_stored(self, choose(collecting, stat, stored), threshold)
        learned = scale_of_stored(self, stored, threshold)
        return choose(collecting, stat if threshold is None else divide(stat, threshold), learned)

    def settle(self, scale: jax.Array, threshold: Any = None) -> jax.Array:
        """The scale that a zero point is searched with.

        It is the batch's own, and after the last of the collected batches, the mean of all of them: then `value` is
        filled, and learned from the next call on (as in Brevitas).

        Args:
            scale: the scale of this call.
            threshold: as for the call.
        """
        if self.use_running_average:
            return scale
        state = (self.value, self.buffer, self.counter)
        due = settle_collection(*state, self.collection, self.restrict_scaling_impl.restrict_init_tensor)
        return choose(due, scale_of_stored(self, self.value.get_value(), threshold), scale)

    def init_scale(self) -> None:
        """End the collection now: `value` is filled from what was collected, if it is not yet."""
        finish_collection(
            self.value,
            self.buffer,
            self.counter,
            self.collection,
            self.restrict_scaling_impl.restrict_init_tensor,
        )

    def has_range(self) -> bool | None:
        """Whether a statistic was collected; see `StaticRange`."""
        return all_counted(self.counter.get_value())

    def begin_calibration(self) -> None:
        """From now on collect anew, however many statistics there are."""
        self.collection = self.collection.of_calibration(True)
        self.counter.set_value(jnp.zeros_like(self.counter.get_value()))
        self.use_running_average = False

    def end_calibration(self) -> None:
        """Fill `value` from what was collected; it is learned from the next call on."""
        self.collection = self.collection.of_calibration(False)
        to_stored = self.restrict_scaling_impl.restrict_init_tensor
        end_calibration(self.value, self.buffer, self.counter, self.collection, to_stored)

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Switch between training and evaluation.

        Args:
            use_running_average: evaluation: collect nothing; None keeps what is set.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def complete_state(self, entries: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint's entries for this component mean.

        A `value` without `counter` means that collection is over; `running_stats` (of a
        `RuntimeStatsScaling`) become the value.

        Args:
            entries: variable name -> array, as found in the checkpoint.

        Returns:
            The entries to load.
        """
        restrict = self.restrict_scaling_impl
        return collection_defaults(
            entries,
            self.collection,
            lambda stat: restrict.restrict_init_tensor(clamp_scale(stat, self.scaling_min_val)),
            restrict,
            1.0,
        )
