"""Scales that are constant, learned, or from statistics of parameters, of batches or of the given tensor.

Common arguments:

| argument                                           | meaning                                                        |
|----------------------------------------------------|----------------------------------------------------------------|
| `scaling_stats_impl`                               | the statistic                                                  |
| `scaling_stats_input_view_shape_impl`              | the view that it is taken of                                   |
| `scaling_shape`                                    | shape of the scale                                             |
| `restrict_scaling_impl`, `restrict_threshold_impl` | which values of scale and threshold are allowed: `ScaleRule`   |
| `restrict_scale_threshold_impl`, `scaling_min_val` | likewise for the quotient, and the least value: `ScaleRule`    |
| `scaling_affine_rescaling_init`, `..._shifting_..` | initial factor and shift of a learned affine map; None: no map |
| `scaling_stats_momentum`                           | weight of the newest batch, in (0, 1]; None for the cumulative |
|                                                    | mean, which calibration takes too unless one is named          |

Differs from Brevitas: a statistic below 2**-64 becomes 2**-64, so that a tensor of zeros has a finite scale greater
than 0 (there: a scale of 0 and quantized values of nan, unless scaling_min_val is set).

The step of integers as a parameter of its own: LSQ, learned step size quantization.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import _protocols, check, component, views
from jqinject.core.memory.memory import DividedScaling, Dynamic, MemoryScaling
from jqinject.core.memory.memory_policy import DEFAULT_MOMENTUM, Broadcastable, Number, initial_number
from jqinject.core.scaling.rule import FloatRestrictValue
from jqinject.core.statistics.search import Task
from jqinject.ops import lean, processes, ste


class _InitialScaling(DividedScaling):
    """Abstract: a scale that starts at, or is, a given number."""

    def begin(self, arguments: dict[str, Any], stored: object = None) -> None:
        """Set what the base sets, with the initial value in the learned domain."""
        where, names = type(self).__name__, ("scaling_init", "scaling_shape")
        restrict = arguments["restrict_scaling_impl"] or FloatRestrictValue()
        init = initial_number(arguments["scaling_init"], arguments.get("scaling_shape"), where, names)
        if processes.is_traced(init):
            return super().begin(arguments, restrict.restrict_init_tensor(init))
        numbers = [restrict.restrict_init_float(float(number)) for number in init.reshape(-1)]
        check.positive(np.abs(init) if _protocols.keeps_sign(restrict) else init, where, "scaling_init")
        super().begin(arguments, np.asarray(numbers, dtype=np.float32).reshape(init.shape))


@component.component
class ConstScaling(_InitialScaling):
    """A constant scale: `s = restrict(scaling_init) / threshold`.

    It is static: neither in the state nor in checkpoints.

    Args:
        scaling_init: the value, a number or an array that broadcasts with the tensor.
        restrict_scaling_impl, restrict_threshold_impl, restrict_scale_threshold_impl, scaling_min_val: see `ScaleRule`.

    Raises:
        ValueError: when `scaling_init` is not finite, or not positive (it may be negative with
            `SignedFloatRestrictValue`).

    Example:
        >>> float(ConstScaling(0.5)(jnp.ones(3))), float(ConstScaling(0.5)(jnp.ones(3), 4))
        (0.5, 0.125)
    """

    kind = "constant"
    scaling_init: Any
    restrict_scaling_impl: _protocols.Restrict | None = None


@component.component
class ParameterScaling(_InitialScaling):
    """A learned scale: `s = restrict(value) / threshold`, the parameter `value` starting at `scaling_init`.

    The parameter is kept in the domain of the restriction: `log2(scaling_init)` for logarithmic and
    power-of-two scales.

    Differs from Brevitas: without a threshold the scale has the shape of the parameter (there: broadcast with
    `(1,)`).

    Args:
        scaling_init: initial value, a number or an array of `scaling_shape`.
        scaling_shape: shape of the parameter; None means that of `scaling_init`.
        restrict_scaling_impl, restrict_threshold_impl, restrict_scale_threshold_impl, scaling_min_val: see `ScaleRule`.

    Raises:
        ValueError: when the shapes disagree, or `scaling_init` is not finite, or not positive where its
            logarithm is learned.

    Example:
        >>> float(ParameterScaling(6.0)(jnp.ones(3)))
        6.0
        >>> from jqinject.core.scaling.rule import PowerOfTwoRestrictValue
        >>> ParameterScaling(6.0, (3,), PowerOfTwoRestrictValue())(jnp.ones(3))
        Array([8., 8., 8.], dtype=float32)
    """

    kind = "learned"
    scaling_init: Any
    scaling_shape: tuple[int, ...] | None = None
    restrict_scaling_impl: _protocols.Restrict | None = None


@component.component
class RuntimeDynamicStatsScaling(DividedScaling, Dynamic):
    """The statistic of the given tensor: `s = restrict(stat(view(x))) / threshold`. No state.

    Args:
        scaling_stats_impl: the statistic.
        scaling_stats_input_view_shape_impl: its view; None for no view.
        restrict_scaling_impl, restrict_threshold_impl, restrict_scale_threshold_impl, scaling_min_val: see `ScaleRule`.
        dynamic_scaling_broadcastable_fn: function of the statistic and the tensor's shape that returns the statistic in
            a shape that broadcasts; None leaves it unchanged, with trailing axes of size 1 if needed (rows of a
            matrix).

    Example:
        >>> from jqinject.core import AbsMax
        >>> scaling = RuntimeDynamicStatsScaling(AbsMax(stats_reduce_dim=-1, keepdim=True))
        >>> scaling(jnp.array([[1.0, -3.0], [0.5, 0.0]]), 2)
        Array([[1.5 ],
               [0.25]], dtype=float32)
    """

    scaling_stats_impl: _protocols.Stat
    scaling_stats_input_view_shape_impl: _protocols.View | None = None
    restrict_scaling_impl: _protocols.Restrict | None = None
    dynamic_scaling_broadcastable_fn: Broadcastable | None = None


@component.component
class RuntimeDynamicGroupStatsScaling(DividedScaling, Dynamic):
    """A scale for each group of the given tensor: `s = restrict(stat(groups(x))) / threshold`. No state.

    Args:
        group_size: elements of a group, or both lengths of a block.
        group_dim: the axis to cut.
        input_view_impl: the grouping view.
        scaling_stats_impl: the statistic of a group, keeping the reduced axis with size 1.
        restrict_scaling_impl, restrict_threshold_impl, restrict_scale_threshold_impl, scaling_min_val: see `ScaleRule`.

    Raises:
        ValueError: a group size below 1.

    Example:
        >>> from jqinject.core import AbsMax, DynamicOverSubChannelBlockView
        >>> scaling = RuntimeDynamicGroupStatsScaling(
        ...     2, -1, DynamicOverSubChannelBlockView(2, -1), AbsMax(stats_reduce_dim=-1, keepdim=True))
        >>> scaling(jnp.array([1.0, -3.0, 0.5, 0.0])).tolist()
        [[3.0], [0.5]]
    """

    group_size: int | tuple[int, int]
    group_dim: int
    input_view_impl: _protocols.View
    scaling_stats_impl: _protocols.Stat
    restrict_scaling_impl: _protocols.Restrict | None = None


@component.component
class StatsFromParameterScaling(DividedScaling):
    """A scale computed anew from the tensor at every call, differentiable: `s = restrict(stat(view(x))) / threshold`.

    With at most one tracked parameter, the given tensor is used and nothing is stored. Several are kept as Variables,
    viewed and joined, and the given tensor is ignored. Other arguments: see the module.

    Args:
        scaling_stats_input_concat_dim: axis along which the views of several parameters are joined.
        tracked_parameter_list: the parameters that share the scale, `nnx.Variable`s (or arrays, by hand).
        force_parameter: also keep a single tracked parameter, used when called with None.

    Raises:
        ValueError: for a shift without a factor; (when called) a wrong `scaling_shape`, or views that cannot be joined.

    Example:
        >>> from jqinject.core import AbsMax, OverTensorView
        >>> scaling = StatsFromParameterScaling(AbsMax(), OverTensorView())
        >>> scaling(jnp.array([[1.0, -3.81], [2.0, 0.0]]), 127)
        Array(0.03, dtype=float32)
    """

    scaling_stats_impl: _protocols.Stat
    scaling_stats_input_view_shape_impl: _protocols.View
    scaling_stats_input_concat_dim: int = 0
    tracked_parameter_list: Iterable[Any] = ()
    scaling_shape: tuple[int, ...] = ()
    force_parameter: bool = False
    restrict_scaling_impl: _protocols.Restrict | None = None
    scaling_affine_rescaling_init: float | None = None
    scaling_affine_shifting_init: float | None = None


class ParameterFromStatsFromParameterScaling(StatsFromParameterScaling):
    """A learned scale that starts from the statistic of the tensor: `s = restrict(value) / threshold`.

    The parameter `value` is filled at the first call in training mode (`counter` becomes 1). Before that, evaluation
    mode computes the same scale and stores nothing. Arguments: see `StatsFromParameterScaling`.

    Differs from Brevitas: neither evaluation nor a non-finite statistic fills the parameter.

    Raises:
        ValueError: as `StatsFromParameterScaling`.

    Example:
        >>> from jqinject.core import AbsMax, OverTensorView
        >>> scaling = ParameterFromStatsFromParameterScaling(AbsMax(), OverTensorView())
        >>> float(scaling(jnp.array([1.0, -3.0]))), float(scaling(jnp.array([1.0, -5.0])))
        (3.0, 3.0)
    """

    kind = "filled"


@component.component
class RuntimeStatsScaling(DividedScaling):
    """The statistic of the batch in training, its running mean in evaluation: `s = restrict(stat) / threshold`.

    Like batch normalization. State: `running_stats`, and `counter`, the number of batches in it. An empty batch is
    treated as in evaluation. Arguments: see the module.

    Differs from Brevitas: a non-finite statistic scales its own batch but does not enter the running mean.

    Raises:
        ValueError: for a momentum out of range, a shift without a factor; (when called) a wrong `scaling_shape`.

    Example:
        >>> from jqinject.core import AbsMax
        >>> scaling = RuntimeStatsScaling(AbsMax(), scaling_stats_momentum=0.5)
        >>> float(scaling(jnp.array([[1.0, -3.0]]))), float(scaling(jnp.array([[1.0, -5.0]])))
        (3.0, 5.0)
        >>> scaling.use_running_average = True
        >>> float(scaling(jnp.array([[1.0, -9.0]])))
        4.0
    """

    kind = "running"
    default_view = views.OverBatchOverTensorView()
    scaling_stats_impl: _protocols.Stat
    scaling_stats_input_view_shape_impl: _protocols.View | None = None
    scaling_shape: tuple[int, ...] = ()
    scaling_affine_rescaling_init: float | None = None
    scaling_affine_shifting_init: float | None = None
    restrict_scaling_impl: _protocols.Restrict | None = None
    scaling_stats_momentum: float | None = DEFAULT_MOMENTUM


@component.component
class _CollectedScaling(MemoryScaling):
    """Abstract: a scale that is first collected, then learned."""

    kind = "collected"
    default_view = views.OverBatchOverTensorView()
    collect_stats_steps: check.Steps
    scaling_stats_impl: _protocols.Stat
    scaling_stats_input_view_shape_impl: _protocols.View | None = None
    scaling_shape: tuple[int, ...] = ()
    restrict_scaling_impl: _protocols.Restrict | None = None
    scaling_stats_momentum: float | None = DEFAULT_MOMENTUM

    def settle(self, scale: jax.Array, threshold: Any = None) -> jax.Array:
        """The scale to search a zero point with.

        It is the batch's own, or after the last collected batch the mean of all: `value` is then filled, and learned
        from the next call on (as in Brevitas).

        Args:
            scale: the scale of this call.
            threshold: as for the call.
        """
        if self.use_running_average:
            return scale
        assert self.value is not None
        due = self.counter.get_value() == self.policy.limit
        self._fill(due)
        learned = super().__call__(None, threshold, number=Number(stored=self.value.get_value()))
        return lean.choose(due, learned, scale)


@component.component
class ParameterFromRuntimeStatsScaling(_CollectedScaling, DividedScaling):
    """A scale that is first collected from statistics, then learned.

    | training call | scale                                           | state                               |
    |---------------|-------------------------------------------------|-------------------------------------|
    | 1 .. N        | the batch's statistic / threshold, unrestricted | `buffer` follows it; `counter` + 1  |
    | N + 1         | restrict(value) / threshold                     | `value` is filled from `buffer`     |
    | later         | restrict(value) / threshold                     | nothing moves; `value` is learned   |

    In evaluation mode the scale is made from `buffer` (1.0 before any training) until `value` is filled, then from
    `value`; no state changes. The statistic is computed only while collecting. An empty batch is treated as in
    evaluation. Other arguments: see the module.

    Differs from Brevitas: in evaluation the minimum is applied before the division, as in training; a non-finite
    statistic scales its own batch but is neither collected nor counted.

    Args:
        collect_stats_steps: N, at least 1.
        collected_range: a statistic that counts as collected, so that it is learned at once; None if absent.

    Raises:
        TypeError: when `collect_stats_steps` is not an int.
        ValueError: when it is less than 1, the momentum is out of range; (when called) a wrong `scaling_shape`.

    Example:
        >>> from jqinject.core import AbsMax
        >>> scaling = ParameterFromRuntimeStatsScaling(1, AbsMax())
        >>> [float(scaling(jnp.array([[1.0, -top]]))) for top in (3.0, 5.0, 9.0)]
        [3.0, 3.0, 3.0]
    """

    collected_range: float | None = None


class _LearnedStep(MemoryScaling):
    """Abstract: a learned step, with LSQ's start and LSQ's gradient."""

    scaling_gradient_scale: check.Step | None

    def __call__(self, x: jax.Array | None = None, threshold: Any = None, task: Task = None) -> jax.Array:  # type: ignore[override]
        """The step, float32; `threshold` is the largest integer, None for 1."""
        largest = 1 if threshold is None else threshold
        root = _root(largest)
        number = self.number(x, task, lambda stat: 2.0 * stat / root)
        factor = self.scaling_gradient_scale
        if factor is None:
            factor = 1.0 / _root(self._shared_by(x) * largest)
        stored = ste.with_gradient_of(number.stored * factor, number.stored)
        return super().__call__(number=number._replace(stored=stored))

    @abstractmethod
    def _shared_by(self, x: jax.Array | None) -> float:
        """How many numbers share a step."""


def _root(number: Any) -> Any:
    """The square root; of a learned width's largest integer without a gradient."""
    if isinstance(number, int | float):
        return math.sqrt(number)
    return jax.lax.stop_gradient(jnp.sqrt(number))


