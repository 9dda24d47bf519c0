"""The proxy of weights that become minifloats."""

from typing import Any, final

from jqinject.ops import FloatFormat
from jqinject.proxy.weight import WeightQuantProxy


class WeightFloatQuantProxy(WeightQuantProxy):
    """Abstract: the proxy of weights whose quantizer makes minifloats, and which says of what kind."""

    def exponent_bit_width(self) -> Any:
        """Bits of the exponent; None where quantization is off."""
        return self._attribute("exponent_bit_width")

    def mantissa_bit_width(self) -> Any:
        """Bits of the mantissa, without the implicit 1; None where quantization is off."""
        return self._attribute("mantissa_bit_width")

    def exponent_bias(self) -> Any:
        """What is subtracted from the exponent field; None where quantization is off."""
        return self._attribute("exponent_bias")

    def is_saturating(self) -> Any:
        """Whether what is too large becomes the largest number; None where quantization is off."""
        return self._attribute("saturating")

    def inf_values(self) -> Any:
        """Mantissas that mean inf together with the largest exponent; None for none, or without quantization."""
        return self._attribute("inf_values")

    def nan_values(self) -> Any:
        """Mantissas that mean nan together with the largest exponent; None for none, or without quantization."""
        return self._attribute("nan_values")

    @property
    def is_ocp(self) -> bool:
        """Whether it is one of OCP's 8-bit formats, e4m3 or e5m2."""
        form = self._format
        return form is not None and form.is_ocp

    @property
    def is_fnuz(self) -> bool:
        """Whether it is one of the 8-bit formats without inf and negative 0, e4m3 or e5m2."""
        form = self._format
        return form is not None and form.is_fnuz

    @property
    def _format(self) -> FloatFormat | None:
        form = self._attribute("format")
        return form if isinstance(form, FloatFormat) else None


@final
class WeightFloatQuantProxyFromInjector(WeightFloatQuantProxy):
    """As `WeightQuantProxyFromInjector`, and says which minifloat its quantizer makes.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> from jqinject.quant import Fp8e4m3OCPWeightPerTensorFloat
        >>> layer = QuantLinear(8, 4, weight_quant=Fp8e4m3OCPWeightPerTensorFloat, rngs=nnx.Rngs(0))
        >>> proxy = layer.weight_quant
        >>> proxy.exponent_bit_width(), proxy.mantissa_bit_width(), proxy.exponent_bias(), proxy.is_ocp
        (4, 3, 7, True)
    """
