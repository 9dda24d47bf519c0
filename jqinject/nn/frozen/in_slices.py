"""Freezing a large weight slice by slice, so that what is computed on the way takes little memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import CodebookQuant, FloatQuant, RescalingIntQuant
from jqinject.core._protocols import grid_of, groups_of
from jqinject.core.component import Component, node_class, parts_of
from jqinject.core.views import DynamicOverSubChannelBlockView, OverSubChannelBlockView
from jqinject.dot import FrozenParam
from jqinject.proxy import Committed
from jqinject.quant_tensor import is_concrete

OF_SLICE = 2**17  # bytes
FEWEST, MOST = 16, 64
PACKED = 8  # a slice has a multiple of so many numbers, which fill whole bytes
# Their `by_scale`, given the scale of a call, makes the bits of this call.
ELEMENTWISE = (CodebookQuant, FloatQuant, RescalingIntQuant)
# What has an element for each of the weight's, or sums some; everything else is of the whole weight.
CUT = ("value", "sums")

Make = Callable[[Any, jax.Array], tuple[Any, Any]]


def slices_of(weight: Any, sliced_from: int) -> int:
    """How many slices a weight is frozen in: 1 below so many bytes, for abstract weights, and on several devices."""
    if not (isinstance(weight, jax.Array) and is_concrete(weight)):
        return 1
    if weight.nbytes < sliced_from or len(weight.sharding.device_set) > 1:
        return 1
    slices = max(FEWEST, weight.nbytes // OF_SLICE)
    return min(1 << slices.bit_length() - 1, MOST)


def in_slices(make: Make, proxy: Any, weight: jax.Array, number: int, kept: tuple[int, ...]) -> Any:
    """What `make(proxy, weight)` returns, to the bit, made slice by slice; None if that is not possible.

    The scale is measured first, of the whole weight; then the slices are quantized by it.

    Args:
        make: returns a `FrozenParam`, and whether it is valid; it works under `jax.jit`.
        proxy: the weight's quantizer, a private copy, which is changed.
        weight: the weight.
        number: of slices, at most.
        kept: axes that are not cut: sums are taken over them.
    """
    quantizer = proxy.tensor_quant
    if proxy.record is None and not is_sliceable(quantizer):
        return None
    record = Committed.of(quantizer, weight).record if proxy.record is None else proxy.record
    cutting = cutting_of(weight.shape, record[...]["scale"].shape, groups_of(quantizer), kept, number)
    if cutting is None:
        return None
    frozen, _ = make(proxy, weight)  # XLA drops the numbers that are taken from the slices
    if not isinstance(frozen, FrozenParam):
        return None
    proxy._hold(Committed(_of_any_shape(quantizer), record))
    graphdef, held = nnx.split(proxy, graph=True)

    def part(i: Any) -> Any:
        copy = nnx.merge(graphdef, jax.tree.map(lambda x: x, held))
        cutting.cut_record(copy, i)
        made, valid = make(copy, cutting.of_weight(weight, i))
        return {name: _as_bits(made.numbers[name]) for name in CUT if name in made.numbers}, valid

    def step(i: Any, made: Any) -> Any:
        found, valid = part(i)
        return jax.tree.map(partial(put, i), made[0], found), made[1] & valid

    whole = {name: frozen.numbers[name] for name in CUT if name in frozen.numbers}
    empty = {name: jnp.zeros(x.shape, _bits_dtype(x.dtype)) for name, x in whole.items()}
    cut, valid = jax.lax.fori_loop(0, cutting.number, step, (empty, jnp.bool_(True)))
    cut = {name: jax.lax.bitcast_convert_type(bits, whole[name].dtype) for name, bits in cut.items()}
    return FrozenParam.holding({**frozen.numbers, **cut}, frozen.form), valid


def is_sliceable(quantizer: Any) -> bool:
    """Whether the slices of a weight are quantized by the whole weight's scales as the whole is."""
    kind = type(quantizer)
    known = kind in ELEMENTWISE or any(
        kind is node_class(each) for each in ELEMENTWISE if issubclass(each, Component)
    )
    return known and grid_of(quantizer) is not None


