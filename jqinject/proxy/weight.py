"""The proxies of weights and biases, and what a weight quantizer may have to know of the input that its weight is
contracted with.
"""

from typing import Any, ClassVar, NamedTuple, final

import jax
import jax.numpy as jnp

from jqinject.core._protocols import Factors
from jqinject.proxy import answers, assembly, base, metadata
from jqinject.quant_tensor import GroupwiseQuantTensor, IntQuantTensor, QuantTensor


class IntegerFormat(NamedTuple):
    """The integers of a layer's input.

    Attributes:
        bit_width: bits of an integer: a Python int, or an array if learned.
        signed: whether the integers have a sign.
    """

    bit_width: int | jax.Array
    signed: bool


class WeightQuantProxyFromInjector(base.QuantProxyFromInjector):
    """Quantizes the weight of a layer, or with one quantizer the weights of several.

    The quantizer depends on the weights: it is assembled with `module` (the layer, or the tuple of layers that share
    it) and `tracked_parameter_list` (their weights), and again whenever they are loaded, assigned or shared.

    A quantizer may depend on the bits and the sign of the input that the weight is contracted with (A2Q). The layer
    then passes its quantized input; without one, the proxy uses the layer's `input_quant`, else the input of the last
    training step.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> from jqinject.quant import Fp8e4m3OCPWeightPerTensorFloat, Int8WeightPerTensorFloat, MXInt8Weight
        >>> first = QuantLinear(40, 3, weight_quant=Int8WeightPerTensorFloat, rngs=nnx.Rngs(0))
        >>> second = QuantLinear(40, 3, weight_quant=first.weight_quant, rngs=nnx.Rngs(1))
        >>> second.weight_quant is first.weight_quant, second.weight_quant.bit_width()
        (True, 8)
        >>> mx = QuantLinear(40, 3, weight_quant=MXInt8Weight, rngs=nnx.Rngs(0)).weight_quant
        >>> mx.group_size, mx.scale_().shape, mx.scale().shape
        (32, (2, 1, 3), (40, 3))
        >>> fp8 = QuantLinear(40, 3, weight_quant=Fp8e4m3OCPWeightPerTensorFloat, rngs=nnx.Rngs(0)).weight_quant
        >>> fp8.exponent_bit_width(), fp8.mantissa_bit_width(), fp8.exponent_bias(), fp8.is_ocp
        (4, 3, 7, True)
    """

    role = "weight"
    parameter = "weight"
    __call__ = base.QuantProxyFromInjector._parameter_quantized

    def scale_(self) -> jax.Array | None:
        """The scale of each group, with 1 along the elements of a group; None if quantization is off."""
        return self._asked("scale_")

    def zero_point_(self) -> jax.Array | None:
        """The zero point of each group; None if quantization is off."""
        return self._asked("zero_point_")

    def pre_scale(self, quant_input: object = None) -> jax.Array | None:
        """What a decoupled quantizer divides the weight by before rounding, float32; None if quantization is off.

        Args:
            quant_input: as for a call.
        """
        return self._look(quant_input).pre_scale if self.is_quant_enabled else None

    def pre_zero_point(self, quant_input: object = None) -> jax.Array | None:
        """What a decoupled quantizer adds before rounding, float32; None if quantization is off.

        Args:
            quant_input: as for a call.
        """
        return self._look(quant_input).pre_zero_point if self.is_quant_enabled else None

    def check_input(self, quant_input: object) -> None:
        """Refuse, before it comes, an input that the quantizer cannot guarantee its accumulator for.

        Args:
            quant_input: as for a call.

        Raises:
            ValueError: it is too wide for the accumulator.

        Warns:
            ZeroWeightsWarning: the accumulator leaves no weight other than 0.
        """
        if self.is_quant_enabled:
            weight = answers.first_parameters(self).weight.get_value()
            self.tensor_quant.check_input(weight, *self._more(quant_input))

    def kept_input(self) -> IntegerFormat | None:
        """The format of the input of the last training step; None in a stack, or where only a running program knows it.

        Raises:
            ValueError: there was none.
        """
        input_format = self.tensor_quant.kept_input()
        return None if input_format is None else IntegerFormat(*input_format)

    def commit(self, *layers: Any) -> None:
        """Keep the scales that the weights have now, whatever becomes of the weights (`record`).

        Args:
            layers: as for `init_tensor_quant`.

        Raises:
            TypeError: the quantizer does not round to nearest on a grid that it knows.
        """
        if self.is_quant_enabled and not self.committed:
            self._assemble_for(self._known(layers), committed=True)

    def release(self, *layers: Any) -> None:
        """Measure scales of the weights as they are again: the reverse of `commit`.

        Args:
            layers: as for `init_tensor_quant`.
        """
        if self.committed:
            self._assemble_for(self._known(layers), committed=False)

    def rescaled(self, factors: Factors) -> dict[str, jax.Array]:
        """The committed scale after the weight's channels are multiplied; see `core._protocols.Factors`."""
        assert self.record is not None, "committed"
        numbers = self.record[...]
        if "zero_point" in numbers:
            factors.check_signs()
        return {"scale": factors.times(numbers["scale"])}

    def sample(self, force_eval: bool = True) -> Any:
        """Quantize the weight as it is, without changing state; None if quantization is off."""
        if not self.is_quant_enabled:
            return None
        return self._seen(self._pack(self._look()), answers.first_parameters(self).weight.get_value())

    def _look(self, quant_input: object = None) -> Any:
        """The quantizer's own result for its weight: on a copy, so that no state moves and no first call is used up."""
        layer = answers.first_parameters(self)
        if quant_input is None and self.requires_quant_input:
            quant_input = layer.input_format()
        quantizer, weight = self._copy(), layer.weight.get_value()
        if self.record is not None:
            return assembly.by_record(quantizer, self.record, weight)
        return quantizer(weight, *self._more(quant_input))

    def _more(self, quant_input: object) -> IntegerFormat | tuple[()]:
        """What the quantizer is called with beside the weight: the format of a quantized input.

        Args:
            quant_input: an `IntQuantTensor`, or its `IntegerFormat`; None for nothing.

        Raises:
            TypeError: it is another.
        """
        if quant_input is None or isinstance(quant_input, IntegerFormat):
            return quant_input or ()
        if isinstance(quant_input, IntQuantTensor):
            return IntegerFormat(quant_input.bit_width, quant_input.signed)
        raise TypeError(
            f"{self.binding.base.__name__} quantizes the weight for the integers that it is multiplied with, and the "
            f"input is not quantized to integers: got {type(quant_input).__name__}.\n  cure: give the layer "
            "input_quant=... (such as Int8ActPerTensorFloat), or feed it an IntQuantTensor"
        )


