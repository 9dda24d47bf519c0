"""Proxies of quantizers that make minifloats with a scale for each group."""

from typing import Any, final

from jqinject.proxy.act_float import ActFloatQuantProxy, of_dynamic_minifloats
from jqinject.proxy.group_proxies import Groupwise, GroupwiseWeight
from jqinject.proxy.weight_float import WeightFloatQuantProxy


@final
class GroupwiseWeightFloatQuantProxyFromInjector(GroupwiseWeight, WeightFloatQuantProxy):
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


@final
class GroupwiseActFloatQuantProxyFromInjector(Groupwise, ActFloatQuantProxy):
    """Quantizes what flows to minifloats, with a scale for each group, made from the tensor at hand.

    Example:
        >>> from jqinject.nn import QuantIdentity
        >>> from jqinject.quant import MXFloat8e5m2Act
        >>> proxy = QuantIdentity(MXFloat8e5m2Act).act_quant
        >>> proxy.group_size, proxy.exponent_bit_width(), proxy.nan_values()
        (32, 5, ('01', '11', '10'))
    """

    def _attribute(self, name: str, force_eval: bool) -> Any:
        return of_dynamic_minifloats(self, name)
