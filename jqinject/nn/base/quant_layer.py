"""What all quantized layers share: a signature that `inspect` reads, the list of their overrides, what they return."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Generic

from flax import nnx

from jqinject.nn.base.overrides import Overrides, overrides_of
from jqinject.nn.base.slots import Slot, slots_of
from jqinject.quant import QuantizerLike

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # The default is for mypy, which takes the result from `__init__`: it would ask for an annotation of each layer.
    Out = TypeVar("Out", covariant=True, default=Any)
else:
    Out = Any


class ConstructorSignature:
    """The signature of a class of layers, which `inspect` would take from NNX's metaclass: `(*args, **kwargs)`."""

    def __get__(self, layer: Any, owner: Any) -> inspect.Signature:
        if layer is not None:
            raise AttributeError("__signature__")  # of an instance: that of its `__call__`
        own = inspect.signature(owner.__init__)
        return own.replace(parameters=list(own.parameters.values())[1:])


class _QuantLayer(nnx.Module):
    """Abstract: a layer with places for quantizers."""

    __signature__: Any = ConstructorSignature()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__call__" not in vars(cls):
            cls.__call__ = cls.__call__  # `nnx.capture` wraps what a class itself defines

    if not TYPE_CHECKING:

        def __class_getitem__(cls, returned: Any) -> Any:
            """`QuantLinear[jax.Array]`, for annotations: the class itself."""
            return cls

    @classmethod
    def override_slots(cls) -> tuple[Slot, ...]:
        """The places for quantizers as the keywords of the layer name them."""
        return slots_of(cls)

    @classmethod
    def overrides(cls, **quantizers: QuantizerLike) -> Overrides:
        """What the layer's further keywords can declare anew: names, types, present values, meanings.

        A name that your own injector adds is listed without a type; declare it with `.let()`, which type checkers
        accept: `weight_quant=Mine.let(my_name=3)`.

        Args:
            quantizers: the quantizers that the layer would be given, such as `weight_quant=Int8WeightPerChannelFloat`;
                one that is missing is the default of its argument.

        Returns:
            A sequence of `Override`s, which prints as a table.

        Raises:
            TypeError: an argument that is not a quantizer of the layer.

        Example:
            >>> from jqinject.nn import QuantIdentity
            >>> from jqinject.quant import Int8ActPerTensorFloat
            >>> table = QuantIdentity.overrides(act_quant=Int8ActPerTensorFloat)
            >>> table["bit_width"].default, table["bit_width"].meaning
            ('8', 'bits of one number')
        """
        return overrides_of(cls, cls.override_slots(), quantizers)


if TYPE_CHECKING:

    class QuantLayer(_QuantLayer, Generic[Out]):
        """Abstract: a layer with places for quantizers, that returns `Out`."""

else:
    QuantLayer = _QuantLayer
