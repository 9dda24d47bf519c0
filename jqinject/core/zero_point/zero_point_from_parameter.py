"""Zero points made from statistics of the parameters that are quantized."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core._protocols import IntQuantizer, Stat, View
from jqinject.core.construction import check
from jqinject.core.construction.assign import set_given
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import Component
from jqinject.core.scaling._affine import AffineRescaling, affine_rescaling
from jqinject.core.state.initialize_once import initialization_defaults, initialize_once
from jqinject.core.state.variables import QuantParam, QuantStat, float_array, int_array
from jqinject.core.stats.search import in_trial
from jqinject.core.stats.tracked import track, tracked_statistic
from jqinject.core.zero_point.shift import shift
from jqinject.ops.devices.explicit_axes import sharded_as
from jqinject.ops.ste import abs_binary_sign_grad

ScaleShift = Callable[[jax.Array, jax.Array, Any], jax.Array]


@dataclass(frozen=True)
class _Source:
    """The static part: how parameters are joined, the shape, and whether the zero point is an integer."""

    quantize: bool
    shape: tuple[int, ...]
    concat_dim: int


@checked_arguments
class StatsFromParameterZeroPoint(Component):
    """A zero point computed anew from the tensor at every call: `z = -stat(view(x))`.

    Args:
        int_quant: gives the integer range, rounding and clamping.
        quantize_zero_point: make it an integer of the range.
        zero_point_stats_input_view_shape_impl: the view the statistic is taken of.
        zero_point_stats_input_concat_dim: axis along which the views of several parameters are joined.
        zero_point_stats_impl: the statistic, `NegativeMinOrZero` for instance.
        zero_point_shape: shape of the zero point.
        tracked_parameter_list: the parameters that share it; with one, the tensor given at the call is used.
        zero_point_affine_rescaling_init: initial factor of a learned affine map of the statistic; None for
            none.
        zero_point_affine_shifting_init: its initial shift; None for none.
        scale_shift_zero_point_impl: from the distance `z` in floats to the zero point, `ScaleShiftQuantZeroPoint` for
            instance; None goes by `int_quant` and `quantize_zero_point`.

    Raises:
        ValueError: for a shift without a factor, or a wrong shape (at the call).

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.core import IntQuant, NegativeMinOrZero, OverTensorView
        >>> int_quant = IntQuant(narrow_range=False, signed=False)
        >>> impl = StatsFromParameterZeroPoint(int_quant, True, OverTensorView(), 0, NegativeMinOrZero(), ())
        >>> float(impl(jnp.array([-1.0, 2.0]), jnp.float32(0.25), 4))
        4.0
    """

    affine_rescaling: AffineRescaling | None = None
    scale_shift_zero_point: ScaleShift | None = None
    tracked_parameters: nnx.List[nnx.Variable[Any]] | None = None

    def __init__(
        self,
        int_quant: IntQuantizer,
        quantize_zero_point: bool,
        zero_point_stats_input_view_shape_impl: View,
        zero_point_stats_input_concat_dim: int,
        zero_point_stats_impl: Stat,
        zero_point_shape: tuple[int, ...],
        tracked_parameter_list: Iterable[Any] = (),
        zero_point_affine_rescaling_init: float | None = None,
        zero_point_affine_shifting_init: float | None = None,
        scale_shift_zero_point_impl: ScaleShift | None = None,
    ) -> None:
        where = "StatsFromParameterZeroPoint"
        shape = check.shape(zero_point_shape, where, "zero_point_shape")
        self.int_quant = int_quant
        self.source = _Source(quantize_zero_point, shape, zero_point_stats_input_concat_dim)
        self.view = zero_point_stats_input_view_shape_impl
        self.stats = zero_point_stats_impl
        set_given(
            self,
            scale_shift_zero_point=scale_shift_zero_point_impl,
            tracked_parameters=track(tracked_parameter_list, False, where),
            affine_rescaling=affine_rescaling(
                shape, zero_point_affine_rescaling_init, zero_point_affine_shifting_init, where, "zero_point"
            ),
        )

    def __call__(self, x: jax.Array, scale: jax.Array, bit_width: Any) -> jax.Array:
        """The zero point of `x`, float32."""
        where = "StatsFromParameterZeroPoint"
        stat = tracked_statistic(
            x, self.tracked_parameters, self.stats, self.view, self.source.concat_dim, where
        )
        stat = check.statistic_shape(stat, self.source.shape, where, "zero_point_shape")
        if self.affine_rescaling is not None:
            stat = self.affine_rescaling(stat)
        if self.scale_shift_zero_point is not None:
            return self.scale_shift_zero_point(-stat, scale, bit_width)
        return shift(-stat, scale, bit_width, self.int_quant, self.source.quantize)


@checked_arguments
class ParameterFromStatsFromParameterZeroPoint(nnx.Module):
    """A learned zero point that starts from a statistic of the tensor: `z = |value|`.

    The parameter `value` is filled at the first call in training mode (`init_done` becomes 1); in evaluation
    mode before that the same zero point is computed and nothing is stored.

    Differs from Brevitas: evaluation does not fill the parameter, nor does a statistic that is not finite.

    Args:
        int_quant: gives the integer range, rounding and clamping.
        quantize_zero_point: make it an integer of the range.
        zero_point_stats_input_view_shape_impl: the view the statistic is taken of.
        zero_point_stats_input_concat_dim: axis along which the views of several parameters are joined.
        zero_point_stats_impl: the statistic, `NegativeMinOrZero` for instance.
        zero_point_shape: shape of the zero point.
        tracked_parameter_list: the parameters that share it; with one, the tensor given at the call is used.
        zero_point_affine_rescaling_init: initial factor of an affine map of the statistic; None for none.
        zero_point_affine_shifting_init: its initial shift; None for none.

    Raises:
        ValueError: for a shift without a factor, or a wrong shape (at the call).
    """

    affine_rescaling: AffineRescaling | None = None
    tracked_parameters: nnx.List[nnx.Variable[Any]] | None = None

    def __init__(
        self,
        int_quant: IntQuantizer,
        quantize_zero_point: bool,
        zero_point_stats_input_view_shape_impl: View,
        zero_point_stats_input_concat_dim: int,
        zero_point_stats_impl: Stat,
        zero_point_shape: tuple[int, ...],
        tracked_parameter_list: Iterable[Any] = (),
        zero_point_affine_rescaling_init: float | None = None,
        zero_point_affine_shifting_init: float | None = None,
    ) -> None:
        where = "ParameterFromStatsFromParameterZeroPoint"
        shape = check.shape(zero_point_shape, where, "zero_point_shape")
        self.int_quant = int_quant
        self.source = _Source(quantize_zero_point, shape, zero_point_stats_input_concat_dim)
        self.view = zero_point_stats_input_view_shape_impl
        self.stats = zero_point_stats_impl
        self.value = QuantParam(float_array(0.0, shape))
        self.init_done = QuantStat(int_array(0))
        self.use_running_average = False
        set_given(
            self,
            tracked_parameters=track(tracked_parameter_list, False, where),
            affine_rescaling=affine_rescaling(
                shape, zero_point_affine_rescaling_init, zero_point_affine_shifting_init, where, "zero_point"
            ),
        )

    def __call__(self, x: jax.Array, scale: jax.Array, bit_width: Any) -> jax.Array:
        """The zero point of `x`, float32."""
        stored = initialize_once(
            self.value, self.init_done, lambda: self._initial(x), not self.use_running_average
        )
        z = abs_binary_sign_grad(stored)
        if in_trial():  # before it is learned, a candidate counts with its sign and without the affine map
            z = jnp.where(self.init_done.get_value() > 0, z, sharded_as(-self._statistic(x), z))
        return shift(z, scale, bit_width, self.int_quant, self.source.quantize)

    def _initial(self, x: jax.Array) -> jax.Array:
        stat = self._statistic(x)
        return stat if self.affine_rescaling is None else self.affine_rescaling(stat)

    def _statistic(self, x: jax.Array) -> jax.Array:
        where = "ParameterFromStatsFromParameterZeroPoint"
        stat = tracked_statistic(
            x, self.tracked_parameters, self.stats, self.view, self.source.concat_dim, where
        )
        return check.statistic_shape(stat, self.source.shape, where, "zero_point_shape")

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Switch between training and evaluation.

        Args:
            use_running_average: evaluation: do not fill the parameter; None keeps what is set.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def complete_state(self, entries: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint's entries for this component mean: a `value` without `init_done` is a filled one.

        Args:
            entries: variable name -> array, as found in the checkpoint.

        Returns:
            The entries to load.
        """
        return initialization_defaults(entries)
