"""The static ranges that a quantizer holds: the components which collect them, asked by their protocol."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jqinject.core import StaticRange, warn_if_uncalibrated
from jqinject.proxy.links import linked_layers


def ranges_in(quantizer: Any) -> list[StaticRange]:
    """The components of a quantizer that collect a range."""
    if not isinstance(quantizer, nnx.Module):
        return []
    nodes = (node for _, node in nnx.iter_modules(quantizer, graph=True) if isinstance(node, StaticRange))
    return [node for node in nodes if node.has_range() is not None]


def check_range(proxy: Any, x: Any, held_as: str = "") -> None:
    """Warn where a proxy is to quantize `x` in evaluation, in a range that never saw data; once for each proxy.

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