@component.component
class LearnedStepScaling(_LearnedStep):
    """A learned step, `s = restrict(value)`, with LSQ's start and LSQ's gradient.

    It starts at `2 mean |w| / sqrt(Q)`, where `Q` is the largest integer (the call's `threshold`), and its gradient is
    multiplied by `1 / sqrt(N Q)`, where `N` weights share a step. Steps then move as fast, compared with their size, as
    weights do, at every width and in layers of every size.

    The parameter `value` is filled at the first call in training mode (`counter` becomes 1). Before that, evaluation
    mode computes the same step and stores nothing.

    Differs from `ParameterFromStatsFromParameterScaling`, which learns `Q` times the step.

    Source: Esser et al., Learned Step Size Quantization, 2020.

    Args:
        scaling_stats_impl: the mean magnitude.
        scaling_stats_input_view_shape_impl: the view that it is taken of.
        scaling_stats_input_concat_dim: axis along which the views of several parameters are joined.
        tracked_parameter_list: the parameters that share the step.
        scaling_shape: shape of the step.
        restrict_scaling_impl, scaling_min_val: see `ScaleRule`.
        scaling_gradient_scale: multiplies the gradient instead of `1 / sqrt(N Q)`.

    Raises:
        ValueError: `scaling_gradient_scale` is not positive; (when called) a wrong `scaling_shape`.

    Example:
        >>> from flax import nnx
        >>> from jqinject.core import AbsAve, OverTensorView
        >>> scaling = LearnedStepScaling(AbsAve(), OverTensorView())
        >>> float(scaling(jnp.array([1.0, -3.0, 2.0, -2.0]), 4))  # 2 * 2 / sqrt(4)
        2.0
        >>> gradients = nnx.grad(lambda s: s(jnp.ones(4), 4))(scaling)
        >>> float(gradients["value"][...])  # 1 / sqrt(4 * 4)
        0.25
    """

    kind = "filled"
    scaling_stats_impl: _protocols.Stat
    scaling_stats_input_view_shape_impl: _protocols.View
    scaling_stats_input_concat_dim: int = 0
    tracked_parameter_list: Iterable[Any] = ()
    scaling_shape: tuple[int, ...] = ()
    restrict_scaling_impl: _protocols.Restrict | None = None
    scaling_gradient_scale: check.Step | None = None

    def _shared_by(self, x: jax.Array | None) -> float:
        tracked = self.tracked_parameters or ()
        sizes = [variable.get_value().size for variable in tracked] or [1 if x is None else x.size]
        assert self.value is not None, "a step is a parameter"
        # Within `shard_map` the parameter and `x` are both those of a part.
        return max(sum(sizes), 1) / max(self.value.get_value().size, 1)


