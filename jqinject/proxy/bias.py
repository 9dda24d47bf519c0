"""The proxy of biases."""

from typing import Any, ClassVar, final

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.proxy.links import first_parameters
from jqinject.proxy.naming import note_quantizer
from jqinject.proxy.number_format import FormatQueries
from jqinject.quant_tensor import GroupwiseQuantTensor, IntQuantTensor, QuantTensor


@final
class BiasQuantProxyFromInjector(FormatQueries):
    """Quantizes a bias, in the steps of the accumulator or with a scale of its own.

    Where the injector says `requires_input_scale`, the scale is input scale * weight scale, so that the bias can be
    added to the integer accumulator. Else the quantizer is assembled from the bias, as that of a weight.

    Attributes:
        requires_input_scale: whether the scale comes in with the input.

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

    reads: ClassVar[frozenset[str]] = FormatQueries.reads | {"requires_input_scale"}

    @property
    def requires_input_scale(self) -> bool:
        """Whether the scale comes in with the input."""
        return self.quant_metadata.requires_input_scale

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
            note_quantizer(error, self)
            raise
        return self._quantized(x, scale)

    def scale(self) -> jax.Array | None:
        """Float per integer step, float32; None without a bias, if quantization is off, or if the scale comes with the
        input."""
        return self._attribute("scale")

    def zero_point(self) -> jax.Array | None:
        """The integer that stands for 0; None if quantization is off."""
        return jnp.zeros((), jnp.float32) if self._needs_input() else self._attribute("zero_point")

    def bit_width(self) -> int | jax.Array | None:
        """Bits of an integer; None if quantization is off."""
        if not self._needs_input():
            return self._attribute("bit_width")
        sentinel = jnp.zeros((), jnp.float32)
        return nnx.clone(self.tensor_quant, graph=True)(sentinel, jnp.ones((), jnp.float32)).bit_width

    def _needs_input(self) -> bool:
        return self.is_quant_enabled and self.requires_input_scale

    def _attribute(self, name: str) -> Any:
        if not self.is_quant_enabled or self.requires_input_scale:
            return None
        biases = self._tracked_parameters((first_parameters(self),))
        if not biases:
            return None
        return getattr(self._pack(nnx.clone(self.tensor_quant, graph=True)(biases[0].get_value())), name)

    def _accumulator_scale(self, input: Any, weight: Any, weight_scale: jax.Array | None) -> jax.Array:
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

    def _tracked_parameters(self, layers: tuple[Any, ...]) -> list[Any]:
        return [layer.bias for layer in layers if layer.bias is not None]
