"""Freezing one weight: a `FrozenParam` takes its place, in a layer and in a model that contracts it by itself.

A large weight is frozen slice by slice, so that what is computed on the way takes little memory; one in an array of
NumPy's is read in slices too, so that no device holds all of it.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject import core, dot
from jqinject.core._protocols import block_width, grid_of, groups_of
from jqinject.core.component import Component, node_class, parts_of
from jqinject.core.views import DynamicOverSubChannelBlockView, OverSubChannelBlockView
from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.dot.frozen.frozen_numbers import Numbers, ScaleForms, scale_of
from jqinject.nn.requantizer import REQUANTIZER, Axes, Requantizer
from jqinject.ops import packing
from jqinject.ops.cut import Cut, cut_in_place
from jqinject.ops.groups import fitting_size
from jqinject.proxy import Committed, beside_weights, map_stack, stack_of
from jqinject.quant_tensor import QuantTensor, is_concrete, is_quantized

SLICED_FROM = 2**20  # bytes
State = nnx.State[object, object]


def numbers_of(layer: Any, sliced_from: int = SLICED_FROM) -> Any:
    """The low-bit numbers of a layer or a site, to be handed to `frozen_param`; None of a stack of layers.

    Dispatch is asynchronous: request one layer ahead to hide latency. For `sliced_from` see `jqinject.freeze`.
    """
    if stack_of((layer,)):
        return None
    graphdef, state = nnx.split(layer.weight_quant, graph=True)
    weight = layer.weight[...]
    slices = slices_of(weight, sliced_from)
    return compiled_numbers(state, weight, _known_input(layer), graphdef, _axes(layer), slices)


def frozen_param(layer: Any, numbers: Any = None, sliced_from: int = SLICED_FROM) -> dot.FrozenParam:
    """The low-bit numbers of a layer or a site whose weight is quantized.

    Args:
        layer: a layer, or a stack of layers; or a site.
        numbers: what `numbers_of` returned for it.
        sliced_from: see `jqinject.freeze`.
    """
    stack = stack_of((layer,))
    if stack:
        if layer.weight_quant.requires_quant_input and layer.input_quant is None:
            layer.weight_quant.kept_input()  # raises if it is not known, which cannot be told under `vmap`
        axes = _axes(layer, stack)
        slices = slices_of(layer.weight[...], sliced_from)
        frozen = map_stack(
            lambda layers, _: _eager_numbers(layers[0], axes),
            beside_weights((layer,)),
            stack,
            one_by_one=slices > 1,
        )
    else:
        frozen, valid = numbers_of(layer, sliced_from) if numbers is None else numbers
        usable = isinstance(frozen, dot.FrozenParam) and (not is_concrete(valid) or bool(valid))
        # Numbers that are not the quantizer's own raise its error.
        frozen = frozen if usable else _eager_numbers(layer, _axes(layer))
    form = replace(frozen.form, block_width=block_width(layer.weight_quant.tensor_quant))
    metadata = {**layer.weight.get_metadata(), REQUANTIZER: Requantizer.of(layer, _axes(layer, stack))}
    return dot.FrozenParam.holding(frozen.numbers, form, metadata)


@partial(jax.jit, static_argnums=(3, 4, 5))
def compiled_numbers(
    state: Any, weight: jax.Array, known_input: Any, graphdef: Any, axes: Axes, slices: int
) -> tuple[Any, Any]:
    """The `FrozenParam`, and whether it is what the quantizer made; compiled once for all layers that are alike.

    No other arrays have the weight's size, and large weights are frozen in slices, as what is computed on the way may
    have it. With a learned bit width, which decides on their dtype, the quantized weight is returned.
    """

    def make(proxy: Any, weight: jax.Array) -> tuple[Any, Any]:
        quantized = proxy(weight, *known_input)
        is_integer = is_quantized(quantized) and quantized.grid.is_integer
        if is_integer and not is_concrete(quantized.bit_width):
            return quantized, True
        return _frozen(proxy, quantized, axes), quantized.is_valid if is_integer else True

    proxy = nnx.merge(graphdef, state)
    sliced = None
    if slices > 1 and not known_input and axes.cut is None:
        sliced = in_slices(make, proxy, weight, slices, axes.uncut)
    return make(proxy, weight) if sliced is None else sliced


def requantized(
    requantizer: Requantizer, slices: int, form: FrozenForm, state: State, weight: jax.Array, stored: Numbers
) -> tuple[dict[str, jax.Array], jax.Array]:
    """New numbers of one frozen weight, as `frozen_param` makes them, and whether they are what the quantizer made.

    Args:
        requantizer: of the weight.
        slices: see `slices_of`.
        form: of the weight's present numbers.
        state: what its quantizer learned or collected.
        weight: the new float values.
        stored: the present numbers if their scales and zero points stay, of which payload and sums are then returned;
            empty to measure them.

    Raises:
        TypeError: scales stay, and the quantizer does not round to nearest on a grid that it knows.
        ValueError: the numbers would have another form.
    """
    graphdef = requantizer.graphdef
    if stored:
        proxy = nnx.merge(graphdef, state)
        committed = Committed.of(proxy.tensor_quant, weight)
        committed.record.set_value(stored_record(stored, form, committed.record[...]))
        proxy._hold(committed)
        graphdef, state = nnx.split(proxy, graph=True)
    frozen, valid = compiled_numbers(state, weight, (), graphdef, requantizer.axes, slices)
    numbers = numbers_of_form(frozen, form)
    return {name: x for name, x in numbers.items() if not stored or name in CUT}, valid


def numbers_of_form(frozen: object, form: FrozenForm) -> dict[str, jax.Array]:
    """The numbers of a frozen weight, which have to be of a form.

    Raises:
        ValueError: they are of another.
    """
    if not isinstance(frozen, dot.FrozenParam):
        raise ValueError("its bit width is learned, and the payload's dtype follows it")
    if replace(frozen.form, block_width=form.block_width) != form:
        raise ValueError(f"its numbers would be {frozen.form}, and they are {form}")
    return frozen.numbers


def stored_record(numbers: Numbers, form: FrozenForm, like: Numbers) -> dict[str, jax.Array]:
    """Scales and zero points of frozen numbers as the record of a committed quantizer.

    Args:
        numbers, form: the frozen numbers.
        like: a record of the quantizer.

    Raises:
        ValueError: they have other shapes.
    """
    record = {**like, "scale": scale_of(numbers)}
    if "zero_point" in like and "zero_point" in numbers:
        offset = 2 ** (form.grid.bit_width - 1) if form.grid.signed else 0
        record["zero_point"] = numbers["zero_point"].astype(np.float32) + offset

    def fitted(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        sizes, own = ([size for size in sizes if size > 1] for sizes in (shape, x.shape))
        return x.reshape(shape) if sizes == own else jnp.broadcast_to(x, shape)

    return {name: fitted(x, like[name].shape) for name, x in record.items()}


def _axes(layer: Any, stack: tuple[int, ...] = ()) -> Axes:
    """How the weight of a layer, or of each layer of a stack, is stored."""
    return Axes(layer.summed_axes, layer.axes_of_sums(), _cut(layer, stack))


def _cut(layer: Any, stack: tuple[int, ...]) -> Cut | None:
    metadata, weight = layer.weight_quant.quant_metadata, layer.weight.get_value()
    size, dim = metadata.group_size, metadata.group_dim
    if size is None or dim is None or not (isinstance(weight, jax.Array) and is_concrete(weight)):
        return None
    axis = dim % (weight.ndim - len(stack))
    along = axis + len(stack)
    cut = cut_in_place(weight, fitting_size(size, weight.shape[along]), along)
    return None if cut is None else replace(cut, axis=axis)


def _eager_numbers(layer: Any, axes: Axes) -> dot.FrozenParam:
    quantized = layer.weight_quant(layer.weight[...], *_known_input(layer))
    return _frozen(layer.weight_quant, quantized, axes)


def _frozen(proxy: Any, quantized: QuantTensor, axes: Axes) -> dot.FrozenParam:
    forms = ScaleForms(proxy.scale_dtype, proxy.has_whole_zero_points, proxy.scale_factor)
    summed = axes.summed
    return dot.FrozenParam.of(quantized, summed, None, proxy.has_zero_point, axes.of_sums, forms, axes.cut)


def _known_input(layer: Any) -> tuple[Any, ...]:
    """The format of the input if the weight is quantized for it, else nothing."""
    if not layer.weight_quant.requires_quant_input:
        return ()
    own = layer.input_format()
    return (layer.weight_quant.kept_input() if own is None else own,)


BYTES_OF_SLICE = 2**17  # bytes
FEWEST, MOST = 16, 64
PACKED = 8  # a slice has a multiple of so many numbers, which fill whole bytes
# Their `by_scale`, given the scale of a call, makes the bits of this call.
ELEMENTWISE = (core.CodebookQuant, core.FloatQuant, core.RescalingIntQuant)
# What has an element for each of the weight's, or sums some; everything else is of the whole weight.
CUT = ("value", "sums")

Make = Callable[[object, jax.Array], tuple[Any, object]]


def slices_of(weight: object, sliced_from: int) -> int:
    """How many slices a weight is frozen in: 1 below so many bytes, for abstract weights, and on several devices."""
    if not (isinstance(weight, jax.Array) and is_concrete(weight)):
        return 1
    return number_of_slices(weight.nbytes, weight.sharding, sliced_from)


def number_of_slices(nbytes: int, sharding: jax.sharding.Sharding, sliced_from: int = SLICED_FROM) -> int:
    """How many slices a weight of so many bytes is frozen in; see `slices_of`."""
    if nbytes < sliced_from or len(sharding.device_set) > 1:
        return 1
    slices = max(FEWEST, nbytes // BYTES_OF_SLICE)
    return min(1 << slices.bit_length() - 1, MOST)


def in_slices(make: Make, proxy: Any, weight: jax.Array, number: int, uncut: tuple[int, ...]) -> Any:
    """What `make(proxy, weight)` returns, to the bit, made slice by slice; None if that is not possible.

    The scale is measured first, of the whole weight; then the slices are quantized by it.

    Args:
        make: returns a `FrozenParam`, and whether it is valid; it works under `jax.jit`.
        proxy: the weight's quantizer, a private copy, which is changed.
        weight: the weight.
        number: of slices, at most.
        uncut: axes that are not cut: sums are taken over them.
    """
    quantizer = proxy.tensor_quant
    if proxy.record is None and not is_sliceable(quantizer):
        return None
    record = Committed.of(quantizer, weight).record if proxy.record is None else proxy.record
    cutting = cutting_of(weight.shape, record[...]["scale"].shape, groups_of(quantizer), uncut, number)
    if cutting is None:
        return None
    frozen, _ = make(proxy, weight)  # XLA drops the numbers that are taken from the slices
    if not isinstance(frozen, dot.FrozenParam):
        return None
    proxy._hold(Committed(_of_any_shape(quantizer), record))
    graphdef, state = nnx.split(proxy, graph=True)

    def bits_of(frozen: dot.FrozenParam) -> packing.LowBitTree:
        """What is cut; 8-bit floats as bits, which XLA moves without converting them."""
        return packing.as_bits({name: frozen.numbers[name] for name in CUT if name in frozen.numbers})

    def step(i: int | jax.Array, carry: Any) -> Any:
        copy = nnx.merge(graphdef, jax.tree.map(lambda x: x, state))
        cutting.cut_record(copy, i)
        part, valid = make(copy, cutting.of_weight(weight, i))
        return jax.tree.map(partial(put, i), carry[0], bits_of(part).tree), carry[1] & valid

    bits = bits_of(frozen)
    empty = jax.tree.map(jnp.zeros_like, bits.tree)
    cut, valid = jax.lax.fori_loop(0, cutting.number, step, (empty, jnp.bool_(True)))
    return dot.FrozenParam.holding({**frozen.numbers, **replace(bits, tree=cut).floats()}, frozen.form), valid


def is_sliceable(quantizer: object) -> bool:
    """Whether the slices of a weight are quantized by the whole weight's scales as the whole is."""
    kind = type(quantizer)
    is_elementwise = kind in ELEMENTWISE or any(
        kind is node_class(base) for base in ELEMENTWISE if issubclass(base, Component)
    )
    return is_elementwise and grid_of(quantizer) is not None


