"""Input and kernel of a contraction in the same groups, if one of them has scales for groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax

from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.kernels.integer import Affine, affine_of, has_integers
from jqinject.quant_tensor import (
    Groups,
    grouped_integers,
    in_pieces,
    smaller_groups,
)
from jqinject.quant_tensor.group_layout import with_two_axes


class InCommonGroups(NamedTuple):
    """Integers of an input and a kernel whose summed axis is cut in two, alike.

    Attributes:
        x: of the input.
        weight: of the kernel.
        groups: how the axis of the input, and that of the kernel, is cut.
    """

    x: Affine
    weight: Affine
    groups: tuple[Groups, Groups]


def in_common_groups(
    x: Any, weight: Affine, of_weight: Groups | None, dims: Dimensions
) -> InCommonGroups | None:
    """An input and a kernel, one of which has scales for groups, in the same groups; None if their integers do not fit.

    Args:
        x: the input.
        weight: the integers of the kernel, with two axes for one if it has groups.
        of_weight: the groups of the kernel, None if it has none.
        dims: of the contraction, without groups.
    """
    if of_weight is None and grouped_integers(x):
        x = in_pieces(x)
    own = x.groups if grouped_integers(x) else None
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
    return None if left is None else InCommonGroups(left, weight, (of_input, right))


def wide_dimensions(dims: Dimensions, left: int, right: int) -> Dimensions:
    """The dimensions of a contraction, of whose operands the summed axes `left` and `right` have become two."""

    return replace(
        dims,
        lhs_ndim=dims.lhs_ndim + 1,
        rhs_ndim=dims.rhs_ndim + 1,
        lhs_contract=with_two_axes(dims.lhs_contract, left),
        rhs_contract=with_two_axes(dims.rhs_contract, right),
        lhs_batch=with_two_axes(dims.lhs_batch, left),
        rhs_batch=with_two_axes(dims.rhs_batch, right),
    )


def _in_groups(x: Any, groups: Groups) -> Affine | None:
    """The integers of an input in groups; None if it has none, or a scale that varies along the axis."""
    if grouped_integers(x):
        return affine_of(x.grouped) if has_integers(x.grouped) else None
    if not has_integers(x):
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
