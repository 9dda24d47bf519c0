"""The weight of a layer, whatever NNX calls it, what its axes are for, and which scale the output has from them."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx

from jqinject.dot import FrozenParam, contraction_output
from jqinject.dot.tensors.choice import ContractionKind as ContractionKind
from jqinject.nn.base.quant_layer import Out, QuantLayer
from jqinject.nn.base.slots import BIAS, INPUT, WEIGHT, is_on
from jqinject.quant_tensor import QuantTensor, is_quantized


class ReassembledOnAssignment(QuantLayer[Out]):
    """Abstract: a new weight or bias assembles its quantizer again."""

    weight_quant: Any = WEIGHT
    bias_quant: Any = BIAS
    weight_name: ClassVar[str]

    def __setattr__(self, name: str, value: Any) -> None:
        name = self.weight_name if name == "weight" else name
        before = vars(self).get(name)
        if isinstance(before, FrozenParam) and isinstance(value, jax.Array | np.ndarray):
            raise before.refusal(value)
        replaced = (
            isinstance(before, nnx.Variable)
            and isinstance(value, nnx.Variable)
            and value is not before
            # Its quantizer made the low-bit numbers, or made them of the weight that comes back.
            and not isinstance(before, FrozenParam)
            and not isinstance(value, FrozenParam)
        )
        if replaced:
            self._check_known_to_quantizers()
        super().__setattr__(name, value)
        if replaced and name in (self.weight_name, "bias"):
            try:
                for proxy in (self.weight_quant, self.bias_quant):
                    if proxy is not None:
                        proxy.init_tensor_quant()
            except Exception:
                super().__setattr__(name, before)
                raise

    def _check_known_to_quantizers(self) -> None:
        """Refuse to replace a parameter before anything is changed where it could not be assembled again."""
        for proxy in (vars(self).get("weight_quant"), vars(self).get("bias_quant")):
            if proxy is not None:
                proxy.check_layers_known(self)


class WeightAxes(ReassembledOnAssignment[Out]):
    """Abstract: a layer with a weight, frozen or not, that knows its channel axes and its summed axes.

    Attributes:
        master: the float weight, where low-bit numbers have its place and it was kept.
        weight_name: what NNX calls the weight.
        takes_batch_norm: whether a batch normalization that follows can be folded into weight and bias.
    """

    input_quant: Any = INPUT
    master: nnx.Variable[Any] | None = None
    weight_name: ClassVar[str] = "kernel"
    takes_batch_norm: ClassVar[bool] = True

    @property
    def weight(self) -> nnx.Variable[Any]:
        """The weight Variable, which the quantizer quantizes; a `FrozenParam` where the float one was not kept."""
        return getattr(self, self.weight_name) if self.master is None else self.master

    @property
    def frozen(self) -> FrozenParam | None:
        """The low-bit numbers in the weight's place; None where it is float."""
        weight = vars(self).get(self.weight_name)
        return weight if isinstance(weight, FrozenParam) else None

    @property
    def output_channel_dim(self) -> int | tuple[int, ...]:
        """The axis of the weight that holds the output channels: the last. A tuple if there are several."""
        return self.weight_ndim - 1

    @property
    def out_channels(self) -> int:
        """How many output channels there are."""
        dims = self.output_channel_dim
        axes = dims if isinstance(dims, tuple) else (dims,)
        return math.prod(self.weight_shape[axis - self.weight_ndim] for axis in axes)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Of the weight, frozen or not."""
        return tuple(getattr(self, self.weight_name).shape)

    @property
    @abstractmethod
    def weight_ndim(self) -> int:
        """The axes of one weight; more than that is a stack of layers."""

    def channel_shapes(self) -> dict[str, tuple[int, ...]]:
        """Slot of activations -> the shape of a scale for each channel there; only what is known beforehand."""
        return {}

    def _free_input_axes(self, ndim: int) -> tuple[int, ...]:
        """The axes of an input of `ndim` axes along which it may have several scales: those not summed over."""
        return ()

    @property
    def summed_axes(self) -> tuple[int, ...]:
        """The axes of the weight that a contraction sums over, to be stored last; none for a convolution."""
        return ()

    @property
    def input_axes(self) -> tuple[int, ...]:
        """The axes of the input that are contracted, in the order of the weight's: the last."""
        return (-1,)

    def axes_of_sums(self) -> tuple[int, ...] | None:
        """The axes along which a contraction of integers needs their sums; None if it needs none."""
        return self.summed_axes or None

    def _terms(self) -> int:
        """How many products one element of the output sums."""
        return math.prod(self.weight_shape) // max(self.out_channels, 1)

    # --- the scale of the output

    def _scales_on_weight(self, quant_input: Any, quant_weight: Any) -> tuple[Any, Any]:
        """Operands with the same products, whose scales lie on the weight if the input has one for each output."""
        return quant_input, quant_weight

    def _bias_on_grid(self, bias: Any, weight: Any) -> bool | jax.Array | None:
        """Whether the bias counts in steps of the accumulator, as far as the layer knows beforehand."""
        on_grid = is_quantized(bias) and self.bias_quant.requires_input_scale
        return True if on_grid else None

    def _with_metadata(self, y: jax.Array, x: Any, weight: Any, bias: Any) -> Any:
        if not (is_quantized(x) and is_quantized(weight)):
            missing = "weight" if is_quantized(x) else "input"
            raise ValueError(
                f"{type(self).__name__}(return_quant_tensor=True): the {missing} is not quantized, so the output has "
                f"no scale.\n  cure: give the layer {missing}_quant=..."
                + (", or feed it a QuantTensor" if missing == "input" else "")
            )
        if not self._has_whole_zero_points():
            return y
        return self._accumulator(y, *self._scales_on_weight(x, weight), bias)

    def _has_whole_zero_points(self) -> bool:
        """Whether products of the quantized numbers are whole, as far as the layer's quantizers say it."""
        if is_on(self.input_quant) and not self.input_quant.has_whole_zero_points:
            return False
        if self.frozen is not None:
            return self.frozen.form.whole_zero_point
        return not is_on(self.weight_quant) or self.weight_quant.has_whole_zero_points

    def _accumulator(self, y: jax.Array, x: QuantTensor, weight: QuantTensor, bias: Any) -> Any:
        """The output with the scale of the sums; an array if they have none."""
        channel = self.output_channel_dim
        assert isinstance(channel, int), "layers with several channel axes lay them out themselves"
        return contraction_output(
            y,
            x,
            weight,
            terms=self._terms(),
            rhs_channel_axis=channel,
            lhs_free_axes=self._free_input_axes(x.ndim),
            bias=bias,
            bias_on_grid=self._bias_on_grid(bias, weight),
            zero_points=self._zero_points(),
        )

    def _zero_points(self) -> tuple[bool | None, bool | None]:
        """Whether zero points of input and weight may differ from 0, as far as the layer's quantizers say it."""
        of_input = self.input_quant.has_zero_point if is_on(self.input_quant) else None
        if self.frozen is not None:
            return of_input, "zero_point" in self.frozen.form.names
        return of_input, self.weight_quant.has_zero_point if is_on(self.weight_quant) else None


