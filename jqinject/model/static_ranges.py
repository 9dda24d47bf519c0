"""Finds the static ranges of a model's activations, and those that never saw data."""

from __future__ import annotations

import itertools
from typing import Any, cast

from jqinject.core import StaticRange
from jqinject.core.state import CURE, UNSEEN
from jqinject.model.walk import ModelIndex, dotted

SHOWN = 8


def static_ranges(index: ModelIndex) -> dict[str, StaticRange]:
    """The outermost modules that may hold static ranges (quantizers, quantized ops, lone components), by first path."""
    return {dotted(path): cast(StaticRange, node) for path, node in index.outermost(_is_static_range)}


def _is_static_range(node: Any) -> bool:
    # Looked up on the class, not the instance: `nnx.Rngs` has a stream under any name.
    return issubclass(type(node), StaticRange)


def uncalibrated(index: ModelIndex) -> tuple[str, ...]:
    """Paths of activation quantizers whose range never saw data; abstract and traced ones, unknown, are left out."""
    return tuple(path for path, held in static_ranges(index).items() if held.has_range() is False)


def check_calibrated(index: ModelIndex, name: str) -> None:
    """Refuse ranges that never saw data.

    Args:
        index: of an NNX module.
        name: the calling function's name, for the error text.

    Raises:
        ValueError: there are some; it names them.
    """
    paths = uncalibrated(index)
    if paths:
        raise ValueError(
            f"{name}: {listed(paths)}: of each, {UNSEEN}.\n  cure: {CURE}; or {name}(..., allow_uncalibrated=True)"
        )


def listed(paths: tuple[str, ...]) -> str:
    """Paths for a message; only the first few if there are many."""
    more = len(paths) - SHOWN
    return ", ".join(itertools.islice(paths, SHOWN)) + (f" and {more} more" if more > 0 else "")
