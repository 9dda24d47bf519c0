"""Ragged contractions of integers: each row of the left operand with the part of the right one that its group has."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jqinject.dot.geometry.dimensions import Dimensions, scale_in_output
from jqinject.dot.kernels import accumulate, integer
from jqinject.quant_tensor.shaping import full_rank


@dataclass(frozen=True)
class Ragged:
    """`lax.ragged_dot_general` whose rows are cut into groups, each with an expert of its own.

    Attributes:
        axes: those of the operands and the output, which lacks the experts.
        rows: the axis of the left operand that is cut into groups; not contracted.
        experts: the axis of the right operand with an entry for each group.
        dtype: of the output.
        precision: of a contraction of floats.
    """

    axes: Dimensions
    rows: int
    experts: int
    dtype: np.dtype
    precision: jax.lax.PrecisionLike = None

    @classmethod
    def of(
        cls, lhs: Any, rhs: Any, numbers: Any, dtype: DTypeLike, precision: jax.lax.PrecisionLike = None
    ) -> "Ragged | None":
        """From `lax.ragged_dot_general`'s dimension numbers; None if they have batch axes or cut a summed axis.

        Args:
            lhs, rhs: the operands.
            numbers: a `jax.lax.RaggedDotDimensionNumbers`.
            dtype: of the output.
            precision: of a contraction of floats.
        """
        (left, _), (batch, _) = numbers.dot_dimension_numbers
        rows, experts = tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)
        if batch or len(rows) != 1 or len(experts) != 1 or rows[0] in left:
            return None
        dims = Dimensions.of(lhs.ndim, rhs.ndim, numbers.dot_dimension_numbers)
        out = tuple(label for label in dims.out if label != dims.rhs[experts[0]])
        return cls(replace(dims, out=out), rows[0], experts[0], np.dtype(dtype), precision)

    def __call__(self, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """The contraction of floats."""
        return self._summed(lhs, rhs, group_sizes, self.dtype, self.precision)

    def _summed(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        dtype: DTypeLike,
        precision: jax.lax.PrecisionLike = None,
    ) -> jax.Array:
        numbers = jax.lax.RaggedDotDimensionNumbers(self.axes.numbers, (self.rows,), (self.experts,))
        return jax.lax.ragged_dot_general(
            lhs, rhs, group_sizes, numbers, precision, preferred_element_type=dtype
        )

    def take(self, lhs: integer.Affine, rhs: integer.Affine) -> bool:
        """Whether int32 holds every sum of products of these integers."""
        lengths = tuple(lhs.payload.shape[axis] for axis in self.axes.lhs_contract)
        dtypes = ((x.payload.dtype, x.zero_point is not None) for x in (lhs, rhs))
        return math.prod(lengths) <= accumulate.accumulation(lengths, *dtypes, None)[1]

    def integers(self, lhs: integer.Affine, rhs: integer.Affine, group_sizes: jax.Array) -> jax.Array:
        """`sum (q_l - z_l) s_l (q_r - z_r) s_r`, the sum taken over integers; rows of no group are 0.

        The right operand's scale and zero point may vary along experts and free axes, the left one's along free axes.
        """
        lhs, rhs = lhs.signed(), rhs.signed()
        left, right = lhs.payload.astype(jnp.int8), rhs.payload.astype(jnp.int8)
        y = self._summed(left, right, group_sizes, jnp.int32)
        ends = jnp.cumsum(group_sizes)
        row = jnp.arange(left.shape[self.rows])
        expert = jnp.minimum(jnp.searchsorted(ends, row, side="right"), group_sizes.shape[0] - 1)
        axes = self.axes

        def laid_out(x: jax.Array, side: int) -> Any:
            """Numbers of an operand, those of the right one for the expert of each row."""
            if side == 0:
                return scale_in_output(x, axes.lhs, axes.out)
            x = full_rank(x, len(axes.rhs))
            if x.shape[self.experts] > 1:
                x = jnp.take(x, expert, self.experts, mode="clip")
            labels = [axes.lhs[self.rows] if axis == self.experts else n for axis, n in enumerate(axes.rhs)]
            return scale_in_output(x, labels, axes.out)

        if lhs.zero_point is not None or rhs.zero_point is not None:
            summed = axes.lhs_contract, axes.rhs_contract
            y = integer.corrected(y, (lhs, rhs), laid_out, summed, jnp.int32)
            in_group: Any = scale_in_output(row < ends[-1], (axes.lhs[self.rows],), axes.out)
            y = jnp.where(in_group, y, 0)
        return (y.astype(jnp.float32) * (laid_out(lhs.scale, 0) * laid_out(rhs.scale, 1))).astype(self.dtype)
