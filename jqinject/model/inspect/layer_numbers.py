"""What a measured report says of one layer: plain data."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from jqinject.model.inspect.histograms import Histogram
from jqinject.model.inspect.histories import History


@dataclass(frozen=True)
class Saturation:
    """Which share of the elements lies outside what their quantizer can represent, 0 to 1.

    None where there is no such quantizer, or the layer was not called. The range reaches from the first to the last
    number that the quantizer has; where a zero point was rounded, it may end up to half a step before the data do.

    Attributes:
        weight: of the weight.
        input: of what comes into the layer.
        output: of what the output quantizer, or that of an activation layer, is given.
    """

    weight: float | None = None
    input: float | None = None
    output: float | None = None


@dataclass(frozen=True)
class Histograms:
    """How the numbers of a layer are spread, before they are quantized.

    None where there is no such quantizer, or the layer was not called.

    Attributes:
        weight: of the weight.
        input: of what comes into the layer.
        output: of what the output quantizer, or that of an activation layer, is given.
    """

    weight: Histogram | None = None
    input: Histogram | None = None
    output: Histogram | None = None


@dataclass(frozen=True)
class LayerNumbers:
    """What quantization does to one layer, measured.

    A signal-to-quantization-noise ratio is `10 log10(sum(y**2) / sum((y - q)**2))` decibels of a float tensor y and the
    tensor q that stands in its place, over all elements and all calls: inf where they are equal, -inf where y is 0 and
    q is not. "The float model" is the model with every quantizer switched off.

    Attributes:
        calls: how often the layer was called; 0 leaves all else None. Iterations of a scan count each.
        isolated_sqnr_db: of the layer's output, where only this layer is quantized and its input is the float model's.
        accumulated_sqnr_db: of the layer's output in the quantized model, against the float model's at the same place.
        weight_sqnr_db: of the weight.
        only_quantized: the ratio of the model's output, in decibels, where this layer is quantized and no other.
        only_float: the same where every layer is quantized but this.
        saturation: shares of what is clipped in the quantized model.
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
    """What one layer does.

    Attributes:
        path: where it is in the model.
        layer: its class.
        contraction: "int", "fp8" or "float", as it stands in the compiled program; "none" where it has none there.
        program: dtypes of the operands and of the output, in XLA's words.
        weight_bytes: of its weight, with scales and zero points.
        note: why numbers are contracted as floats though they are quantized, or why they are not quantized; whether the
            weight's groups cross its shards.
        operations: multiply-accumulates of its contractions for these inputs, all calls together; 0 where it is not
            called. Those of a loop count as often as it runs, once where nobody knows how often that is; of branches
            those with the most count.
        numbers: what quantization does to it; None of a report without numbers, and of a layer that is not quantized.
    """

    path: str
    layer: str
    contraction: str
    program: str
    weight_bytes: int
    note: str = ""
    operations: int = 0
    numbers: LayerNumbers | None = None


def plain(found: Any) -> Any:
    """A dataclass as dicts, lists, strings and numbers that JSON has; inf, -inf and nan become their names."""
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        return {field.name: plain(getattr(found, field.name)) for field in dataclasses.fields(found)}
    if isinstance(found, tuple | list):
        return [plain(entry) for entry in found]
    if isinstance(found, float) and not math.isfinite(found):
        return str(found)
    return found
