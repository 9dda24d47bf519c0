"""The places for quantizers on a layer, as attributes that know their layer.

A layer class declares its slots as class attributes, `weight_quant: Any = WEIGHT`: the declaration says what the
attribute, the keyword and the prefix of overrides are called, and which proxies fit. Next: `hold_proxies`, which fills
the slots of a layer from what a user gives.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from jqinject.nn.base.weight_input import LayerParameters
from jqinject.proxy import (
    LINKS,
    ActQuantProxyFromInjector,
    BiasQuantProxyFromInjector,
    GradQuantProxyFromInjector,
    QuantProxyFromInjector,
    TruncQuantProxyFromInjector,
    WeightQuantProxyFromInjector,
    complete,
)


@dataclass(frozen=True)
class Slot:
    """One place for a quantizer on a layer, and the attribute that holds its proxy.

    The proxy stands in `vars(layer)`, where NNX looks for children; read through the slot, it knows its layer. Without
    one the attribute is None. A subclass without the slot declares `input_quant = None`.

    A read of a proxy all of whose layers are known changes nothing. It links the layer otherwise, as a copy that NNX
    made has to be seen once (`jqinject.proxy.links`).

    Attributes:
        name: the attribute, as in `weight_quant`.
        prefix: what overrides for it start with, as in `weight_`; empty for an activation layer's own quantizer.
        proxy_class: the proxy of injectors that name none.
        what: what it quantizes, in words.
        of_parameter: whether that is the weight or bias, which the proxy may be asked about after its layer is gone.
        keyword: the argument of the layer; empty if it is called as the attribute.
    """

    name: str
    prefix: str
    proxy_class: type[QuantProxyFromInjector]
    what: str
    of_parameter: bool = False
    keyword: str = ""

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        if layer is None:
            return self
        attributes = vars(layer)
        held = attributes.get(self.name)
        if isinstance(held, nnx.Module):
            links = LINKS.get(held)
            if links is None or links.layers[0]() is not layer:
                links = complete(held, layer)
            if self.of_parameter and links.layers[0]() is layer:
                links.parameters = LayerParameters(
                    attributes.get(layer.weight_name), attributes.get("bias"), attributes.get("input_quant")
                )
        return held

    def __set__(self, layer: Any, proxy: Any) -> None:
        vars(layer)[self.name] = proxy
        # From Flax 0.12.10 on an attribute with a descriptor is the descriptor's own: NNX would take it for static.
        known = vars(layer).get("_pytree__nodes")  # NNX restores it by itself where it makes a copy
        if known is not None and self.name not in known:
            vars(layer)["_pytree__nodes"] = known.update({self.name: nnx.is_data(proxy)})

    def __delete__(self, layer: Any) -> None:
        if self.name not in vars(layer):
            raise AttributeError(f"{type(layer).__name__} holds no {self.name}")
        del vars(layer)[self.name]

    def of(self, name: str) -> "Slot":
        """Another slot that is filled from the same argument."""
        return replace(self, name=name, keyword=self.argument)

    @property
    def argument(self) -> str:
        """The argument of the layer."""
        return self.keyword or self.name


WEIGHT = Slot("weight_quant", "weight_", WeightQuantProxyFromInjector, "weights", of_parameter=True)
BIAS = Slot("bias_quant", "bias_", BiasQuantProxyFromInjector, "biases", of_parameter=True)
INPUT = Slot("input_quant", "input_", ActQuantProxyFromInjector, "activations")
OUTPUT = Slot("output_quant", "output_", ActQuantProxyFromInjector, "activations")
GRAD = Slot("grad_quant", "grad_", GradQuantProxyFromInjector, "gradients")
TRUNC = Slot("trunc_quant", "", TruncQuantProxyFromInjector, "accumulators")
ACT = Slot("act_quant", "", ActQuantProxyFromInjector, "activations")


@functools.cache
def slots_of(layer: type) -> tuple[Slot, ...]:
    """The slots that a class of layers declares, those of its bases first, each in the order of its declaration."""
    bodies = (vars(cls) for cls in reversed(layer.__mro__))
    names = dict.fromkeys(name for body in bodies for name in body if isinstance(body[name], Slot))
    declared = (getattr(layer, name) for name in names)
    return tuple(slot for slot in declared if isinstance(slot, Slot))
