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


def plain(found: Any) -> Any:
    """A dataclass as dicts, lists, strings and numbers that JSON has; inf, -inf and nan become their names."""
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        return {field.name: plain(getattr(found, field.name)) for field in dataclasses.fields(found)}
    if isinstance(found, tuple | list):
        return [plain(entry) for entry in found]
    if isinstance(found, float) and not math.isfinite(found):
        return str(found)
    return found