def _of_any_shape(component: Any) -> Any:
    """A quantizer whose view of groups also takes a slice; modules are changed, values made anew."""
    changed: dict[str, Any] = {}
    for name, part in vars(component).items():
        if isinstance(part, OverSubChannelBlockView):
            changed[name] = DynamicOverSubChannelBlockView(
                part.group_size, part.group_dim, block_width=part.block_width, block_dim=part.block_dim
            )
        elif name == "int_quant" and isinstance(part, Component):
            changed[name] = _of_any_shape(part)
    if not isinstance(component, nnx.Module):
        value = object.__new__(type(component))
        value.__setstate__(dict(parts_of(component)) | changed)
        return value
    for name, part in changed.items():
        setattr(component, name, nnx.data(part) if nnx.is_data(part) else nnx.static(part))
    return component


class Cutting(NamedTuple):
    """How a weight and its scales are cut.

    Attributes:
        axis: of the weight.
        number: of slices.
        size: of one, along the axis.
        along: the same axis of the scales, which have two axes for one if there are groups; None if they are not cut.
    """

    axis: int
    number: int
    size: int
    along: int | None

    def of_weight(self, weight: jax.Array, i: Any) -> jax.Array:
        """The i-th slice of the weight."""
        if weight.dtype.itemsize != 2:
            return jax.lax.dynamic_slice_in_dim(weight, i * self.size, self.size, self.axis)
        # As bfloat16, and before the loop if that is possible, XLA converts the whole weight to float32.
        weight, i = jax.lax.optimization_barrier((weight, i))
        bits = jax.lax.bitcast_convert_type(weight, jnp.uint16)
        part = jax.lax.dynamic_slice_in_dim(bits, i * self.size, self.size, self.axis)
        return jax.lax.bitcast_convert_type(part, weight.dtype)

    def of_host(self, array: np.ndarray, i: int) -> np.ndarray:
        """The i-th slice of an array of NumPy's."""
        part = slice(i * self.size, (i + 1) * self.size)
        return np.ascontiguousarray(array[(slice(None),) * self.axis + (part,)])

    def of_scale(self, scale: jax.Array, i: Any) -> jax.Array:
        """The scales of the i-th slice."""
        if self.along is None or scale.ndim <= self.along or scale.shape[self.along] == 1:
            return scale
        return jax.lax.dynamic_slice_in_dim(scale, i * self.size, self.size, self.along)

    def cut_record(self, proxy: Any, i: Any) -> None:
        """Give a committed proxy the scales of the i-th slice."""
        proxy.record.set_value({name: self.of_scale(held, i) for name, held in proxy.record[...].items()})


def cutting_of(
    shape: tuple[int, ...],
    scale: tuple[int, ...],
    groups: tuple[int, int] | None,
    kept: tuple[int, ...],
    number: int,
) -> Cutting | None:
    """How to cut a weight, in as many slices as possible; None if it cannot be cut.

    Args:
        shape: of the weight.
        scale: the shape of its scales.
        groups: group size and grouped axis of its quantizer.
        kept: axes that are not cut.
        number: of slices, at most.
    """
    grouped = None if groups is None else groups[1] % len(shape)
    ndim = len(shape) + (groups is not None)
    single = math.prod(scale) == 1
    found: list[Cutting] = []
    for axis in range(len(shape)):
        along = axis + (grouped is not None and axis > grouped)
        fits = single or (len(scale) == ndim and scale[along] in (1, shape[axis]))
        slices = math.gcd(number, shape[axis] // PACKED) if shape[axis] % PACKED == 0 else 1
        if fits and slices > 1 and axis != grouped and axis not in {one % len(shape) for one in kept}:
            separate = not single and scale[along] > 1
            found.append(Cutting(axis, slices, shape[axis] // slices, along if separate else None))
    return max(found, key=lambda one: (one.number, one.along is not None), default=None)


def _bits_dtype(dtype: np.dtype) -> np.dtype:
    """Of the bits of 8-bit floats, as which XLA moves them without converting them; other dtypes as they are."""
    is_float8 = dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.floating)
    return np.dtype(np.uint8) if is_float8 else dtype


def _as_bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, _bits_dtype(x.dtype))


def put(i: Any, whole: jax.Array, part: jax.Array) -> jax.Array:
    """Write the i-th part; what the whole weight has one of, such as a single scale, is the same in all parts."""
    cut = [
        axis for axis, sizes in enumerate(zip(whole.shape, part.shape, strict=True)) if sizes[0] != sizes[1]
    ]
    return jax.lax.dynamic_update_slice_in_dim(whole, part, i * part.shape[cut[0]], cut[0]) if cut else part
