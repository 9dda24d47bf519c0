"""What `report` returns: an entry for each layer, as a table, plain data or an HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jqinject.model.inspect.coverage import Coverage
from jqinject.model.inspect.layer_numbers import LayerReport, plain
from jqinject.model.inspect.page import fragment, page
from jqinject.model.inspect.report_table import as_rich, as_text
from jqinject.model.inspect.training_bytes import TrainingBytes

WEIGHTS = ("kernel", "embedding")


@dataclass(frozen=True)
class ContractionReport:
    """An entry for every layer.

    `str()` and `rich.print` show it as a table.

    Attributes:
        layers: one entry per layer.
        output_sqnr_db: signal-to-quantization-noise ratio of the model's output (all its floating-point arrays
            together), in decibels; None without numbers.
        uncalibrated: paths of activation quantizers whose static range never saw data.
        coverage: which weights are quantized, and why not the others; see `jqinject.coverage`.
        training: bytes of a training step; None without an optimizer.

    Example:
        >>> import jax
        >>> from flax import nnx
        >>> from jqinject import report
        >>> from jqinject.nn import QuantLinear
        >>> x = jax.random.normal(jax.random.key(0), (32, 16))
        >>> found = report(QuantLinear(16, 8, weight_bit_width=2, rngs=nnx.Rngs(0)), x, numbers=True)
        >>> 0 < found.output_sqnr_db < 12, found.as_dict()["layers"][0]["operations"]
        (True, 4096)
    """

    layers: tuple[LayerReport, ...]
    output_sqnr_db: float | None = None
    uncalibrated: tuple[str, ...] = ()
    coverage: Coverage | None = None
    training: TrainingBytes | None = None

    def __getitem__(self, path: str) -> LayerReport:
        """The entry of a layer or of a parameter, by path; a parameter of a layer has the layer's entry."""
        found = {entry.path: entry for entry in self.layers}
        layer, _, name = path.rpartition(".")
        return found[layer if path not in found and layer in found and name in WEIGHTS else path]

    def __iter__(self) -> Iterator[LayerReport]:
        return iter(self.layers)

    @property
    def weight_bytes(self) -> int:
        """Of all the layers."""
        return sum(entry.weight_bytes for entry in self.layers)

    @property
    def operations(self) -> int:
        """Of all the layers."""
        return sum(entry.operations for entry in self.layers)

    def most_sensitive(self, n: int = 5) -> tuple[LayerReport, ...]:
        """The layers whose quantization hurts the model's output most: give these more bits first.

        Args:
            n: how many, at most.

        Returns:
            The layers with the lowest `numbers.only_quantized`, lowest first; ties are broken by the higher
            `numbers.only_float`.

        Raises:
            ValueError: the report has no numbers.
        """
        if self.output_sqnr_db is None:
            raise ValueError(
                "most_sensitive needs numbers, and this report has none.\n  cure: report(model, ..., numbers=True)"
            )
        ranked = [
            (_worst_if_nan(numbers.only_quantized), -(numbers.only_float or 0.0), position)
            for position, numbers in enumerate(entry.numbers for entry in self.layers)
            if numbers is not None and numbers.only_quantized is not None
        ]
        return tuple(self.layers[position] for _, _, position in sorted(ranked)[:n])

    def as_dict(self) -> dict[str, Any]:
        """The whole report as dicts, lists, strings, numbers and None, ready for JSON.

        An infinite ratio becomes the string "inf" or "-inf", a nan the string "nan".
        """
        return {**plain(self), "weight_bytes": self.weight_bytes, "operations": self.operations}

    def html(self, path: str | Path | None = None) -> str:
        """The report as one self-contained HTML page: table, histograms, histories.

        Args:
            path: file to write it to, or None.

        Returns:
            The page.
        """
        text = page(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return fragment(self)

    def __rich__(self) -> Any:
        return as_rich(self)


def _worst_if_nan(ratio: float) -> float:
    return -math.inf if math.isnan(ratio) else ratio