def _of_any_shape(component: Any) -> Any:
    """A quantizer whose view of groups also takes a slice; modules are changed, values replaced."""
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

    def of_scale(self, scale: jax.Array, i: int | jax.Array) -> jax.Array:
        """The scales of the i-th slice."""
        if self.along is None or scale.ndim <= self.along or scale.shape[self.along] == 1:
            return scale
        return jax.lax.dynamic_slice_in_dim(scale, i * self.size, self.size, self.along)

    def cut_record(self, proxy: Any, i: Any) -> None:
        """Give a committed proxy the scales of the i-th slice."""
        proxy.record.set_value(
            {name: self.of_scale(numbers, i) for name, numbers in proxy.record[...].items()}
        )


def cutting_of(
    shape: tuple[int, ...],
    scale: tuple[int, ...],
    groups: tuple[int, int] | None,
    uncut: tuple[int, ...],
    number: int,
) -> Cutting | None:
    """How to cut a weight, in as many slices as possible; None if it cannot be cut.

    Args:
        shape: of the weight.
        scale: the shape of its scales.
        groups: group size and grouped axis of its quantizer.
        uncut: axes that are not cut.
        number: of slices, at most.
    """
    grouped = None if groups is None else groups[1] % len(shape)
    ndim = len(shape) + (groups is not None)
    single = math.prod(scale) == 1
    cuttings: list[Cutting] = []
    for axis in range(len(shape)):
        along = axis + (grouped is not None and axis > grouped)
        fits = single or (len(scale) == ndim and scale[along] in (1, shape[axis]))
        slices = math.gcd(number, shape[axis] // PACKED) if shape[axis] % PACKED == 0 else 1
        if fits and slices > 1 and axis != grouped and axis not in {place % len(shape) for place in uncut}:
            separate = not single and scale[along] > 1
            cuttings.append(Cutting(axis, slices, shape[axis] // slices, along if separate else None))
    return max(cuttings, key=lambda cutting: (cutting.number, cutting.along is not None), default=None)


def put(i: Any, array: jax.Array, part: jax.Array) -> jax.Array:
    """Write the i-th part; what the whole weight has one of, such as a single scale, is the same in all parts."""
    cut = [
        axis for axis, sizes in enumerate(zip(array.shape, part.shape, strict=True)) if sizes[0] != sizes[1]
    ]
    return jax.lax.dynamic_update_slice_in_dim(array, part, i * part.shape[cut[0]], cut[0]) if cut else part


LARGE, BYTES_OF_LARGE_SLICE = 2**22, 2**19  # bytes
ALIGNED = 64  # bytes; JAX takes such memory without a copy on a CPU
OF_EXTREMES = (core.AbsMax, core.AbsMaxRange, core.AbsMinMax, core.MinMaxRange, core.NegativeMinOrZero)


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
    like = jax.ShapeDtypeStruct(array.shape, layer.weight.dtype)
    scale = jax.eval_shape(lambda x: Committed.of(proxy.tensor_quant, x).record[...]["scale"], like)
    axes = Axes(layer.summed_axes, layer.axes_of_sums())
    number = min(max(FEWEST, 1 << (array.nbytes // BYTES_OF_LARGE_SLICE).bit_length()), MOST)
    cutting = cutting_of(array.shape, scale.shape, None, axes.uncut, number)
    extremes = _extremes(array, scale.shape)
    if cutting is None or extremes is None or not np.isfinite(extremes).all():
        return None

    def numbers_of_part(scales: object, part: object) -> Any:
        graphdef, state = nnx.split(scales, graph=True)
        return compiled_numbers(state, part, (), graphdef, axes, 1)

    proxy.record = Committed.of(proxy.tensor_quant, jnp.asarray(extremes, like.dtype)).record
    frozen, _ = jax.eval_shape(partial(numbers_of_part, proxy), like)
    numbers, valid = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), frozen.numbers), True
    for i, part in enumerate(np.split(array, cutting.number, cutting.axis)):
        own = nnx.clone(proxy)
        cutting.cut_record(own, i)
        frozen_part, fits = numbers_of_part(own, jnp.asarray(np.ascontiguousarray(part), like.dtype))
        numbers, valid = jax.block_until_ready((_put_all(i, numbers, frozen_part.numbers), valid & fits))
    return dot.FrozenParam.holding(numbers, frozen.form), valid


def _private_copy(layer: Any) -> Any:
    """The proxy of a layer whose quantizer has no state and is cut; else None."""
    proxy = layer.weight_quant
    if proxy.requires_quant_input or jax.tree.leaves(nnx.state(proxy)):
        return None
    proxy = nnx.clone(proxy)
    quantizer = proxy.tensor_quant
    sources = [getattr(quantizer, name, None) for name in ("scaling_impl", "zero_point_impl")]
    statistics = [getattr(source, name, None) for source in sources for name in ("calibration_impl", "stats")]
    measures = [type(statistic) for statistic in statistics if statistic is not None]
    fits = bool(measures) and all(kind in OF_EXTREMES for kind in measures)
    return proxy if fits and is_sliceable(quantizer) and groups_of(quantizer) is None else None


def _is_large(array: object) -> bool:
    if not isinstance(array, np.ndarray) or array.nbytes < LARGE or not jax.sharding.get_mesh().empty:
        return False
    return not array.flags.c_contiguous or array.ctypes.data % ALIGNED != 0 or jax.default_backend() != "cpu"


def _extremes(array: np.ndarray, scale: tuple[int, ...]) -> np.ndarray | None:
    """The smallest and the largest number of each scale, along the first axis that shares it."""
    sizes = scale if len(scale) == array.ndim else (1,) * array.ndim
    axes = tuple(axis for axis, size in enumerate(sizes) if size == 1)
    ends = [end(array, axis=axes, keepdims=True) for end in (np.min, np.max)]
    return np.concatenate(ends, axes[0]) if axes else None


@partial(jax.jit, donate_argnums=1)
def _put_all(i: object, arrays: object, parts: object) -> Any:
    return jax.tree.map(partial(put, i), arrays, parts)
