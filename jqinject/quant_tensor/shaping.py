"""Shape operations: they move the value, and with it a scale or zero point of several elements.

Metadata of one element (per tensor) stays as it is. Metadata that varies along some axes (per channel) is
laid out in the new shape, so that every element keeps its own scale; if an axis of the new shape mixes
elements of different scales, the scale has one entry per element there.

differs from Brevitas: reshape, flatten and indexing there leave a per-channel scale in its old shape, so the
result is not valid.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.quant_tensor._integer_fields import Tensor

_Shape = tuple[int, ...]


def map_metadata(
    x: Tensor,
    value: jax.Array,
    move: Callable[[jax.Array], jax.Array],
    payload: jax.Array | None = None,
) -> Tensor:
    """`x` with a new value, and `move` applied to scale and zero point if they vary.

    Args:
        x: the tensor.
        value: its new value.
        move: gets the metadata with as many axes as the old value has, of size 1 where it does not vary.
        payload: the integers of the new value, if they are known.
    """
    scale, zero_point = (_move(held, x.ndim, value.ndim, move) for held in (x.scale, x.zero_point))
    moved = x.set(value=value, scale=scale, zero_point=zero_point)
    return moved if payload is None else moved.keeping(payload)


def _move(metadata: jax.Array, ndim: int, new_ndim: int, move: Callable[[jax.Array], jax.Array]) -> jax.Array:
    if metadata.size == 1:
        # Nothing varies: any shape of ones will do. Full-rank metadata keeps its full rank, axes that no longer
        # exist are dropped.
        if metadata.ndim == ndim and ndim > 0:
            return metadata.reshape((1,) * new_ndim)
        return metadata if metadata.ndim <= new_ndim else metadata.reshape((1,) * new_ndim)
    return move(full_rank(metadata, ndim))


def full_rank(metadata: jax.Array, ndim: int) -> jax.Array:
    """`metadata` with leading axes of size 1, `ndim` in all."""
    return metadata.reshape((1,) * (ndim - metadata.ndim) + metadata.shape)


def reshape(x: Tensor, shape: int | Sequence[int]) -> Tensor:
    """The elements of `x` in another shape; scale and zero point follow.

    Args:
        x: the tensor.
        shape: the new shape; one entry may be -1.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant_tensor import IntQuantTensor
        >>> x = IntQuantTensor(jnp.ones((2, 4)), jnp.array([[0.5], [1.0]]), 0.0, 8, True, False)
        >>> reshape(x, (2, 2, 2)).scale.shape
        (2, 1, 1)
        >>> reshape(x, -1).scale.shape
        (8,)
    """
    value, payload = x.value.reshape(shape), x.payload
    return map_metadata(
        x,
        value,
        lambda metadata: reshape_metadata(metadata, x.shape, value.shape),
        None if payload is None else payload.reshape(shape),
    )


def reshape_metadata(metadata: jax.Array, old: _Shape, new: _Shape) -> jax.Array:
    """Metadata for the new shape: axes are matched in the smallest blocks of equal size, each kept or expanded."""
    if 0 in old:
        return jnp.broadcast_to(metadata, old).reshape(new)
    expanded: list[int] = []
    target: list[int] = []
    for old_axes, new_axes in matching_blocks(old, new):
        varies = any(metadata.shape[axis] > 1 for axis in old_axes)
        expanded += [old[axis] if varies else 1 for axis in old_axes]
        target += [new[axis] if varies else 1 for axis in new_axes]
    return jnp.broadcast_to(metadata, expanded).reshape(target)


def matching_blocks(old: _Shape, new: _Shape) -> list[tuple[range, range]]:
    """Divide two shapes of equal size into the smallest consecutive blocks of axes with equally many elements."""
    blocks: list[tuple[range, range]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        start_i, start_j = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while (left := math.prod(old[start_i:i])) != (right := math.prod(new[start_j:j])):
            if left < right:
                i += 1
            else:
                j += 1
        blocks.append((range(start_i, i), range(start_j, j)))
    return blocks


def transpose(x: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    """Axes permuted (reversed by default); scale and zero point follow.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant_tensor import IntQuantTensor
        >>> x = IntQuantTensor(jnp.ones((2, 4)), jnp.array([[0.5], [1.0]]), 0.0, 8, True, False)
        >>> transpose(x).scale.shape
        (1, 2)
    """
    payload = None if x.payload is None else jnp.transpose(x.payload, axes)
    return map_metadata(x, jnp.transpose(x.value, axes), lambda held: jnp.transpose(held, axes), payload)


def swapaxes(x: Tensor, axis1: int, axis2: int) -> Tensor:
    """Two axes exchanged; scale and zero point follow."""
    return map_metadata(x, jnp.swapaxes(x.value, axis1, axis2), lambda m: jnp.swapaxes(m, axis1, axis2))


def squeeze(x: Tensor, axis: int | Sequence[int] | None = None) -> Tensor:
    """Axes of size 1 removed (all of them by default); scale and zero point follow."""
    axes = tuple(i for i, n in enumerate(x.shape) if n == 1) if axis is None else axis
    return map_metadata(x, jnp.squeeze(x.value, axes), lambda metadata: jnp.squeeze(metadata, axes))


def expand_dims(x: Tensor, axis: int | Sequence[int]) -> Tensor:
    """Axes of size 1 inserted; scale and zero point follow."""
    return map_metadata(x, jnp.expand_dims(x.value, axis), lambda metadata: jnp.expand_dims(metadata, axis))


def repeat(x: Tensor, repeats: int, axis: int) -> Tensor:
    """Every entry along `axis` repeated, as nearest-neighbour upsampling does; scale and zero point follow.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant_tensor import IntQuantTensor
        >>> x = IntQuantTensor(jnp.array([0.5, 1.0]), 0.5, 0.0, 8, signed=True, training=False)
        >>> repeat(x, 2, axis=0).value
        Array([0.5, 0.5, 1. , 1. ], dtype=float32)
    """

    def along(array: jax.Array) -> jax.Array:
        return jnp.repeat(array, repeats, axis=axis)

    return map_metadata(x, along(x.value), lambda m: along(m) if m.shape[axis] > 1 else m)


def pad(x: Tensor, pad_width: Any) -> Tensor:
    """`x` with zeros around it: 0.0 is on every grid, because the zero point is an integer.

    Args:
        x: the tensor.
        pad_width: as for `jnp.pad`: one number, a pair, or a pair for every axis.

    Returns:
        The padded tensor. A scale that varies along a padded axis is repeated at its ends.
    """
    widths = [(int(low), int(high)) for low, high in np.broadcast_to(np.asarray(pad_width), (x.ndim, 2))]

    def extend(metadata: jax.Array) -> jax.Array:
        kept = [width if n > 1 else (0, 0) for width, n in zip(widths, metadata.shape, strict=True)]
        return jnp.pad(metadata, kept, mode="edge")

    return map_metadata(x, jnp.pad(x.value, widths), extend)


def index(x: Tensor, key: Any) -> Tensor:
    """x[key] with any index that `jax.numpy` takes; scale and zero point follow.

    Slices, integers, None and Ellipsis keep axes on which nothing varies at size 1. An index by arrays
    expands varying metadata over all elements.
    """
    keys = key if isinstance(key, tuple) else (key,)
    basic = all(
        k is None or k is Ellipsis or (isinstance(k, slice | int) and not isinstance(k, bool)) for k in keys
    )

    def select(metadata: jax.Array) -> jax.Array:
        if not basic:
            return jnp.broadcast_to(metadata, x.shape)[key]
        return metadata[basic_key(keys, metadata.shape)]

    return map_metadata(x, x.value[key], select)


def basic_key(keys: tuple[Any, ...], shape: _Shape) -> tuple[Any, ...]:
    """`keys` for metadata of this shape: any selection on an axis of size 1 selects its only entry."""
    used = sum(k is not None and k is not Ellipsis for k in keys)
    result: list[Any] = []
    axis = 0
    for k in keys:
        if k is Ellipsis:
            skipped = len(shape) - used
            result += [slice(None)] * skipped
            axis += skipped
        elif k is None:
            result.append(None)
        else:
            single = shape[axis] == 1
            result.append((slice(None) if isinstance(k, slice) else 0) if single else k)
            axis += 1
    return tuple(result)
