"""The static ranges of a model's activations: where they are, and whether they saw data."""

from __future__ import annotations

import itertools
from typing import Any, cast

from jqinject.core import StaticRange
from jqinject.core.state.uncalibrated import CURE, UNSEEN
from jqinject.model.walk import dotted, walk

SHOWN = 8


def static_ranges(model: Any) -> dict[str, StaticRange]:
    """What may hold static ranges, outermost, by its first path: quantizers, quantized ops, components on their own."""
    found: dict[int, tuple[str, StaticRange]] = {}
    for path, node in walk(model, within=lambda node: not _is_static_range(node)):
        if _is_static_range(node):
            found.setdefault(id(node), (dotted(path), cast(StaticRange, node)))
    return dict(found.values())


def _is_static_range(node: Any) -> bool:
    # Of its class, not of the instance: `nnx.Rngs` has a stream under any name.
    return issubclass(type(node), StaticRange)


def uncalibrated(model: Any) -> tuple[str, ...]:
    """Paths of the quantizers of activations whose range never saw data; of abstract and traced state that is not
    known."""
    return tuple(path for path, held in static_ranges(model).items() if held.has_range() is False)


def check_calibrated(model: Any, name: str) -> None:
    """Refuse ranges that never saw data.

    Args:
        model: an NNX module.
        name: of the function that asks, for the error text.

    Raises:
        ValueError: there are some; it names them.
    """
    paths = uncalibrated(model)
    if paths:
        raise ValueError(
            f"{name}: {listed(paths)}: of each, {UNSEEN}.\n  cure: {CURE}; or {name}(..., allow_uncalibrated=True)"
        )


def listed(paths: tuple[str, ...]) -> str:
    """Paths in a message, the first few of many."""
    more = len(paths) - SHOWN
    return ", ".join(itertools.islice(paths, SHOWN)) + (f" and {more} more" if more > 0 else "")
