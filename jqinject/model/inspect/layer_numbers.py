"""One layer's entry in a measured report: plain data."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from jqinject.model.inspect.histograms import Histogram
from jqinject.model.inspect.histories import History


@dataclass(frozen=True)
class Saturation:
    """The share of elements outside the range that their quantizer can represent, 0 to 1.

    None if there is no such quantizer, or the layer was not called. The range runs from the quantizer's first to its
    last representable number; if the zero point was rounded, it may end up to half a step before the data do.

    Attributes:
        weight: of the weight.
        input: of the layer's input.
        output: of the input of the output quantizer (or of an activation layer's quantizer).
    """

    weight: float | None = None
    input: float | None = None
    output: float | None = None


@dataclass(frozen=True)
class Histograms:
    """The distribution of a layer's numbers before quantization.

    None if there is no such quantizer, or the layer was not called.

    Attributes:
        weight: of the weight.
        input: of the layer's input.
        output: of the input of the output quantizer (or of an activation layer's quantizer).
    """

    weight: Histogram | None = None
    input: Histogram | None = None
    output: Histogram | None = None


@dataclass(frozen=True)
class LayerNumbers:
    """The measured quantization error of one layer, or of a parameter that the model contracts by itself.

    The signal-to-quantization-noise ratio of a float tensor y and its quantized counterpart q is
    `10 log10(sum(y**2) / sum((y - q)**2))` decibels, over all elements and all calls: inf if they are equal, -inf if y
    is 0 and q is not. "The float model" is the model with every quantizer switched off.

    Attributes:
        calls: how often the layer was called, or the parameter contracted or looked up. Each iteration of a scan
            counts. 0 leaves all else None, but for a parameter that is read within a branch or a loop of unknown
            length: then the ratios of the weight and of the model's output are known.
        isolated_sqnr_db: of the layer's output, if only this layer is quantized and its input is the float model's.
        accumulated_sqnr_db: of the layer's output in the quantized model, against the same output in the float model.
        weight_sqnr_db: of the weight.
        only_quantized: the ratio of the model's output, in decibels, if only this layer is quantized.
        only_float: the same if every layer but this one is quantized.
        saturation: shares of clipped elements in the quantized model.
        histograms: of the same numbers.
        histories: amaxes and scales that the layer's quantizers keep.
    """

    calls: int
    isolated_sqnr_db: float | None = None
    accumulated_sqnr_db: float | None = None
    weight_sqnr_db: float | None = None
    only_quantized: float | None = None
    only_float: float | None = None
    saturation: Saturation = Saturation()
    histograms: Histograms = Histograms()
    histories: tuple[History, ...] = ()


@dataclass(frozen=True)
class LayerReport:
    """The report's entry for one layer.

    Attributes:
        path: the layer's path in the model.
        layer: its class.
        contraction: "int", "fp8", "fp4" or "float", as in the compiled program; "none" if it has none there.
        program: dtypes of the operands and of the output, in XLA's notation.
        weight_bytes: of its weight, with scales and zero points.
        note: why quantized numbers are contracted as floats, or why they are not quantized; whether the weight's groups
            cross its shards.
        operations: multiply-accumulates of its contractions for these inputs, over all calls; 0 if it is not called. A
            loop body counts once per iteration (once if the trip count is unknown); of several branches, the one with
            the most counts.
        formats: the numbers that quantizers make of its input and of its weight, as in "int8 x int4"; "" for neither.
        numbers: its quantization error; None in a report without numbers, or if the layer is not quantized.
    """

    path: str
    layer: str
    contraction: str
    program: str
    weight_bytes: int
    note: str = ""
    operations: int = 0
    formats: str = ""
    numbers: LayerNumbers | None = None


def plain(found: Any) -> Any:
    """A dataclass as dicts, lists, strings and numbers that JSON supports; inf, -inf and nan become their names."""
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        return {field.name: plain(getattr(found, field.name)) for field in dataclasses.fields(found)}
    if isinstance(found, tuple | list):
        return [plain(entry) for entry in found]
    if isinstance(found, float) and not math.isfinite(found):
        return str(found)
    return found
