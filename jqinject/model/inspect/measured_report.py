"""Measures the quantization error of each layer of a model, and of the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from jqinject.model.inspect.histograms import Clipped, histogram, saturation
from jqinject.model.inspect.histories import histories
from jqinject.model.inspect.layer_numbers import Histograms, LayerNumbers, Saturation
from jqinject.model.inspect.sensitivity import SensitivityRuns
from jqinject.model.running.recorder import Recorder
from jqinject.model.running.switching import QuantizedLayer, has_float, quantized_layers, switchable
from jqinject.model.static_ranges import listed
from jqinject.program import Call
from jqinject.quant_tensor import is_concrete

ADVICE = (
    "report(numbers=True) failed while it ran a copy of the model with quantizers switched off: no layer of jqinject's "
    "may be needed quantized by code that is not in a layer of jqinject's.\n  cure: report(model, ...) without numbers"
)


@dataclass(frozen=True)
class Measured:
    """The measurements.

    Attributes:
        layers: path -> numbers of every quantized layer.
        output_sqnr_db: of the quantized model's output against the float model's.
    """

    layers: dict[str, LayerNumbers]
    output_sqnr_db: float


def sqnr_db(reference: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> float:
    """`10 log10(sum(y**2) / sum((y - q)**2))` over all elements of some arrays, in decibels.

    Args:
        reference: y, float64.
        found: q, of the same shapes.

    Returns:
        inf if they are equal, -inf if only y is 0, nan if there is a nan or both have an inf.

    Example:
        >>> sqnr_db([np.array([3.0, 4.0])], [np.array([3.0, 3.5])])
        20.0
    """
    with np.errstate(all="ignore"):
        signal = sum(float(np.sum(np.square(y))) for y in reference)
        noise = sum(float(np.sum(np.square(y - q))) for y, q in zip(reference, found, strict=True))
    if noise == 0:
        return math.inf
    return -math.inf if signal == 0 else 10 * (math.log10(signal) - math.log10(noise))


def check_numbers(model: nnx.Module, call: Call) -> None:
    """Check that the model can be run and has a float model to compare with.

    Raises:
        TypeError: an input or a Variable of the model is not a concrete array.
        ValueError: frozen layers whose float weights are gone.
    """
    without_float = tuple(path for path, layer in quantized_layers(model).items() if not has_float(layer))
    if without_float:
        raise ValueError(
            "report(numbers=True) compares with the float model, and the float weights of "
            f"{listed(tuple(path or 'the model itself' for path in without_float))} are gone: frozen.\n"
            "  cure: keep the model that is not frozen, and ask it: freeze(nnx.clone(model)), "
            "post_training_quantize(..., freeze=False); or freeze(model, keep_masters=True)"
        )
    for (_, place, *_), leaf in jax.tree_util.tree_leaves_with_path((call.args, call.kwargs)):
        if _abstract(leaf):
            name = place.idx if isinstance(place, jax.tree_util.SequenceKey) else place.key
            raise TypeError(
                f"report(numbers=True) runs the model and needs numbers; input {name} is {_kind(leaf)}.\n"
                "  cure: give it arrays, best a batch of data as the model will see; or leave numbers=True away"
            )
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        for leaf in jax.tree.leaves(variable):
            if _abstract(leaf):
                raise TypeError(
                    f"report(numbers=True) runs the model and needs numbers; {'.'.join(map(str, path))} is "
                    f"{_kind(leaf)}.\n  cure: a model with its weights, not one from nnx.eval_shape and not inside of "
                    "jax.jit; or leave numbers=True away"
                )


def _abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or not is_concrete(leaf)


def _kind(leaf: Any) -> str:
    kind = "a ShapeDtypeStruct" if isinstance(leaf, jax.ShapeDtypeStruct) else "traced"
    return f"{kind} ({leaf.dtype}{list(leaf.shape)})"


def measure(model: nnx.Module, call: Call) -> Measured:
    """Run a model in float, quantized, and with each layer switched.

    Args:
        model: in evaluation mode; not changed.
        call: of it, with arrays.
    """
    nodes = quantized_layers(model)
    layers = {path: switchable(path, node) for path, node in nodes.items()}
    runs = SensitivityRuns(model, call, layers)
    in_float, quantized = Recorder(), Recorder()
    try:
        output = runs.quantized(quantized)
        try:
            reference = runs.floating(in_float)
            called = [path for path in layers if quantized.calls(path, "quantized")]
            switched = {path: _sensitivity(runs, path, reference) for path in called}
        except Exception as error:
            error.add_note(ADVICE)
            raise
        found = {
            path: _numbers(layer, nodes[path], in_float, quantized, switched.get(path))
            for path, layer in layers.items()
        }
    finally:
        in_float.clear()
        quantized.clear()
    return Measured(found, sqnr_db(reference, output))


def _sensitivity(runs: SensitivityRuns, path: str, reference: list[np.ndarray]) -> tuple[float, float]:
    """The ratio of the output if only this layer is quantized, and if only this one is not."""
    alone = runs.mixed({other: other == path for other in runs.layers}, others=False)
    without = runs.mixed({other: other != path for other in runs.layers}, others=True)
    return sqnr_db(reference, alone), sqnr_db(reference, without)


def _numbers(
    layer: QuantizedLayer,
    node: Any,
    in_float: Recorder,
    quantized: Recorder,
    switched: tuple[float, float] | None,
) -> LayerNumbers:
    path, kept = layer.path, histories(node)
    if switched is None:
        return LayerNumbers(calls=0, histories=kept)
    outputs, there = in_float.of(path, "float"), quantized.of(path, "quantized")
    parts = {part: _clipped(quantized, path, part) for part in ("weight", "input", "output")}
    isolated = accumulated = None
    if outputs:
        isolated = sqnr_db([y for y, _ in outputs], [q for _, q in outputs])
    if [y.shape for y, _ in outputs] == [q.shape for (q,) in there]:
        accumulated = sqnr_db([y for y, _ in outputs], [q for (q,) in there])
    weight = parts["weight"]
    return LayerNumbers(
        calls=len(there),
        isolated_sqnr_db=isolated,
        accumulated_sqnr_db=accumulated,
        weight_sqnr_db=sqnr_db([c.x for c in weight], [c.value for c in weight]) if weight else None,
        only_quantized=switched[0],
        only_float=switched[1],
        saturation=Saturation(**{part: saturation(calls) for part, calls in parts.items()}),
        histograms=Histograms(
            weight=histogram(weight),
            input=histogram(parts["input"]),
            output=histogram(parts["output"]),
        ),
        histories=kept,
    )


def _clipped(recorder: Recorder, path: str, part: str) -> list[Clipped]:
    return [
        Clipped(x, value, scale, zero_point, float(low), float(high))
        for x, value, scale, zero_point, low, high in recorder.of(path, part)
        if x.shape == value.shape
    ]
