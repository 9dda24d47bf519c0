"""The static ranges of a model's activations: where they are."""

from __future__ import annotations

import itertools
from typing import Any

from flax import nnx

from jqinject.core import StaticRange
from jqinject.model.walk import dotted, walk

SHOWN = 8


def static_ranges(model: Any) -> dict[str, StaticRange]:
    """What may hold static ranges, outermost, by its first path: quantizers, quantized ops, components on their own."""
    found: dict[int, tuple[str, StaticRange]] = {}
    for path, node in walk(model, within=lambda node: not isinstance(node, StaticRange)):
        if isinstance(node, nnx.Module) and isinstance(node, StaticRange):
            found.setdefault(id(node), (dotted(path), node))
    return dict(found.values())


def listed(paths: tuple[str, ...]) -> str:
    """Paths in a message, the first few of many."""
    more = len(paths) - SHOWN
    return ", ".join(itertools.islice(paths, SHOWN)) + (f" and {more} more" if more > 0 else "")