CONTRACTED = ("in_features", "kernel_shape")  # arguments whose axes are summed over


class WrongFeaturesError(ValueError, TypeError):
    """An input has other features than the layer; a TypeError too, as XLA's contractions raise."""


def check_features(
    layer: Any,
    inputs: Any,
    expected: Mapping[int, int],
    *,
    channels_last: bool = False,
    argument: str = "in_features",
    what: str = "an input",
) -> None:
    """Refuse an input of wrong features, before any quantizer has seen it.

    Args:
        layer: the layer that is called, for the error text.
        inputs: an array or a QuantTensor.
        expected: the size of each axis that is contracted; axes count from the front or (negative) from the end.
        channels_last: whether the input has axes in space, so that the channels may stand in the wrong place.
        argument: the argument of the layer that decides the features, for the text.
        what: what came, for the text.

    Raises:
        WrongFeaturesError: an axis has another size, or is missing.
    """
    shape = tuple(np.shape(inputs) if isinstance(inputs, list | tuple | int | float) else inputs.shape)
    kind = type(layer).__name__
    for axis, size in expected.items():
        if not -len(shape) <= axis < len(shape):
            raise WrongFeaturesError(
                f"{kind} got {what} of shape {shape}, which has no axis {axis}; expected {size} features there"
            )
        if shape[axis] != size:
            where = "last axis" if axis in (-1, len(shape) - 1) else f"axis {axis}"
            found = tuple(shape[each] for each in expected if -len(shape) <= each < len(shape))
            contracted = f"{found} and {tuple(expected.values())}"
            by = f"the layer's {argument}" + (
                f" (contracted: {contracted})" if argument in CONTRACTED else ""
            )
            other = f"{argument}={shape[axis]}" if argument != "kernel_shape" else "another kernel_shape"
            cure = _moved(shape, axis, size, channels_last)
            cure = cure or f"{what} with {size} features, or {kind} with {other}"
            raise WrongFeaturesError(
                f"{kind} got {what} of shape {shape}, whose {where} is {shape[axis]}; expected {size}, {by}.\n"
                f"  cure: {cure}"
            )


def _moved(shape: tuple[int, ...], axis: int, size: int, channels_last: bool) -> str:
    """How the features come to their place, if another axis has as many."""
    if size not in shape:
        return ""
    there = shape.index(size)
    order = "channels come last here: " if channels_last else ""
    return f"axis {there} has {size}; {order}jnp.moveaxis(x, {there}, {axis})"