@component.component
class LearnedActStepScaling(_LearnedStep, _CollectedScaling):
    """A learned step of activations, with LSQ's start and LSQ's gradient.

    It starts at `2 mean |x| / sqrt(Q)`, where `Q` is the largest integer (the call's `threshold`), averaged over the
    batches that are collected; then `value` is learned. Its gradient is multiplied by `1 / sqrt(N Q)`, where `N`
    numbers of one example (all axes but the first) share a step.

    Differs from `ParameterFromRuntimeStatsScaling`, which learns `Q` times the step.

    Source: Esser et al., Learned Step Size Quantization, 2020.

    Args:
        collect_stats_steps: batches in training mode that are collected.
        scaling_stats_impl: the mean magnitude.
        scaling_gradient_scale: multiplies the gradient instead of `1 / sqrt(N Q)`.
        arguments: see the base.

    Raises:
        ValueError: `scaling_gradient_scale` is not positive; see the base.

    Example:
        >>> from flax import nnx
        >>> from jqinject.core import AbsAve
        >>> scaling = LearnedActStepScaling(1, AbsAve())
        >>> x = jnp.array([[1.0, -3.0, 2.0, -2.0]])
        >>> float(scaling(x, 4)), float(scaling(5 * x, 4))  # 2 * 2 / sqrt(4) from the first batch on
        (2.0, 2.0)
        >>> gradients = nnx.grad(lambda s: s(x, 4))(scaling)
        >>> float(gradients["value"][...])  # 1 / sqrt(4 * 4)
        0.25
    """

    scaling_gradient_scale: check.Step | None = None

    def _shared_by(self, x: jax.Array | None) -> float:
        assert x is not None, "a step of activations is for a tensor"
        return max(math.prod(x.shape[1:]), 1) / max(math.prod(self.shape), 1)

    def settle(self, scale: jax.Array, threshold: _protocols.Threshold = None) -> jax.Array:
        """The step to search a zero point with: it is learned itself, not its threshold. See the base."""
        return super().settle(scale)
