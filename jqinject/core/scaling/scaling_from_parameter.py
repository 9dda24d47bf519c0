"""Scales made from statistics of the parameters that are quantized: weights and biases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jqinject.core._protocols import Restrict, Stat, View
from jqinject.core.construction import check
from jqinject.core.construction.assign import assign, set_given
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import Component
from jqinject.core.restrict_val import FloatRestrictValue
from jqinject.core.scaling._affine import AffineRescaling, affine_rescaling
from jqinject.core.scaling._restricted import (
    RestrictedScaling,
    clamp_scale,
    scale_of_statistic,
    scale_of_stored,
)
from jqinject.core.state.initialize_once import initialization_defaults, initialize_once
from jqinject.core.state.variables import QuantParam, QuantStat, float_array, int_array
from jqinject.core.stats.tracked import track, tracked_statistic


@dataclass(frozen=True)
class _Source:
    """The static part: how parameters are joined, and the shape and least value of the scale."""

    concat_dim: int
    shape: tuple[int, ...]
    min_val: float | None


@checked_arguments
class StatsFromParameterScaling(RestrictedScaling, Component):
    """A scale computed anew from the tensor at every call, differentiable: `s = restrict(stat(view(x))) /
    threshold`.

    In order: statistic, least value, to the restriction's domain, affine map (if any), restriction, least
    value, division by the restricted threshold.

    With one tracked parameter (or none) the tensor given at the call is used, and nothing is stored. With
    several, they are kept as Variables, viewed and joined, and the tensor given is not looked at.

    Differs from Brevitas: a statistic below 2**-64 counts as 2**-64, so that a tensor of zeros has a finite
    scale greater than 0 (there: a scale of 0 and quantized values of nan, unless scaling_min_val is set).

    Args:
        scaling_stats_impl: the statistic.
        scaling_stats_input_view_shape_impl: the view it is taken of.
        scaling_stats_input_concat_dim: axis along which the views of several parameters are joined.
        tracked_parameter_list: the parameters that share the scale, `nnx.Variable`s (or arrays, by hand).
        scaling_shape: shape of the scale.
        force_parameter: keep a single tracked parameter too, and use it when called with None.
        restrict_scaling_impl: which values are allowed; None means `FloatRestrictValue()`.
        restrict_threshold_impl: likewise for the threshold; None means as `restrict_scaling_impl`.
        restrict_scale_threshold_impl: applied to the quotient; None means nothing.
        scaling_affine_rescaling_init: initial factor of a learned affine map; None for none.
        scaling_affine_shifting_init: its initial shift; None for none.
        scaling_min_val: the least value before the division.

    Raises:
        ValueError: for a shift without a factor, a wrong `scaling_shape`, or views that cannot be joined (at
            the call).

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.core.stats import AbsMax
        >>> from jqinject.core.view import OverTensorView
        >>> scaling = StatsFromParameterScaling(AbsMax(), OverTensorView())
        >>> scaling(jnp.array([[1.0, -3.81], [2.0, 0.0]]), 127)
        Array(0.03, dtype=float32)
    """

    source: _Source
    stats: Stat
    view: View
    restrict_scaling_impl: Restrict = FloatRestrictValue()
    restrict_threshold_impl: Restrict | None = None
    restrict_scale_threshold_impl: Restrict | None = None
    affine_rescaling: AffineRescaling | None = None
    tracked_parameters: nnx.List[nnx.Variable[Any]] | None = None

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
        where = "StatsFromParameterScaling"
        shape = check.shape(scaling_shape, where, "scaling_shape")
        least = check.minimum(scaling_min_val, where, "scaling_min_val")
        assign(
            self,
            source=_Source(scaling_stats_input_concat_dim, shape, least),
            stats=scaling_stats_impl,
            view=scaling_stats_input_view_shape_impl,
        )
        set_given(
            self,
            restrict_scaling_impl=restrict_scaling_impl,
            restrict_threshold_impl=restrict_threshold_impl,
            restrict_scale_threshold_impl=restrict_scale_threshold_impl,
            tracked_parameters=track(tracked_parameter_list, force_parameter, where),
            affine_rescaling=affine_rescaling(
                shape, scaling_affine_rescaling_init, scaling_affine_shifting_init, where, "scaling"
            ),
        )

    def __call__(self, x: jax.Array | None, threshold: Any = None) -> jax.Array:
        """The scale of `x`, float32."""
        where = "StatsFromParameterScaling"
        stat = tracked_statistic(
            x, self.tracked_parameters, self.stats, self.view, self.source.concat_dim, where
        )
        stat = check.statistic_shape(stat, self.source.shape, where)
        if self.affine_rescaling is None:
            return scale_of_statistic(self, stat, threshold, self.stats)
        stored = self.restrict_scaling_impl.restrict_init_tensor(clamp_scale(stat, self.scaling_min_val))
        return scale_of_stored(self, self.affine_rescaling(stored), threshold)

    @property
    def scaling_min_val(self) -> float | None:
        """The least value before the division."""
        return self.source.min_val


@checked_arguments
class ParameterFromStatsFromParameterScaling(RestrictedScaling, nnx.Module):
    """A learned scale that starts from a statistic of the tensor: `s = restrict(value) / threshold`.

    The parameter `value` is filled at the first call in training mode (`init_done` becomes 1); no statistic
    is computed after that. The gradient goes to the parameter from the first call on. In evaluation mode
    before it, the same scale is computed and nothing is stored.

    Differs from Brevitas: evaluation does not fill the parameter; a statistic that is not finite does not
    either; a statistic below 2**-64 counts as 2**-64.

    Args:
        scaling_stats_impl: the statistic.
        scaling_stats_input_view_shape_impl: the view it is taken of.
        scaling_stats_input_concat_dim: axis along which the views of several parameters are joined.
        tracked_parameter_list: the parameters that share the scale, `nnx.Variable`s (or arrays, by hand).
        scaling_shape: shape of the scale.
        force_parameter: keep a single tracked parameter too, and use it when called with None.
        restrict_scaling_impl: which values are allowed; None means `FloatRestrictValue()`.
        restrict_threshold_impl: likewise for the threshold; None means as `restrict_scaling_impl`.
        restrict_scale_threshold_impl: applied to the quotient; None means nothing.
        scaling_affine_rescaling_init: initial factor of an affine map of the statistic; None for none.
        scaling_affine_shifting_init: its initial shift; None for none.
        scaling_min_val: the least value before the division.

    Raises:
        ValueError: for a shift without a factor, a wrong `scaling_shape`, or views that cannot be joined (at
            the call).

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.core.stats import AbsMax
        >>> from jqinject.core.view import OverTensorView
        >>> scaling = ParameterFromStatsFromParameterScaling(AbsMax(), OverTensorView())
        >>> float(scaling(jnp.array([1.0, -3.0]))), float(scaling(jnp.array([1.0, -5.0])))
        (3.0, 3.0)
    """

    restrict_scaling_impl: Restrict = FloatRestrictValue()
    restrict_threshold_impl: Restrict | None = None
    restrict_scale_threshold_impl: Restrict | None = None
    affine_rescaling: AffineRescaling | None = None
    tracked_parameters: nnx.List[nnx.Variable[Any]] | None = None

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
        where = "ParameterFromStatsFromParameterScaling"
        shape = check.shape(scaling_shape, where, "scaling_shape")
        least = check.minimum(scaling_min_val, where, "scaling_min_val")
        self.source = _Source(scaling_stats_input_concat_dim, shape, least)
        self.stats = scaling_stats_impl
        self.view = scaling_stats_input_view_shape_impl
        self.value = QuantParam(float_array(1.0, shape))
        self.init_done = QuantStat(int_array(0))
        self.use_running_average = False
        set_given(
            self,
            restrict_scaling_impl=restrict_scaling_impl,
            restrict_threshold_impl=restrict_threshold_impl,
            restrict_scale_threshold_impl=restrict_scale_threshold_impl,
            tracked_parameters=track(tracked_parameter_list, force_parameter, where),
            affine_rescaling=affine_rescaling(
                shape, scaling_affine_rescaling_init, scaling_affine_shifting_init, where, "scaling"
            ),
        )

    def __call__(self, x: jax.Array | None, threshold: Any = None) -> jax.Array:
        """The scale of `x`, float32."""
        stored = initialize_once(
            self.value, self.init_done, lambda: self._initial(x), not self.use_running_average
        )
        return scale_of_stored(self, stored, threshold)

    @property
    def scaling_min_val(self) -> float | None:
        """The least value before the division."""
        return self.source.min_val

    def _initial(self, x: jax.Array | None) -> jax.Array:
        where = "ParameterFromStatsFromParameterScaling"
        stat = tracked_statistic(
            x, self.tracked_parameters, self.stats, self.view, self.source.concat_dim, where
        )
        stat = check.statistic_shape(stat, self.source.shape, where)
        value = self.restrict_scaling_impl.restrict_init_tensor(clamp_scale(stat, self.source.min_val))
        return value if self.affine_rescaling is None else self.affine_rescaling(value)

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
