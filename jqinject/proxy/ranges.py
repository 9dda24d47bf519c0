"""The static ranges that a quantizer holds: the components which collect them, asked by their protocol."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jqinject.core import StaticRange
from jqinject.proxy.links import linked_layers


def ranges_in(quantizer: Any) -> list[StaticRange]:
    """The components of a quantizer that collect a range."""
    if not isinstance(quantizer, nnx.Module):
        return []
    nodes = (node for _, node in nnx.iter_modules(quantizer, graph=True) if isinstance(node, StaticRange))
    return [node for node in nodes if node.has_range() is not None]


def name_of(proxy: nnx.Module, injector: str) -> str:
    """What a user calls a quantizer, where the model that it is part of is not known."""
    holders = [
        f"{type(layer).__name__}.{name}"
        for layer in linked_layers(proxy)
        for name, child in vars(layer).items()
        if child is proxy
    ]
    return f"{' and '.join(holders)} ({injector})" if holders else injector
