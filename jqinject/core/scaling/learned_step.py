"""The step of integers as a parameter of its own: LSQ, learned step size quantization."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.core._protocols import Restrict, Stat, View
from jqinject.core.construction import check
from jqinject.core.construction.assign import assign, set_given
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.scaling.from_statistics import ParameterFromRuntimeStatsScaling
from jqinject.core.scaling.scale_rule import ScaleRule
from jqinject.core.sources import FromParameter, Number
from jqinject.core.sources.collection import DEFAULT_MOMENTUM
from jqinject.core.stats.search import Task
from jqinject.ops.ste import with_gradient_of


@dataclass(frozen=True)
class _Steps:
    """From the mean magnitude of a weight to the step that is learned: `2 mean |w| / sqrt(Q)`.

    Attributes:
        rule: which steps are allowed.
        root: the square root of the largest integer `Q`.
    """

    rule: ScaleRule
    root: Any

    def clamped(self, stat: jax.Array) -> jax.Array:
        """The first step, bounded from below."""
        return self.rule.clamped(2.0 * stat / self.root)

    def to_stored(self, value: jax.Array) -> jax.Array:
        """From a step to the domain in which it is learned."""
        return self.rule.to_stored(value)

    def from_stored(self, stored: jax.Array) -> jax.Array:
        """From the domain in which it is learned to the step."""
        return self.rule.from_stored(stored)


@checked_arguments
class LearnedStepScaling(FromParameter):
    """A learned step, `s = restrict(value)`, with LSQ's start and LSQ's gradient.

    It starts at `2 mean |w| / sqrt(Q)`, where `Q` is the largest integer (the call's `threshold`), and its gradient is
    multiplied by `1 / sqrt(N Q)`, where `N` weights share a step. Steps then move as fast, compared with their size, as
    weights do, at every width and in layers of every size.

    The parameter `value` is filled at the first call in training mode (`init_done` becomes 1). Before that, evaluation
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

    fills = True
    rule: ScaleRule
    gradient_scale: float | None = None

    def __init__(
        self,
        scaling_stats_impl: Stat,
        scaling_stats_input_view_shape_impl: View,
        scaling_stats_input_concat_dim: int = 0,
        tracked_parameter_list: Iterable[Any] = (),
        scaling_shape: tuple[int, ...] = (),
        restrict_scaling_impl: Restrict | None = None,
        scaling_min_val: float | None = None,
        scaling_gradient_scale: float | None = None,
    ) -> None:
        where = "LearnedStepScaling"
        super().__init__(
            scaling_stats_impl,
            scaling_stats_input_view_shape_impl,
            scaling_stats_input_concat_dim,
            tracked_parameter_list,
            scaling_shape,
            (None, None),
            of="scaling",
        )
        rule = ScaleRule(
            restrict_scaling_impl, scaling_min_val=scaling_min_val, of=scaling_stats_impl, where=where
        )
        assign(self, rule=rule)
        _set_gradient_scale(self, scaling_gradient_scale)

    def __call__(self, x: jax.Array | None, threshold: Any = None, task: Task = None) -> jax.Array:
        """The step, float32; `threshold` is the largest integer, None for 1."""
        largest = 1 if threshold is None else threshold
        number = self.number(x, _Steps(self.rule, _root(largest)), task)
        return _step(self, number, self._shared_by(x) * largest)

    def _shared_by(self, x: jax.Array | None) -> float:
        """How many weights share a step."""
        tracked = self.tracked_parameters
        sizes = (
            [variable.get_value().size for variable in tracked]
            if tracked
            else [x.size if x is not None else 1]
        )
        assert self.value is not None, "a step is a parameter"
        # Within `shard_map` the parameter and `x` are both those of a part.
        return max(sum(sizes), 1) / max(self.value.get_value().size, 1)


@checked_arguments
class LearnedActStepScaling(ParameterFromRuntimeStatsScaling):
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

    gradient_scale: float | None = None

    def __init__(
        self,
        collect_stats_steps: int,
        scaling_stats_impl: Stat,
        scaling_stats_input_view_shape_impl: View | None = None,
        scaling_shape: tuple[int, ...] = (),
        restrict_scaling_impl: Restrict | None = None,
        scaling_stats_momentum: float | None = DEFAULT_MOMENTUM,
        scaling_min_val: float | None = None,
        scaling_gradient_scale: float | None = None,
    ) -> None:
        super().__init__(
            collect_stats_steps,
            scaling_stats_impl,
            scaling_stats_input_view_shape_impl,
            scaling_shape,
            restrict_scaling_impl,
            scaling_stats_momentum=scaling_stats_momentum,
            scaling_min_val=scaling_min_val,
        )
        _set_gradient_scale(self, scaling_gradient_scale)

    def __call__(self, x: jax.Array, threshold: Any = None, task: Task = None) -> jax.Array:
        """The step, float32; `threshold` is the largest integer, None for 1."""
        largest = 1 if threshold is None else threshold
        number = self.number(x, _Steps(self.rule, _root(largest)), task)
        shared = max(math.prod(x.shape[1:]), 1) / max(math.prod(self.collection.shape), 1)
        return _step(self, number, shared * largest)

    def settle(self, scale: jax.Array, threshold: Any = None) -> jax.Array:
        """The step to search a zero point with: it is learned itself, not its threshold. See the base."""
        return super().settle(scale)


def _set_gradient_scale(scaling: Any, gradient_scale: float | None) -> None:
    if gradient_scale is not None:
        check.positive(gradient_scale, type(scaling).__name__, "scaling_gradient_scale")
        set_given(scaling, gradient_scale=float(gradient_scale))


def _step(scaling: Any, number: Number, root_of_factor: Any) -> jax.Array:
    """The step, whose gradient is multiplied by `1 / sqrt(root_of_factor)` unless a factor was declared."""
    factor = scaling.gradient_scale
    if factor is None:
        factor = 1.0 / _root(root_of_factor)
    stored = with_gradient_of(number.stored * factor, number.stored)
    return scaling.rule.scale(number._replace(stored=stored), None)


def _root(number: Any) -> Any:
    """The square root; of a learned width's largest integer without a gradient."""
    if isinstance(number, int | float):
        return math.sqrt(number)
    return jax.lax.stop_gradient(jnp.sqrt(number))
