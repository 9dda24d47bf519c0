"""The static ranges that a quantizer holds: the components which collect them, asked by their protocol."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jqinject.core import StaticRange


def ranges_in(quantizer: Any) -> list[StaticRange]:
    """The components of a quantizer that collect a range."""
    if not isinstance(quantizer, nnx.Module):
        return []
    nodes = (node for _, node in nnx.iter_modules(quantizer, graph=True) if isinstance(node, StaticRange))
    return [node for node in nodes if node.has_range() is not None]
