"""The proxies of weights that are divided by one scale and multiplied by another."""

from typing import Any, NamedTuple, final

import jax
from flax import nnx

from jqinject.proxy.links import first_parameters
from jqinject.proxy.weight import WeightQuantProxy
from jqinject.quant_tensor import IntQuantTensor


class InputFormat(NamedTuple):
    """What a weight quantizer may have to know of the input that its weight is contracted with.

    Attributes:
        bit_width: bits of an integer: a Python int, or an array where it is learned.
        signed: whether the integers have a sign.
    """

    bit_width: int | jax.Array
    signed: bool


@final
class DecoupledWeightQuantProxyFromInjector(WeightQuantProxy):
    """Quantizes a weight by a scale before rounding and one after; both can be asked for.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> from jqinject.quant import Int8WeightPerChannelFloatDecoupled
        >>> fc = QuantLinear(8, 4, weight_quant=Int8WeightPerChannelFloatDecoupled, rngs=nnx.Rngs(0))
        >>> fc.weight_quant.pre_scale().shape, fc.weight_quant.scale().shape
        ((1, 4), (1, 4))
    """

    def pre_scale(self) -> jax.Array | None:
        """What the weight is divided by before rounding, float32; None where quantization is off."""
        return self._look().pre_scale if self.is_quant_enabled else None

    def pre_zero_point(self) -> jax.Array | None:
        """What is added before rounding, float32; None where quantization is off."""
        return self._look().pre_zero_point if self.is_quant_enabled else None


@final
class DecoupledWeightQuantWithInputProxyFromInjector(WeightQuantProxy):
    """Quantizes a weight so that it depends on the bits and the sign of the input that it is contracted with.

    The layer hands its quantized input in. Asked without one, it goes by the layer's `input_quant`, else by the input
    of the last training step.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> from jqinject.quant import Int8AccumulatorAwareWeightQuant, Uint8ActPerTensorFloat
        >>> fc = QuantLinear(
        ...     8, 4, weight_quant=Int8AccumulatorAwareWeightQuant, weight_accumulator_bit_width=12,
        ...     input_quant=Uint8ActPerTensorFloat, rngs=nnx.Rngs(0))
        >>> bool((abs(fc.quant_weight().int()).sum(axis=0) * 255 < 2**11).all())
        True
    """

    requires_quant_input = True

    def __call__(self, x: jax.Array, quant_input: Any = None) -> IntQuantTensor | jax.Array:
        """Quantize a weight.

        Args:
            x: the weight; float, any shape.
            quant_input: the `IntQuantTensor` that the weight is contracted with, or its `InputFormat`.

        Returns:
            A QuantTensor of the shape and dtype of `x`, or `x` itself where quantization is off.

        Raises:
            TypeError: the input is not quantized to integers.
            ValueError: the input's format is not known, or too wide for the accumulator.
        """
        if not self.is_quant_enabled:
            return x
        return self._quantized(x, *self._format_of(quant_input))

    def quantize(self, x: jax.Array, quant_input: Any = None) -> Any:
        """Quantize as a call does."""
        return self(x, quant_input)

    def pre_scale(self, quant_input: Any = None) -> jax.Array | None:
        """What the weight is divided by before rounding, float32; None where quantization is off.

        Args:
            quant_input: as for a call.
        """
        return self._look(quant_input).pre_scale if self.is_quant_enabled else None

    def pre_zero_point(self, quant_input: Any = None) -> jax.Array | None:
        """What is added before rounding, float32; None where quantization is off.

        Args:
            quant_input: as for a call.
        """
        return self._look(quant_input).pre_zero_point if self.is_quant_enabled else None

    def check_input(self, quant_input: Any) -> None:
        """Refuse, before it comes, an input that the quantizer can not keep its guarantee for.

        Args:
            quant_input: as for a call.

        Raises:
            ValueError: it is too wide for the accumulator.
        """
        if self.is_quant_enabled:
            self.tensor_quant.check_input(*self._format_of(quant_input))

    def kept_input(self) -> InputFormat | None:
        """The format of the input of the last training step; None in a stack, or where only a running program knows it.

        Raises:
            ValueError: there was none.
        """
        kept = self.tensor_quant.kept_input()
        return None if kept is None else InputFormat(*kept)

    def _look(self, quant_input: Any = None) -> Any:
        layer = first_parameters(self)
        known = layer.input_format() if quant_input is None else quant_input
        quantizer = nnx.clone(self.tensor_quant, graph=True)
        return quantizer(layer.weight.get_value(), *self._format_of(known))

    def _format_of(self, quant_input: Any) -> InputFormat | tuple[()]:
        if quant_input is None:
            return ()
        if isinstance(quant_input, InputFormat):
            return quant_input
        if isinstance(quant_input, IntQuantTensor):
            return InputFormat(quant_input.bit_width, quant_input.signed)
        raise TypeError(
            f"{self.binding.base.__name__} quantizes the weight for the integers that it is multiplied with, and the "
            f"input is not quantized to integers: got {type(quant_input).__name__}.\n  cure: give the layer "
            "input_quant=... (such as Int8ActPerTensorFloat), or feed it an IntQuantTensor"
        )
