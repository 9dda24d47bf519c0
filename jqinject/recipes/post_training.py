"""`post_training_quantize`: prepares a float model for serving, in one step and without training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, overload

import jax
import numpy as np
from flax import nnx

from jqinject.model import ContractionReport, calibrate, quantize
from jqinject.model import freeze as freeze_model
from jqinject.model.inspect.contraction_report import report_of
from jqinject.model.quantizing.rules import Rule
from jqinject.model.running.batches import BatchCalls, CallBatch
from jqinject.program import CALL, Method, checked_method
from jqinject.quant import (
    Int8ActPerTensorMinMax,
    Int8DynamicActPerRowAbsMax,
    Int8WeightPerChannelFloat,
    QuantizerLike,
)
from jqinject.recipes.correcting import correct_biases

Model = TypeVar("Model", bound=nnx.Module)
Activations = Literal["float", "dynamic", "static"]
ACTIVATIONS = {"float": None, "dynamic": Int8DynamicActPerRowAbsMax, "static": Int8ActPerTensorMinMax}


@overload
def post_training_quantize(
    model: Model,
    activations: Activations = "float",
    *,
    batches: Iterable[Any] | None = None,
    method: Method = CALL,
    call: CallBatch | None = None,
    weight_quant: QuantizerLike = Int8WeightPerChannelFloat,
    act_quant: QuantizerLike = None,
    keep_float: str | None = None,
    bias_correction: bool = False,
    freeze: bool = True,
    report: Literal[False] = False,
    progress: bool = True,
) -> Model: ...


@overload
def post_training_quantize(
    model: Model,
    activations: Activations = "float",
    *,
    batches: Iterable[Any] | None = None,
    method: Method = CALL,
    call: CallBatch | None = None,
    weight_quant: QuantizerLike = Int8WeightPerChannelFloat,
    act_quant: QuantizerLike = None,
    keep_float: str | None = None,
    bias_correction: bool = False,
    freeze: bool = True,
    report: Literal[True],
    progress: bool = True,
) -> tuple[Model, ContractionReport]: ...


def post_training_quantize(
    model: Model,
    activations: Activations = "float",
    *,
    batches: Iterable[Any] | None = None,
    method: Method = CALL,
    call: CallBatch | None = None,
    weight_quant: QuantizerLike = Int8WeightPerChannelFloat,
    act_quant: QuantizerLike = None,
    keep_float: str | None = None,
    bias_correction: bool = False,
    freeze: bool = True,
    report: bool = False,
    progress: bool = True,
) -> Model | tuple[Model, ContractionReport]:
    """Quantize, calibrate and freeze a float model.

    | activations | what is quantized |
    |---|---|
    | "float" | weights only |
    | "dynamic" | the inputs of layers too, each row in its own range, found at run time |
    | "static" | the inputs of layers too, in ranges collected from `batches` |

    The steps are `quantize`, `calibrate`, `correct_biases` and `freeze`; call them yourself for anything else.

    Args:
        model: a float NNX module; it is not changed.
        activations: "float", "dynamic" or "static".
        batches: the model's arguments, as for `calibrate`; for static ranges and bias correction. The first one also
            shows what the model contracts by itself: without batches, or with `call`, layers alone are quantized.
        method: the method that batches are arguments of: its name, or a function that takes the model first.
        call: a function of the model and a batch, which calls the model; instead of `method`.
        weight_quant: quantizer of weights.
        act_quant: quantizer of the inputs of layers; None for an 8-bit one that suits `activations`.
        keep_float: regular expression of the paths of layers that stay float.
        bias_correction: whether to correct biases.
        freeze: whether to freeze the model. An unfrozen model can still be measured
            (`jqinject.report(model, x, numbers=True)`), and frozen later (`jqinject.freeze`).
        report: also return a report with numbers, of the model before it is frozen, on the first batch.
        progress: show progress bars, if `rich` is installed.

    Returns:
        The model, frozen unless `freeze=False`; with `report`, a pair of the model and the report.

    Raises:
        ValueError: unknown `activations`; the model has no such method; no batches although they are needed; see
            `quantize` and `calibrate`.

    Example:
        >>> import jax.numpy as jnp
        >>> model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(64, 8, rngs=nnx.Rngs(1)))
        >>> served = post_training_quantize(model, "dynamic")
        >>> served.layers[0].kernel.numbers["value"].dtype, served(jnp.ones((2, 64))).shape
        (dtype('int8'), (2, 8))
        >>> _, found = post_training_quantize(model, "dynamic", batches=[jnp.ones((2, 64))], report=True)
        >>> sorted(layer.path for layer in found.most_sensitive())
        ['layers.0', 'layers.2']
    """
    if activations not in ACTIVATIONS:
        raise ValueError(
            f"activations must be one of {', '.join(map(repr, ACTIVATIONS))}; got {activations!r}"
        )
    calls = BatchCalls(model, method, call, "post_training_quantize")
    held = None if batches is None else list(batches)
    from_data = {"static ranges": activations == "static", "biases": bias_correction, "a report": report}
    needed = [what for what, on in from_data.items() if on]
    if needed and not held:
        raise ValueError(
            f"{' and '.join(needed)} are made from data, and batches is {'empty' if held == [] else 'None'}.\n"
            "  cure: batches=[x, ...], what the model is called with; or activations='dynamic', which needs none"
        )
    inputs = None if activations == "float" else act_quant or ACTIVATIONS[activations]
    rules = [Rule(weight_quant=weight_quant, input_quant=inputs)]
    traced = _traced(model, held, method) if call is None else {}
    quantized = quantize(model, rules if keep_float is None else [Rule(keep_float), *rules], **traced)
    if activations == "static":
        calibrate(quantized, held or (), method=method, call=call, progress=progress)
    quantized.eval()
    if bias_correction:
        correct_biases(quantized, held or (), method=method, call=call, progress=progress)
    found = report_of(quantized, next(calls.of(held or ())), numbers=True) if report else None
    served = freeze_model(quantized) if freeze else quantized
    return served if found is None else (served, found)


def _traced(model: nnx.Module, batches: list[Any] | None, method: Method) -> dict[str, Any]:
    """The call that shows what the model contracts by itself, as arguments of `quantize`; empty if there is none."""
    found = checked_method(model, method, "post_training_quantize")
    known = batches and isinstance(batches[0], Mapping | tuple | list | jax.Array | np.ndarray)
    if not batches or not known or not isinstance(found, str):
        return {}
    return {"inputs": batches[0]} if found == CALL else {"methods": {found: batches[0]}}
