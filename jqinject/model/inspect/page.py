"""A report as HTML: a self-contained page, and what a notebook shows."""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Protocol

from jqinject.model.inspect.layer_numbers import Histogram, History
from jqinject.model.inspect.site_table import LEGEND, RIGHT, SiteRow, decibels

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


class CoveragePage(Protocol):
    """What a page shows of a coverage."""

    @property
    def rows(self) -> Sequence[SiteRow]: ...
    @property
    def sizes(self) -> Mapping[str, tuple[int, int]]: ...
    @property
    def matrices(self) -> int: ...
    @property
    def quantized_matrices(self) -> int: ...
    @property
    def share_of_bytes(self) -> float: ...
    @property
    def share_of_operations(self) -> float | None: ...
    @property
    def summary(self) -> tuple[str, ...]: ...
    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]: ...


class ReportPage(Protocol):
    """What a page shows of a report."""

    @property
    def layers(self) -> Sequence[SiteRow]: ...
    @property
    def coverage(self) -> CoveragePage: ...
    @property
    def output_sqnr_db(self) -> float | None: ...
    def head(self) -> tuple[str, ...]: ...
    def legend(self) -> tuple[tuple[str, str], ...]: ...
    def table(self) -> list[tuple[str, ...]]: ...
    def notes(self) -> tuple[str, ...]: ...


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
        for at in (x(_place(drawn.edges, edge)) for edge in (drawn.low, drawn.high))
    ]
    unit = "" if drawn.unit == "value" else f" {drawn.unit}"
    about = f"quantizer's range {drawn.low:.3g} to {drawn.high:.3g}{unit} (dashed); heights: log of counts"
    marks = [
        *_axis_ends("", ""),
        *(_mark(x(place), _rounded(drawn.edges, place)) for place in range(0, bins + 1, bins // 4 or 1)),
    ]
    return _figure(title, about, [*bars, *lines, *marks])


def _place(edges: Sequence[float], value: float) -> float:
    """Where a value lies among the bins, in bins."""
    after = min(max(bisect.bisect_right(edges, value), 1), len(edges) - 1)
    left, right = edges[after - 1], edges[after]
    return after - 1 + min(max((value - left) / (right - left), 0.0), 1.0)


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


UNITS = ("B", "kB", "MB", "GB", "TB")


def tiles(report: ReportPage) -> str:
    """The numbers of the model: noise of its output, bytes before and after, coverage."""
    numbers = []
    if report.output_sqnr_db is not None:
        numbers.append((f"{decibels(report.output_sqnr_db)} dB", "signal to noise of the model's output"))
    return _tiles([*numbers, *_of_coverage(report.coverage)])


def coverage_tiles(covered: CoveragePage) -> str:
    """The numbers of a coverage."""
    return _tiles(_of_coverage(covered))


def _of_coverage(covered: CoveragePage) -> list[tuple[str, str]]:
    before, after = (sum(sizes[place] for sizes in covered.sizes.values()) for place in (0, 1))
    share = covered.share_of_operations
    return [
        (f"{in_units(before)} → {in_units(after)}", "weights before and after, scales aside"),
        (
            f"{covered.share_of_bytes:.1%}",
            f"of the weight bytes quantized: {covered.quantized_matrices} of {covered.matrices} matrices",
        ),
        ("unknown" if share is None else f"{share:.1%}", "of the multiply-adds in low bits"),
    ]


def _tiles(entries: list[tuple[str, str]]) -> str:
    inside = "".join(
        f'<div class="tile"><b>{escape(big)}</b><span>{escape(small)}</span></div>' for big, small in entries
    )
    return f'<div class="tiles">{inside}</div>\n'


def costs(report: ReportPage) -> str:
    """A bar for each layer: its noise in the model's output, the costliest first; without numbers its bytes."""
    sizes = _by_layer(report)
    measured = report.output_sqnr_db is not None
    noise = {entry.path: _noise(entry) for entry in report.layers} if measured else {}
    finite = {path: part for path, part in noise.items() if part is not None}
    shown = finite if measured else {path: float(low) for path, (_, low) in sizes.items()}
    if not shown:
        return ""
    worst = max((part for part in shown.values() if math.isfinite(part)), default=0.0) or 1.0
    entries = {entry.path: entry for entry in report.layers}
    rows = "".join(
        _row(path, min(part / worst, 1.0), _label(entries.get(path), measured), sizes.get(path))
        for path, part in sorted(shown.items(), key=lambda item: -item[1])
    )
    heads = (
        ("layer", "noise that it alone brings to the output", "dB")
        if measured
        else ("layer", "bytes after", "")
    )
    head = "".join(f'<div class="head">{escape(text)}</div>' for text in (*heads, "bytes"))
    return f'<h2>What every layer costs</h2><div class="costs">{head}{rows}</div>\n'


def _row(path: str, part: float, label: str, size: tuple[int, int] | None) -> str:
    bytes_ = "" if size is None else " → ".join(map(in_units, size))
    return (
        f"<div>{escape(path) or 'the model'}</div>"
        f'<div class="track"><div class="fill" style="width: {part:.2%}"></div></div>'
        f'<div class="number">{escape(label)}</div><div class="number">{escape(bytes_)}</div>\n'
    )


def _label(entry: SiteRow | None, measured: bool) -> str:
    if not measured or entry is None or entry.numbers is None:
        return ""
    return decibels(entry.numbers.only_quantized)


def _noise(entry: SiteRow) -> float | None:
    """The power of the output's noise if only this layer is quantized, against the signal's."""
    ratio = None if entry.numbers is None else entry.numbers.only_quantized
    if ratio is None:
        return None
    return math.inf if math.isnan(ratio) or ratio == -math.inf else 10 ** (-ratio / 10)


def _by_layer(report: ReportPage) -> dict[str, tuple[int, int]]:
    """The sizes of the weight of each row: of a layer, of its kernel."""
    paths = {row.parameter: row.path for row in report.coverage.rows}
    return {paths[parameter]: sizes for parameter, sizes in report.coverage.sizes.items()}


def in_units(count: float) -> str:
    """Bytes in a unit that suits them.

    Example:
        >>> in_units(0), in_units(65536), in_units(3.2e9)
        ('0 B', '65.5 kB', '3.2 GB')
    """
    place = 0
    while count >= 1000 and place < len(UNITS) - 1:
        count, place = count / 1000, place + 1
    return f"{count:.0f} {UNITS[0]}" if place == 0 else f"{count:.1f} {UNITS[place]}"


def page(report: ReportPage) -> str:
    """The whole page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>jqinject report</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<style>:root { color-scheme: light dark; } body { margin: 1rem 20px; }</style></head>\n"
        f"<body>{fragment(report, '<h1>jqinject report</h1>')}</body></html>\n"
    )


def fragment(report: ReportPage, title: str = "") -> str:
    """The report as a part of a page, or of a notebook.

    Args:
        report: the report.
        title: HTML that comes first.
    """
    terms = _terms(report.legend())
    sections = "".join(_section(entry) for entry in report.layers)
    charts = f"<h2>Numbers and their ranges</h2>\n{sections}" if sections else ""
    beneath = "".join(f"<p>{escape(note)}</p>\n" for note in report.notes())
    return (
        f'<div class="jqinject"><style>{STYLE}</style>\n{title}{tiles(report)}{costs(report)}'
        f"<h2>All layers</h2>\n{_table(report)}{beneath}<dl>\n{terms}</dl>\n{charts}</div>\n"
    )


def _terms(legend: Sequence[tuple[str, str]]) -> str:
    """A legend, as the inside of a list of terms."""
    return "".join(
        f"<dt>{escape(TITLES.get(name, name))}</dt>\n<dd>{escape(text)}</dd>\n" for name, text in legend
    )


def _table(report: ReportPage) -> str:
    """A row for each layer, and below it its note, over all columns."""
    names = report.head()[:-1]
    *entries, totals = report.table()
    body = [row_of(names, row[:-1], RIGHT, below=_note(row[-1], len(names))) for row in entries]
    return framed(names, [*body, row_of(names, totals[:-1], RIGHT, kind=' class="total"')], RIGHT)


def _note(text: str, columns: int) -> str:
    return f'<tr class="note"><td colspan="{columns}">{escape(text)}</td></tr>' if text else ""


def _section(entry: SiteRow) -> str:
    """The charts of a layer; empty without measured numbers."""
    if entry.numbers is None:
        return ""
    histograms = entry.numbers.histograms
    parts = (("weight", histograms.weight), ("input", histograms.input), ("output", histograms.output))
    drawn = [histogram_chart(name, part) for name, part in parts if part is not None]
    histories = [_history(history) for history in entry.numbers.histories]
    calls = f"{entry.numbers.calls} call{'' if entry.numbers.calls == 1 else 's'}"
    return (
        f'<section><h2>{escape(entry.path) or "the model"}</h2><p class="dim">{escape(entry.layer)}, {calls}</p>'
        f'<div class="charts">{"".join([*drawn, *histories])}</div></section>\n'
    )


def _history(history: History) -> str:
    title, name = state_as_text(history.slot, history.name), f"{history.slot}.{history.name}"
    if len(history.values) > 1:
        return series_chart(title, history.values, _ends(history), joined=history.along == "steps")
    value = f"{history.values[0]:.6g}" if history.values else "not filled yet"
    caption = f"<figcaption><b>{escape(title)}</b> {value}</figcaption>"
    return f'<figure title="{escape(name, quote=True)}">{caption}</figure>'


def _ends(history: History) -> tuple[str, str]:
    """What the two ends of a chart's horizontal axis are."""
    count = len(history.values)
    if history.along == "steps":
        return f"{count - 1} steps before", "last step"
    return "channel or group 1", f"{count}"


# The last part of a name, as in `averaging_impl.sum_of_max`.
WORDS = {
    "amax_history": "largest magnitude of each step",
    "scale": "scale",
    "value": "learned value",
    "buffer": "collected average",
    "running_stats": "running statistic",
    "sum_of_max": "sum of the batches' largest numbers",
    "sum_of_min": "sum of the batches' smallest numbers",
    "minimum": "smallest number",
    "maximum": "largest number",
    "affine_weight": "learned factor",
    "affine_bias": "learned shift",
}
OWN = ("amax_history", "scale")  # are said without what they belong to
TENSORS = {"act": "activation", "grad": "gradient"}
# A part of the path before it that says what it belongs to.
OWNERS = {"scaling_impl": "scale", "zero_point_impl": "zero point", "bit_width_impl": "bit width"}


def state_as_text(slot: str, name: str) -> str:
    """A state as text.

    Args:
        slot: the quantizer, as in "input_quant".
        name: the path of the state within it.

    Example:
        >>> state_as_text("input_quant", "averaging_impl.sum_of_max")
        "input: sum of the batches' largest numbers"
        >>> state_as_text("weight_quant", "scaling_impl.value"), state_as_text("act_quant", "my_impl.some_thing")
        ('weight: learned value of the scale', 'activation: some thing of my')
    """
    *path, last = name.split(".")
    words = WORDS.get(last, last.replace("_", " "))
    owner = next((f"the {OWNERS[part]}" for part in reversed(path) if part in OWNERS), "")
    if not owner and path and last not in WORDS:
        owner = path[-1].removesuffix("_impl").replace("_", " ")
    of = f" of {owner}" if owner and last not in OWN else ""
    tensor = slot.removesuffix("_quant").replace("_", " ")
    return f"{TENSORS.get(tensor, tensor)}: {words}{of}"


def coverage_fragment(covered: CoveragePage) -> str:
    """A coverage as a part of a page, or of a notebook."""
    beneath = "".join(f"<p>{escape(line)}</p>\n" for line in covered.summary[1:])
    terms = _terms(LEGEND)
    names, rows = covered.table()
    right = names[-1:]
    body = framed(names, [row_of(names, row, right) for row in rows], right) if rows else ""
    return (
        f'<div class="jqinject"><style>{STYLE}</style>\n{coverage_tiles(covered)}'
        f"{body and '<h2>Contractions</h2>'}{body}{beneath}<dl>\n{terms}</dl>\n</div>\n"
    )
