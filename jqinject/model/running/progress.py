"""A progress bar in the terminal, if `rich` is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Sized
from typing import Any


def with_progress(items: Iterable[Any], what: str, *, shown: bool) -> Iterator[Any]:
    """The items, with a bar that advances as they are taken.

    Args:
        items: any iterable; its length is shown if it has one.
        what: the label.
        shown: whether to show a bar at all.
    """
    if not shown or importlib.util.find_spec("rich") is None:
        yield from items
        return
    from rich.progress import track

    total = len(items) if isinstance(items, Sized) else None
    yield from track(items, description=what, total=total, transient=True)
