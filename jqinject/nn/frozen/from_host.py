"""Freezing a large weight from slices of an array of NumPy's, so that the whole of it never lies on a device."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import AbsMax, AbsMaxRange, AbsMinMax, MinMaxRange, NegativeMinOrZero
from jqinject.core._protocols import groups_of
from jqinject.dot import FrozenParam
from jqinject.nn.frozen.freeze_layer import compiled_numbers
from jqinject.nn.frozen.in_slices import FEWEST, MOST, cutting_of, is_sliceable, put
from jqinject.proxy import Committed, stack_of

LARGE, OF_SLICE = 2**22, 2**19  # bytes
ALIGNED = 64  # bytes; JAX takes such memory without a copy on a CPU
OF_EXTREMES = (AbsMax, AbsMaxRange, AbsMinMax, MinMaxRange, NegativeMinOrZero)


def numbers_from_host(layer: Any, array: Any) -> Any:
    """What `numbers_of` returns of a layer with this weight, to the bit; None if it is not made slice by slice.

    It is, if the array is large and NumPy's, and the range of each scale is that of its smallest and its largest
    number. These are found first; then slice after slice is quantized by the scale.

    Args:
        layer: whose weight may be abstract.
        array: the weight.
    """
    proxy = _private_copy(layer)
    if proxy is None or not _is_large(array) or stack_of((layer,)):
        return None
    scale = jax.eval_shape(lambda x: _scale(proxy, x), jax.ShapeDtypeStruct(array.shape, layer.weight.dtype))
    kept = (*layer.summed_axes, *(layer.axes_of_sums() or ()))
    number = min(max(FEWEST, 1 << (array.nbytes // OF_SLICE).bit_length()), MOST)
    cutting = cutting_of(array.shape, scale.shape, None, kept, number)
    extremes = _extremes(array, scale.shape)
    if cutting is None or extremes is None or not np.isfinite(extremes).all():
        return None
    static = (layer.summed_axes, layer.axes_of_sums(), None, 1)

    def numbers(scales: Any, part: Any) -> Any:
        graphdef, state = nnx.split(scales, graph=True)
        return compiled_numbers(state, part, None, graphdef, *static)

    dtype = layer.weight.dtype
    proxy.record = Committed.of(proxy.tensor_quant, jnp.asarray(extremes, dtype)).record
    frozen, _ = jax.eval_shape(partial(numbers, proxy), jax.ShapeDtypeStruct(array.shape, dtype))
    whole, valid = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), frozen.numbers), True
    for i in range(cutting.number):
        own = nnx.clone(proxy)
        cutting.cut_record(own, i)
        part = jnp.asarray(cutting.of_host(array, i), dtype)
        found, fits = numbers(own, part)
        whole, valid = jax.block_until_ready((_put_all(i, whole, found.numbers), valid & fits))
    return FrozenParam.holding(whole, frozen.form), valid


def _private_copy(layer: Any) -> Any:
    """The proxy of a layer whose quantizer has no state and is cut; else None."""
    proxy = layer.weight_quant
    if proxy.requires_quant_input or jax.tree.leaves(nnx.state(proxy)):
        return None
    proxy = nnx.clone(proxy)
    quantizer = proxy.tensor_quant
    sources = [getattr(quantizer, name, None) for name in ("scaling_impl", "zero_point_impl")]
    found = [getattr(one, name, None) for one in sources for name in ("calibration_impl", "stats")]
    measures = [type(one) for one in found if one is not None]
    fits = bool(measures) and all(kind in OF_EXTREMES for kind in measures)
    return proxy if fits and is_sliceable(quantizer) and groups_of(quantizer) is None else None


def _is_large(array: Any) -> bool:
    if not isinstance(array, np.ndarray) or array.nbytes < LARGE or not jax.sharding.get_mesh().empty:
        return False
    return not array.flags.c_contiguous or array.ctypes.data % ALIGNED != 0 or jax.default_backend() != "cpu"


def _scale(proxy: Any, x: Any) -> jax.Array:
    return Committed.of(proxy.tensor_quant, x).record[...]["scale"]


def _extremes(array: np.ndarray, scale: tuple[int, ...]) -> np.ndarray | None:
    """The smallest and the largest number of each scale, along the first axis that shares it."""
    sizes = scale if len(scale) == array.ndim else (1,) * array.ndim
    axes = tuple(axis for axis, size in enumerate(sizes) if size == 1)
    ends = [end(array, axis=axes, keepdims=True) for end in (np.min, np.max)]
    return np.concatenate(ends, axes[0]) if axes else None


@partial(jax.jit, donate_argnums=1)
def _put_all(i: Any, whole: Any, part: Any) -> Any:
    return jax.tree.map(partial(put, i), whole, part)
