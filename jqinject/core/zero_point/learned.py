"""Learned zero points: from an initial value, or collected at run time."""

from __future__ import annotations

from typing import Any

import jax

from jqinject.core._protocols import IntQuantizer, Stat, View
from jqinject.core.construction import check
from jqinject.core.construction.assign import assign
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.sources import DISTANCE, Collected, Learned
from jqinject.core.sources.collection import DEFAULT_MOMENTUM
from jqinject.core.sources.given import initial_number
from jqinject.core.stats.search import Task
from jqinject.core.zero_point.shift import shift
from jqinject.ops.choose import choose
from jqinject.ops.ste import abs_binary_sign_grad


@checked_arguments
class ParameterZeroPoint(Learned):
    """A learned zero point: `z = |value|`, the parameter `value` starting at `zero_point_init`.

    Args:
        zero_point_init: initial distance in floats that the range reaches below zero; a number or an array.
        int_quant: gives the integer range, rounding and clamping.
        quantize_zero_point: make it an integer of the range.
        zero_point_shape: shape of the parameter; None means that of `zero_point_init`.

    Raises:
        ValueError: when the shapes disagree or the initial value is not finite.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.core import IntQuant
        >>> impl = ParameterZeroPoint(1.0, IntQuant(narrow_range=False, signed=False), True)
        >>> float(impl(jnp.ones(3), jnp.float32(0.25), 4))
        4.0
    """

    int_quant: IntQuantizer
    quantize: bool

    def __init__(
        self,
        zero_point_init: Any,
        int_quant: IntQuantizer,
        quantize_zero_point: bool,
        zero_point_shape: tuple[int, ...] | None = None,
    ) -> None:
        names = ("zero_point_init", "zero_point_shape")
        super().__init__(initial_number(zero_point_init, zero_point_shape, "ParameterZeroPoint", names))
        assign(self, int_quant=int_quant, quantize=bool(quantize_zero_point))

    def __call__(self, x: jax.Array | None, scale: jax.Array, bit_width: Any) -> jax.Array:
        """The zero point, float32. `x` is unused."""
        z = abs_binary_sign_grad(self.number(x, DISTANCE).stored)
        return shift(z, scale, bit_width, self.int_quant, self.quantize)


@checked_arguments
class ParameterFromRuntimeZeroPoint(Collected):
    """A zero point that is first collected from statistics, then learned: `z = |value|`.

    Like `ParameterFromRuntimeStatsScaling`: the first N training calls use the batch's own statistic while `buffer`
    follows it; call N + 1 fills `value`, which is then learned. Until then, evaluation mode and empty batches use
    `buffer` (0.0 before any training).

    Differs from Brevitas: a non-finite statistic is used for its own batch, but neither collected nor
    counted.

    Args:
        collect_stats_steps: N, at least 1.
        int_quant: gives the integer range, rounding and clamping.
        quantize_zero_point: make it an integer of the range.
        zero_point_stats_impl: the statistic, such as `NegativePercentileOrZero`.
        zero_point_shape: shape of the zero point.
        zero_point_stats_input_view_shape_impl: its view.
        zero_point_stats_momentum: weight of the newest batch, in (0, 1]; None for the cumulative mean, which
            calibration takes too unless a momentum is named.

        collected_zero_point: a distance that counts as collected, so that it is learned at once; None for none.

    Raises:
        TypeError: when `collect_stats_steps` is not an int.
        ValueError: when it is less than 1, the momentum is out of range, or the shape is wrong (when called).

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.core import IntQuant, NegativeMinOrZero, OverTensorView
        >>> int_quant = IntQuant(narrow_range=False, signed=False)
        >>> stat, view = NegativeMinOrZero(), OverTensorView()
        >>> impl = ParameterFromRuntimeZeroPoint(1, int_quant, True, stat, (), view)
        >>> [float(impl(jnp.array([-low, 2.0]), jnp.float32(0.25), 4)) for low in (1.0, 2.0)]
        [4.0, 4.0]
    """

    int_quant: IntQuantizer
    quantize: bool

    def __init__(
        self,
        collect_stats_steps: int,
        int_quant: IntQuantizer,
        quantize_zero_point: bool,
        zero_point_stats_impl: Stat,
        zero_point_shape: tuple[int, ...],
        zero_point_stats_input_view_shape_impl: View,
        zero_point_stats_momentum: float | None = DEFAULT_MOMENTUM,
        collected_zero_point: float | None = None,
    ) -> None:
        super().__init__(
            zero_point_stats_impl,
            zero_point_stats_input_view_shape_impl,
            check.positive_steps(collect_stats_steps, type(self).__name__),
            zero_point_stats_momentum,
            zero_point_shape,
            of="zero_point",
        )
        assign(self, int_quant=int_quant, quantize=bool(quantize_zero_point))
        if collected_zero_point is not None:
            self._begin(DISTANCE, collected_zero_point)

    def __call__(self, x: jax.Array, scale: jax.Array, bit_width: Any, task: Task = None) -> jax.Array:
        """The zero point, float32; collects and hands over in training mode."""
        stat, stored, collecting = self.number(x, DISTANCE, task)
        z: Any = stored if stat is None else choose(collecting, stat, stored)
        return shift(abs_binary_sign_grad(z), scale, bit_width, self.int_quant, self.quantize)

    def init_zero_point(self) -> None:
        """End the collection now: fill `value` if it is not filled yet."""
        self._finish(DISTANCE)

    def end_calibration(self) -> None:
        """Fill `value` from the collected statistics; it is learned from the next call on."""
        self._end_calibration(DISTANCE)

    def complete_state(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Translate a checkpoint's entries for this component: a `value` without `counter` ends the collection.

        Args:
            entries: variable name -> array, as found in the checkpoint.

        Returns:
            The entries to load.
        """
        own = {name: entry for name, entry in entries.items() if "running_stats" not in name}
        return self._completed(own, DISTANCE)