@final
class BiasQuantProxyFromInjector(base.QuantProxyFromInjector):
    """Quantizes a bias, in the steps of the accumulator or with a scale of its own.

    Where the injector says `requires_input_scale`, the scale is input scale * weight scale, so that the bias can be
    added to the integer accumulator. Else the quantizer is assembled from the bias, as that of a weight.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> from jqinject.quant import Int8BiasPerTensorFloatInternalScaling
        >>> fc = QuantLinear(8, 4, bias_quant=Int8BiasPerTensorFloatInternalScaling, rngs=nnx.Rngs(0))
        >>> fc.bias[...] = jnp.array([-1.28, 0.0, 0.5, 1.0])
        >>> fc.quant_bias().int()
        Array([-128,    0,   50,  100], dtype=int8)
    """

    role = "bias"
    parameter = "bias"
    reads: ClassVar[frozenset[str]] = base.QuantProxyFromInjector.reads | {"requires_input_scale"}

    requires_input_scale: bool = answers.said(
        "requires_input_scale", "Whether the scale comes in with the input."
    )

    def __call__(
        self,
        x: jax.Array,
        input: jax.Array | QuantTensor | None = None,
        weight: jax.Array | QuantTensor | None = None,
        weight_scale: jax.Array | None = None,
    ) -> IntQuantTensor | jax.Array:
        """Quantize a bias.

        Args:
            x: the bias, float, `(channels,)` or of several axes that channels are counted along.
            input: what the layer contracts with its weight; an `IntQuantTensor` if the scale comes from it.
            weight: the layer's quantized weight.
            weight_scale: its scale in the shape of the bias, if the weight has several channel axes; None takes
                it from the weight.

        Returns:
            A QuantTensor, or `x` itself if quantization is off.

        Raises:
            ValueError: the scale comes in with the input, and input or weight are not quantized, or the input has more
                than one scale.
        """
        if self.tensor_quant is None or self.disable_quant:
            return x
        if not self.quant_metadata.requires_input_scale:
            return self._quantized(x)
        try:
            scale = self._accumulator_scale(input, weight, weight_scale)
        except Exception as error:
            metadata.note_quantizer(error, answers.name_of(self), self.tensor_quant)
            raise
        return self._quantized(x, scale)

    def sample(self, force_eval: bool = True) -> QuantTensor | None:
        """Quantize the bias as it is; None without a bias, if quantization is off, or if the scale comes with the
        input."""
        if not self.is_quant_enabled or self.requires_input_scale:
            return None
        bias = answers.first_parameters(self).bias
        return None if bias is None else self._pack(self._copy()(bias.get_value()))

    def zero_point(self, force_eval: bool = True) -> jax.Array | None:
        """The integer that represents 0; None without a bias, or if quantization is off."""
        return jnp.zeros((), jnp.float32) if self._needs_input() else super().zero_point(force_eval)

    def bit_width(self, force_eval: bool = True) -> int | jax.Array | None:
        """Bits of an integer; None without a bias, or if quantization is off."""
        if not self._needs_input():
            return super().bit_width(force_eval)
        return self._copy()(jnp.zeros((), jnp.float32), jnp.ones((), jnp.float32)).bit_width

    def _needs_input(self) -> bool:
        return self.is_quant_enabled and self.requires_input_scale

    def _accumulator_scale(self, input: object, weight: object, weight_scale: jax.Array | None) -> jax.Array:
        name = self.binding.base.__name__
        if isinstance(input, GroupwiseQuantTensor) or isinstance(weight, GroupwiseQuantTensor):
            raise ValueError(
                f"{name} takes its scale from input and weight, and one of them has a scale for each group, so that "
                "their sums have none.\n  cure: a bias quantizer with a scale of its own "
                "(Int8BiasPerTensorFloatInternalScaling)"
            )
        if not (isinstance(input, IntQuantTensor) and isinstance(weight, IntQuantTensor)):
            missing = "weight" if isinstance(input, IntQuantTensor) else "input"
            feed = " or feed it a QuantTensor," if missing == "input" else ""
            raise ValueError(
                f"{name} takes its scale from input and weight, and the {missing} is not quantized.\n"
                f"  cure: bias_quant=None, which leaves the bias float; or give the layer {missing}_quant=...,{feed} "
                "or take a bias quantizer with a scale of its own (Int8BiasPerTensorFloatInternalScaling)"
            )
        if input.scale.size != 1:
            raise ValueError(
                f"{name} needs an input with one scale, got scales of shape {input.scale.shape}.\n"
                "  cure: quantize the input per tensor, or use Int8BiasPerTensorFloatInternalScaling"
            )
        of_input, of_weight = input.scale, weight.scale if weight_scale is None else weight_scale
        if weight_scale is None and of_weight.ndim > 1:
            of_weight = of_weight.reshape(-1)  # the bias has one axis
        return of_weight * (of_input.reshape(()) if of_input.ndim else of_input)
