"""Learned zero points: from an initial value, or collected from what flows through."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core._protocols import IntQuantizer, Stat, View
from jqinject.core.construction import check
from jqinject.core.construction.assign import set_given
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.state.collect import (
    DEFAULT_MOMENTUM,
    Collection,
    all_counted,
    collect,
    collected_value,
    collection_defaults,
    end_calibration,
    finish_collection,
)
from jqinject.core.state.variables import QuantParam, QuantStat, float_array, int_array
from jqinject.core.stats.layout import gated_statistic, statistic_and_input
from jqinject.core.zero_point.shift import shift
from jqinject.ops.choose import choose
from jqinject.ops.ste import abs_binary_sign_grad


def _identity(x: jax.Array) -> jax.Array:
    return x


@checked_arguments
class ParameterZeroPoint(nnx.Module):
    """A learned zero point: `z = |value|`, the parameter `value` starting at `zero_point_init`.

    Args:
        zero_point_init: initial distance in floats that the range reaches below zero; a number or an array.
        int_quant: gives the integer range, rounding and clamping.
        quantize_zero_point: make it an integer of the range.
        zero_point_shape: shape of the parameter; None means that of `zero_point_init`.

    Raises:
        ValueError: when the shapes disagree or the initial value is not finite.

    Example:
        >>> from jqinject.core import IntQuant
        >>> impl = ParameterZeroPoint(1.0, IntQuant(narrow_range=False, signed=False), True)
        >>> float(impl(jnp.ones(3), jnp.float32(0.25), 4))
        4.0
    """

    quantize: bool = True

    def __init__(
        self,
        zero_point_init: Any,
        int_quant: IntQuantizer,
        quantize_zero_point: bool,
        zero_point_shape: tuple[int, ...] | None = None,
    ) -> None:
        where, name = "ParameterZeroPoint", "zero_point_shape"
        shape = None if zero_point_shape is None else check.shape(zero_point_shape, where, name)
        init = check.initial_value(zero_point_init, shape, where, "zero_point_init", name)
        self.value = QuantParam(jnp.asarray(init))
        self.int_quant = int_quant
        set_given(self, quantize=bool(quantize_zero_point))

    def __call__(self, x: jax.Array | None, scale: jax.Array, bit_width: Any) -> jax.Array:
        """The zero point, float32. `x` is not looked at."""
        z = abs_binary_sign_grad(self.value.get_value())
        return shift(z, scale, bit_width, self.int_quant, self.quantize)


@checked_arguments
class ParameterFromRuntimeZeroPoint(nnx.Module):
    """A zero point that is collected from statistics first, and learned after: `z = |value|`.

    As `ParameterFromRuntimeStatsScaling`: in the first N training calls the batch's own statistic is used
    while `buffer` follows it, call N + 1 fills `value`, from there it is learned. In evaluation mode `buffer`
    (0.0 before any training) is used until then, and for an empty batch, which is no statistic.

    Differs from Brevitas: a statistic that is not finite is used for its own batch, but neither collected nor
    counted.

    Args:
        collect_stats_steps: N, at least 1.
        int_quant: gives the integer range, rounding and clamping.
        quantize_zero_point: make it an integer of the range.
        zero_point_stats_impl: the statistic, `NegativePercentileOrZero` for instance.
        zero_point_shape: shape of the zero point.
        zero_point_stats_input_view_shape_impl: the view the statistic is taken of.
        zero_point_stats_momentum: weight of the newest batch, in (0, 1]; None for the cumulative mean, which
            calibration takes too unless a momentum is named.

    Raises:
        TypeError: when `collect_stats_steps` is not an int.
        ValueError: when it is less than 1, the momentum is out of range, or the shape is wrong (at the call).

    Example:
        >>> from jqinject.core import IntQuant, NegativeMinOrZero, OverTensorView
        >>> int_quant = IntQuant(narrow_range=False, signed=False)
        >>> stat, view = NegativeMinOrZero(), OverTensorView()
        >>> impl = ParameterFromRuntimeZeroPoint(1, int_quant, True, stat, (), view)
        >>> [float(impl(jnp.array([-low, 2.0]), jnp.float32(0.25), 4)) for low in (1.0, 2.0)]
        [4.0, 4.0]
    """

    quantize: bool = True

    def __init__(
        self,
        collect_stats_steps: int,
        int_quant: IntQuantizer,
        quantize_zero_point: bool,
        zero_point_stats_impl: Stat,
        zero_point_shape: tuple[int, ...],
        zero_point_stats_input_view_shape_impl: View,
        zero_point_stats_momentum: float | None = DEFAULT_MOMENTUM,
    ) -> None:
        where = "ParameterFromRuntimeZeroPoint"
        shape = check.shape(zero_point_shape, where, "zero_point_shape")
        steps = check.positive_steps(collect_stats_steps, where)
        self.collection = Collection.of(
            steps, zero_point_stats_momentum, shape, where, "zero_point_stats_momentum"
        )
        self.int_quant = int_quant
        set_given(self, quantize=bool(quantize_zero_point))
        self.stats = zero_point_stats_impl
        self.view = zero_point_stats_input_view_shape_impl
        self.value = QuantParam(float_array(0.0, shape))
        self.buffer = QuantStat(float_array(0.0, shape))
        self.counter = QuantStat(int_array(0))
        self.use_running_average = False

    def __call__(self, x: jax.Array, scale: jax.Array, bit_width: Any) -> jax.Array:
        """The zero point, float32; collects and hands over in training mode."""
        state = (self.value, self.buffer, self.counter)
        if self.use_running_average or x.size == 0:
            z = collected_value(*state, self.collection, _identity)
        else:
            collecting = self.counter.get_value() < self.collection.limit
            stat = gated_statistic(
                *statistic_and_input(self.stats, self.view, x.astype(jnp.float32)), collecting
            )
            where = "ParameterFromRuntimeZeroPoint"
            stat = check.statistic_shape(stat, self.collection.shape, where, "zero_point_shape")
            z = choose(collecting, stat, collect(*state, stat, collecting, self.collection, _identity))
        return shift(abs_binary_sign_grad(z), scale, bit_width, self.int_quant, self.quantize)

    def init_zero_point(self) -> None:
        """End the collection now: `value` is filled from what was collected, if it is not yet."""
        finish_collection(self.value, self.buffer, self.counter, self.collection, _identity)

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
        end_calibration(self.value, self.buffer, self.counter, self.collection, _identity)

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Switch between training and evaluation.

        Args:
            use_running_average: evaluation: collect nothing; None keeps what is set.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def complete_state(self, entries: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint's entries for this component mean: a `value` without `counter` ends the
        collection.

        Args:
            entries: variable name -> array, as found in the checkpoint.

        Returns:
            The entries to load.
        """
        known = {name: entry for name, entry in entries.items() if "running_stats" not in name}
        return collection_defaults(known, self.collection, _identity, _identity, 0.0)
