"""A report as one self-contained HTML page."""

from __future__ import annotations

from html import escape

from jqinject.model.inspect.histories import History
from jqinject.model.inspect.layer_numbers import LayerReport
from jqinject.model.inspect.report_table import RIGHT, Rows, head, notes, rows
from jqinject.model.inspect.svg_charts import histogram_chart, line_chart

STYLE = """
:root { color-scheme: light dark; --line: #8886; --bar: #4878a8; --out: #d0553a; --clip: #d0553a; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: left; white-space: nowrap; }
td.right, th.right { text-align: right; font-variant-numeric: tabular-nums; }
tbody tr:last-child { font-weight: 600; }
section { border-top: 1px solid var(--line); margin-top: 1.5rem; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: 0; width: 20rem; }
figcaption { font-size: 12px; }
svg { width: 100%; height: auto; display: block; }
svg text { font-size: 10px; fill: currentColor; }
.bar { fill: var(--bar); } .bar.out { fill: var(--out); }
.clip { stroke: var(--clip); stroke-width: 1.2; stroke-dasharray: 4 2; }
.axis { stroke: var(--line); } .line { fill: none; stroke: var(--bar); stroke-width: 1.5; }
@media (prefers-color-scheme: dark) { :root { --bar: #7fb0e0; --out: #f08060; --clip: #f08060; } }
"""
LEGEND = """
<dl>
<dt>alone dB, here dB, weight dB</dt>
<dd>Signal-to-quantization-noise ratio: of the layer's output when only it is quantized and its input is the float
model's; of its output in the quantized model; of its weight.</dd>
<dt>clipped w/in/out</dt>
<dd>Share of the elements of weight, input and output that lie outside what their quantizer can represent.</dd>
<dt>only quantized, only float</dt>
<dd>The ratio of the model's output, in dB, when this layer is quantized and no other; when every layer is but this. The
last row has the ratio of the model's output with all layers quantized.</dd>
</dl>
"""
ALONG = {"steps": ("oldest", "newest"), "elements": ("first", "last")}


def page(report: Rows) -> str:
    """The whole page."""
    measured = report.output_sqnr_db is not None
    sections = "".join(_section(entry) for entry in report.layers)
    beneath = "".join(f"<p>{escape(note)}</p>\n" for note in notes(report))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>jqinject report</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body><h1>jqinject report</h1>\n"
        f"{_table(report)}{beneath}{LEGEND if measured else ''}{sections}</body></html>\n"
    )


def _table(report: Rows) -> str:
    names = head(report)
    header = "".join(_cell("th", name, name) for name in names)
    body = "\n".join(
        f"<tr>{''.join(_cell('td', name, cell) for name, cell in zip(names, row, strict=True))}</tr>"
        for row in rows(report)
    )
    return f"<table><thead><tr>{header}</tr></thead>\n<tbody>{body}</tbody></table>\n"


def _cell(tag: str, column: str, text: str) -> str:
    kind = ' class="right"' if column in RIGHT else ""
    return f"<{tag}{kind}>{escape(text)}</{tag}>"


def _section(entry: LayerReport) -> str:
    """The charts of a layer; empty without measured numbers."""
    if entry.numbers is None:
        return ""
    found = entry.numbers.histograms
    parts = (("weight", found.weight), ("input", found.input), ("output", found.output))
    drawn = [histogram_chart(name, part) for name, part in parts if part is not None]
    kept = [_history(history) for history in entry.numbers.histories]
    calls = f"{entry.numbers.calls} call{'' if entry.numbers.calls == 1 else 's'}"
    return (
        f"<section><h2>{escape(entry.path)}</h2><p>{escape(entry.layer)}, {calls}</p>"
        f'<div class="charts">{"".join([*drawn, *kept])}</div></section>\n'
    )


def _history(history: History) -> str:
    title = f"{history.slot}.{history.name}"
    if len(history.values) > 1:
        return line_chart(title, history.values, ALONG[history.along])
    value = f"{history.values[0]:.6g}" if history.values else "nothing yet"
    return f"<figure><figcaption><b>{escape(title)}</b> {value}</figcaption></figure>"
