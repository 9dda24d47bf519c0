"""The scale that a weight is divided by before it is rounded, from its norm: weight normalization."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import jax

from jqinject.core._protocols import Restrict, Scaling, Stat, View
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.scaling._norm import NormParameter
from jqinject.core.scaling.scale_rule import clamp_scale
from jqinject.ops.power import divide


@checked_arguments
@final
class ParameterPreScalingWeightNorm(NormParameter):
    """Normalizes a weight: `pre_scale = s * norm(w) / g`, so that `w / pre_scale = (g / s) * w / norm(w)`.

    `s` is the scale after rounding (`scaling_impl`), and `g` the learned norm, the parameter `value`; it starts at the
    norm of the weight, so that `pre_scale = s` in the beginning.

    Differs from Brevitas: a norm of 0 counts as 2**-64, so that a weight of zeros is quantized to zeros (there: nan).

    Args:
        scaling_impl: the scale after rounding.
        normalize_stats_impl: the norm, `L2Norm` for instance.
        scaling_stats_input_view_shape_impl: the view it is taken of.
        tracked_parameter_list: the one weight.
        pre_scaling_shape: shape of the result; None for a scalar.
        restrict_pre_scaling_impl: which values g may take; None for all.
        pre_scaling_min_val: the least magnitude of g.

    Raises:
        ValueError: for no weight or several, or a wrong `pre_scaling_shape`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.core import ConstScaling, L2Norm, OverOutputChannelView
        >>> w = jnp.array([[3.0, 4.0]])
        >>> impl = ParameterPreScalingWeightNorm(
        ...     ConstScaling(0.5), L2Norm(stats_reduce_dim=1), OverOutputChannelView(), [w], (1, 1))
        >>> impl.value.get_value().item(), impl(w).item(), impl(2 * w).item()
        (5.0, 0.5, 1.0)
    """

    def __init__(
        self,
        scaling_impl: Scaling,
        normalize_stats_impl: Stat,
        scaling_stats_input_view_shape_impl: View,
        tracked_parameter_list: Iterable[Any],
        pre_scaling_shape: tuple[int, ...] | None = None,
        restrict_pre_scaling_impl: Restrict | None = None,
        pre_scaling_min_val: float | None = None,
    ) -> None:
        super().__init__(
            scaling_impl,
            normalize_stats_impl,
            scaling_stats_input_view_shape_impl,
            tracked_parameter_list,
            pre_scaling_shape,
            restrict_pre_scaling_impl,
            pre_scaling_min_val,
        )

    def __call__(self, weights: jax.Array) -> jax.Array:
        """The scale before rounding, float32."""
        scaled = self.scaling_impl(weights) * self.norm(weights)
        return clamp_scale(divide(scaled, self.learned_norm()), None)
