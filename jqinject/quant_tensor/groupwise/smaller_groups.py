"""The same numbers in smaller groups, several of which share a scale."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.ops.cut import cut_in_place
from jqinject.ops.groups import elements_axis
from jqinject.quant_tensor.groupwise.formats import GroupwiseIntQuantTensor
from jqinject.quant_tensor.int_quant_tensor import IntQuantTensor


def in_pieces(x: GroupwiseIntQuantTensor) -> GroupwiseIntQuantTensor:
    """A tensor whose groups may cross shards, in pieces of groups that no shard divides; any other unchanged.

    Args:
        x: the tensor.
    """
    lies = x.as_it_lies
    cut = cut_in_place(x.value if lies is None else lies.value, x.group_size, x.groups.dim % x.ndim)
    return x if cut is None else smaller_groups(x, cut.piece)


def smaller_groups(x: GroupwiseIntQuantTensor, size: int) -> GroupwiseIntQuantTensor:
    """The same numbers in groups of `size`, each with the scale and the zero point of the group that it is part of.

    Args:
        x: the tensor, whose group size is a multiple of `size`.
        size: elements of a smaller group.

    Example:
        >>> x = GroupwiseIntQuantTensor(jnp.ones((1, 4)), jnp.ones((1, 1)), 0.0, 4, 0, 8, True, False, (3,))
        >>> smaller_groups(x, 2).value_
        Array([[1., 1.],
               [1., 0.]], dtype=float32)
    """
    groups, lies = replace(x.groups, size=size), x.as_it_lies
    whole = x.grouped if lies is None else lies
    payload = None if whole.payload is None else groups.split(x._joined(whole.payload))
    scale, zero = (_of_pieces(x, number, size) for number in (whole.scale, whole.zero_point))
    made = IntQuantTensor(groups.split(x.value), scale, zero, x.bit_width, x.signed, x.training, payload)
    return GroupwiseIntQuantTensor._of(made, groups, x.group_dim)


def _of_pieces(x: GroupwiseIntQuantTensor, number: jax.Array, size: int) -> jax.Array:
    """Scales or zero points of the groups, or of the elements as they lie, once for each smaller group."""
    groups = x.groups
    if number.ndim == 0:
        return number
    if x.as_it_lies is not None:
        axis = groups.dim % number.ndim
        if number.shape[axis] == 1:
            return jnp.expand_dims(number, axis + 1)
        pieces = replace(groups, size=size).split(number)
        return jax.lax.slice_in_dim(pieces, 0, 1, axis=axis + 1)
    axis = elements_axis(groups.dim) % number.ndim - 1
    if number.shape[axis] == 1:
        return number
    group_of = np.arange(math.ceil(groups.length / size)) // (groups.size // size)
    return jnp.take(number, group_of, axis=axis, mode="clip")
