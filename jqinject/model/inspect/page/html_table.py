"""Tables in HTML."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape

STYLE = """
.jqinject { color-scheme: light dark; --line: #8885; --soft: #8882; --bar: #4878a8; --out: #c8502f; --dim: #666;
  font: 14px/1.45 system-ui, sans-serif; max-width: 1160px; margin: 0 auto; overflow-wrap: break-word; }
@media (prefers-color-scheme: dark) { .jqinject { --bar: #7fb0e0; --out: #f08060; --dim: #aaa; } }
.jqinject h1 { font-size: 1.5rem; } .jqinject h2 { font-size: 1.1rem; margin: 1.6rem 0 .5rem; }
.jqinject .tiles { display: flex; flex-wrap: wrap; gap: .8rem; }
.jqinject .tile { border: 1px solid var(--line); border-radius: 6px; padding: .5rem .9rem; flex: 1 1 11rem; }
.jqinject .tile b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.jqinject .tile span, .jqinject .dim, .jqinject .note td { color: var(--dim); font-size: 12px; }
.jqinject .costs { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr max-content max-content;
  gap: .25rem .8rem; align-items: center; }
.jqinject .costs .head { color: var(--dim); font-size: 12px; }
.jqinject .track { background: var(--soft); height: .8rem; border-radius: 2px; }
.jqinject .fill { background: var(--bar); height: 100%; border-radius: 2px; min-width: 1px; }
.jqinject .number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.jqinject table { border-collapse: collapse; width: 100%; font-size: 12.5px; display: table; }
.jqinject th, .jqinject td { border-top: 1px solid var(--line); padding: .25rem .4rem; text-align: left;
  vertical-align: baseline; background: none; }
.jqinject th { border-top: 0; vertical-align: bottom; }
.jqinject .note td { border-top: 0; padding-top: 0; }
.jqinject td.right, .jqinject th.right { text-align: right; font-variant-numeric: tabular-nums; }
.jqinject td.right, .jqinject td.whole { white-space: nowrap; }
.jqinject td:first-child { overflow-wrap: anywhere; min-width: 7rem; }
.jqinject .costs div:first-child, .jqinject p { overflow-wrap: anywhere; }
.jqinject tr.total td { font-weight: 600; }
.jqinject dt { font-weight: 600; margin-top: .4rem; } .jqinject dd { margin-left: 1rem; }
.jqinject section { border-top: 1px solid var(--line); margin-top: 1.2rem; }
.jqinject .charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(260px, 1fr)); gap: .6rem 1.2rem; }
.jqinject figure { margin: 0; } .jqinject figcaption { font-size: 12px; min-height: 2.9em; }
.jqinject svg { width: 100%; height: auto; display: block; } .jqinject svg text { font-size: 10px; fill: currentColor; }
.jqinject rect.bar, .jqinject .dot { fill: var(--bar); } .jqinject rect.out { fill: var(--out); }
.jqinject .clip { stroke: var(--out); stroke-width: 1.2; stroke-dasharray: 4 2; }
.jqinject .axis { stroke: var(--line); } .jqinject .line { fill: none; stroke: var(--bar); stroke-width: 1.5; }
"""


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
