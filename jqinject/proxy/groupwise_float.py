"""Proxies of quantizers that make minifloats with a scale for each group."""

from typing import Any, final

import jax

from jqinject.proxy.act_float import ActFloatQuantProxy, of_dynamic_minifloats
from jqinject.proxy.base import QuantFacts
from jqinject.proxy.groupwise import seen_in_groups, with_groups
from jqinject.proxy.weight_float import WeightFloatQuantProxy


@final
class GroupwiseWeightFloatQuantProxyFromInjector(WeightFloatQuantProxy):
    """Quantizes weights to minifloats with a scale for each group.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> from jqinject.quant import MXFloat8e4m3Weight
        >>> layer = QuantLinear(40, 3, weight_quant=MXFloat8e4m3Weight, rngs=nnx.Rngs(0))
        >>> proxy = layer.weight_quant
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

    def _read_facts(self, layers: tuple[Any, ...], quantizer: Any) -> QuantFacts:
        return with_groups(super()._read_facts(layers, quantizer), self.binding, layers, quantizer)

    def _seen(self, packed: Any, x: Any) -> Any:
        return super()._seen(seen_in_groups(packed, self.facts, x), x)


@final
class GroupwiseActFloatQuantProxyFromInjector(ActFloatQuantProxy):
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

    def _attribute(self, name: str, force_eval: bool) -> Any:
        return of_dynamic_minifloats(self, name)

    def _read_facts(self, layers: tuple[Any, ...], quantizer: Any) -> QuantFacts:
        return with_groups(super()._read_facts(layers, quantizer), self.binding, layers, quantizer)

    def _seen(self, packed: Any, x: Any) -> Any:
        return super()._seen(seen_in_groups(packed, self.facts, x), x)
