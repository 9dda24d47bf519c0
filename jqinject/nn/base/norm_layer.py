"""What quantized normalizations share: Flax's own arithmetic in float, between an input and an output quantizer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
from flax import nnx

from jqinject.nn.base.quant_layer import Out, QuantLayer
from jqinject.nn.base.slots import GRAD, INPUT, OUTPUT, hold_proxies
from jqinject.nn.base.weight_axes import check_features
from jqinject.quant_tensor import as_array


class QuantNormLayer(QuantLayer[Out]):
    """Abstract: y = output_quant(norm(input_quant(x))), the norm computed in float.

    Attributes:
        input_quant, output_quant, grad_quant: proxies, or None.
        return_quant_tensor: whether the output is a QuantTensor.
    """

    input_quant: Any = INPUT
    output_quant: Any = OUTPUT
    grad_quant: Any = GRAD
    return_quant_tensor: bool
    num_features: int
    _flax_forward: ClassVar[Any]

    def _init_quantizers(
        self,
        arguments: Mapping[str, Any],
        overrides: Mapping[str, Any],
        return_quant_tensor: bool,
        rngs: nnx.Rngs | None,
    ) -> None:
        """Make the proxies; to be called when the parameters are there, also on a Flax layer whose class was changed.

        Args:
            arguments: what the user gave for each slot, None if it is missing; `act_quant` is another name of
                `input_quant`.
            overrides: the user's further keywords.
            return_quant_tensor: whether to return QuantTensors.
            rngs: for quantizers that draw random numbers.
        """
        stack, shapes = self._stack(), self._channel_shapes()
        axis_name = self.axis_name if isinstance(self, nnx.BatchNorm) else None
        offered = {} if axis_name is None else {"axis_name": axis_name}
        hold_proxies(self, arguments, overrides, rngs, stack=stack, channel_shapes=shapes, offered=offered)
        self.return_quant_tensor = return_quant_tensor
        if return_quant_tensor and (self.output_quant is None or not self.output_quant.is_quant_enabled):
            raise ValueError(
                f"{type(self).__name__}(return_quant_tensor=True) needs output_quant to have a scale to return.\n"
                "  cure: give it output_quant=..."
            )

    def _channel_shapes(self) -> dict[str, tuple[int, ...]]:
        """Slot -> the shape of a scale for each channel, where features are an axis that counts from the end."""
        axis, count = self._features()
        if axis is None or axis >= 0:
            return {}
        return dict.fromkeys(("input_quant", "output_quant"), (count, *(1,) * (-axis - 1)))

    def _features(self) -> tuple[int | None, int]:
        """The axis of the features, None if there are several, and how many they are."""
        axes = self.axis if isinstance(self, nnx.BatchNorm) else -1
        if isinstance(self, nnx.LayerNorm | nnx.RMSNorm):
            axes = self.feature_axes
        axis = axes[0] if isinstance(axes, Sequence) and len(axes) == 1 else axes
        count = self.num_groups * self.group_size if isinstance(self, nnx.GroupNorm) else self.num_features
        return axis if isinstance(axis, int) else None, count

    def _stack(self) -> tuple[int, ...]:
        """The sizes of the leading axes that parameters have in a stack of layers; the last axis is the features'."""
        held = [v for v in vars(self).values() if isinstance(v, nnx.Variable)]
        return held[0].shape[:-1] if held else ()

    def _quantized(self, x: Any, norm: Callable[[jax.Array], jax.Array]) -> Any:
        """The norm of the quantized input, with a quantized output.

        Args:
            x: float array or QuantTensor.
            norm: the forward of the Flax layer.
        """
        axis, count = self._features()
        if axis is not None:
            check_features(self, x, {axis: count}, argument="num_features")
        x = x if self.input_quant is None else self.input_quant(x)
        y: Any = norm(as_array(x))
        if self.grad_quant is not None:
            y = self.grad_quant(y)
        y = y if self.output_quant is None else self.output_quant(y)
        return y if self.return_quant_tensor else as_array(y)
