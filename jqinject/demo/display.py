"""The tables in the terminal and the picture in a file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

COLUMNS = ("quantizer", "weight bits", "input bits", "float", "loaded", "trained", "bytes", "of float32")
RULE_COLUMNS = ("model", "weight bits", "epochs", "accuracy", "points", "bytes", "of float32")


@dataclass(frozen=True)
class Row:
    """One quantized model, measured.

    Attributes:
        name: of the recipe.
        weight_bits, act_bits: bits of the inner layers.
        float_accuracy: of the float model.
        loaded_accuracy: with the float weights loaded and activations calibrated.
        trained_accuracy: after quantization-aware training; None without.
        bytes: of the quantized model.
        sqnr: layer -> signal-to-quantization-noise ratio of its weights, in decibels.
    """

    name: str
    weight_bits: float
    act_bits: int
    float_accuracy: float
    loaded_accuracy: float
    trained_accuracy: float | None
    bytes: int
    sqnr: dict[str, float]


@dataclass(frozen=True)
class RuleRow:
    """The float model, quantized by a rule and frozen, measured.

    Attributes:
        name: of the recipe.
        weight_bits: bits of all weights.
        epochs: of quantization-aware training.
        float_accuracy: of the float model.
        accuracy: of the frozen one.
        bytes: of its weights and biases.
    """

    name: str
    weight_bits: int
    epochs: int
    float_accuracy: float
    accuracy: float
    bytes: int

    @property
    def points(self) -> float:
        """The difference in accuracy from the float model, in percentage points."""
        return 100 * (self.accuracy - self.float_accuracy)


def print_table(console: Console, rows: Sequence[Row], float_bytes: int) -> None:
    """Print the results."""
    lines = [
        (
            row.name,
            f"{row.weight_bits:g}",
            str(row.act_bits),
            f"{row.float_accuracy:.1%}",
            f"{row.loaded_accuracy:.1%}",
            "-" if row.trained_accuracy is None else f"{row.trained_accuracy:.1%}",
            *_sizes(row.bytes, float_bytes),
        )
        for row in rows
    ]
    _print(console, "Digits: 450 test images; first and last layer in 8 bits, biases in 32", COLUMNS, lines)


def print_rule_table(console: Console, rows: Sequence[RuleRow], float_bytes: int) -> None:
    """Print the float model and those quantized by rules."""
    lines = [
        (
            row.name,
            str(row.weight_bits),
            str(row.epochs or "-"),
            f"{row.accuracy:.1%}",
            f"{row.points:+.1f}",
            *_sizes(row.bytes, float_bytes),
        )
        for row in rows
    ]
    floats = [
        ("float", "32", "-", f"{row.float_accuracy:.1%}", "-", *_sizes(float_bytes, float_bytes))
        for row in rows
    ]
    title = "The float model, quantized by a rule and frozen: all layers, 8-bit inputs"
    _print(console, title, RULE_COLUMNS, [*floats[:1], *lines])


def _sizes(size: int, float_bytes: int) -> tuple[str, str]:
    return f"{size:,}", f"{size / float_bytes:.2f}"


def _print(console: Console, title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table: a word of a column's title a line, the first column's names may be wrapped."""
    table = Table(title=title)
    for place, name in enumerate(columns):
        table.add_column(name.replace(" ", "\n"), justify="right" if place else "left", no_wrap=place > 0)
    for line in lines:
        table.add_row(*line)
    console.print(table)


def save_picture(path: Path, rows: Sequence[Row]) -> None:
    """Draw accuracy, and the signal-to-quantization-noise ratio of every layer's weights."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    places = range(len(rows))
    trained = [float("nan") if r.trained_accuracy is None else r.trained_accuracy for r in rows]
    loaded = [100 * row.loaded_accuracy for row in rows]
    left.plot(places, loaded, "o", label="after loading")
    left.plot(places, [100 * share for share in trained], "s", label="after training")
    left.axhline(100 * rows[0].float_accuracy, color="black", linestyle="--", linewidth=1, label="float")
    left.set(ylabel="test accuracy in %", xticks=places, xticklabels=[row.name for row in rows])
    left.margins(x=0.15)
    left.grid(axis="y", alpha=0.3)
    # They cover nothing there.
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "frameon": False}
    left.legend(ncols=3, **above)
    for number, row in enumerate(rows):  # side by side: layers are no series, which a line would join
        shift = 0.12 * (number - (len(rows) - 1) / 2)
        right.plot([place + shift for place in range(len(row.sqnr))], row.sqnr.values(), "o", label=row.name)
    layers = list(rows[0].sqnr)
    right.set(
        ylabel="weights: signal / quantization noise in dB", xticks=range(len(layers)), xticklabels=layers
    )
    right.grid(axis="y", alpha=0.3)
    right.legend(ncols=(len(rows) + 1) // 2, **above)
    figure.savefig(path, dpi=120)
    plt.close(figure)
