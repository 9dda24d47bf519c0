"""Shape operations and pooling: they move the value, and with it a scale or zero point of several elements.

Metadata of one element (per tensor) stays as it is. Metadata that varies along some axes (per channel) is
laid out in the new shape, so that every element keeps its own scale; if an axis of the new shape mixes
elements of different scales, the scale has one entry per element there.

differs from Brevitas: reshape, flatten and indexing there leave a per-channel scale in its old shape, so the
result is not valid.

A tensor in groups is moved as the tensor with two axes for its groups. Pooling has channels last, as in Flax.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.quant_tensor import array_methods, group_layout, tensor_fields, validity

_Shape = tuple[int, ...]
_Padding = str | Sequence[tuple[int, int]]
Tensor = TypeVar("Tensor", bound=tensor_fields.TensorFields)


def map_metadata(
    x: Tensor, value: jax.Array, move: Callable[[jax.Array], jax.Array], payload: jax.Array | None = None
) -> Tensor:
    """Return `x` with a new value, and `move` applied to scale and zero point if they vary.

    Args:
        x: the tensor, without groups.
        value: its new value.
        move: takes the metadata with as many axes as the old value has, of size 1 where it does not vary.
        payload: the low-bit numbers of the new value, if they are known.
    """
    moved = jax.tree.map(lambda old: _move(old, x.ndim, value.ndim, move), (x._scale, x._zero_point))
    return x._of(value, *moved, x._grid, x._training, payload)


def _moved(x: Tensor, move: Callable[[jax.Array], jax.Array]) -> Tensor:
    """Return `x` with `move` applied to value, payload, and scale and zero point if they vary."""
    return map_metadata(x, move(x.value), move, None if x._payload is None else move(x._payload))


def _move(metadata: jax.Array, ndim: int, new_ndim: int, move: Callable[[jax.Array], jax.Array]) -> jax.Array:
    if metadata.size == 1:
        # Nothing varies: any shape of ones will do. Full-rank metadata keeps its full rank, axes that no longer
        # exist are dropped.
        stays = metadata.ndim <= new_ndim and not metadata.ndim == ndim > 0
        return metadata if stays else metadata.reshape((1,) * new_ndim)
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
    value = x.value.reshape(shape)
    payload = None if x._payload is None else x._payload.reshape(shape)
    return map_metadata(x, value, lambda old: reshape_metadata(old, x.shape, value.shape), payload)


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
    ndim, layout = x.ndim, x._layout
    order = list(reversed(range(ndim))) if axes is None else [axis % ndim for axis in axes]
    if layout is None:
        return _moved(x, lambda array: jnp.transpose(array, order))
    cut = layout.groups.dim % ndim
    wide = group_layout.with_two_axes(order, cut)
    moved = _moved(x._grouped, lambda array: jnp.transpose(array, wide))
    return moved._like(type(x), layout.at(order.index(cut) - ndim))


def swapaxes(x: Tensor, axis1: int, axis2: int) -> Tensor:
    """Two axes exchanged; scale and zero point follow."""
    order = list(range(x.ndim))
    order[axis1], order[axis2] = order[axis2], order[axis1]
    return transpose(x, order)


def squeeze(x: Tensor, axis: int | Sequence[int] | None = None) -> Tensor:
    """Axes of size 1 removed (all of them by default); scale and zero point follow."""
    axes = tuple(i for i, n in enumerate(x.shape) if n == 1) if axis is None else axis
    return _moved(x, lambda array: jnp.squeeze(array, axes))


def expand_dims(x: Tensor, axis: int | Sequence[int]) -> Tensor:
    """Axes of size 1 inserted; scale and zero point follow."""
    return _moved(x, lambda array: jnp.expand_dims(array, axis))


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


def pad(x: Tensor, pad_width: object) -> Tensor:
    """`x` with zeros around it: 0.0 is on every grid, because the zero point is an integer.

    Args:
        x: the tensor.
        pad_width: as for `jnp.pad`: one number, a pair, or a pair for every axis.

    Returns:
        The padded tensor. A scale that varies along a padded axis is repeated at its ends.
    """
    widths = [(int(low), int(high)) for low, high in np.broadcast_to(np.asarray(pad_width), (x.ndim, 2))]

    def extend(metadata: jax.Array) -> jax.Array:
        varying = [width if n > 1 else (0, 0) for width, n in zip(widths, metadata.shape, strict=True)]
        return jnp.pad(metadata, varying, mode="edge")

    return map_metadata(x, jnp.pad(x.value, widths), extend)


def index(x: tensor_fields.TensorFields, key: object) -> Any:
    """x[key] with any index that `jax.numpy` takes; scale and zero point follow.

    Slices, integers, None and Ellipsis keep axes on which nothing varies at size 1. An index by arrays
    expands varying metadata over all elements. In groups, a plain array for an index of the axis in groups.
    """
    layout, keys = x._layout, group_layout.whole_key(key, x.ndim)
    if layout is not None:
        cut = layout.groups.dim % x.ndim
        if keys is None or None in keys or keys[cut] != slice(None):
            return x.value[key]
        behind = sum(isinstance(k, slice) for k in keys[cut + 1 :])
        wide = (*keys[:cut], slice(None), *keys[cut:])
        return index(x._grouped, wide)._like(type(x), layout.at(-1 - behind))

    def select(metadata: jax.Array) -> jax.Array:
        if keys is None:
            return jnp.broadcast_to(metadata, x.shape)[key]
        sizes = iter(metadata.shape)
        return metadata[tuple(k if k is None or next(sizes) > 1 else _only(k) for k in keys)]

    return map_metadata(x, x.value[key], select)


def _only(key: object) -> object:
    """Any selection on an axis of size 1 selects its only entry."""
    return slice(None) if isinstance(key, slice) else 0


def relu(x: Any) -> Any:
    """max(x, 0); the format is kept, because 0 is on the grid. A plain array stays one.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant_tensor import IntQuantTensor
        >>> x = IntQuantTensor(jnp.array([-0.5, 1.0]), 0.5, 0.0, 8, signed=True, training=False)
        >>> relu(x).int()
        Array([0, 2], dtype=int8)
    """
    value = jax.nn.relu(array_methods.as_array(x))
    return x.set(value=value) if array_methods.kind_of(x) in ("integers", "minifloats") else value


def max_pool(
    x: Any, window_shape: Sequence[int], strides: Sequence[int] | None = None, padding: _Padding = "VALID"
) -> Any:
    """The largest element of every window; the format is kept.

    Args:
        x: `IntQuantTensor`, `FloatQuantTensor` or array of shape (*batch, *spatial, channels).
        window_shape: size of the window along every spatial axis.
        strides: steps of the window; 1 by default, as in Flax.
        padding: "VALID", "SAME", or a (low, high) pair for every spatial axis; padding is never the maximum.

    Returns:
        The type of `x`, of shape (*batch, *pooled, channels).

    Raises:
        ValueError: the window has more axes than x has spatial ones, or scale or zero point vary along one of
            them.
    """
    value = array_methods.as_array(x)
    pooled = _reduce_windows(value, -jnp.inf, jax.lax.max, window_shape, strides, padding)
    if array_methods.kind_of(x) not in ("integers", "minifloats"):
        return pooled
    _check_spatially_constant(x, len(window_shape), "max_pool")
    return x.set(value=pooled)


def avg_pool(
    x: Any, window_shape: Sequence[int], strides: Sequence[int] | None = None, padding: _Padding = "VALID"
) -> Any:
    """The mean of every window: scale / k, bits = ceil(log2((2^b - 1) * k)), for k elements in a window.

    Padding counts as zeros (Flax's `count_include_pad=True`): the divisor is k everywhere, so that one scale
    serves all.

    Args:
        x: `IntQuantTensor` or array of shape (*batch, *spatial, channels).
        window_shape: size of the window along every spatial axis.
        strides: steps of the window; 1 by default, as in Flax.
        padding: "VALID", "SAME", or a (low, high) pair for every spatial axis.

    Returns:
        The type of `x`, of shape (*batch, *pooled, channels). Its integers are the sums of the window's integers.

    Raises:
        ValueError: the window has more axes than x has spatial ones, or scale or zero point vary along one of
            them.

    differs from Brevitas: the zero point is multiplied by k, because the integers are sums. Brevitas keeps it.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant_tensor import IntQuantTensor
        >>> x = IntQuantTensor(jnp.ones((1, 2, 2, 3)), 0.5, 0.0, 8, signed=False, training=False)
        >>> y = avg_pool(x, (2, 2))
        >>> y.shape, y.bit_width, float(y.scale)
        ((1, 1, 1, 3), 10, 0.125)
    """
    value = array_methods.as_array(x)
    terms = math.prod(window_shape)
    pooled = _reduce_windows(value, 0.0, jax.lax.add, window_shape, strides, padding) / terms
    if array_methods.kind_of(x) != "integers":
        return pooled
    _check_spatially_constant(x, len(window_shape), "avg_pool")
    return x.set(
        value=pooled,
        scale=x.scale / terms,
        zero_point=None if x._zero_point is None else x._zero_point * terms,
        bit_width=validity.product_sum_bit_width(terms, x.bit_width),
    )


def adaptive_avg_pool(x: jax.Array, output_shape: Sequence[int]) -> Any:
    """Means over equal windows, with `output_shape` along the spatial axes; see `avg_pool`.

    Args:
        x: `IntQuantTensor` or array of shape (*batch, *spatial, channels).
        output_shape: the wanted size along every spatial axis; each must divide the input's size.

    Raises:
        ValueError: a size is not divisible. The windows would differ in size, and with them the scales.
    """
    spatial = array_methods.as_array(x).shape[-1 - len(output_shape) : -1]
    if len(spatial) != len(output_shape) or any(n % m for n, m in zip(spatial, output_shape, strict=True)):
        raise ValueError(
            f"adaptive_avg_pool: output_shape {tuple(output_shape)} does not divide the spatial shape "
            f"{spatial} of a tensor of shape {array_methods.as_array(x).shape} (channels last). Windows of different "
            "size would need different scales: choose a divisor, or pool `x.value`."
        )
    window = [n // m for n, m in zip(spatial, output_shape, strict=True)]
    return avg_pool(x, window, strides=window)


def _reduce_windows(
    value: jax.Array, init: float, reducer: Any, window_shape: Sequence[int], strides: Any, padding: _Padding
) -> jax.Array:
    """`lax.reduce_window` over the axes before the last (the channels)."""
    steps = (1,) * len(window_shape) if strides is None else tuple(strides)
    if len(steps) != len(window_shape) or len(window_shape) > value.ndim - 1:
        raise ValueError(
            f"pooling: window_shape {tuple(window_shape)} and strides {steps} need one entry for every "
            f"spatial axis of a tensor of shape {value.shape}, laid out as (*batch, *spatial, channels)."
        )
    lead = value.ndim - 1 - len(window_shape)
    pads = padding if isinstance(padding, str) else ((0, 0),) * lead + tuple(padding) + ((0, 0),)
    dims = (1,) * lead + tuple(window_shape) + (1,)
    return jax.lax.reduce_window(
        value, np.asarray(init, value.dtype), reducer, dims, (1,) * lead + steps + (1,), pads
    )


def _check_spatially_constant(x: tensor_fields.TensorFields, window_axes: int, operation: str) -> None:
    """Raise ValueError if scale or zero point vary along a pooled axis."""
    for name, metadata in (("scale", x.scale), ("zero_point", x.zero_point)):
        if any(n > 1 for n in metadata.shape[:-1][-window_axes:]):
            raise ValueError(
                f"{operation}: {name} of shape {metadata.shape} varies along an axis that is pooled, so the "
                "elements of a window are on different grids. Pool `x.value`, or use a scale per tensor or "
                "per channel."
            )
