"""Switches the quantizers of a whole model off and on again."""

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from flax import nnx

from jqinject.model.walk import ModelIndex, check_module, place_name
from jqinject.program import listed
from jqinject.proxy import QuantProxyFromInjector

Change = tuple[dict[str, Any], str, object]
_MISSING = object()


@contextmanager
def changed(changes: list[Change]) -> Generator[None]:
    """Change attributes within a `with` block.

    This bypasses NNX, which refuses changes to a layer reached through the closure of a transformation. The old values
    are back before NNX looks at the layer again.
    """
    before = [(attributes, name, attributes.get(name, _MISSING)) for attributes, name, _ in changes]
    try:
        for attributes, name, value in changes:
            attributes[name] = value
        yield
    finally:
        for attributes, name, value in reversed(before):
            if value is _MISSING:
                attributes.pop(name, None)
            else:
                attributes[name] = value


@contextmanager
def quantization_status_manager(
    model: nnx.Module,
    *,
    disable_act_quant: bool = False,
    disable_weight_quant: bool = False,
    disable_bias_quant: bool = False,
) -> Generator[None]:
    """Switch off the named quantizers within a `with` block, and restore them after it.

    With activations off, quantizers that need a quantized input are off as well: biases with the accumulator's scale,
    and weights whose quantizer depends on the input's bit width. With weights off, such biases are off too. Layers
    return arrays meanwhile.

    Source: Brevitas's `quantization_status_manager`; differs from Brevitas: quantizers that depend on a disabled one
    are off too. Weights that are frozen stay what they are, with a warning.

    Args:
        model: an NNX module; not one that a compiled function holds.
        disable_act_quant: activations and accumulators.
        disable_weight_quant: weights.
        disable_bias_quant: biases.

    Raises:
        TypeError: `model` is not an NNX module.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantLinear
        >>> layer = QuantLinear(4, 2, weight_bit_width=2, use_bias=False, rngs=nnx.Rngs(0))
        >>> with quantization_status_manager(layer, disable_weight_quant=True):
        ...     same = layer(jnp.ones(4)) == nnx.Linear.__call__(layer, jnp.ones(4))
        >>> bool(same.all()), layer.weight_quant.is_quant_enabled
        (True, True)
    """
    check_module(model, "quantization_status_manager")
    if disable_weight_quant:
        _warn_of_frozen(model)

    def is_off(proxy: QuantProxyFromInjector) -> bool:
        if proxy.role == "weight":
            return disable_weight_quant or (disable_act_quant and proxy.requires_quant_input)
        if proxy.role == "bias":
            needs_both = proxy.quant_metadata.requires_input_scale
            return disable_bias_quant or (needs_both and (disable_act_quant or disable_weight_quant))
        return disable_act_quant and proxy.role in ("activation", "accumulator")

    returns_arrays = disable_act_quant or disable_weight_quant
    changes: list[Change] = []
    for _, module in nnx.iter_modules(model, graph=True):
        if isinstance(module, QuantProxyFromInjector) and is_off(module):
            changes.append((vars(module), "disable_quant", True))
        if returns_arrays and vars(module).get("return_quant_tensor") is True:
            changes.append((vars(module), "return_quant_tensor", False))
    with changed(changes):
        yield


def _warn_of_frozen(model: nnx.Module) -> None:
    frozen = ModelIndex(model).frozen_parameters
    if frozen:
        shown = listed(tuple(map(place_name, frozen)))
        warnings.warn(
            f"quantization_status_manager: disable_weight_quant has no effect on {shown}: frozen weights have no "
            "quantizer to switch off.\n  cure: the model before freeze(model); or unfreeze(model), if its masters were "
            "kept",
            UserWarning,
            stacklevel=4,  # past contextlib, to the `with`
        )
