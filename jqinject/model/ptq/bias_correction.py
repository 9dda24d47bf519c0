"""Bias correction: a layer's bias compensates for the shift that quantization causes in its mean output."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.model.ptq.sites_left import warn_of_sites_left
from jqinject.model.running.batches import BatchCalls, CallBatch
from jqinject.model.running.progress import with_progress
from jqinject.model.running.recorder import Recorder
from jqinject.model.walk import modules_by_path
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import CALL, Around, Call, Method, compiled, intercept, with_copied_modules
from jqinject.proxy import QuantProxyFromInjector, stack_of
from jqinject.quant_tensor import as_array

Means = dict[str, np.ndarray]
MEAN = "mean output"


def correct_biases(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    method: Method = CALL,
    call: CallBatch | None = None,
    progress: bool = True,
) -> tuple[str, ...]:
    """Correct each bias for the shift that quantization causes in the layer's mean output.

        bias += mean(output of the float model) - mean(output of the quantized model), channel by channel

    Layers are corrected in execution order, each after those before it. Everything runs in evaluation mode.

    Args:
        model: a quantized NNX module, calibrated and not frozen.
        batches: the model's arguments, as for `calibrate`; they are kept in memory.
        method: the method that batches are arguments of: its name, or a function that takes the model first.
        call: a function of the model and a batch, which calls the model; instead of `method`.
        progress: show a progress bar, if `rich` is installed.

    Returns:
        Paths of the layers whose bias was corrected: jqinject layers with a bias and a quantized weight that are not
        stacked.

    Raises:
        ValueError: the model has no such method; no such layer; no batch; a batch with nan or inf. Nothing is
            changed then.

    Warns:
        SitesLeftWarning: the model contracts quantized parameters by itself; these have no bias.

    Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019; Brevitas's
    `bias_correction_mode`.

    Example:
        >>> from jqinject.nn import QuantLinear
        >>> layer = QuantLinear(4, 2, weight_bit_width=2, rngs=nnx.Rngs(0))
        >>> x = jnp.ones((3, 4))
        >>> correct_biases(layer, [x], progress=False)
        ('the model itself',)
        >>> bool(jnp.allclose(layer(x)[0], (x @ layer.kernel[...])[0], atol=1e-6))
        True
    """
    held = list(BatchCalls(model, method, call, "correct_biases").of(batches))
    warn_of_sites_left(model, "correct_biases", "contracted by the model itself, they have no bias")
    floating, quantized = nnx.clone(model, graph=True), nnx.clone(model, graph=True)
    for copy in (floating, quantized):
        copy.eval()
    for _, node in nnx.iter_modules(floating, graph=True):
        if isinstance(node, QuantProxyFromInjector):
            node.observing = True
    wanted = _MeanOutputs(floating, held)()
    if not wanted:
        raise ValueError(
            f"{type(model).__name__} ran no layer of ours with a bias and a quantized weight.\n"
            "  cure: quantize it first: jqinject.quantize(model, Rule(weight_quant=...))"
        )
    copies, layers = _layers(quantized), _layers(model)
    now = _MeanOutputs(quantized, held)
    for path in with_progress(tuple(wanted), "biases", shown=progress):
        bias = copies[path].bias
        shift = jnp.asarray((wanted[path] - now()[path]).astype(np.float32))
        bias.set_value((bias.get_value().astype(jnp.float32) + shift).astype(bias.dtype))
    for path in wanted:
        layers[path].bias.set_value(copies[path].bias.get_value())
    return tuple(wanted)


def _layers(model: nnx.Module) -> dict[str, QuantWeightLayer]:
    found = modules_by_path(model, QuantWeightLayer)
    return {path: layer for path, layer in found.items() if _has_both(layer) and not stack_of((layer,))}


def _has_both(layer: QuantWeightLayer) -> bool:
    return layer.weight_quant is not None and vars(layer).get("bias") is not None


class _MeanOutputs:
    """The mean output of every layer of a model, over batches; compiled once.

    Args:
        model: in evaluation mode.
        calls: of it.
    """

    def __init__(self, model: nnx.Module, calls: list[Call]) -> None:
        self._model = model
        self._calls = calls
        self._recorder = Recorder()

        def run(model: Any, call: Call) -> None:
            copy = nnx.clone(model, graph=True)
            for path, layer in _layers(copy).items():
                intercept(layer, _Recording(path, self._recorder))
            call(copy)

        self._run = compiled(run)

    def __call__(self) -> Means:
        """The means with the current parameters, in execution order."""
        self._recorder.clear()
        for call in with_copied_modules(self._calls):
            self._run(self._model, call)
        self._recorder.finish(nnx.state(self._model), [call.arrays for call in self._calls])
        paths = self._recorder.layers(MEAN)
        return {path: np.mean([mean for (mean,) in self._recorder.of(path, MEAN)], axis=0) for path in paths}


class _Recording(Around):
    """Records the mean output of a layer, channel by channel."""

    def __init__(self, path: str, recorder: Recorder) -> None:
        self._path = path
        self._recorder = recorder

    def __call__(self, layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `Around`."""
        y = call(*args, **kwargs)
        out = as_array(y).astype(jnp.float32)
        leading = tuple(range(out.ndim - layer.bias.ndim))
        self._recorder.note(self._path, MEAN, jnp.mean(out, axis=leading))
        return y
