"""Small charts as SVG, to stand in an HTML page."""

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

    Bars are as high as the square root of their count, so that the few numbers at the ends are seen.
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
    """Numbers along a line, from 0 (or the lowest below it) up.

    Args:
        title: what they are.
        values: the numbers; of very many, evenly chosen ones are drawn.
        ends: what is written at the two ends of the line.
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
