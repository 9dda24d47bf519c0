"""Pooling and ReLU: operations whose result stays on the grid. Channels last, as in Flax."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.quant_tensor.base import as_array
from jqinject.quant_tensor.bit_widths import product_sum_bit_width
from jqinject.quant_tensor.float_quant_tensor import FloatQuantTensor
from jqinject.quant_tensor.int_quant_tensor import IntQuantTensor

_Padding = str | Sequence[tuple[int, int]]


def relu(x: Any) -> Any:
    """max(x, 0); the format is kept, because 0 is on the grid. A plain array stays one.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant_tensor import IntQuantTensor
        >>> x = IntQuantTensor(jnp.array([-0.5, 1.0]), 0.5, 0.0, 8, signed=True, training=False)
        >>> relu(x).int()
        Array([0, 2], dtype=int8)
    """
    value = jax.nn.relu(as_array(x))
    return x.set(value=value) if isinstance(x, IntQuantTensor | FloatQuantTensor) else value


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
    value = as_array(x)
    pooled = _reduce_windows(value, -jnp.inf, jax.lax.max, window_shape, strides, padding)
    if not isinstance(x, IntQuantTensor | FloatQuantTensor):
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
    value = as_array(x)
    terms = math.prod(window_shape)
    pooled = _reduce_windows(value, 0.0, jax.lax.add, window_shape, strides, padding) / terms
    if not isinstance(x, IntQuantTensor):
        return pooled
    _check_spatially_constant(x, len(window_shape), "avg_pool")
    return x.set(
        value=pooled,
        scale=x.scale / terms,
        zero_point=x.zero_point * terms,
        bit_width=product_sum_bit_width(terms, x.bit_width),
    )


def adaptive_avg_pool(x: Any, output_shape: Sequence[int]) -> Any:
    """Means over equal windows, with `output_shape` along the spatial axes; see `avg_pool`.

    Args:
        x: `IntQuantTensor` or array of shape (*batch, *spatial, channels).
        output_shape: the wanted size along every spatial axis; each must divide the input's size.

    Raises:
        ValueError: a size is not divisible. The windows would differ in size, and with them the scales.
    """
    spatial = as_array(x).shape[-1 - len(output_shape) : -1]
    if len(spatial) != len(output_shape) or any(n % m for n, m in zip(spatial, output_shape, strict=True)):
        raise ValueError(
            f"adaptive_avg_pool: output_shape {tuple(output_shape)} does not divide the spatial shape "
            f"{spatial} of a tensor of shape {as_array(x).shape} (channels last). Windows of different size "
            "would need different scales: choose a divisor, or pool `x.value`."
        )
    window = [n // m for n, m in zip(spatial, output_shape, strict=True)]
    return avg_pool(x, window, strides=window)


def _reduce_windows(
    value: jax.Array,
    init: float,
    reducer: Any,
    window_shape: Sequence[int],
    strides: Sequence[int] | None,
    padding: _Padding,
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


def _check_spatially_constant(x: IntQuantTensor | FloatQuantTensor, window_axes: int, operation: str) -> None:
    """Raise ValueError if scale or zero point vary along a pooled axis."""
    for name, metadata in (("scale", x.scale), ("zero_point", x.zero_point)):
        if any(n > 1 for n in metadata.shape[:-1][-window_axes:]):
            raise ValueError(
                f"{operation}: {name} of shape {metadata.shape} varies along an axis that is pooled, so the "
                "elements of a window are on different grids. Pool `x.value`, or use a scale per tensor or "
                "per channel."
            )
