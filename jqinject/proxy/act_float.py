"""The proxy of activations that become minifloats."""

from typing import Any, final

from jqinject.ops import FloatFormat
from jqinject.proxy.act import ActQuantProxy, input_dependent


class ActFloatQuantProxy(ActQuantProxy):
    """Abstract: the proxy of activations whose quantizer makes minifloats, and which says of what kind."""

    def exponent_bit_width(self, force_eval: bool = True) -> Any:
        """Bits of the exponent; None where quantization is off."""
        return self._attribute("exponent_bit_width", force_eval)

    def mantissa_bit_width(self, force_eval: bool = True) -> Any:
        """Bits of the mantissa, without the implicit 1; None where quantization is off."""
        return self._attribute("mantissa_bit_width", force_eval)

    def exponent_bias(self, force_eval: bool = True) -> Any:
        """What is subtracted from the exponent field; None where quantization is off."""
        return self._attribute("exponent_bias", force_eval)

    def is_saturating(self, force_eval: bool = True) -> Any:
        """Whether what is too large becomes the largest number; None where quantization is off."""
        return self._attribute("saturating", force_eval)

    def inf_values(self, force_eval: bool = True) -> Any:
        """Mantissas that mean inf together with the largest exponent; None for none, or without quantization."""
        return self._attribute("inf_values", force_eval)

    def nan_values(self, force_eval: bool = True) -> Any:
        """Mantissas that mean nan together with the largest exponent; None for none, or without quantization."""
        return self._attribute("nan_values", force_eval)

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
        form = self._attribute("format", True)
        return form if isinstance(form, FloatFormat) else None


@final
class ActFloatQuantProxyFromInjector(ActFloatQuantProxy):
    """As `ActQuantProxyFromInjector`, and says which minifloat its quantizer makes.

    Example:
        >>> from jqinject.nn import QuantIdentity
        >>> from jqinject.quant import Fp8e5m2FNUZActPerTensorFloat
        >>> proxy = QuantIdentity(Fp8e5m2FNUZActPerTensorFloat).act_quant
        >>> proxy.exponent_bit_width(), proxy.mantissa_bit_width(), proxy.exponent_bias(), proxy.is_fnuz
        (5, 2, 16, True)
    """


@final
class DynamicActFloatQuantProxyFromInjector(ActFloatQuantProxy):
    """The same with scales made from the tensor at hand: nothing is kept.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> from jqinject.quant import Fp8e4m3OCPDynamicActPerTensorFloat
        >>> identity = QuantIdentity(Fp8e4m3OCPDynamicActPerTensorFloat, return_quant_tensor=True)
        >>> identity(jnp.array([448.0, 17.0])).value, identity.act_quant.mantissa_bit_width()
        (Array([448.,  16.], dtype=float32), 3)
    """

    sample_shape = (1,)  # a statistic of rows needs an axis

    def _attribute(self, name: str, force_eval: bool) -> Any:
        return of_dynamic_minifloats(self, name)


def of_dynamic_minifloats(proxy: ActFloatQuantProxy, name: str) -> Any:
    """What can be said of a quantizer whose scale comes from the tensor at hand: its format.

    Args:
        proxy: the proxy.
        name: an attribute of a `FloatQuantTensor`.

    Raises:
        RuntimeError: it is asked for what depends on the tensor.
    """
    if name in ("scale", "zero_point"):
        return input_dependent(proxy, name)
    if not proxy.is_quant_enabled:
        return None
    form = proxy.tensor_quant.format
    return form if name == "format" else getattr(form, {"exponent_bias": "bias"}.get(name, name))
