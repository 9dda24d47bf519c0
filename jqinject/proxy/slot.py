"""The attribute of a layer that holds a proxy."""

from typing import Any, Self, final, overload

from flax import nnx

from jqinject.proxy.links import link


@final
class QuantizerSlot:
    """A layer attribute that holds a proxy or None, and tells the proxy which layer it was read from.

    Because of this, `clone.weight_quant.scale()` and `clone.weight_quant.init_tensor_quant()` are about the clone: a
    copy is linked the first time its proxy is read through it, also inside a transform.
    """

    name: str

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, layer: None, owner: type) -> Self: ...
    @overload
    def __get__(self, layer: object, owner: type) -> Any: ...
    def __get__(self, layer: object | None, owner: type) -> Any:
        if layer is None:
            return self
        try:
            held = vars(layer)[self.name]
        except KeyError:
            raise AttributeError(f"{type(layer).__name__} has no attribute {self.name!r} yet") from None
        if isinstance(held, nnx.Module):
            link(held, layer)
        return held

    def __set__(self, layer: object, value: Any) -> None:
        vars(layer)[self.name] = value

    def __delete__(self, layer: object) -> None:
        del vars(layer)[self.name]
