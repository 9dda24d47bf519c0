"""Parts of a report as HTML: a self-contained page, and what a notebook shows."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

from jqinject.model.inspect import layer_numbers, site_table
from jqinject.terminal import blocks, wrapped

if TYPE_CHECKING:
    from rich.text import Text

STYLE = resources.files("jqinject.model.inspect").joinpath("page.css").read_text(encoding="utf-8")
#: The last column of a table whose texts are long: where it does not fit, they are listed beneath.
NOTE = "note"
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


class Shown:
    """Abstract: a table with a legend and notes, as text, for `rich.print`, and for notebooks and pages."""

    @abstractmethod
    def table(self) -> Table:
        """The names of the columns, and a line of cells for each row."""

    def legend(self) -> tuple[tuple[str, str], ...]:
        """What the columns mean: names, explanation."""
        return ()

    @abstractmethod
    def notes(self) -> tuple[str, ...]:
        """Notes beneath the table."""

    def __str__(self) -> str:
        """The table, as wide as the terminal: where columns do not fit, several tables, and the notes beneath."""
        names, rows = self.table()
        lines = blocks(names, rows, right=site_table.RIGHT)
        legend = [f"{name}: {text}" for name, text in self.legend()] if rows else []
        beneath = [*legend, *self.notes()]
        if "" in lines and names[-1] == NOTE:
            lines = blocks(names[:-1], [row[:-1] for row in rows], right=site_table.RIGHT)
            beneath = [*(f"{row[0]}: {row[-1]}" for row in rows if row[-1]), *beneath]
        return "\n".join([*(lines if rows else ()), *(wrapped(line, hang="  ") for line in beneath)])

    def __rich__(self) -> Text:
        from rich.text import Text

        return Text(str(self))

    def body(self) -> str:
        """The table with its notes and its legend, as HTML."""
        names, rows = self.table()
        below = "".join(f"<p>{escape(line)}</p>\n" for line in self.notes())
        terms = "".join(f"<dt>{escape(name)}</dt>\n<dd>{escape(text)}</dd>\n" for name, text in self.legend())
        return f"{table(names, rows) if rows else ''}{below}<dl>\n{terms}</dl>\n"

    def _repr_html_(self, title: str = "") -> str:
        return f'<div class="jqinject"><style>\n{STYLE}</style>\n{title}{self.body()}</div>\n'


def document(title: str, body: str, head: str = "") -> str:
    """A whole HTML page; it adapts to narrow screens, and to dark ones.

    Args:
        title: of the page, as text.
        body: its content, as HTML.
        head: further elements of its head, as HTML.
    """
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{head}'
        "<style>:root { color-scheme: light dark; } body { margin: 1rem 20px; }</style></head>\n"
        f"<body>{body}</body></html>\n"
    )


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table: the names of its columns, and its cells."""
    header = "".join(_cell("th", name, name) for name in names)
    cells = ("".join(_cell("td", *cell) for cell in zip(names, row, strict=True)) for row in rows)
    body = "\n".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table><thead><tr>{header}</tr></thead>\n<tbody>{body}</tbody></table>\n"


def _cell(tag: str, column: str, text: str) -> str:
    attribute = ' class="right"' if column in site_table.RIGHT else ""
    return f"<{tag}{attribute}>{escape(text)}</{tag}>"


WIDTH, HEIGHT = 320, 110
CHART_LEFT, CHART_RIGHT, TOP, BOTTOM = 8, 312, 8, 92


