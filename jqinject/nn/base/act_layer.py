"""What layers with an activation function share: quantizers for input, output and gradient around the function."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from flax import nnx

from jqinject.nn.base.quant_layer import Out, QuantLayer
from jqinject.nn.base.slots import ACT, GRAD, INPUT, hold_proxies
from jqinject.quant_tensor import as_array


class QuantActLayer(QuantLayer[Out]):
    """Abstract: y = act_quant(f(input_quant(x))).

    Attributes:
        act_quant, input_quant, grad_quant: proxies, or None.
        return_quant_tensor: whether the output is a QuantTensor.
        keeps_scale: whether the function leaves a QuantTensor its scale, so that it needs no quantizer to return one.
    """

    act_quant: Any = ACT
    input_quant: Any = INPUT
    grad_quant: Any = GRAD
    return_quant_tensor: bool
    keeps_scale: ClassVar[bool] = False

    def _init_quantizers(
        self,
        arguments: dict[str, Any],
        overrides: Mapping[str, Any],
        return_quant_tensor: bool,
        rngs: nnx.Rngs | None,
        offered: dict[str, Any] | None = None,
    ) -> None:
        if return_quant_tensor and arguments["act_quant"] is None and not self.keeps_scale:
            raise ValueError(
                f"{type(self).__name__}(return_quant_tensor=True) needs a quantizer to have a scale to return.\n"
                "  cure: give it act_quant=..."
            )
        vars(self).update(return_quant_tensor=return_quant_tensor)
        hold_proxies(self, arguments, overrides, rngs, offered=offered)

    @abstractmethod
    def _activation(self, x: Any) -> Any:
        """The activation function, on an array or a QuantTensor."""

    def _before_quantizer(self, x: jax.Array) -> jax.Array:
        return self._activation(x)

    def __call__(self, x: Any) -> Out:
        """The activation function, then the quantizer.

        Args:
            x: float array or QuantTensor, any shape.

        Returns:
            An array of the shape and dtype of `x`, or a QuantTensor with `return_quant_tensor`. Without any quantizer,
            what comes in as an array comes out as one.
        """
        x = x if self.input_quant is None else self.input_quant(x)
        if self.act_quant is not None and self.act_quant.is_quant_enabled:
            y = self.act_quant(self._before_quantizer(as_array(x)))
        else:
            y = self._activation(x)
        if self.grad_quant is not None:
            y = self.grad_quant.on(y)
        return y if self.return_quant_tensor else as_array(y)
