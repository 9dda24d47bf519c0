"""Scales of blocks in two levels, from the given tensor at every call."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core._protocols import Stat, View
from jqinject.core.construction.assign import assign
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.scaling.block_scales import BlockScaleImpl, BlockScales
from jqinject.core.sources import Dynamic
from jqinject.core.sources.source import DISTANCE
from jqinject.core.view import GroupingView
from jqinject.ops.groups import block_of, elements_axis


class Candidates(NamedTuple):
    """The scales that a tensor may have.

    Attributes:
        scales: one or several.
        shared: the largest magnitude of the tensor, or of each row.
    """

    scales: tuple[BlockScales, ...]
    shared: jax.Array


@checked_arguments
class RuntimeDynamicTwoLevelScaling(Dynamic):
    """A scale for each block of the given tensor: a minifloat, times a float32 number that all share. No state.

    Args:
        group_size: elements of a block along `group_dim`, or both lengths of a block.
        group_dim: the axis to cut.
        input_view_impl: the grouping view.
        scaling_stats_impl: the statistic of a block, its largest magnitude, keeping the reduced axes with size 1.
        block_scale_impl: from these and the tensor's to the scales: `NVFP4Scales`, `FourOverSixScales`,
            `LeastNormalScales`.
        shared_per_row: every row, the numbers along `group_dim`, has a shared scale of its own.

    Raises:
        ValueError: a group size below 1.

    Example:
        >>> from jqinject.core import AbsMax, DynamicOverSubChannelBlockView, NVFP4Scales
        >>> scaling = RuntimeDynamicTwoLevelScaling(
        ...     2, -1, DynamicOverSubChannelBlockView(2, -1), AbsMax(stats_reduce_dim=-1, keepdim=True), NVFP4Scales())
        >>> scaling(jnp.array([1.0, -3.0, 6.0, 0.0])).tolist()
        [[0.5], [1.0]]
    """

    group_size: int
    group_dim: int
    block_scale_impl: Any
    shared_per_row: bool = False

    def __init__(
        self,
        group_size: int | tuple[int, int],
        group_dim: int,
        input_view_impl: View,
        scaling_stats_impl: Stat,
        block_scale_impl: BlockScaleImpl,
        shared_per_row: bool = False,
    ) -> None:
        super().__init__(scaling_stats_impl, input_view_impl, in_groups=True)
        assign(
            self,
            group_size=block_of(group_size, type(self).__name__)[0],
            group_dim=group_dim,
            block_scale_impl=block_scale_impl,
            shared_per_row=shared_per_row,
        )

    @property
    def scale_dtype(self) -> np.dtype | None:
        """e4m3, if the largest of the block scales is its largest number."""
        known = self.block_scale_impl.reaches_largest and not self.shared_per_row
        return np.dtype(jnp.float8_e4m3fn) if known else None

    def candidates(self, x: jax.Array) -> Candidates:
        """The scales that `x` may have."""
        block = jax.lax.stop_gradient(self.number(x, DISTANCE).statistic)
        if not self.shared_per_row:
            shared = jnp.max(block)
        else:
            view: Any = self.view
            cut = view.cut(x) if isinstance(view, GroupingView) else None
            axis = elements_axis(self.group_dim) - 1 if cut is None else cut.axis
            shared = jnp.max(block, axis=axis, keepdims=True)
        return Candidates(self.block_scale_impl(block, shared), shared)

    def __call__(self, x: jax.Array, threshold: Any = None) -> jax.Array:
        """The scales of `x`, float32, in the grouped shape with 1 along the elements of a block; of several the first.

        Args:
            x: float array.
            threshold: unused: the block scales know what they map to.
        """
        return self.candidates(x).scales[0].scale
