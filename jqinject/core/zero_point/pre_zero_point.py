"""Zero points that are added before rounding and not subtracted after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.core._protocols import View
from jqinject.core.construction import check
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.stats.in_place import reduced
from jqinject.core.stats.two_phase import finish
from jqinject.ops.devices.mapped import names_of
from jqinject.ops.devices.over import Over
from jqinject.ops.power import divide


@checked_arguments
@dataclass(frozen=True)
class PreZeroCenterZeroPoint:
    """Centers a weight on 0 before it is rounded: `-mean(x) / scale`, the mean of each channel.

    Differs from Brevitas: the mean of no numbers is 0 (there: nan).

    Args:
        stats_reduce_dim: the axis of the view to take the mean along; None for the whole tensor.
        pre_zero_point_stats_input_view_shape_impl: the view.
        pre_zero_point_shape: shape of the result; None for a scalar.
        axis_name: a mapped axis that channels are spread over, or a tuple of them.

    Example:
        >>> from jqinject.core import OverOutputChannelView
        >>> center = PreZeroCenterZeroPoint(1, OverOutputChannelView(), (2, 1))
        >>> center(jnp.array([[1.0, 3.0], [0.0, -1.0]]), jnp.float32(0.5), 8).reshape(-1)
        Array([-4.,  1.], dtype=float32)
    """

    stats_reduce_dim: int | None
    pre_zero_point_stats_input_view_shape_impl: View
    pre_zero_point_shape: tuple[int, ...] | None = None
    axis_name: Any = None

    def get_zero_center(self, x: jax.Array) -> jax.Array:
        """The shift that centers `x`: minus the means, float32."""
        view, x = self.pre_zero_point_stats_input_view_shape_impl, x.astype(jnp.float32)
        axes, viewed = reduced(view, self.stats_reduce_dim, x)
        over = Over(axes, names_of(self.axis_name))
        mean = finish(over.sum(viewed) / max(over.count(viewed), 1), axes, True)
        where, shape = "PreZeroCenterZeroPoint", self.pre_zero_point_shape or ()
        return -check.statistic_shape(mean, shape, where, "pre_zero_point_shape")

    def __call__(self, x: jax.Array, scale: jax.Array, bit_width: Any = None) -> jax.Array:
        """The zero point, float32, in steps of `scale`."""
        return divide(self.get_zero_center(x), scale)
