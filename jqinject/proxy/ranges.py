"""The static ranges that a quantizer holds."""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from jqinject.core import StaticRange, warn_if_uncalibrated
from jqinject.core.construction.component import InnerModule
from jqinject.proxy.links import linked_layers


def ranges_in(quantizer: Any) -> list[StaticRange]:
    """The components of a quantizer that collect a range."""
    if not isinstance(quantizer, nnx.Module):
        return []
    nodes = (node for _, node in nnx.iter_modules(quantizer, graph=True) if isinstance(node, StaticRange))
    return [node for node in nodes if node.has_range() is not None]


class HoldsRanges(InnerModule):
    """Abstract: the protocol of `core.StaticRange`, answered for the components that a quantizer holds.

    Attributes:
        tensor_quant: the quantizer; None if the injector says so (no quantization).
        disable_quant: set it to let the tensor through as it is.
        quantizes_activations: whether it is used on what flows, so that its range can be collected.
    """

    tensor_quant: Any
    disable_quant: bool = False
    quantizes_activations: ClassVar[bool] = False

    @property
    def is_quant_enabled(self) -> bool:
        """Whether a tensor is quantized on its way through."""
        return self.tensor_quant is not None and not self.disable_quant

    def has_range(self) -> bool | None:
        """Whether data were seen; None if nothing is collected: of weights, constant and dynamic ranges, and while
        quantization is off."""
        used = self.is_quant_enabled and self.quantizes_activations
        held = ranges_in(self.tensor_quant) if used else []
        return all(component.has_range() for component in held) if held else None

    def begin_calibration(self) -> None:
        """Switch to training mode and start to collect anew."""
        self.set_attributes(use_running_average=False, raise_if_not_found=False)
        for component in ranges_in(self.tensor_quant):
            component.begin_calibration()

    def end_calibration(self) -> None:
        """Take what was collected as the range."""
        for component in ranges_in(self.tensor_quant):
            component.end_calibration()


def check_range(proxy: Any, x: Any, held_as: str = "") -> None:
    """Warn if a proxy is about to quantize `x` in evaluation in a range that never saw data; once for each proxy.

    Args:
        proxy: the proxy.
        x: what it quantizes.
        held_as: where the user finds it; empty for an attribute of the layers that hold it.
    """
    if proxy.use_running_average and not proxy.observing:
        warn_if_uncalibrated(proxy, lambda: name_of(proxy, held_as), x)


def name_of(proxy: Any, held_as: str = "") -> str:
    """Where a proxy is found, with its injector: `QuantLinear.input_quant (Int8ActPerTensorFloat)`."""
    injector = proxy.binding.base.__name__
    holders = [held_as] if held_as else _attributes(proxy)
    return f"{' and '.join(holders)} ({injector})" if holders else injector


def _attributes(proxy: Any) -> list[str]:
    return [
        f"{type(layer).__name__}.{name}"
        for layer in linked_layers(proxy)
        for name, child in vars(layer).items()
        if child is proxy
    ]
