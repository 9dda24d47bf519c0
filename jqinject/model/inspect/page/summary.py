"""What a report leads with: a few numbers of the model, and what every layer costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from jqinject.model.inspect.coverage_rows import Covered, WeightSize
from jqinject.model.inspect.layer_numbers import LayerReport
from jqinject.model.inspect.report_table import ReportRows, decibels

UNITS = ("B", "kB", "MB", "GB", "TB")


def tiles(report: ReportRows) -> str:
    """The numbers of the model: noise of its output, bytes before and after, coverage."""
    found = []
    if report.output_sqnr_db is not None:
        found.append((f"{decibels(report.output_sqnr_db)} dB", "signal to noise of the model's output"))
    return _tiles([*found, *_of_coverage(report.coverage)])


def coverage_tiles(covered: Covered) -> str:
    """The numbers of a coverage."""
    return _tiles(_of_coverage(covered))


def _of_coverage(covered: Covered | None) -> list[tuple[str, str]]:
    if covered is None:
        return []
    before, after = (
        sum(getattr(size, name) for size in covered.sizes) for name in ("float_bytes", "low_bytes")
    )
    share = covered.share_of_operations
    return [
        (f"{in_units(before)} → {in_units(after)}", "weights before and after, scales aside"),
        (
            f"{covered.share_of_bytes:.1%}",
            f"of the weight bytes quantized: {covered.quantized_matrices} of {covered.matrices} matrices",
        ),
        ("unknown" if share is None else f"{share:.1%}", "of the multiply-adds in low bits"),
    ]


def _tiles(found: list[tuple[str, str]]) -> str:
    inside = "".join(
        f'<div class="tile"><b>{escape(big)}</b><span>{escape(small)}</span></div>' for big, small in found
    )
    return f'<div class="tiles">{inside}</div>\n'


def costs(report: ReportRows) -> str:
    """A bar for each layer: its noise in the model's output, the costliest first; without numbers its bytes."""
    sizes = _by_layer(report)
    measured = report.output_sqnr_db is not None
    noise = {entry.path: _noise(entry) for entry in report.layers} if measured else {}
    known = {path: part for path, part in noise.items() if part is not None}
    shown = known if measured else {path: float(size.low_bytes) for path, size in sizes.items()}
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


def _row(path: str, part: float, label: str, size: WeightSize | None) -> str:
    bytes_ = "" if size is None else f"{in_units(size.float_bytes)} → {in_units(size.low_bytes)}"
    return (
        f"<div>{escape(path) or 'the model'}</div>"
        f'<div class="track"><div class="fill" style="width: {part:.2%}"></div></div>'
        f'<div class="number">{escape(label)}</div><div class="number">{escape(bytes_)}</div>\n'
    )


def _label(entry: LayerReport | None, measured: bool) -> str:
    if not measured or entry is None or entry.numbers is None:
        return ""
    return decibels(entry.numbers.only_quantized)


def _noise(entry: LayerReport) -> float | None:
    """The power of the output's noise if only this layer is quantized, against the signal's."""
    ratio = None if entry.numbers is None else entry.numbers.only_quantized
    if ratio is None:
        return None
    return math.inf if math.isnan(ratio) or ratio == -math.inf else 10 ** (-ratio / 10)


def _by_layer(report: ReportRows) -> Mapping[str, WeightSize]:
    """The size of the weight of each entry: of a layer, of its kernel."""
    if report.coverage is None:
        return {}
    paths = {entry.path for entry in report.layers}
    found: dict[str, WeightSize] = {}
    for size in report.coverage.sizes:
        above = size.parameter.rpartition(".")[0]
        found[size.parameter if size.parameter in paths or above not in paths else above] = size
    return found


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
