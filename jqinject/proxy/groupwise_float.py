"""Proxies of quantizers that make minifloats with a scale for each group."""

from typing import Any, final

import jax

from jqinject.proxy.act import ActQuantProxy, input_dependent
from jqinject.proxy.base import QuantFacts
from jqinject.proxy.groupwise import seen_in_groups, with_groups
from jqinject.proxy.weight import WeightQuantProxy


@final
class GroupwiseWeightFloatQuantProxyFromInjector(WeightQuantProxy):
    """Quantizes weights to minifloats with a scale for each group.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> from jqinject.quant import MXFloat8e4m3Weight
        >>> proxy = QuantLinear(40, 3, weight_quant=MXFloat8e4m3Weight, rngs=nnx.Rngs(0)).weight_quant
        >>> proxy.group_size, proxy.scale_().shape, proxy.mantissa_bit_width()
        (32, (2, 1, 3), 3)
    """

    @property
    def group_size(self) -> int | None:
        """Elements that share a scale."""
        return self.facts.group_size

    @property
    def group_dim(self) -> int | None:
        """The axis of the weight that is cut into groups."""
        return self.facts.group_dim

    def scale_(self) -> jax.Array | None:
        """The scale of each group, with 1 along the elements of a group; None where quantization is off."""
        return self._attribute("scale_")

    def zero_point_(self) -> jax.Array | None:
        """0; None where quantization is off."""
        return self._attribute("zero_point_")

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

    def _read_facts(self, layers: tuple[Any, ...], quantizer: Any) -> QuantFacts:
        return with_groups(super()._read_facts(layers, quantizer), self.binding, layers, quantizer)

    def _seen(self, packed: Any, x: Any) -> Any:
        return super()._seen(seen_in_groups(packed, self.facts, x), x)


@final
class GroupwiseActFloatQuantProxyFromInjector(ActQuantProxy):
    """Quantizes what flows to minifloats, with a scale for each group, made from the tensor at hand.

    Example:
        >>> from jqinject.nn import QuantIdentity
        >>> from jqinject.quant import MXFloat8e5m2Act
        >>> proxy = QuantIdentity(MXFloat8e5m2Act).act_quant
        >>> proxy.group_size, proxy.exponent_bit_width(), proxy.nan_values()
        (32, 5, ('01', '11', '10'))
    """

    @property
    def group_size(self) -> int | None:
        """Elements that share a scale."""
        return self.facts.group_size

    @property
    def group_dim(self) -> int | None:
        """The axis that is cut into groups."""
        return self.facts.group_dim

    def exponent_bit_width(self, force_eval: bool = True) -> Any:
        """Bits of the exponent; None where quantization is off."""
        return self._of_format("exponent_bit_width")

    def mantissa_bit_width(self, force_eval: bool = True) -> Any:
        """Bits of the mantissa, without the implicit 1; None where quantization is off."""
        return self._of_format("mantissa_bit_width")

    def exponent_bias(self, force_eval: bool = True) -> Any:
        """What is subtracted from the exponent field; None where quantization is off."""
        return self._of_format("bias")

    def is_saturating(self, force_eval: bool = True) -> Any:
        """Whether what is too large becomes the largest number; None where quantization is off."""
        return self._of_format("saturating")

    def inf_values(self, force_eval: bool = True) -> Any:
        """Mantissas that mean inf together with the largest exponent; None for none, or without quantization."""
        return self._of_format("inf_values")

    def nan_values(self, force_eval: bool = True) -> Any:
        """Mantissas that mean nan together with the largest exponent; None for none, or without quantization."""
        return self._of_format("nan_values")

    def _of_format(self, name: str) -> Any:
        return getattr(self.tensor_quant.format, name) if self.is_quant_enabled else None

    def _attribute(self, name: str, force_eval: bool) -> Any:
        return self._of_format(name) if name == "bit_width" else input_dependent(self, name)

    def _read_facts(self, layers: tuple[Any, ...], quantizer: Any) -> QuantFacts:
        return with_groups(super()._read_facts(layers, quantizer), self.binding, layers, quantizer)

    def _seen(self, packed: Any, x: Any) -> Any:
        return super()._seen(seen_in_groups(packed, self.facts, x), x)
