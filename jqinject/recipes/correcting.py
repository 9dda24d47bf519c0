"""`correct_biases`: the pass `CorrectBiases` for a model that is quantized already."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from flax import nnx

from jqinject.model import SitesLeftWarning
from jqinject.model.running.batches import BatchCalls, CallBatch
from jqinject.model.walk import modules_by_path
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import CALL, Method
from jqinject.proxy import QuantProxyFromInjector
from jqinject.recipes.passes.added_biases import variables_by_path
from jqinject.recipes.passes.correct_biases import CorrectBiases, Corrected
from jqinject.recipes.work import Work


def correct_biases(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    method: Method = CALL,
    call: CallBatch | None = None,
    progress: bool = True,
) -> tuple[str, ...]:
    """Correct each bias for the shift that quantization causes in the mean of what it is added to, in place.

        bias += mean(output of the float site) - mean(output of the quantized site), channel by channel

    `jqinject.recipes.CorrectBiases(inputs="quantized", add=False)` for a model that is quantized already: sites are
    corrected in execution order, each after those before it, in layers, in the model's own code and in stacks. The
    float model is the same one with its quantizers off. Everything runs in evaluation mode.

    Args:
        model: a quantized NNX module, calibrated and not frozen.
        batches: the model's arguments, as for `calibrate`; they are kept in memory.
        method: the method that batches are arguments of: its name, or a function that takes the model first.
        call: a function of the model and a batch, which calls the model; instead of `method`.
        progress: show a progress bar, if `rich` is installed.

    Returns:
        Paths of the layers whose bias was corrected, and of biases that are the model's own parameters.

    Raises:
        ValueError: the model has no such method; it ran no quantized contraction with a bias; no batch; a batch with
            nan or inf. Nothing is changed then.

    Warns:
        SitesLeftWarning: quantized contractions have no bias; they are named.

    Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019; Brevitas's
    `bias_correction_mode`, which gives each layer the float model's inputs.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantLinear
        >>> layer = QuantLinear(4, 2, weight_bit_width=2, rngs=nnx.Rngs(0))
        >>> x = jnp.ones((3, 4))
        >>> correct_biases(layer, [x], progress=False)
        ('the model itself',)
        >>> bool(jnp.allclose(layer(x)[0], (x @ layer.kernel[...])[0], atol=1e-6))
        True
    """
    held = list(BatchCalls(model, method, call, "correct_biases").of(batches))
    floating, quantized = nnx.clone(model, graph=True), nnx.clone(model, graph=True)
    for copy in (floating, quantized):
        copy.eval()
    for _, node in nnx.iter_modules(floating, graph=True):
        if isinstance(node, QuantProxyFromInjector):
            node.observing = True
    work = Work.of_quantized(floating, quantized, held, progress=progress)
    report = CorrectBiases(inputs="quantized", add=False)(work)
    paths = list(dict.fromkeys(each.path for each in report if isinstance(each, Corrected)))
    if not paths:
        raise ValueError(
            f"{type(model).__name__} ran no quantized contraction whose output a bias is added to.\n"
            "  cure: quantize it first: jqinject.quantize(model, Rule(weight_quant=...))"
        )
    left = [each for each in report if not isinstance(each, Corrected)]
    if left:
        text = "correct_biases changes biases, and leaves as they are:\n" + "\n".join(
            f"  {each}" for each in left
        )
        warnings.warn(text, SitesLeftWarning, stacklevel=2)
    made, variables = variables_by_path(quantized), variables_by_path(model)
    for path in paths:
        variables[path].set_value(made[path].get_value())
    layers = modules_by_path(model, QuantWeightLayer)
    return tuple(_layer_of(path, layers) for path in paths)


def _layer_of(path: str, layers: Any) -> str:
    """The layer that holds a bias; the bias's own path if none does."""
    holder, _, name = path.rpartition(".")
    if name == "bias" and holder in layers:
        return holder
    return "the model itself" if path == "bias" and "the model itself" in layers else path
