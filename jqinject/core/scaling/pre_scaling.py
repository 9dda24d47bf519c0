"""The scale before rounding, from a weight's learned and actual norms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core._protocols import Restrict, Scaling, Stat, View
from jqinject.core.construction import check
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import InnerModule
from jqinject.core.scaling.scale_rule import clamp_scale
from jqinject.core.state.variables import QuantParam
from jqinject.core.stats.in_place import statistic_of
from jqinject.ops.power import divide


@dataclass(frozen=True)
class NormSettings:
    """The static part: the shape of the norms, and the minimum of the learned one."""

    shape: tuple[int, ...]
    min_val: float | None


class NormParameter(InnerModule):
    """Abstract: holds the learned norm g, the parameter `value`, and measures weights.

    g starts at the norm of the one tracked weight. A norm of 0 becomes 2**-64.

    Args:
        scaling_impl: the scale after rounding.
        normalize_stats_impl: the norm, such as `L2Norm`.
        scaling_stats_input_view_shape_impl: its view.
        tracked_parameter_list: the one weight.
        pre_scaling_shape: shape of the norms; None for a scalar.
        restrict_pre_scaling_impl: which values g may take; None for all.
        pre_scaling_min_val: the minimum magnitude of g.

    Raises:
        ValueError: for no weight or several, or a wrong `pre_scaling_shape`.
    """

    restrict_impl: Restrict | None = None

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
        where = type(self).__name__
        weight = _only(list(tracked_parameter_list), where)
        shape = check.shape(pre_scaling_shape or (), where, "pre_scaling_shape")
        self.settings = NormSettings(shape, check.minimum(pre_scaling_min_val, where, "pre_scaling_min_val"))
        self.scaling_impl = scaling_impl
        self.stats = normalize_stats_impl
        self.view = scaling_stats_input_view_shape_impl
        if restrict_pre_scaling_impl is not None:
            self.restrict_impl = restrict_pre_scaling_impl
        norm = clamp_scale(self.norm(weight.astype(jnp.float32)), None)
        init = norm if self.restrict_impl is None else self.restrict_impl.restrict_init_tensor(norm)
        self.value = QuantParam(init)

    def norm(self, weights: jax.Array) -> jax.Array:
        """The norm of weights, of `pre_scaling_shape`."""
        stat = statistic_of(self.stats, self.view, weights)
        where = type(self).__name__
        return check.statistic_shape(stat, self.settings.shape, where, "pre_scaling_shape")

    def learned_norm(self) -> jax.Array:
        """g."""
        value = self.value.get_value()
        g = value if self.restrict_impl is None else self.restrict_impl(value)
        return clamp_scale(g, self.settings.min_val)

    def complete_state(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Translate a checkpoint's entries for this component: `learned_value` is an older name of `value`.

        Args:
            entries: variable name -> array, as found in the checkpoint.

        Returns:
            The entries to load.
        """
        completed = dict(entries)
        older = completed.pop("learned_value", None)
        return completed if older is None else {"value": older, **completed}


def _only(tracked: list[Any], where: str) -> jax.Array:
    if len(tracked) != 1:
        raise ValueError(
            f"{where} normalizes one weight, got {len(tracked)} in tracked_parameter_list: the norm that it learns is "
            "that of one layer.\n  cure: a quantizer for each layer, weight_quant=MyQuantizer instead of "
            "weight_quant=other.weight_quant"
        )
    only = tracked[0]
    return only.get_value() if isinstance(only, nnx.Variable) else jnp.asarray(only)


@checked_arguments
@final
class ParameterPreScalingWeightNorm(NormParameter):
    """Normalizes a weight: `pre_scale = s * norm(w) / g`, so that `w / pre_scale = (g / s) * w / norm(w)`.

    `s` is the scale after rounding (`scaling_impl`), and `g` the learned norm, the parameter `value`; it starts at the
    norm of the weight, so that initially `pre_scale = s`.

    Differs from Brevitas: a norm of 0 becomes 2**-64, so that a weight of zeros is quantized to zeros (there: nan).

    Arguments: see `NormParameter`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.core import ConstScaling, L2Norm, OverOutputChannelView
        >>> w = jnp.array([[3.0, 4.0]])
        >>> impl = ParameterPreScalingWeightNorm(
        ...     ConstScaling(0.5), L2Norm(stats_reduce_dim=1), OverOutputChannelView(), [w], (1, 1))
        >>> impl.value.get_value().item(), impl(w).item(), impl(2 * w).item()
        (5.0, 0.5, 1.0)
    """

    def __call__(self, weights: jax.Array) -> jax.Array:
        """The scale before rounding, float32."""
        scaled = self.scaling_impl(weights) * self.norm(weights)
        return clamp_scale(divide(scaled, self.learned_norm()), None)
