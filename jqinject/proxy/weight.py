"""The proxy of weights."""

import math
import warnings
from typing import Any

import jax
from flax import nnx

from jqinject.core import CommittedQuant
from jqinject.proxy.input_format import InputFormat, input_format_of
from jqinject.proxy.links import first_parameters
from jqinject.proxy.number_format import FormatQueries
from jqinject.quant_tensor import QuantTensor


class WeightQuantProxyFromInjector(FormatQueries):
    """Quantizes the weight of a layer, or with one quantizer the weights of several.

    The quantizer depends on the weights: it is assembled with `module` (the layer, or the tuple of layers that share
    it) and `tracked_parameter_list` (their weights), and again whenever they are loaded, assigned or shared.

    A quantizer may go by the bits and the sign of the input that the weight is contracted with (A2Q). The layer then
    hands its quantized input in; asked without one, the proxy goes by the layer's `input_quant`, else by the input of
    the last training step.

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

    def __init__(self, injector: Any, layer: Any, *, where: tuple[str, str] = ("", ""), **how: Any) -> None:
        super().__init__(injector, layer, where=where, **how)
        self._warn_of_cut_groups(layer, where[0])

    def _warn_of_cut_groups(self, layer: Any, where: str) -> None:
        """Warn if groups end with an axis although the contraction sums over another one too."""
        summed = getattr(layer, "summed_axes", ())
        size, dim = self.group_size, self.group_dim
        # Groups without padding are refused where they do not fill the axis.
        if (
            size is None
            or dim is None
            or len(summed) < 2
            or not getattr(self.tensor_quant, "group_padding", True)
        ):
            return
        shape = tuple(layer.weight_shape)[-layer.weight_ndim :]
        axis = dim % len(shape)
        last = shape[axis] % size
        if axis in summed and last:
            which = "groups of" if shape[axis] < size else "the last group of each row has"
            warnings.warn(
                f"{where or type(layer).__name__}: {self.binding.base.__name__} declares groups of {size}, and axis "
                f"{axis} of {shape} ends before: {which} {last}, although the contraction sums over axes {summed}.\n"
                f"  cure: group_size={math.gcd(shape[axis], size)}; for groups across these axes, a weight that has "
                "them as one axis",
                UserWarning,
                stacklevel=2,
            )

    def __call__(self, x: jax.Array, quant_input: Any = None) -> QuantTensor | jax.Array:
        """Quantize a weight.

        Args:
            x: the weight; float, any shape.
            quant_input: for a quantizer that goes by it, the `IntQuantTensor` that the weight is contracted with, or
                its `InputFormat`.

        Returns:
            A QuantTensor of the shape and dtype of `x`, or `x` itself if quantization is off.

        Raises:
            TypeError: the quantizer goes by the input, and this is not quantized to integers.
            ValueError: it goes by the input, whose format is not known, or too wide for the accumulator.
        """
        if self.tensor_quant is None or self.disable_quant:
            return x
        return self._quantized(x) if quant_input is None else self._quantized(x, *self._more(quant_input))

    def quantize(self, x: jax.Array, quant_input: Any = None) -> Any:
        """Quantize as a call does: a QuantTensor, whose `payload()` or `int()` are the low-bit numbers and whose
        `value` the dequantized ones; `x` itself if quantization is off."""
        return self(x, quant_input)

    def scale(self) -> jax.Array | None:
        """Float per integer step, float32; None if quantization is off."""
        return self._attribute("scale")

    def zero_point(self) -> jax.Array | None:
        """The integer that stands for 0, float32; None if quantization is off."""
        return self._attribute("zero_point")

    def bit_width(self) -> int | jax.Array | None:
        """Bits of one number; None if quantization is off."""
        return self._attribute("bit_width")

    def scale_(self) -> jax.Array | None:
        """The scale of each group, with 1 along the elements of a group; None if quantization is off."""
        return self._attribute("scale_")

    def zero_point_(self) -> jax.Array | None:
        """The zero point of each group; None if quantization is off."""
        return self._attribute("zero_point_")

    def pre_scale(self, quant_input: Any = None) -> jax.Array | None:
        """What a decoupled quantizer divides the weight by before rounding, float32; None if quantization is off.

        Args:
            quant_input: as for a call.
        """
        return self._look(quant_input).pre_scale if self.is_quant_enabled else None

    def pre_zero_point(self, quant_input: Any = None) -> jax.Array | None:
        """What a decoupled quantizer adds before rounding, float32; None if quantization is off.

        Args:
            quant_input: as for a call.
        """
        return self._look(quant_input).pre_zero_point if self.is_quant_enabled else None

    def check_input(self, quant_input: Any) -> None:
        """Refuse, before it comes, an input that the quantizer cannot guarantee its accumulator for.

        Args:
            quant_input: as for a call.

        Raises:
            ValueError: it is too wide for the accumulator.

        Warns:
            ZeroWeightsWarning: the accumulator leaves no weight other than 0.
        """
        if self.is_quant_enabled:
            weight = first_parameters(self).weight.get_value()
            self.tensor_quant.check_input(weight, *self._more(quant_input))

    def kept_input(self) -> InputFormat | None:
        """The format of the input of the last training step; None in a stack, or where only a running program knows it.

        Raises:
            ValueError: there was none.
        """
        kept = self.tensor_quant.kept_input()
        return None if kept is None else InputFormat(*kept)

    def commit(self, *layers: Any) -> None:
        """Keep the scales that the weights have now, whatever becomes of the weights (`jqinject.core.CommittedQuant`).

        Args:
            layers: as for `init_tensor_quant`.

        Raises:
            TypeError: the quantizer does not round to nearest on a grid that it knows.
        """
        if not self.committed and self.is_quant_enabled:
            self.committed = True
            try:
                self._assembled_again(*layers)
            except Exception:
                self.committed = False
                raise

    def release(self, *layers: Any) -> None:
        """Measure scales of the weights as they are again: the reverse of `commit`.

        Args:
            layers: as for `init_tensor_quant`.
        """
        if self.committed:
            self.committed = False
            self._assembled_again(*layers)

    def _with_kept_scales(self, quantizer: Any, layers: tuple[Any, ...]) -> Any:
        return CommittedQuant(quantizer, layers[0].weight.get_value())

    def _attribute(self, name: str) -> Any:
        return getattr(self._looked_at(), name) if self.is_quant_enabled else None

    def _looked_at(self) -> Any:
        weight = first_parameters(self).weight.get_value()
        return self._seen(self._pack(self._look()), weight)

    def _look(self, quant_input: Any = None) -> Any:
        """The quantizer's own result for its weight: on a copy, so that no state moves and no first call is used up."""
        layer = first_parameters(self)
        if quant_input is None and self.requires_quant_input:
            quant_input = layer.input_format()
        quantizer = nnx.clone(self.tensor_quant, graph=True)
        return quantizer(layer.weight.get_value(), *self._more(quant_input))

    def _more(self, quant_input: Any) -> InputFormat | tuple[()]:
        """What the quantizer is called with beside the weight."""
        return () if quant_input is None else input_format_of(quant_input, self.binding.base.__name__)

    def _tracked_parameters(self, layers: tuple[Any, ...]) -> list[Any]:
        return [layer.weight for layer in layers]
