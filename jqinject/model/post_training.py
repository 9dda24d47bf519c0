"""`post_training_quantize`: a float model for serving, in one step and without training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeVar

from flax import nnx

from jqinject.model.bias_correction import correct_biases
from jqinject.model.calibration import calibrate
from jqinject.model.freezing import freeze
from jqinject.model.quantizing import quantize
from jqinject.model.rules import Rule
from jqinject.quant import Int8ActDynamicPerRow, Int8ActPerTensorMinMax, Int8WeightPerChannelFloat

Model = TypeVar("Model", bound=nnx.Module)
Activations = Literal["float", "dynamic", "static"]
ACTIVATIONS = {"float": None, "dynamic": Int8ActDynamicPerRow, "static": Int8ActPerTensorMinMax}


def post_training_quantize(
    model: Model,
    activations: Activations = "float",
    *,
    batches: Iterable[Any] | None = None,
    weight_quant: Any = Int8WeightPerChannelFloat,
    act_quant: Any = None,
    keep_float: str | None = None,
    bias_correction: bool = False,
    progress: bool = True,
) -> Model:
    """Quantize, calibrate and freeze a float model.

    | activations | what is quantized |
    |---|---|
    | "float" | weights only |
    | "dynamic" | the inputs of layers too, each row in its own range, found at run time |
    | "static" | the inputs of layers too, in ranges collected from `batches` |

    The steps are `quantize`, `calibrate`, `correct_biases` and `freeze`; call them for anything else.

    Args:
        model: a float NNX module; it is not changed.
        activations: "float", "dynamic" or "static".
        batches: what the model is called with, as for `calibrate`; for static ranges and bias correction.
        weight_quant: quantizer of weights.
        act_quant: quantizer of the inputs of layers; None for 8 bits of the kind that `activations` says.
        keep_float: regular expression of the paths of layers that stay float.
        bias_correction: whether to correct biases.
        progress: show progress bars, where `rich` is installed.

    Returns:
        The frozen model.

    Raises:
        ValueError: an unknown kind of activations; no batches where they are needed; see `quantize` and `calibrate`.

    Example:
        >>> import jax.numpy as jnp
        >>> model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(64, 8, rngs=nnx.Rngs(1)))
        >>> served = post_training_quantize(model, "dynamic")
        >>> served.layers[0].frozen.freezer.value.dtype, served(jnp.ones((2, 64))).shape
        (dtype('int8'), (2, 8))
    """
    if activations not in ACTIVATIONS:
        raise ValueError(
            f"activations must be one of {', '.join(map(repr, ACTIVATIONS))}; got {activations!r}"
        )
    held = None if batches is None else list(batches)
    needed = [
        what for what, on in (("static ranges", activations == "static"), ("biases", bias_correction)) if on
    ]
    if needed and not held:
        raise ValueError(
            f"{' and '.join(needed)} are made from data, and batches is {'empty' if held == [] else 'None'}.\n"
            "  cure: batches=[x, ...], what the model is called with; or activations='dynamic', which needs none"
        )
    inputs = None if activations == "float" else act_quant or ACTIVATIONS[activations]
    rules = [Rule(weight_quant=weight_quant, input_quant=inputs)]
    quantized = quantize(model, rules if keep_float is None else [Rule(keep_float), *rules])
    if activations == "static":
        calibrate(quantized, held or (), progress=progress)
    quantized.eval()
    if bias_correction:
        correct_biases(quantized, held or (), progress=progress)
    return freeze(quantized)
