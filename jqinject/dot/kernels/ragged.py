"""Ragged contractions of integers: each row of the left operand with the part of the right one that its group has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jqinject.dot.geometry.dimensions import scaled_axes
from jqinject.dot.geometry.labels import Label, Labels
from jqinject.dot.kernels.accumulate import accumulation
from jqinject.dot.kernels.integer import Affine
from jqinject.ops.ste import nearest
from jqinject.quant_tensor import QuantTensor
from jqinject.quant_tensor.shaping import full_rank


@dataclass(frozen=True)
class Ragged:
    """`lax.ragged_dot_general` whose rows are cut into groups, each with an expert of its own.

    Attributes:
        lhs_ndim, rhs_ndim: axes of the operands.
        lhs_contract, rhs_contract: contracted axes, pairwise.
        rows: the axis of the left operand that is cut into groups; not contracted.
        experts: the axis of the right operand with an entry for each group.
        dtype: of the output.
        precision: of a contraction of floats.
    """

    lhs_ndim: int
    rhs_ndim: int
    lhs_contract: tuple[int, ...]
    rhs_contract: tuple[int, ...]
    rows: int
    experts: int
    dtype: np.dtype
    precision: jax.lax.PrecisionLike = None

    @classmethod
    def of(
        cls, lhs: Any, rhs: Any, numbers: Any, dtype: DTypeLike, precision: jax.lax.PrecisionLike = None
    ) -> Ragged | None:
        """From `lax.ragged_dot_general`'s dimension numbers; None if they have batch axes or cut a summed axis.

        Args:
            lhs, rhs: the operands.
            numbers: a `jax.lax.RaggedDotDimensionNumbers`.
            dtype: of the output.
            precision: of a contraction of floats.
        """
        (left, right), (batch, _) = numbers.dot_dimension_numbers
        rows, experts = tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)
        if batch or len(rows) != 1 or len(experts) != 1 or rows[0] in left:
            return None
        return cls(
            lhs.ndim, rhs.ndim, tuple(left), tuple(right), rows[0], experts[0], np.dtype(dtype), precision
        )

    @property
    def numbers(self) -> jax.lax.RaggedDotDimensionNumbers:
        """As `lax.ragged_dot_general` takes them."""
        dot = (self.lhs_contract, self.rhs_contract), ((), ())
        return jax.lax.RaggedDotDimensionNumbers(dot, (self.rows,), (self.experts,))

    @property
    def labels(self) -> tuple[Labels, Labels, Labels]:
        """Labels of the axes of the operands and the output: those of summed axes are shared."""
        lhs: list[Label] = [("lhs", axis) for axis in range(self.lhs_ndim)]
        rhs: list[Label] = [("rhs", axis) for axis in range(self.rhs_ndim)]
        for left, right in zip(self.lhs_contract, self.rhs_contract, strict=True):
            lhs[left] = rhs[right] = ("summed", left)
        out = [*(lhs[axis] for axis in self.lhs_free), *(rhs[axis] for axis in self.rhs_free)]
        return tuple(lhs), tuple(rhs), tuple(out)

    @property
    def lhs_free(self) -> tuple[int, ...]:
        """Free axes of the left operand, the first ones of the output."""
        return tuple(axis for axis in range(self.lhs_ndim) if axis not in self.lhs_contract)

    @property
    def rhs_free(self) -> tuple[int, ...]:
        """Free axes of the right operand, the last ones of the output."""
        taken = (*self.rhs_contract, self.experts)
        return tuple(axis for axis in range(self.rhs_ndim) if axis not in taken)

    def floats(self, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """The contraction of floats."""
        return jax.lax.ragged_dot_general(
            lhs, rhs, group_sizes, self.numbers, self.precision, preferred_element_type=self.dtype
        )

    def fit(self, lhs: QuantTensor, rhs: QuantTensor) -> bool:
        """Whether no scale and no zero point of two tensors varies along a summed axis."""
        return all(
            scaled_axes((x.scale.shape, x.zero_point.shape), x.ndim).isdisjoint(summed)
            for x, summed in ((lhs, self.lhs_contract), (rhs, self.rhs_contract))
        )

    def take(self, lhs: Affine, rhs: Affine) -> bool:
        """Whether int32 holds every sum of products of these integers."""
        lengths = tuple(lhs.payload.shape[axis] for axis in self.lhs_contract)
        dtypes = ((x.payload.dtype, x.zero_point is not None) for x in (lhs, rhs))
        return math.prod(lengths) <= accumulation(lengths, *dtypes, None)[1]

    def integers(self, lhs: Affine, rhs: Affine, group_sizes: jax.Array) -> jax.Array:
        """`sum (q_l - z_l) s_l (q_r - z_r) s_r`, the sum taken over integers; rows of no group are 0.

        The right operand's scale and zero point may vary along experts and free axes, the left one's along free axes.
        """
        lhs, rhs = lhs.signed(), rhs.signed()
        left, right = lhs.payload.astype(jnp.int8), rhs.payload.astype(jnp.int8)
        y = jax.lax.ragged_dot_general(
            left, right, group_sizes, self.numbers, preferred_element_type=jnp.int32
        )
        ends = jnp.cumsum(group_sizes)
        row = jnp.arange(left.shape[self.rows])
        expert = jnp.minimum(jnp.searchsorted(ends, row, side="right"), group_sizes.shape[0] - 1)
        if lhs.zero_point is not None or rhs.zero_point is not None:
            y = y + self._of_zero_points(lhs, rhs, expert)
            in_group = self._of_lhs((row < ends[-1]).reshape(self._along_rows(self.lhs_ndim, row.size)))
            y = jnp.where(in_group, y, 0)
        scale = self._of_lhs(full_rank(lhs.scale, self.lhs_ndim)) * self._of_rhs(rhs.scale, expert)
        return (y.astype(jnp.float32) * scale).astype(self.dtype)

    def _of_zero_points(self, lhs: Affine, rhs: Affine, expert: jax.Array) -> jax.Array:
        """`n z_l z_r - z_l sum q_r - z_r sum q_l`, laid out for the output."""
        correction = jnp.zeros((), jnp.int32)
        terms = math.prod(lhs.payload.shape[axis] for axis in self.lhs_contract)
        left = right = None
        if lhs.zero_point is not None:
            sums = jnp.sum(rhs.payload, self.rhs_contract, jnp.int32, keepdims=True)
            left = self._of_lhs(full_rank(nearest(lhs.zero_point).astype(jnp.int32), self.lhs_ndim))
            correction = correction - left * self._of_rhs(sums, expert)
        if rhs.zero_point is not None:
            sums = jnp.sum(lhs.payload, self.lhs_contract, jnp.int32, keepdims=True)
            right = self._of_rhs(nearest(rhs.zero_point).astype(jnp.int32), expert)
            correction = correction - right * self._of_lhs(sums)
        return correction if left is None or right is None else correction + terms * left * right

    def _along_rows(self, ndim: int, count: int) -> tuple[int, ...]:
        return tuple(count if axis == self.rows else 1 for axis in range(ndim))

    def _of_lhs(self, x: jax.Array) -> jax.Array:
        """Numbers of the left operand's axes, 1 along summed ones, laid out for the output."""
        return x.reshape(*(x.shape[axis] for axis in self.lhs_free), *(1 for _ in self.rhs_free))

    def _of_rhs(self, x: jax.Array, expert: jax.Array) -> jax.Array:
        """Numbers of the right operand's axes, 1 along summed ones, for each row and laid out for the output."""
        x = jnp.moveaxis(full_rank(x, self.rhs_ndim), self.experts, 0)
        of_experts = x.reshape(x.shape[0], *self._free_sizes(x))
        rows = of_experts if x.shape[0] == 1 else of_experts[expert]
        place = self.lhs_free.index(self.rows)
        ones = (1,) * place, (1,) * (len(self.lhs_free) - place - 1)
        return rows.reshape(*ones[0], rows.shape[0], *ones[1], *rows.shape[1:])

    def _free_sizes(self, x: jax.Array) -> tuple[int, ...]:
        """Sizes of the free axes of the right operand, whose experts have been moved to the front."""
        order = (self.experts, *(axis for axis in range(self.rhs_ndim) if axis != self.experts))
        return tuple(x.shape[order.index(axis)] for axis in self.rhs_free)
