"""Contracting integers with scales for groups inside the forward of a Flax layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from jqinject.dot import Affine, affine_of, contract_integers, has_integers
from jqinject.dot.frozen.frozen_groups import wide_axis
from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.quant_tensor import Groups, GroupwiseIntQuantTensor, IntQuantTensor, in_pieces, smaller_groups

LEAST_GROUP = 128
"""Groups of fewer elements are contracted as floats unless integers are asked for. Every group makes a whole output, so
small ones cost more than they save: on a CPU (256, 1024) x (1024, 1024) in groups of 32 takes 224 ms as integers, 10 ms
dequantized. Qwix draws the line there too."""


class GroupedIntegerContraction:
    """In the place of `lax.dot_general`: contracts integers group by group, and sums the groups in float32.

    Args:
        x: the integers of the input, its summed axis that is cut as two.
        weight: those of the kernel.
        of_input: how the axis of the input is cut.
        of_weight: how the axis of the kernel is cut.
        stored: as for `IntegerContraction`.
    """

    token = None

    def __init__(
        self, x: Affine, weight: Affine, of_input: Groups, of_weight: Groups, stored: Any = None
    ) -> None:
        self.x = x
        self.weight = weight
        self.of_input = of_input
        self.of_weight = of_weight
        self.stored = stored

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """The contraction; gradients go to the arrays."""
        dims = Dimensions.of(lhs.ndim, rhs.ndim, dimension_numbers)
        return contract_integers(
            self.of_input.split(lhs),
            self.of_weight.split(rhs) if self.stored is None else self.stored,
            self.x,
            self.weight,
            wide_dimensions(dims, self.of_input.dim % lhs.ndim, self.of_weight.dim % rhs.ndim),
            preferred_element_type or lhs.dtype,
            out_sharding=out_sharding,
        )


def grouped_contraction(
    x: Any, weight: Affine, of_weight: Groups | None, dims: Dimensions, stored: Any = None
) -> GroupedIntegerContraction | None:
    """What contracts an input with a kernel, one of which has scales for groups; None if their integers do not fit.

    Args:
        x: the input.
        weight: the integers of the kernel, with two axes for one if it has groups.
        of_weight: the groups of the kernel, None if it has none.
        dims: of the contraction, without groups.
        stored: as for `IntegerContraction`.
    """
    if of_weight is None and isinstance(x, GroupwiseIntQuantTensor):
        x = in_pieces(x)
    own = x.groups if isinstance(x, GroupwiseIntQuantTensor) else None
    pairs = dict(zip(dims.rhs_contract, dims.lhs_contract, strict=True))
    if of_weight is not None:
        axis = pairs.get(of_weight.dim % dims.rhs_ndim)
    else:
        axis = None if own is None else own.dim % dims.lhs_ndim
    back = {left: right for right, left in pairs.items()}
    if axis is None or axis not in back:
        return None
    size = (of_weight or own or Groups(0, 0, 0)).size
    length = x.shape[axis]
    of_input = Groups(size, axis - dims.lhs_ndim, length)
    if own is not None and own.size % size == 0 and own.size > size:
        x = smaller_groups(x, size)  # the weight is in pieces of groups that cross shards
        own = x.groups
    if own is not None and own != of_input:
        return None
    left = _in_groups(x, of_input)
    right = Groups(size, back[axis] - dims.rhs_ndim, length)
    if of_weight is None:
        weight = _cut(weight, right)
    return None if left is None else GroupedIntegerContraction(left, weight, of_input, right, stored)


def wide_dimensions(dims: Dimensions, left: int, right: int) -> Dimensions:
    """The dimensions of a contraction, of whose operands the summed axes `left` and `right` have become two."""

    def widened(axes: tuple[int, ...], cut: int) -> tuple[int, ...]:
        return tuple(wide for axis in axes for wide in wide_axis(axis, cut))

    return replace(
        dims,
        lhs_ndim=dims.lhs_ndim + 1,
        rhs_ndim=dims.rhs_ndim + 1,
        lhs_contract=widened(dims.lhs_contract, left),
        rhs_contract=widened(dims.rhs_contract, right),
        lhs_batch=widened(dims.lhs_batch, left),
        rhs_batch=widened(dims.rhs_batch, right),
    )


def _in_groups(x: Any, groups: Groups) -> Affine | None:
    """The integers of an input in groups; None if it has none, or a scale that varies along the axis."""
    if isinstance(x, GroupwiseIntQuantTensor):
        return affine_of(x.grouped) if has_integers(x.grouped) else None
    if not isinstance(x, IntQuantTensor) or not has_integers(x):
        return None
    varies = any(
        found.ndim >= -groups.dim and found.shape[groups.dim] > 1 for found in (x.scale, x.zero_point)
    )
    return None if varies else _cut(affine_of(x), groups)


def _cut(found: Affine, groups: Groups) -> Affine:
    """Integers whose scale does not vary along an axis, with the axis in groups."""

    def apart(metadata: jax.Array) -> jax.Array:
        if metadata.ndim < -groups.dim:
            return metadata
        place = metadata.ndim + groups.dim
        return metadata.reshape((*metadata.shape[:place], 1, *metadata.shape[place:]))

    zero = None if found.zero_point is None else apart(found.zero_point)
    return Affine(groups.split(found.payload), apart(found.scale), zero)
