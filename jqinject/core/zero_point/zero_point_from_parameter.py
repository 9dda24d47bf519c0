"""Zero points made from statistics of the parameters that are quantized."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.core._protocols import IntQuantizer, Stat, View
from jqinject.core.construction.assign import assign, set_given
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.sources import DISTANCE, FromParameter
from jqinject.core.stats.search import Candidate, Task
from jqinject.core.zero_point.shift import shift
from jqinject.ops.devices.explicit_axes import sharded_as
from jqinject.ops.ste import abs_binary_sign_grad

ScaleShift = Callable[[jax.Array, jax.Array, Any], jax.Array]


@checked_arguments
class StatsFromParameterZeroPoint(FromParameter):
    """A zero point computed anew from the tensor at every call: `z = -stat(view(x))`.

    Args:
        int_quant: gives the integer range, rounding and clamping.
        quantize_zero_point: make it an integer of the range.
        zero_point_stats_input_view_shape_impl: its view.
        zero_point_stats_input_concat_dim: axis along which the views of several parameters are joined.
        zero_point_stats_impl: the statistic, such as `NegativeMinOrZero`.
        zero_point_shape: shape of the zero point.
        tracked_parameter_list: the parameters that share it; with one, the tensor passed to the call is used.
        zero_point_affine_rescaling_init: initial factor of a learned affine map of the statistic, if any.
        zero_point_affine_shifting_init: its initial shift, if any.
        scale_shift_zero_point_impl: from the distance `z` in floats to the zero point, such as
            `ScaleShiftQuantZeroPoint`; None uses `int_quant` and `quantize_zero_point`.

    Raises:
        ValueError: for a shift without a factor, or a wrong shape (when called).

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.core import IntQuant, NegativeMinOrZero, OverTensorView
        >>> int_quant = IntQuant(narrow_range=False, signed=False)
        >>> impl = StatsFromParameterZeroPoint(int_quant, True, OverTensorView(), 0, NegativeMinOrZero(), ())
        >>> float(impl(jnp.array([-1.0, 2.0]), jnp.float32(0.25), 4))
        4.0
    """

    int_quant: IntQuantizer
    quantize: bool
    scale_shift_zero_point: ScaleShift | None = None

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
        super().__init__(
            zero_point_stats_impl,
            zero_point_stats_input_view_shape_impl,
            zero_point_stats_input_concat_dim,
            tracked_parameter_list,
            zero_point_shape,
            (zero_point_affine_rescaling_init, zero_point_affine_shifting_init),
            of="zero_point",
        )
        assign(self, int_quant=int_quant, quantize=bool(quantize_zero_point))
        set_given(self, scale_shift_zero_point=scale_shift_zero_point_impl)

    def __call__(self, x: jax.Array, scale: jax.Array, bit_width: Any, task: Task = None) -> jax.Array:
        """The zero point of `x`, float32; `task` for a statistic that is searched."""
        stat, stored, _ = self.number(x, DISTANCE, task)
        lowest: Any = stored if stat is None else stat
        if self.scale_shift_zero_point is not None:
            return self.scale_shift_zero_point(-lowest, scale, bit_width)
        return shift(-lowest, scale, bit_width, self.int_quant, self.quantize)


@checked_arguments
class ParameterFromStatsFromParameterZeroPoint(FromParameter):
    """A learned zero point that starts from a statistic of the tensor: `z = |value|`.

    The parameter `value` is filled at the first call in training mode (`init_done` becomes 1); before that, evaluation
    mode computes the same zero point and stores nothing.

    Differs from Brevitas: neither evaluation nor a non-finite statistic fills the parameter.

    Arguments: see `StatsFromParameterZeroPoint`.

    Raises:
        ValueError: for a shift without a factor, or a wrong shape (when called).
    """

    fills = True
    int_quant: IntQuantizer
    quantize: bool

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
        super().__init__(
            zero_point_stats_impl,
            zero_point_stats_input_view_shape_impl,
            zero_point_stats_input_concat_dim,
            tracked_parameter_list,
            zero_point_shape,
            (zero_point_affine_rescaling_init, zero_point_affine_shifting_init),
            of="zero_point",
        )
        assign(self, int_quant=int_quant, quantize=bool(quantize_zero_point))

    def __call__(self, x: jax.Array, scale: jax.Array, bit_width: Any, task: Task = None) -> jax.Array:
        """The zero point of `x`, float32; `task` for a statistic that is searched."""
        z = abs_binary_sign_grad(self.number(x, DISTANCE, task).stored)
        if isinstance(task, Candidate):
            # Before learning, a candidate keeps its sign and skips the affine map.
            assert self.init_done is not None
            filled = self.init_done.get_value() > 0
            z = jnp.where(filled, z, sharded_as(-self.statistic(x, task), z))
        return shift(z, scale, bit_width, self.int_quant, self.quantize)
