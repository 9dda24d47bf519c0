"""Zero points: none, or from a distance in floats: learned, or a statistic of the tensor or of parameters."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jqinject.core import _protocols, check, component
from jqinject.core.memory import memory, memory_policy
from jqinject.core.statistics.search import Candidate, Task
from jqinject.ops import groups, lean, power, sharding, ste


@dataclass(frozen=True)
class ZeroZeroPoint:
    """The zero point 0: symmetric quantization.

    Example:
        >>> float(ZeroZeroPoint()(jnp.ones(3), jnp.float32(1), 8))
        0.0
    """

    has_zero_point = False

    def __call__(
        self, x: jax.Array | None = None, scale: jax.Array | None = None, bit_width: lean.Bits | None = None
    ) -> jax.Array:
        """A float32 zero."""
        return lean.known_zero()


@component.component
class ScaleShiftQuantZeroPoint(component.Component):
    """A zero point whose distance in floats is itself quantized: `quantized(z) / scale + min_int`.

    Source: Brevitas's `_ScaleShiftQuantZeroPoint`.

    Args:
        zp_int_quant: quantizes the distance; the first part of its result is used.
        int_quant: gives the integer range.
        zero_point_dequantized_shape: shape of the quantized distance; None means that of the distance, even if
            `zp_int_quant` is grouped.

    Example:
        >>> from jqinject.core import BitWidthConst, ConstScaling, IntQuant, IntScaling, RescalingIntQuant
        >>> steps = RescalingIntQuant(IntQuant(False, False), ConstScaling(1.5), IntScaling(False, False),
        ...     ZeroZeroPoint(), BitWidthConst(2))
        >>> shift = ScaleShiftQuantZeroPoint(steps, IntQuant(narrow_range=False, signed=False))
        >>> float(shift(jnp.float32(0.9), jnp.float32(0.25), 4))
        4.0
    """

    zp_int_quant: Callable[[jax.Array], tuple[Any, ...]]
    int_quant: _protocols.IntQuantizer
    zero_point_dequantized_shape: tuple[int, ...] | None = None

    def __call__(self, zero_point: jax.Array, scale: jax.Array, bit_width: Any) -> jax.Array:
        """The zero point of a range that reaches `zero_point` below zero, float32."""
        quantized, *_ = self.zp_int_quant(zero_point)
        shape = self.zero_point_dequantized_shape
        quantized = groups.ungrouped(quantized, zero_point) if shape is None else quantized.reshape(shape)
        return power.divide(quantized, scale) + self.int_quant.min_int(bit_width)


ScaleShift = Callable[[jax.Array, jax.Array, object], jax.Array]


class _MemoryZeroPoint(memory.Memory):
    """Abstract: a zero point from the distance that a memory remembers.

    A subclass is a dataclass of its constructor's arguments, and states the kind of policy.

    Attributes:
        is_low_end: whether its number is the lower end of the range, at most 0, instead of the distance.
    """

    of = "zero_point"
    empty = 0.0
    is_low_end: ClassVar[bool] = False
    int_quant: Any
    quantize_zero_point: bool
    scale_shift_zero_point: ScaleShift | None = None

    def begin(self, arguments: dict[str, Any], stored: object = None) -> None:
        """Set how a distance becomes a zero point, and what the base sets."""
        super().begin(arguments, stored)
        self.scale_shift_zero_point = arguments.get("scale_shift_zero_point_impl")

    def distance(self, x: jax.Array | None, task: Task) -> jax.Array:
        """How far the range reaches below zero, in floats."""
        stat, stored, collecting = self.number(x, task)
        z = stored if stat is None else stat if stored is None else lean.choose(collecting, stat, stored)
        return -z if self.is_low_end else ste.abs_binary_sign_grad(z)

    def __call__(
        self, x: jax.Array | None, scale: jax.Array, bit_width: object, task: Task = None
    ) -> jax.Array:
        """The zero point of `x`, float32: `clamp(round(z / scale + min_int))`, or `z / scale + min_int`.

        Args:
            x: the tensor.
            scale: float per integer step.
            bit_width: the bit width.
            task: for a statistic that is searched.
        """
        z = self.distance(x, task)
        if self.scale_shift_zero_point is not None:
            return self.scale_shift_zero_point(z, scale, bit_width)
        least = self.int_quant.min_int(bit_width)
        if not self.quantize_zero_point:
            return power.divide(z, scale) + least
        # Distances of groups are in groups already: an `IntQuant` does not view them.
        to_int = getattr(self.int_quant, "steps_to_int", self.int_quant.to_int)
        return to_int(scale, jnp.asarray(least, dtype=jnp.float32), bit_width, z)


@component.component
class ParameterZeroPoint(_MemoryZeroPoint):
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

    kind = "learned"
    zero_point_init: Any
    int_quant: _protocols.IntQuantizer
    quantize_zero_point: bool
    zero_point_shape: tuple[int, ...] | None = None

    def begin(self, arguments: dict[str, object], stored: object = None) -> None:
        """Set what the base sets, with the initial value."""
        names = ("zero_point_init", "zero_point_shape")
        init, shape = (arguments[name] for name in names)
        super().begin(arguments, memory_policy.initial_number(init, shape, "ParameterZeroPoint", names))


@component.component
class ParameterFromRuntimeZeroPoint(_MemoryZeroPoint):
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

        collected_zero_point: a distance that counts as collected, so that it is learned at once; None if absent.

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

    kind = "collected"
    collect_stats_steps: check.Steps
    int_quant: _protocols.IntQuantizer
    quantize_zero_point: bool
    zero_point_stats_impl: _protocols.Stat
    zero_point_shape: tuple[int, ...]
    zero_point_stats_input_view_shape_impl: _protocols.View
    zero_point_stats_momentum: float | None = memory_policy.DEFAULT_MOMENTUM
    collected_zero_point: float | None = None


@component.component
class RuntimeDynamicStatsZeroPoint(_MemoryZeroPoint, memory.Dynamic):
    """The zero point of the given tensor: `z = |stat(view(x))|`, in steps. No state.

    Args:
        zero_point_stats_impl: the statistic, such as `NegativeMinOrZero`.
        int_quant: gives the integer range, rounding and clamping.
        quantize_zero_point: make it an integer of the range.
        zero_point_stats_input_view_shape_impl: its view; None for no view.
        dynamic_scaling_broadcastable_fn: see `RuntimeDynamicStatsScaling`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.core import IntQuant, NegativeMinOrZero
        >>> int_quant = IntQuant(narrow_range=False, signed=False)
        >>> impl = RuntimeDynamicStatsZeroPoint(NegativeMinOrZero(), int_quant, True)
        >>> float(impl(jnp.array([-1.0, 2.0]), jnp.float32(0.25), 4))
        4.0
    """

    zero_point_stats_impl: _protocols.Stat
    int_quant: _protocols.IntQuantizer
    quantize_zero_point: bool
    zero_point_stats_input_view_shape_impl: _protocols.View | None = None
    dynamic_scaling_broadcastable_fn: memory_policy.Broadcastable | None = None


@component.component
class RuntimeDynamicGroupZeroPoint(_MemoryZeroPoint, memory.Dynamic):
    """A zero point for each group of the given tensor: `z = -stat(groups(x))`, in steps. No state.

    Args:
        input_view_impl: the grouping view.
        zero_point_stats_impl: the statistic of a group, keeping the reduced axis with size 1.
        int_quant: gives the integer range, rounding and clamping.
        quantize_zero_point: make it an integer of the range.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.core import DynamicOverSubChannelBlockView, IntQuant, NegativeMinOrZero
        >>> groups = DynamicOverSubChannelBlockView(2, -1)
        >>> impl = RuntimeDynamicGroupZeroPoint(
        ...     groups, NegativeMinOrZero(stats_reduce_dim=-1, keepdim=True), IntQuant(False, False, groups), True)
        >>> impl(jnp.array([-1.0, 2.0, 3.0, 4.0]), jnp.full((2, 1), 0.25), 4).tolist()
        [[4.0], [0.0]]
    """

    input_view_impl: _protocols.View
    zero_point_stats_impl: _protocols.Stat
    int_quant: _protocols.IntQuantizer
    quantize_zero_point: bool
    is_low_end: ClassVar[bool] = True


@component.component
class _OfParameterZeroPoint(_MemoryZeroPoint):
    """Abstract: a zero point of a parameter, or of several that share it."""

    int_quant: _protocols.IntQuantizer
    quantize_zero_point: bool
    zero_point_stats_input_view_shape_impl: _protocols.View
    zero_point_stats_input_concat_dim: int
    zero_point_stats_impl: _protocols.Stat
    zero_point_shape: tuple[int, ...]
    tracked_parameter_list: Iterable[Any] = ()
    zero_point_affine_rescaling_init: float | None = None
    zero_point_affine_shifting_init: float | None = None


@component.component
class StatsFromParameterZeroPoint(_OfParameterZeroPoint):
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

    is_low_end: ClassVar[bool] = True
    scale_shift_zero_point_impl: ScaleShift | None = None


class ParameterFromStatsFromParameterZeroPoint(_OfParameterZeroPoint):
    """A learned zero point that starts from a statistic of the tensor: `z = |value|`.

    The parameter `value` is filled at the first call in training mode (`counter` becomes 1); before that, evaluation
    mode computes the same zero point and stores nothing.

    Differs from Brevitas: neither evaluation nor a non-finite statistic fills the parameter.

    Arguments: see `StatsFromParameterZeroPoint`.

    Raises:
        ValueError: for a shift without a factor, or a wrong shape (when called).
    """

    kind = "filled"

    def distance(self, x: jax.Array | None, task: Task) -> jax.Array:
        """How far the range reaches below zero, in floats."""
        z = super().distance(x, task)
        if not isinstance(task, Candidate):
            return z
        # Before learning, a candidate keeps its sign and skips the affine map.
        return jnp.where(self.counter.get_value() > 0, z, sharding.sharded_as(-self.statistic(x, task), z))
