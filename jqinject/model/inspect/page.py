"""Parts of a report as HTML: a self-contained page, and what a notebook shows."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

from jqinject.model.inspect.layer_numbers import Histogram, History
from jqinject.model.inspect.site_table import RIGHT, TOTAL, SiteRow
from jqinject.terminal import blocks, wrapped

if TYPE_CHECKING:
    from rich.text import Text

STYLE = resources.files("jqinject.model.inspect").joinpath("page.css").read_text(encoding="utf-8")
NOTE = "note"
"""The last column of a table whose texts are long: where it does not fit, they are listed beneath."""
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


class Shown:
    """Abstract: a table with a legend and notes, as text, for `rich.print`, and for notebooks and pages."""

    @abstractmethod
    def table(self) -> Table:
        """The names of the columns, and a line of cells for each row."""

    @abstractmethod
    def legend(self) -> tuple[tuple[str, str], ...]:
        """What the columns mean: names, explanation."""

    @abstractmethod
    def notes(self) -> tuple[str, ...]:
        """Notes beneath the table."""

    def __str__(self) -> str:
        """The table, as wide as the terminal: where columns do not fit, several tables, and the notes beneath."""
        names, rows = self.table()
        lines = blocks(names, rows, right=RIGHT)
        beneath = [*(f"{name}: {text}" for name, text in self.legend()), *self.notes()]
        if "" in lines and names[-1] == NOTE:
            lines = blocks(names[:-1], [row[:-1] for row in rows], right=RIGHT)
            beneath = [*(f"{row[0]}: {row[-1]}" for row in rows if row[-1]), *beneath]
        return "\n".join([*(lines if rows else ()), *(wrapped(line, hang="  ") for line in beneath)])

    def __rich__(self) -> Text:
        from rich.text import Text

        return Text(str(self))

    def body(self) -> str:
        """The table with its notes and its legend, as HTML."""
        names, rows = self.table()
        names = names[:-1] if names[-1] == NOTE else names
        below = "".join(f"<p>{escape(line)}</p>\n" for line in self.notes())
        terms = "".join(f"<dt>{escape(name)}</dt>\n<dd>{escape(text)}</dd>\n" for name, text in self.legend())
        return f"{table(names, rows) if rows else ''}{below}<dl>\n{terms}</dl>\n"

    def _repr_html_(self, title: str = "") -> str:
        return f'<div class="jqinject"><style>\n{STYLE}</style>\n{title}{self.body()}</div>\n'

    def page(self, title: str) -> str:
        """It as a page by itself."""
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            "<style>:root { color-scheme: light dark; } body { margin: 1rem 20px; }</style></head>\n"
            f"<body>{self._repr_html_(f'<h1>{title}</h1>')}</body></html>\n"
        )


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table.

    Args:
        names: of its columns.
        rows: their cells, and maybe one more, a note that is shown below the row.
    """
    header = "".join(_cell("th", name, name) for name in names)
    body = "\n".join(_row(names, row) for row in rows)
    return f"<table><thead><tr>{header}</tr></thead>\n<tbody>{body}</tbody></table>\n"


def _row(names: Sequence[str], cells: Sequence[str]) -> str:
    inside = "".join(_cell("td", name, cell) for name, cell in zip(names, cells, strict=False))
    total = ' class="total"' if cells[0] == TOTAL else ""
    note = "".join(cells[len(names) :])
    below = f'<tr class="note"><td colspan="{len(names)}">{escape(note)}</td></tr>' if note else ""
    return f"<tr{total}>{inside}</tr>{below}"


def _cell(tag: str, column: str, text: str) -> str:
    attribute = ' class="right"' if column in RIGHT else ""
    return f"<{tag}{attribute}>{escape(text)}</{tag}>"


WIDTH, HEIGHT = 320, 110
CHART_LEFT, CHART_RIGHT, TOP, BOTTOM = 8, 312, 8, 92
MOST_POINTS = 400


