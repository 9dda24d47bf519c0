"""What cases of algorithms after training have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.golden._config import CannotDrive, Settings

ORDERS = {"natural": False, "descending diag(H), stable": True}


def said(given: Settings, name: str, table: Mapping[str, Any]) -> Any:
    """What a sentence stands for, by how it begins; the rest of it explains.

    The vocabulary shortens long texts, which end in `...`.
    """
    text = given.take(name)
    for begins, value in table.items():
        shortened = str(text).endswith("...") and begins.startswith(str(text).removesuffix("..."))
        if str(text).startswith(begins) or shortened:
            return value
    raise CannotDrive(f"{name}: {text!r} has no meaning; known are {sorted(table)}")


def check_order(given: Settings, act_order: bool) -> None:
    """Read `order`, a sentence that says the same as `act_order`."""
    given.choose("order", ORDERS)
