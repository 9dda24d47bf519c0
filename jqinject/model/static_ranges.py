"""The static ranges of a model's activations: where they are, and whether they saw data."""

from __future__ import annotations

import itertools
from typing import Any, cast

from jqinject.core import StaticRange
from jqinject.core.state.uncalibrated import CURE, UNSEEN
from jqinject.model.walk import ModelIndex, dotted

SHOWN = 8


def static_ranges(index: ModelIndex) -> dict[str, StaticRange]:
    """What may hold static ranges, outermost, by its first path: quantizers, quantized ops, components on their own."""
    return {dotted(path): cast(StaticRange, node) for path, node in index.outermost(_is_static_range)}


def _is_static_range(node: Any) -> bool:
    # Of its class, not of the instance: `nnx.Rngs` has a stream under any name.
    return issubclass(type(node), StaticRange)


def uncalibrated(index: ModelIndex) -> tuple[str, ...]:
    """Paths of the quantizers of activations whose range never saw data; of abstract and traced state that is not
    known."""
    return tuple(path for path, held in static_ranges(index).items() if held.has_range() is False)


def check_calibrated(index: ModelIndex, name: str) -> None:
    """Refuse ranges that never saw data.

    Args:
        index: of an NNX module.
        name: of the function that asks, for the error text.

    Raises:
        ValueError: there are some; it names them.
    """
    paths = uncalibrated(index)
    if paths:
        raise ValueError(
            f"{name}: {listed(paths)}: of each, {UNSEEN}.\n  cure: {CURE}; or {name}(..., allow_uncalibrated=True)"
        )


def listed(paths: tuple[str, ...]) -> str:
    """Paths in a message, the first few of many."""
    more = len(paths) - SHOWN
    return ", ".join(itertools.islice(paths, SHOWN)) + (f" and {more} more" if more > 0 else "")
