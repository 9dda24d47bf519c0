"""Small SVG charts for an HTML page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from jqinject.model.inspect.histograms import Histogram

WIDTH, HEIGHT = 320, 110
LEFT, RIGHT, TOP, BOTTOM = 8, 312, 8, 92
MOST_POINTS = 400


def histogram_chart(title: str, drawn: Histogram) -> str:
    """Bars of a histogram, with the clipping range as two vertical lines.

    The height of a bar is the square root of its count, so that the few numbers at the ends remain visible.
    """
    first, last = drawn.edges[0], drawn.edges[-1]

    def x(value: float) -> float:
        return LEFT + (value - first) / (last - first) * (RIGHT - LEFT)

    highest = math.sqrt(max(*drawn.counts, 1))
    bars = []
    for left, right, count in zip(drawn.edges, drawn.edges[1:], drawn.counts, strict=False):
        if count:
            height = (BOTTOM - TOP) * math.sqrt(count) / highest
            kind = "bar" if drawn.low <= (left + right) / 2 <= drawn.high else "bar out"
            bars.append(
                f'<rect class="{kind}" x="{x(left):.1f}" y="{BOTTOM - height:.1f}" '
                f'width="{max(x(right) - x(left) - 0.5, 0.5):.1f}" height="{height:.1f}"/>'
            )
    lines = [
        f'<line class="clip" x1="{x(edge):.1f}" x2="{x(edge):.1f}" y1="{TOP - 6}" y2="{BOTTOM}"/>'
        for edge in (drawn.low, drawn.high)
    ]
    unit = "" if drawn.unit == "value" else f" {drawn.unit}"
    about = f"clipped outside {drawn.low:.4g} to {drawn.high:.4g}{unit}"
    return _figure(title, about, [*bars, *lines, *_ends(f"{first:.4g}", f"{last:.4g}{unit}")])


def line_chart(title: str, values: Sequence[float], ends: tuple[str, str]) -> str:
    """A line chart whose vertical axis starts at 0, or at the lowest value if that is negative.

    Args:
        title: its title.
        values: the numbers; if there are very many, an evenly spaced subset is drawn.
        ends: labels of the two ends of the horizontal axis.
    """
    shown = [v for v in values[:: math.ceil(len(values) / MOST_POINTS)] if math.isfinite(v)]
    low, high = min([0.0, *shown]), max([0.0, *shown])
    span = high - low or 1.0
    step = (RIGHT - LEFT) / max(len(shown) - 1, 1)
    points = " ".join(
        f"{LEFT + i * step:.1f},{BOTTOM - (v - low) / span * (BOTTOM - TOP):.1f}" for i, v in enumerate(shown)
    )
    about = f"{low:.4g} to {high:.4g}, last {values[-1]:.4g}"
    return _figure(title, about, [f'<polyline class="line" points="{points}"/>', *_ends(*ends)])


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
