"""What a weight quantizer may have to know of the layer's input."""

from typing import Any, NamedTuple

import jax

from jqinject.proxy import InputFormat
from jqinject.quant_tensor import IntQuantTensor


class LayerParameters(NamedTuple):
    """What a weight's or bias's proxy may be asked about: it stays when the layer is gone.

    Attributes:
        weight, bias: Variables, or None.
        input_quant: the proxy of the input, or None.
    """

    weight: Any
    bias: Any
    input_quant: Any

    def input_format(self) -> InputFormat | None:
        """Of the quantized input, as far as `input_quant` says it."""
        return input_format(self)


def check_input_for_weight(layer: Any) -> None:
    """Refuse a weight quantizer that goes by the input where there is none, or an input that it cannot go by.

    Args:
        layer: a layer that holds its quantizers.

    Raises:
        TypeError: the input is not quantized to integers.
        ValueError: the layer has no quantized input, or it is too wide for the accumulator.
    """
    weight_quant, input_quant = layer.weight_quant, layer.input_quant
    if weight_quant is None or not weight_quant.is_quant_enabled or not weight_quant.requires_quant_input:
        return
    if type(layer).input_quant is None:
        raise ValueError(
            f"{type(layer).__name__}: {weight_quant.binding.base.__name__} quantizes the weight for the integers that "
            "it is multiplied with, and this layer has no quantized input.\n  cure: another weight quantizer, such as "
            "Int8WeightPerChannelFloat"
        )
    if input_quant is not None and input_quant.is_quant_enabled:
        weight_quant.check_input(_sample(input_quant))


def input_format(layer: Any) -> InputFormat | None:
    """The format of a layer's quantized input, as far as its `input_quant` says it; None if there is none."""
    proxy = layer.input_quant
    sample = _sample(proxy) if proxy is not None and proxy.is_quant_enabled else None
    return InputFormat(sample.bit_width, sample.signed) if isinstance(sample, IntQuantTensor) else None


def _sample(proxy: Any) -> Any:
    """One quantized 0, of which bits and sign are read; only traced if bits are static, so that nothing runs."""
    traced = jax.eval_shape(proxy.sample)
    static = not isinstance(traced, IntQuantTensor) or isinstance(traced.bit_width, int)
    return traced if static else proxy.sample()
