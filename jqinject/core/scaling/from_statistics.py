"""Scales from statistics of the quantized parameters or of run-time tensors.

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
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from jqinject.core._protocols import Restrict, Stat, View
from jqinject.core.construction import check
from jqinject.core.construction.assign import assign
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.scaling.scale_rule import ScaleRule
from jqinject.core.sources import Collected, FromParameter, Number, Running
from jqinject.core.sources.collection import DEFAULT_MOMENTUM
from jqinject.core.stats.search import Task
from jqinject.core.view import OverBatchOverTensorView
from jqinject.ops.choose import choose


class _FromParameterScaling(FromParameter):
    """Abstract: a scale from a statistic of weights."""

    rule: ScaleRule

    def __init__(
        self,
        scaling_stats_impl: Stat,
        scaling_stats_input_view_shape_impl: View,
        scaling_stats_input_concat_dim: int = 0,
        tracked_parameter_list: Iterable[Any] = (),
        scaling_shape: tuple[int, ...] = (),
        force_parameter: bool = False,
        restrict_scaling_impl: Restrict | None = None,
        restrict_threshold_impl: Restrict | None = None,
        restrict_scale_threshold_impl: Restrict | None = None,
        scaling_affine_rescaling_init: float | None = None,
        scaling_affine_shifting_init: float | None = None,
        scaling_min_val: float | None = None,
    ) -> None:
        super().__init__(
            scaling_stats_impl,
            scaling_stats_input_view_shape_impl,
            scaling_stats_input_concat_dim,
            tracked_parameter_list,
            scaling_shape,
            (scaling_affine_rescaling_init, scaling_affine_shifting_init),
            of="scaling",
            force_parameter=force_parameter,
        )
        restrictions = restrict_scaling_impl, restrict_threshold_impl, restrict_scale_threshold_impl
        assign(self, rule=_rule(self, restrictions, scaling_min_val))

    def __call__(self, x: jax.Array | None, threshold: Any = None, task: Task = None) -> jax.Array:
        """The scale of `x`, float32; `task` for a statistic that is searched."""
        return self.rule.scale(self.number(x, self.rule, task), threshold)


@checked_arguments
class StatsFromParameterScaling(_FromParameterScaling):
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
        >>> import jax.numpy as jnp
        >>> from jqinject.core import AbsMax, OverTensorView
        >>> scaling = StatsFromParameterScaling(AbsMax(), OverTensorView())
        >>> scaling(jnp.array([[1.0, -3.81], [2.0, 0.0]]), 127)
        Array(0.03, dtype=float32)
    """


@checked_arguments
class ParameterFromStatsFromParameterScaling(_FromParameterScaling):
    """A learned scale that starts from the statistic of the tensor: `s = restrict(value) / threshold`.

    The parameter `value` is filled at the first call in training mode (`init_done` becomes 1). Before that, evaluation
    mode computes the same scale and stores nothing. Arguments: see `StatsFromParameterScaling`.

    Differs from Brevitas: neither evaluation nor a non-finite statistic fills the parameter.

    Raises:
        ValueError: as `StatsFromParameterScaling`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.core import AbsMax, OverTensorView
        >>> scaling = ParameterFromStatsFromParameterScaling(AbsMax(), OverTensorView())
        >>> float(scaling(jnp.array([1.0, -3.0]))), float(scaling(jnp.array([1.0, -5.0])))
        (3.0, 3.0)
    """

    fills = True


@checked_arguments
class RuntimeStatsScaling(Running):
    """The statistic of the batch in training, its running mean in evaluation: `s = restrict(stat) / threshold`.

    Like batch normalization. State: `running_stats`, and `counter`, the number of batches in it. An empty batch is
    treated as in evaluation. Arguments: see the module.

    Differs from Brevitas: a non-finite statistic scales its own batch but does not enter the running mean.

    Raises:
        ValueError: for a momentum out of range, a shift without a factor; (when called) a wrong `scaling_shape`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.core import AbsMax
        >>> scaling = RuntimeStatsScaling(AbsMax(), scaling_stats_momentum=0.5)
        >>> float(scaling(jnp.array([[1.0, -3.0]]))), float(scaling(jnp.array([[1.0, -5.0]])))
        (3.0, 5.0)
        >>> scaling.use_running_average = True
        >>> float(scaling(jnp.array([[1.0, -9.0]])))
        4.0
    """

    rule: ScaleRule

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
        super().__init__(
            scaling_stats_impl,
            scaling_stats_input_view_shape_impl or OverBatchOverTensorView(),
            scaling_stats_momentum,
            scaling_shape,
            (scaling_affine_rescaling_init, scaling_affine_shifting_init),
            of="scaling",
        )
        restrictions = restrict_scaling_impl, restrict_threshold_impl, restrict_scale_threshold_impl
        assign(self, rule=_rule(self, restrictions, scaling_min_val))

    def __call__(self, x: jax.Array, threshold: Any = None, task: Task = None) -> jax.Array:
        """The scale, float32; updates the running statistic in training mode."""
        return self.rule.scale(self.number(x, self.rule, task), threshold)


@checked_arguments
class ParameterFromRuntimeStatsScaling(Collected):
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
        collected_range: a statistic that counts as collected, so that it is learned at once; None for none.

    Raises:
        TypeError: when `collect_stats_steps` is not an int.
        ValueError: when it is less than 1, the momentum is out of range; (when called) a wrong `scaling_shape`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.core import AbsMax
        >>> scaling = ParameterFromRuntimeStatsScaling(1, AbsMax())
        >>> [float(scaling(jnp.array([[1.0, -top]]))) for top in (3.0, 5.0, 9.0)]
        [3.0, 3.0, 3.0]
    """

    rule: ScaleRule

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
        collected_range: float | None = None,
    ) -> None:
        super().__init__(
            scaling_stats_impl,
            scaling_stats_input_view_shape_impl or OverBatchOverTensorView(),
            check.positive_steps(collect_stats_steps, type(self).__name__),
            scaling_stats_momentum,
            scaling_shape,
            of="scaling",
        )
        restrictions = restrict_scaling_impl, restrict_threshold_impl, restrict_scale_threshold_impl
        assign(self, rule=_rule(self, restrictions, scaling_min_val))
        if collected_range is not None:
            self._begin(self.rule, collected_range)

    def __call__(self, x: jax.Array, threshold: Any = None, task: Task = None) -> jax.Array:
        """The scale, float32; collects and hands over in training mode."""
        return self.rule.scale(self.number(x, self.rule, task), threshold)

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
        due = self._settle(self.rule)
        return choose(due, self.rule.scale(Number(stored=self.value.get_value()), threshold), scale)

    def init_scale(self) -> None:
        """End the collection now: fill `value` if it is not filled yet."""
        self._finish(self.rule)

    def end_calibration(self) -> None:
        """Fill `value` from the collected statistics; it is learned from the next call on."""
        self._end_calibration(self.rule)

    def complete_state(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Translate a checkpoint's entries for this component.

        A `value` without `counter` means that collection is over; `running_stats` (of a `RuntimeStatsScaling`) become
        the value.

        Args:
            entries: variable name -> array, as found in the checkpoint.

        Returns:
            The entries to load.
        """
        return self._completed(entries, self.rule)


def _rule(
    scaling: Any,
    restrictions: tuple[Restrict | None, Restrict | None, Restrict | None],
    scaling_min_val: float | None,
) -> ScaleRule:
    return ScaleRule(*restrictions, scaling_min_val, of=scaling.stats, where=type(scaling).__name__)
