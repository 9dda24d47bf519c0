"""Freezing one weight: a `FrozenParam` takes its place, in a layer and in a model that contracts it by itself."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
from flax import nnx

from jqinject.dot import FrozenParam
from jqinject.dot.frozen.frozen_groups import ScaleForms, without_groups
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.nn.frozen.in_slices import in_slices, slices_of
from jqinject.ops.cut import Cut, cut_in_place
from jqinject.ops.groups import fitting_size
from jqinject.proxy import beside_weights, map_stack, stack_of
from jqinject.quant_tensor import is_concrete, is_grouped, on_integers

SLICED_FROM = 2**20  # bytes


def freezes(layer: QuantWeightLayer) -> bool:
    """Whether a layer has a quantized weight that is not frozen."""
    quantized = layer.weight_quant is not None and layer.weight_quant.is_quant_enabled
    return layer.frozen is None and quantized


def numbers_of(layer: Any, sliced_from: int = SLICED_FROM) -> Any:
    """The low-bit numbers of a layer or a site, to be handed to `frozen_param`; None of a stack of layers.

    Dispatch is asynchronous: request one layer ahead to hide latency. For `sliced_from` see `jqinject.freeze`.
    """
    return None if stack_of((layer,)) else _numbers(layer, sliced_from)


def frozen_param(layer: Any, numbers: Any = None, sliced_from: int = SLICED_FROM) -> FrozenParam:
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
        cut = _cut(layer, stack)
        slices = slices_of(layer.weight[...], sliced_from)
        frozen = map_stack(
            lambda layers, _: _eager_numbers(layers[0], cut),
            beside_weights((layer,)),
            stack,
            one_by_one=slices > 1,
        )
    else:
        frozen = _checked(layer, _numbers(layer, sliced_from) if numbers is None else numbers)
    return FrozenParam.holding(frozen.numbers, frozen.form, layer.weight.get_metadata())


def _numbers(layer: Any, sliced_from: int) -> tuple[Any, Any]:
    graphdef, state = nnx.split(layer.weight_quant, graph=True)
    weight, summed, axes = layer.weight[...], layer.summed_axes, layer.axes_of_sums()
    static = (graphdef, summed, axes, _cut(layer, ()), slices_of(weight, sliced_from))
    return compiled_numbers(state, weight, _known_input(layer), *static)


@partial(jax.jit, static_argnums=(3, 4, 5, 6, 7))
def compiled_numbers(
    state: Any,
    weight: jax.Array,
    known_input: Any,
    graphdef: Any,
    summed: tuple[int, ...],
    axes_of_sums: tuple[int, ...] | None,
    cut: Cut | None,
    slices: int,
) -> tuple[Any, Any]:
    """The `FrozenParam`, and whether it is what the quantizer made; compiled once for all layers that are alike.

    No other arrays have the weight's size, and large weights are frozen in slices, as what is computed on the way may
    have it. With a learned bit width, which decides on their dtype, the quantized weight is returned.
    """

    def make(proxy: Any, weight: jax.Array) -> tuple[Any, Any]:
        quantized = _quantized(proxy, weight, known_input)
        integers = quantized
        if is_grouped(quantized):
            integers = quantized.grouped if cut is None else without_groups(quantized, cut)
        is_integer = on_integers(integers)
        if is_integer and not is_concrete(integers.bit_width):
            return quantized, True
        valid = integers.is_valid if is_integer else True
        return _frozen(proxy, quantized, summed, axes_of_sums, cut), valid

    proxy = nnx.merge(graphdef, state)
    sliced = None
    if slices > 1 and known_input is None and cut is None:
        sliced = in_slices(make, proxy, weight, slices, (*summed, *(axes_of_sums or ())))
    return make(proxy, weight) if sliced is None else sliced


def _checked(layer: Any, numbers: tuple[Any, Any]) -> FrozenParam:
    """The numbers; numbers that are not the quantizer's own raise its error."""
    found, valid = numbers
    usable = isinstance(found, FrozenParam) and (not is_concrete(valid) or bool(valid))
    return found if usable else _eager_numbers(layer, _cut(layer, ()))


def _cut(layer: Any, stack: tuple[int, ...]) -> Cut | None:
    """The groups of a layer's weight if they cross its shards; else None."""
    metadata, weight = layer.weight_quant.quant_metadata, layer.weight.get_value()
    size, dim = metadata.group_size, metadata.group_dim
    if size is None or dim is None or not (isinstance(weight, jax.Array) and is_concrete(weight)):
        return None
    axis = dim % (weight.ndim - len(stack))
    along = axis + len(stack)
    found = cut_in_place(weight, fitting_size(size, weight.shape[along]), along)
    return None if found is None else replace(found, axis=axis)


def _eager_numbers(layer: Any, cut: Cut | None) -> FrozenParam:
    proxy = layer.weight_quant
    quantized = _quantized(proxy, layer.weight[...], _known_input(layer))
    return _frozen(proxy, quantized, layer.summed_axes, layer.axes_of_sums(), cut)


def _quantized(proxy: Any, weight: jax.Array, known_input: Any) -> Any:
    return proxy(weight) if known_input is None else proxy(weight, known_input)


def _frozen(
    proxy: Any,
    quantized: Any,
    summed: tuple[int, ...],
    axes_of_sums: tuple[int, ...] | None,
    cut: Cut | None,
) -> FrozenParam:
    forms = ScaleForms(proxy.scale_dtype, proxy.has_whole_zero_points)
    return FrozenParam.of(quantized, summed, None, proxy.has_zero_point, axes_of_sums, forms, cut)


def _known_input(layer: Any) -> Any:
    """The format of the input if the weight is quantized for it, else None."""
    if not layer.weight_quant.requires_quant_input:
        return None
    own = layer.input_format()
    return layer.weight_quant.kept_input() if own is None else own
