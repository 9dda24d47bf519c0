"""The table of a report: its cells, and the two ways to print it in a terminal."""

from __future__ import annotations

import math
from typing import Any, Protocol

from jqinject.model.inspect.coverage_rows import Covered
from jqinject.model.inspect.layer_numbers import LayerReport
from jqinject.model.inspect.training_bytes import TrainingBytes
from jqinject.terminal import blocks, columns, table, wrapped

COLUMNS = ("layer", "class", "input x weight", "contracts", "program", "bytes", "operations")
MEASURED = ("alone dB", "here dB", "weight dB", "clipped w/in/out", "only quantized", "only float")
# Numbers stand at the right of their column.
RIGHT = frozenset({"bytes", "operations", *MEASURED})
TOTAL = "all layers"
# What the columns mean: names, explanation.
COLUMNS_EXPLAINED = (
    ("input x weight", "The numbers that quantizers make of both; int4 in 32s: with a scale for each 32."),
    (
        "contracts, program",
        "What the compiled program multiplies, and its types in XLA's notation (s8: 8-bit integers).",
    ),
    ("bytes, operations", "Of the weight with its scales; multiply-adds of this call."),
)
MEASURED_EXPLAINED = (
    (
        "alone dB, here dB, weight dB",
        "Signal-to-quantization-noise ratio: of the layer's output when only it is quantized and its input is the "
        f"float model's; of its output in the quantized model ({TOTAL}: of the model's output); of its weight.",
    ),
    (
        "clipped w/in/out",
        "Share of the elements of weight, input and output that lie outside what their quantizer can represent.",
    ),
    (
        "only quantized, only float",
        "The ratio of the model's output, in dB, when this layer is quantized and no other; when all but it are.",
    ),
)


class ReportRows(Protocol):
    """The data of a table: see `ContractionReport`."""

    @property
    def layers(self) -> tuple[LayerReport, ...]:
        """An entry for each layer."""
        ...

    @property
    def output_sqnr_db(self) -> float | None:
        """The ratio of the model's output; None without numbers."""
        ...

    @property
    def uncalibrated(self) -> tuple[str, ...]:
        """Paths of static ranges that never saw data."""
        ...

    @property
    def coverage(self) -> Covered | None:
        """Which weights are quantized, and why not the others."""
        ...

    @property
    def training(self) -> TrainingBytes | None:
        """Bytes of a training step."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Of all the layers."""
        ...

    @property
    def operations(self) -> int:
        """Of all the layers."""
        ...


def head(report: ReportRows) -> tuple[str, ...]:
    """The columns; those of measured numbers only if the report has them."""
    measured = MEASURED if report.output_sqnr_db is not None else ()
    return (*COLUMNS, *measured, "note")


def legend(report: ReportRows) -> tuple[tuple[str, str], ...]:
    """What the columns mean: names, explanation."""
    return COLUMNS_EXPLAINED if report.output_sqnr_db is None else (*COLUMNS_EXPLAINED, *MEASURED_EXPLAINED)


def rows(report: ReportRows) -> list[tuple[str, ...]]:
    """A row for each layer, and one of totals."""
    found = [(*_cells(entry), *_measured(report, entry), entry.note) for entry in report.layers]
    # The model's output ratio goes in the column "here dB": a layer's output in the quantized model.
    measured = (
        ("", decibels(report.output_sqnr_db), "", "", "", "") if report.output_sqnr_db is not None else ()
    )
    totals = (TOTAL, "", "", "", "", f"{report.weight_bytes:,}", f"{report.operations:,}", *measured, "")
    return [*found, totals]


def as_text(report: ReportRows) -> str:
    """The table in plain text, as wide as the terminal: where columns do not fit, several, and the notes beneath."""
    names, body = head(report), rows(report)
    explained = ["", *(wrapped(f"{name}: {text}", hang="  ") for name, text in legend(report))]
    widths = [max(len(row[column]) for row in (names, *body)) for column in range(len(names))]
    if sum(widths) + 2 * len(names) - 2 <= columns():
        return "\n".join([*table(names, body, right=RIGHT), *explained, *notes(report)])
    lines = blocks(names[:-1], [row[:-1] for row in body], right=RIGHT)
    noted = (f"{row[0]}: {row[-1]}" for row in body if row[-1])
    beneath = (wrapped(line, hang="  ") for line in (*noted, *notes(report)))
    return "\n".join([*lines, *explained, *beneath])


def as_rich(report: ReportRows) -> Any:
    """The table for `rich`, which is imported only when it asks for it."""
    from rich.table import Table
    from rich.text import Text

    beneath = (*(f"{name}: {text}" for name, text in legend(report)), *notes(report))
    shown = Table(caption=Text("\n".join(beneath)), caption_justify="left")
    for name in head(report):
        shown.add_column(name, justify="right" if name in RIGHT else "left", overflow="fold")
    for row in rows(report):
        shown.add_row(*map(Text, row))
    return shown


def notes(report: ReportRows) -> tuple[str, ...]:
    """Notes beneath the table."""
    unseen, covered = report.uncalibrated, report.coverage
    lines = (f"static ranges that never saw data: {', '.join(unseen)}",) if unseen else ()
    if report.training is not None:
        lines = (*lines, *report.training.lines)
    if covered is None:
        return lines
    products = (
        f"contraction of activations: {one.name} ({one.operation}): {one.lhs or 'float'} x {one.rhs or 'float'}, "
        f"{one.operations:,} operations{f'; {one.transform}' if one.transform else ''}"
        for one in covered.activations
    )
    return (*lines, *products, *covered.summary)


def decibels(ratio: float | None) -> str:
    """A ratio as a cell's text."""
    if ratio is None:
        return "-"
    return f"{ratio:.1f}" if math.isfinite(ratio) else str(ratio)


def share(part: float | None) -> str:
    """A share as a cell's text, in percent."""
    return "-" if part is None else f"{part:.2%}"


def _cells(entry: LayerReport) -> tuple[str, ...]:
    counts = (f"{entry.weight_bytes:,}", f"{entry.operations:,}")
    return entry.path or "the model", entry.layer, entry.formats, entry.contraction, entry.program, *counts


def _measured(report: ReportRows, entry: LayerReport) -> tuple[str, ...]:
    if report.output_sqnr_db is None:
        return ()
    numbers = entry.numbers
    if numbers is None:
        return ("-",) * len(MEASURED)
    saturation = numbers.saturation
    return (
        decibels(numbers.isolated_sqnr_db),
        decibels(numbers.accumulated_sqnr_db),
        decibels(numbers.weight_sqnr_db),
        " ".join(map(share, (saturation.weight, saturation.input, saturation.output))),
        decibels(numbers.only_quantized),
        decibels(numbers.only_float),
    )
