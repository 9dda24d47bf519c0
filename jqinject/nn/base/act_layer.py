"""What layers with an activation function share: quantizers for input, output and gradient around the function."""

from abc import abstractmethod
from typing import Any, ClassVar

import jax
from flax import nnx

from jqinject.core.construction.assign import assign
from jqinject.nn.base.slots import ACT, GRAD, INPUT, Slot, make_proxy, share, split_overrides
from jqinject.proxy import link_if_proxy
from jqinject.quant_tensor import as_array


class QuantActLayer(nnx.Module):
    """Abstract: y = act_quant(f(input_quant(x))).

    Attributes:
        act_quant, input_quant, grad_quant: proxies, or None.
        return_quant_tensor: whether the output is a QuantTensor.
        keeps_scale: whether the function leaves a QuantTensor its scale, so that it needs no quantizer to return one.
    """

    act_quant: Any = None
    input_quant: Any = None
    grad_quant: Any = None
    return_quant_tensor: bool
    keeps_scale: ClassVar[bool] = False

    def _init_quantizers(
        self,
        given: dict[str, Any],
        overrides: dict[str, Any],
        return_quant_tensor: bool,
        rngs: nnx.Rngs | None,
        offered: dict[str, Any] | None = None,
    ) -> None:
        slots: tuple[Slot, ...] = tuple(slot for slot in (ACT, INPUT, GRAD) if slot.name in given)
        by_slot = split_overrides(self, slots, overrides)
        proxies = {
            s.name: make_proxy(
                self, s, given[s.name], by_slot[s.name], rngs, offered=offered if s is ACT else None
            )
            for s in slots
        }
        if return_quant_tensor and proxies["act_quant"] is None and not self.keeps_scale:
            raise ValueError(
                f"{type(self).__name__}(return_quant_tensor=True) needs a quantizer to have a scale to return.\n"
                "  cure: give it act_quant=..."
            )
        held = {name: proxy for name, proxy in proxies.items() if proxy is not None}
        assign(self, return_quant_tensor=return_quant_tensor, **held)
        for slot in slots:
            share(self, given[slot.name])

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name.endswith("_quant"):
            link_if_proxy(self, value)
        return value

    @abstractmethod
    def _activation(self, x: Any) -> Any:
        """The activation function, on an array or a QuantTensor."""

    def _before_quantizer(self, x: jax.Array) -> jax.Array:
        return self._activation(x)

    def __call__(self, x: Any) -> Any:
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
