"""Freezing one layer: its quantized weight gives way to low-bit numbers, and comes back."""

from typing import Any

import jax
from flax import nnx

from jqinject.nn._frozen import FrozenWeight
from jqinject.nn._frozen_groups import ScaleForms
from jqinject.nn._weight_layer import QuantWeightLayer
from jqinject.proxy import build_stacked, stack_of


def freezes(layer: QuantWeightLayer) -> bool:
    """Whether a layer has a quantized weight that is not frozen."""
    quantized = layer.weight_quant is not None and layer.weight_quant.is_quant_enabled
    return layer.frozen is None and quantized


def quantized_weight(layer: QuantWeightLayer) -> Any:
    """The quantized weight of a layer that `freezes`, to be handed to `freeze_layer`; None of a stack of layers.

    It is computed while the caller goes on: asked for one layer ahead, nobody waits for it.
    """
    return None if stack_of((layer,)) else _quantized(layer.weight_quant, layer.weight[...])


def freeze_layer(layer: QuantWeightLayer, *, keep_master: bool = False, weight: Any = None) -> bool:
    """Put the low-bit numbers of the weight in the place of the weight, its quantizer and that of the gradient.

    Args:
        layer: a layer, or a stack of layers.
        keep_master: keep those too, so that `unfreeze_layer` can bring them back.
        weight: what `quantized_weight` returned for the layer.

    Returns:
        Whether there was a quantized weight to freeze.
    """
    if not freezes(layer):
        return False
    stack = stack_of((layer,))
    layer.frozen = (
        build_stacked(lambda layers, _: _numbers(layers[0]), (layer,), stack)
        if stack
        else _numbers(layer, weight)
    )
    if not keep_master:
        for name in (layer.weight_name, "weight_quant", "grad_quant"):
            if vars(layer).get(name) is not None:
                delattr(layer, name)
    return True


def unfreeze_layer(layer: QuantWeightLayer) -> bool:
    """Take the weight itself again.

    Returns:
        Whether the layer was frozen.

    Raises:
        ValueError: the weight was not kept.
    """
    check_unfreezes(layer)
    if layer.frozen is None:
        return False
    del layer.frozen
    return True


def check_unfreezes(layer: QuantWeightLayer) -> None:
    """Raise where `unfreeze_layer` would.

    Raises:
        ValueError: the weight was not kept.
    """
    if layer.frozen is not None and vars(layer).get(layer.weight_name) is None:
        raise ValueError(
            f"{type(layer).__name__}: the float weight is gone.\n  cure: freeze(model, keep_masters=True), or load a "
            "float checkpoint into a model that was not frozen"
        )


def _numbers(layer: QuantWeightLayer, weight: Any = None) -> FrozenWeight:
    weight = _quantized(layer.weight_quant, layer.weight[...]) if weight is None else weight
    metadata = layer.weight.get_metadata()
    zero_point = layer.weight_quant.has_zero_point
    forms = ScaleForms(layer.weight_quant.scale_dtype, layer.weight_quant.has_whole_zero_points)
    return FrozenWeight(weight, layer.summed_axes(), metadata, zero_point, layer.axes_of_sums(), forms)


@nnx.jit(graph=True)
def _quantized(proxy: Any, weight: jax.Array) -> Any:
    """Compiled, once for all layers that are alike: no array of the weight's size but the result."""
    return proxy(weight)
