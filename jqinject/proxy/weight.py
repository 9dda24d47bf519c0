"""The proxy of weights."""

from typing import Any, final

import jax
from flax import nnx

from jqinject.proxy.base import QuantProxyFromInjector
from jqinject.proxy.links import first_parameters
from jqinject.quant_tensor import QuantTensor


class WeightQuantProxy(QuantProxyFromInjector):
    """Abstract: the proxy of a layer's weight, or of the weights of several that share one quantizer."""

    role = "weight"

    def __call__(self, x: jax.Array) -> QuantTensor | jax.Array:
        """Quantize a weight.

        Args:
            x: the weight; float, any shape.

        Returns:
            A QuantTensor of the shape and dtype of `x`, or `x` itself where quantization is off.
        """
        return x if self.tensor_quant is None or self.disable_quant else self._quantized(x)

    def quantize(self, x: jax.Array) -> Any:
        """Quantize as a call does: a QuantTensor, whose `payload()` or `int()` are the low-bit numbers and whose
        `value` the dequantized ones; `x` itself where quantization is off."""
        return self(x)

    def scale(self) -> jax.Array | None:
        """Float per integer step, float32; None where quantization is off."""
        return self._attribute("scale")

    def zero_point(self) -> jax.Array | None:
        """The integer that stands for 0, float32; None where quantization is off."""
        return self._attribute("zero_point")

    def bit_width(self) -> int | jax.Array | None:
        """Bits of an integer; None where quantization is off."""
        return self._attribute("bit_width")

    def _attribute(self, name: str) -> Any:
        if not self.is_quant_enabled:
            return None
        weight = first_parameters(self).weight.get_value()
        return getattr(self._seen(self._pack(self._look()), weight), name)

    def _look(self) -> Any:
        """The quantizer's own result for its weight: on a copy, so that no state moves and no first call is used up."""
        return nnx.clone(self.tensor_quant, graph=True)(first_parameters(self).weight.get_value())

    def _tracked_parameters(self, layers: tuple[Any, ...]) -> list[Any]:
        return [layer.weight for layer in layers]


@final
class WeightQuantProxyFromInjector(WeightQuantProxy):
    """Quantizes the weight of a layer, or with one quantizer the weights of several.

    The quantizer depends on the weights: it is assembled with `module` (the layer, or the tuple of layers that share
    it) and `tracked_parameter_list` (their weights), and again whenever they are loaded, assigned or shared.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> from jqinject.quant import Int8WeightPerTensorFloat
        >>> first = QuantLinear(8, 4, weight_quant=Int8WeightPerTensorFloat, rngs=nnx.Rngs(0))
        >>> second = QuantLinear(8, 4, weight_quant=first.weight_quant, rngs=nnx.Rngs(1))
        >>> second.weight_quant is first.weight_quant, second.weight_quant.bit_width()
        (True, 8)
    """
