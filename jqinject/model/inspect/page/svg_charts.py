"""Small SVG charts for an HTML page."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from html import escape

from jqinject.model.inspect.layer_numbers import Histogram

WIDTH, HEIGHT = 320, 110
LEFT, RIGHT, TOP, BOTTOM = 8, 312, 8, 92
MOST_POINTS = 400


def histogram_chart(title: str, drawn: Histogram) -> str:
    """Bars of a histogram, with the clipping range as two vertical lines.

    The height of a bar is the logarithm of its count, so that a single outlier is seen beside a million numbers. All
    bars have one width: where the bins grow with the distance from 0, the axis is logarithmic there.
    """
    bins = len(drawn.counts)

    def x(place: float) -> float:
        return LEFT + place / bins * (RIGHT - LEFT)

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
        *_ends("", ""),
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
    anchor = "start" if at < LEFT + 1 else "end" if at > RIGHT - 1 else "middle"
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
    step = (RIGHT - LEFT) / max(len(shown) - 1, 1)
    points = [
        (f"{LEFT + i * step:.1f}", f"{BOTTOM - (v - low) / span * (BOTTOM - TOP):.1f}")
        for i, v in enumerate(shown)
    ]
    line = f'<polyline class="line" points="{" ".join(",".join(point) for point in points)}"/>'
    drawing = [line] if joined else [f'<circle class="dot" cx="{x}" cy="{y}" r="1.6"/>' for x, y in points]
    about = f"{min(shown, default=math.nan):.4g} to {max(shown, default=math.nan):.4g}, drawn from {low:.4g}"
    return _figure(title, about, [*drawing, *_ends(*ends)])


def _ends(left: str, right: str) -> list[str]:
    y = HEIGHT - 4
    return [
        f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}"/>',
        f'<text x="{LEFT}" y="{y}">{escape(left)}</text>',
        f'<text x="{RIGHT}" y="{y}" text-anchor="end">{escape(right)}</text>',
    ]


def _figure(title: str, about: str, drawing: Sequence[str]) -> str:
    label = escape(f"{title}: {about}", quote=True)
    return (
        f"<figure><figcaption><b>{escape(title)}</b> {escape(about)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(drawing)}</svg></figure>'
    )
