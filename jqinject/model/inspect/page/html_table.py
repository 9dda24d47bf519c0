"""Tables in HTML."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape

TITLES = {"clipped w/in/out": "clipped weight, input, output"}


def framed(names: Sequence[str], body: Sequence[str], right: Collection[str]) -> str:
    """A table.

    Args:
        names: of its columns.
        body: its rows, as `row_of` makes them.
        right: the columns of numbers.
    """
    header = "".join(_cell("th", name, TITLES.get(name, name), right) for name in names)
    lines = "\n".join(body)
    return f"<table><thead><tr>{header}</tr></thead>\n<tbody>{lines}</tbody></table>\n"


def row_of(
    names: Sequence[str], cells: Sequence[str], right: Collection[str], *, below: str = "", kind: str = ""
) -> str:
    """A row; `below` follows it, `kind` is an attribute."""
    inside = "".join(_cell("td", name, cell, right) for name, cell in zip(names, cells, strict=True))
    return f"<tr{kind}>{inside}</tr>{below}"


def _cell(tag: str, column: str, text: str, right: Collection[str]) -> str:
    kind = (
        ' class="right"'
        if column in right
        else ' class="whole"'
        if column == "program" and tag == "td"
        else ""
    )
    return f"<{tag}{kind}>{escape(text)}</{tag}>"
