"""A report as one self-contained HTML page, or as a part of one."""

from __future__ import annotations

from html import escape

from jqinject.model.inspect.coverage_rows import Covered
from jqinject.model.inspect.layer_numbers import History, LayerReport
from jqinject.model.inspect.page.html_table import STYLE, TITLES, framed, row_of
from jqinject.model.inspect.page.summary import costs, coverage_tiles, tiles
from jqinject.model.inspect.page.svg_charts import histogram_chart, series_chart
from jqinject.model.inspect.report_table import RIGHT, ReportRows, head, legend, notes, rows


def page(report: ReportRows) -> str:
    """The whole page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>jqinject report</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<style>:root { color-scheme: light dark; } body { margin: 1rem 20px; }</style></head>\n"
        f"<body>{fragment(report, '<h1>jqinject report</h1>')}</body></html>\n"
    )


def fragment(report: ReportRows, title: str = "") -> str:
    """The report as a part of a page, or of a notebook.

    Args:
        report: the report.
        title: HTML that comes first.
    """
    terms = "".join(
        f"<dt>{escape(TITLES.get(name, name))}</dt>\n<dd>{escape(text)}</dd>\n"
        for name, text in legend(report)
    )
    sections = "".join(_section(entry) for entry in report.layers)
    charts = f"<h2>Numbers and their ranges</h2>\n{sections}" if sections else ""
    beneath = "".join(f"<p>{escape(note)}</p>\n" for note in notes(report))
    return (
        f'<div class="jqinject"><style>{STYLE}</style>\n{title}{tiles(report)}{costs(report)}'
        f"<h2>All layers</h2>\n{_table(report)}{beneath}<dl>\n{terms}</dl>\n{charts}</div>\n"
    )


def _table(report: ReportRows) -> str:
    """A row for each layer, and below it its note, over all columns."""
    names = head(report)[:-1]
    *entries, totals = rows(report)
    body = [row_of(names, row[:-1], RIGHT, below=_note(row[-1], len(names))) for row in entries]
    return framed(names, [*body, row_of(names, totals[:-1], RIGHT, kind=' class="total"')], RIGHT)


def _note(text: str, columns: int) -> str:
    return f'<tr class="note"><td colspan="{columns}">{escape(text)}</td></tr>' if text else ""


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
        f'<section><h2>{escape(entry.path) or "the model"}</h2><p class="dim">{escape(entry.layer)}, {calls}</p>'
        f'<div class="charts">{"".join([*drawn, *kept])}</div></section>\n'
    )


def _history(history: History) -> str:
    title, name = in_words(history.slot, history.name), f"{history.slot}.{history.name}"
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


def in_words(slot: str, name: str) -> str:
    """A state in words.

    Args:
        slot: the quantizer, as in "input_quant".
        name: the path of the state within it.

    Example:
        >>> in_words("input_quant", "averaging_impl.sum_of_max")
        "input: sum of the batches' largest numbers"
        >>> in_words("weight_quant", "scaling_impl.value"), in_words("act_quant", "my_impl.some_thing")
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


def coverage_fragment(covered: Covered) -> str:
    """A coverage as a part of a page, or of a notebook."""
    beneath = "".join(f"<p>{escape(line)}</p>\n" for line in covered.summary[1:])
    names, rows = covered.table()
    right = names[-1:]
    body = framed(names, [row_of(names, row, right) for row in rows], right) if rows else ""
    return (
        f'<div class="jqinject"><style>{STYLE}</style>\n{coverage_tiles(covered)}'
        f"{body and '<h2>Contractions</h2>'}{body}{beneath}</div>\n"
    )
