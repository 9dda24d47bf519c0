"""One layer's entry in a measured report: plain data."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jqinject import core
from jqinject.ops.processes import on_host
from jqinject.proxy import QuantProxyFromInjector

BINS = 48
ONE_STEP = (core.BinaryQuant, core.ClampedBinaryQuant, core.TernaryQuant)
OUTLYING = 12.0  # a range that is so many times the usual magnitude has outliers
# With a scale of max |x| / steps, that x comes back up to float32 rounding: this is not clipping.
ROUNDING = 4 * float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Histogram:
    """A histogram, and the range outside of which numbers are clipped.

    Attributes:
        unit: "value"; or, with several scales, "steps" (`x / scale + zero_point`), so that all numbers share one range.
        edges: bin edges, ascending; one more than there are bins.
        counts: numbers in each bin. inf and nan are not counted.
        low, high: the range that the quantizer represents.
    """

    unit: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    low: float
    high: float


@dataclass(frozen=True)
class Clipped:
    """A quantizer's inputs and outputs.

    All broadcast against `x`; float64.

    Attributes:
        x: the inputs.
        value: quantized and dequantized.
        scale: float per step.
        zero_point: the step of 0.
        low, high: the first and the last step of the quantizer's range.
    """

    x: np.ndarray
    value: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray
    low: float | np.ndarray
    high: float | np.ndarray

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """The range as values, for each scale."""
        return (self.low - self.zero_point) * self.scale, (self.high - self.zero_point) * self.scale

    def outside(self) -> int:
        """How many numbers lie outside the range; an inf does, a nan does not."""
        low, high = self.bounds()
        margin = ROUNDING * np.maximum(np.abs(low), np.abs(high))
        return int(np.sum((self.x < low - margin) | (self.x > high + margin)))


def clipped_fields(proxy: QuantProxyFromInjector | None, x: jax.Array, quantized: Any) -> tuple[object, ...]:
    """The fields of `Clipped`: a quantizer's input, its output and its range.

    Args:
        proxy: the quantizer's; None if it is gone.
        x: the input.
        quantized: the same quantized, a QuantTensor.
    """
    if proxy is not None and isinstance(proxy.tensor_quant, ONE_STEP):
        low, high = -1, 1
    else:
        grid = quantized.grid
        if grid.is_integer and proxy is not None and proxy.is_narrow_range:
            grid = dataclasses.replace(grid, narrow_range=True)
        low, high = grid.bounds
    return x, quantized.value, quantized.scale, quantized.zero_point, low, high


def saturation(calls: Sequence[Clipped]) -> float | None:
    """The share of numbers outside the range; None if there are no numbers."""
    count = sum(call.x.size for call in calls)
    return sum(call.outside() for call in calls) / count if count else None


def histogram(calls: Sequence[Clipped]) -> Histogram | None:
    """The numbers of all calls in one histogram; None without numbers or a finite range."""
    if not sum(call.x.size for call in calls):
        return None
    ranges = [
        np.unique(np.stack(np.broadcast_arrays(*call.bounds())).reshape(2, -1), axis=1) for call in calls
    ]
    bounds = np.unique(np.concatenate(ranges, axis=1), axis=1)
    if not np.all(np.isfinite(bounds)):
        return None
    if bounds.shape[1] == 1:
        unit, (low, high) = "value", bounds[:, 0].tolist()
        numbers = [call.x for call in calls]
    else:
        unit = "steps"
        low, high = min(call.low for call in calls), max(call.high for call in calls)
        with np.errstate(all="ignore"):  # a scale of 0 leaves nothing to draw
            numbers = [call.x / call.scale + call.zero_point for call in calls]
    flat = np.concatenate([x.reshape(-1) for x in numbers])
    flat = flat[np.isfinite(flat)]
    ends = np.array([low, high], np.float64)
    edges = _edges(flat, flat.min(initial=ends.min()), flat.max(initial=ends.max()))
    counts, _ = np.histogram(flat, edges)
    return Histogram(unit, tuple(edges.tolist()), tuple(counts.tolist()), float(low), float(high))


def _edges(numbers: np.ndarray, first: float, last: float) -> np.ndarray:
    """Bins of one width, or with outliers such that grow with the distance from 0.

    With outliers, most numbers would lie in a few bins of one width. The bins then have one width in `asinh(x / c)`: it
    is linear up to `c`, the magnitude that nine of ten numbers do not exceed, and logarithmic beyond.
    """
    usual = float(np.quantile(np.abs(numbers), 0.9)) if numbers.size else 0.0
    if not usual or last - first < OUTLYING * usual:
        return np.histogram_bin_edges(numbers, BINS, (first, last))
    edges = usual * np.sinh(np.linspace(math.asinh(first / usual), math.asinh(last / usual), BINS + 1))
    edges[0], edges[-1] = first, last
    return edges


@dataclass(frozen=True)
class History:
    """The amaxes of the steps that a quantizer remembers.

    Attributes:
        slot: the quantizer, as in "input_quant".
        name: their path within the quantizer.
        values: oldest first, newest last; of amaxes per channel the largest of each step.
    """

    slot: str
    name: str
    values: tuple[float, ...]


def histories_of(slots: Iterable[tuple[str, object]]) -> tuple[History, ...]:
    """The histories of quantizers.

    Args:
        slots: the slot and the quantizer of each; anything else is left out.
    """
    return tuple(
        History(slot, "scaling_impl.amax_history", _steps(proxy.amax_history))
        for slot, proxy in slots
        if isinstance(proxy, QuantProxyFromInjector) and proxy.amax_history is not None
    )


def _steps(scaling: core.AmaxScaling) -> tuple[float, ...]:
    """The largest amax of each step, oldest first, without the leading zeros of steps not yet taken."""
    record = on_host(scaling.amax_history.get_value()).astype(np.float64)
    axis = record.ndim - 1 - len(scaling.scaling_shape)
    steps = np.moveaxis(record, axis, 0).reshape(record.shape[axis], -1)
    largest = np.roll(steps.max(axis=1, initial=0.0), -1)  # element 0 is the newest, element 1 the oldest
    return tuple(np.trim_zeros(largest, "f").tolist())


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
        histories: the amaxes that the layer's quantizers keep.
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