def histogram_chart(title: str, drawn: layer_numbers.Histogram) -> str:
    """Bars of a histogram, with the clipping range as two vertical lines.

    The height of a bar is the logarithm of its count, so that a single outlier is seen beside a million numbers. All
    bars have one width: where the bins grow with the distance from 0, the axis is logarithmic there.
    """
    bins = len(drawn.counts)

    def x(place: float) -> float:
        return CHART_LEFT + place / bins * (CHART_RIGHT - CHART_LEFT)

    highest = math.log1p(max(*drawn.counts, 1))
    bars = []
    for place, count in enumerate(drawn.counts):
        if count:
            height = (BOTTOM - TOP) * math.log1p(count) / highest
            middle = (drawn.edges[place] + drawn.edges[place + 1]) / 2
            kind = "bar" if drawn.low <= middle <= drawn.high else "bar out"
            bars.append(
                f'<rect class="{kind}" x="{x(place):.1f}" y="{BOTTOM - height:.1f}" '
                f'width="{x(1) - x(0) - 0.5:.1f}" height="{height:.1f}"/>'
            )
    lines = [
        f'<line class="clip" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 6}" y2="{BOTTOM}"/>'
        for at in map(x, np.interp((drawn.low, drawn.high), drawn.edges, range(bins + 1)))
    ]
    unit = "" if drawn.unit == "value" else f" {drawn.unit}"
    about = f"quantizer's range {drawn.low:.3g} to {drawn.high:.3g}{unit} (dashed); heights: log of counts"
    span = drawn.edges[-1] - drawn.edges[0]
    # Where only rounding separates an edge from 0, it is 0.
    edges = [edge if abs(edge) > 1e-6 * span else 0.0 for edge in drawn.edges]
    marks = [(x(place), f"{edges[place]:.3g}") for place in range(0, bins + 1, bins // 4 or 1)]
    return _figure(title, about, [*bars, *lines], marks)


def series_chart(title: str, values: Sequence[float]) -> str:
    """Numbers of successive steps as a line, above a vertical axis that starts at 0."""
    high, step = max(values) or 1.0, (CHART_RIGHT - CHART_LEFT) / (len(values) - 1)
    points = " ".join(
        f"{CHART_LEFT + place * step:.1f},{BOTTOM - value / high * (BOTTOM - TOP):.1f}"
        for place, value in enumerate(values)
    )
    marks = (CHART_LEFT, f"{len(values) - 1} steps before"), (CHART_RIGHT, "last step")
    about = f"{min(values):.4g} to {max(values):.4g}"
    return _figure(title, about, [f'<polyline class="line" points="{points}"/>'], marks)


def _figure(title: str, about: str, drawing: Sequence[str], marks: Iterable[tuple[float, str]]) -> str:
    """A drawing above a horizontal axis with texts at some places."""
    axis = [f'<line class="axis" x1="{CHART_LEFT}" x2="{CHART_RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}"/>']
    for at, text in marks:
        anchor = "start" if at < CHART_LEFT + 1 else "end" if at > CHART_RIGHT - 1 else "middle"
        axis.append(f'<text x="{at:.1f}" y="{HEIGHT - 4}" text-anchor="{anchor}">{escape(text)}</text>')
    label, inside = escape(f"{title}: {about}", quote=True), "".join([*drawing, *axis])
    return (
        f"<figure><figcaption><b>{escape(title)}</b> {escape(about)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{inside}</svg></figure>'
    )


def charts(rows: Iterable[site_table.SiteRow]) -> str:
    """The numbers of measured rows; empty without any."""
    sections = "".join(map(_section, rows))
    return f"<h2>Numbers and their ranges</h2>\n{sections}" if sections else ""


def _section(entry: site_table.SiteRow) -> str:
    """The charts of a layer; empty without measured numbers."""
    if entry.numbers is None:
        return ""
    parts = vars(entry.numbers.histograms).items()
    drawn = [histogram_chart(name, part) for name, part in parts if part is not None]
    histories = [_history(history) for history in entry.numbers.histories]
    calls = f"{entry.numbers.calls} call{'' if entry.numbers.calls == 1 else 's'}"
    return (
        f'<section><h2>{escape(entry.path) or "the model"}</h2><p class="dim">{escape(entry.layer)}, {calls}</p>'
        f'<div class="charts">{"".join([*drawn, *histories])}</div></section>\n'
    )


def _history(history: layer_numbers.History) -> str:
    title = f"{history.slot}.{history.name}"
    if len(history.values) > 1:
        return series_chart(title, history.values)
    value = f"{history.values[0]:.6g}" if history.values else "not filled yet"
    return f"<figure><figcaption><b>{escape(title)}</b> {value}</figcaption></figure>"