def histogram_chart(title: str, drawn: Histogram) -> str:
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
    marks = [
        *_axis_ends("", ""),
        *(_mark(x(place), _rounded(drawn.edges, place)) for place in range(0, bins + 1, bins // 4 or 1)),
    ]
    return _figure(title, about, [*bars, *lines, *marks])


def _rounded(edges: Sequence[float], place: int) -> float:
    """An edge, 0 where only rounding separates it from 0."""
    return edges[place] if abs(edges[place]) > 1e-6 * (edges[-1] - edges[0]) else 0.0


def _mark(at: float, value: float) -> str:
    """The value at a place of the axis."""
    anchor = "start" if at < CHART_LEFT + 1 else "end" if at > CHART_RIGHT - 1 else "middle"
    return f'<text x="{at:.1f}" y="{HEIGHT - 4}" text-anchor="{anchor}">{value:.3g}</text>'


def series_chart(title: str, values: Sequence[float], ends: tuple[str, str], *, joined: bool) -> str:
    """Draw numbers in order, above a vertical axis that starts at 0, or at the lowest value if that is negative.

    Args:
        title: its title.
        values: the numbers; if there are very many, an evenly spaced subset is drawn.
        ends: labels of the two ends of the horizontal axis.
        joined: whether a line joins them, as numbers of successive steps; dots otherwise.
    """
    shown = [v for v in values[:: math.ceil(len(values) / MOST_POINTS)] if math.isfinite(v)]
    low, high = min([0.0, *shown]), max([0.0, *shown])
    span = high - low or 1.0
    step = (CHART_RIGHT - CHART_LEFT) / max(len(shown) - 1, 1)
    points = [
        (f"{CHART_LEFT + i * step:.1f}", f"{BOTTOM - (v - low) / span * (BOTTOM - TOP):.1f}")
        for i, v in enumerate(shown)
    ]
    line = f'<polyline class="line" points="{" ".join(",".join(point) for point in points)}"/>'
    drawing = [line] if joined else [f'<circle class="dot" cx="{x}" cy="{y}" r="1.6"/>' for x, y in points]
    about = f"{min(shown, default=math.nan):.4g} to {max(shown, default=math.nan):.4g}, drawn from {low:.4g}"
    return _figure(title, about, [*drawing, *_axis_ends(*ends)])


def _axis_ends(left: str, right: str) -> list[str]:
    y = HEIGHT - 4
    return [
        f'<line class="axis" x1="{CHART_LEFT}" x2="{CHART_RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}"/>',
        f'<text x="{CHART_LEFT}" y="{y}">{escape(left)}</text>',
        f'<text x="{CHART_RIGHT}" y="{y}" text-anchor="end">{escape(right)}</text>',
    ]


def _figure(title: str, about: str, drawing: Sequence[str]) -> str:
    label = escape(f"{title}: {about}", quote=True)
    return (
        f"<figure><figcaption><b>{escape(title)}</b> {escape(about)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(drawing)}</svg></figure>'
    )


def charts(rows: Iterable[SiteRow]) -> str:
    """The numbers of measured rows; empty without any."""
    sections = "".join(map(_section, rows))
    return f"<h2>Numbers and their ranges</h2>\n{sections}" if sections else ""


def _section(entry: SiteRow) -> str:
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


def _history(history: History) -> str:
    title = f"{history.slot}.{history.name}"
    if len(history.values) > 1:
        return series_chart(title, history.values, _ends(history), joined=history.along == "steps")
    value = f"{history.values[0]:.6g}" if history.values else "not filled yet"
    return f"<figure><figcaption><b>{escape(title)}</b> {value}</figcaption></figure>"


def _ends(history: History) -> tuple[str, str]:
    """What the two ends of a chart's horizontal axis are."""
    count = len(history.values)
    if history.along == "steps":
        return f"{count - 1} steps before", "last step"
    return "channel or group 1", f"{count}"
