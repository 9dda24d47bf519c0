"""`learn_rounding`: learns, layer by layer, whether each quantized weight is rounded up or down."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jqinject.core.state import flat_parts
from jqinject.inject import reach_of
from jqinject.model.ptq.round_training import Recipe, RoundingErrors, learn_layer, rounding_of
from jqinject.model.ptq.sites_left import warn_of_sites_left
from jqinject.model.running.batches import BatchCalls, CallBatch
from jqinject.model.running.layer_records import LayerRecords, Record
from jqinject.model.running.progress import with_progress
from jqinject.model.walk import modules_by_path
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import CALL, Method
from jqinject.proxy import QuantProxyFromInjector, WeightQuantProxyFromInjector, stack_of
from jqinject.quant.enums import LearnedRoundImplType, as_enum


@dataclass(frozen=True)
class RoundingReport:
    """What `learn_rounding` did.

    Attributes:
        layers: the errors of every layer whose rounding was learned, by path, in execution order.
    """

    layers: dict[str, RoundingErrors]

    def __str__(self) -> str:
        lines = [f"learned the rounding of {len(self.layers)} layers; squared error of their outputs:"]
        for path, errors in self.layers.items():
            lines.append(f"  {path}: {errors.nearest:.4g} -> {errors.learned:.4g}")
        return "\n".join(lines)


def learn_rounding(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    method: Method = CALL,
    call: CallBatch | None = None,
    learned_round_impl_type: str | LearnedRoundImplType = LearnedRoundImplType.HARD_SIGMOID,
    steps: int = 1000,
    learning_rate: float = 1e-2,
    regularization: float = 0.01,
    beta: tuple[float, float] = (20.0, 2.0),
    warmup: float = 0.2,
    seed: int = 0,
    progress: bool = True,
) -> RoundingReport:
    """Learn whether each quantized weight is rounded up or down, from unlabelled data (AdaRound).

    Layer by layer, in execution order, Adam minimizes over the rounding alone

        mean over examples of |output of the float layer - output of the quantized layer|^2
        + regularization * sum(1 - |2 p - 1|^b)

    where `p` is the share by which each weight is rounded up, the quantized layer gets its input from the quantized
    model, and `b` falls from `beta[0]` to `beta[1]` after the warm-up, so that shares end at 0 or 1. If the result is
    worse than nearest rounding on the data, the layer keeps nearest rounding. Quantizers with
    `float_to_int_impl_type='learned_round'` and the same scales replace those of these layers; the model is in
    evaluation mode afterwards. Recreate optimizers that were made before.

    Args:
        model: a quantized NNX module, calibrated and not frozen.
        batches: the model's arguments, as for `calibrate`; they are kept in memory.
        method: the method that batches are arguments of: its name, or a function that takes the model first.
        call: a function of the model and a batch, which calls the model; instead of `method`.
        learned_round_impl_type: "hard_sigmoid" (AdaRound), "sigmoid" or "identity" (no regularization).
        steps: optimizer steps per layer; each uses one batch.
        learning_rate: Adam's.
        regularization: weight of the second term.
        beta: the exponent at the start and at the end.
        warmup: the share of the steps without regularization.
        seed: for the order of the batches.
        progress: show a progress bar, if `rich` is installed.

    Returns:
        The error of every layer, with nearest and with learned rounding.

    Raises:
        ValueError: the model has no such method; no unstacked jqinject layer with a quantized weight of its own; no
            batch; a batch with nan or inf; a number out of range; a quantizer whose rounding is given as a component.
            Nothing is changed then.

    Warns:
        SitesLeftWarning: the model contracts quantized parameters by itself; these keep nearest rounding.

    Source: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", 2020.

    Example:
        >>> import jax
        >>> from jqinject.nn import QuantLinear
        >>> layer = QuantLinear(16, 4, weight_bit_width=2, rngs=nnx.Rngs(0))
        >>> x = jax.random.normal(jax.random.key(1), (64, 16))
        >>> errors = learn_rounding(layer, [x], steps=100, progress=False).layers["the model itself"]
        >>> errors.learned < errors.nearest
        True
    """
    recipe = _checked(steps, learning_rate, regularization, beta, warmup)
    kind = as_enum(LearnedRoundImplType, learned_round_impl_type, name="learned_round_impl_type")
    held = list(BatchCalls(model, method, call, "learn_rounding").of(batches))
    warn_of_sites_left(model, "learn_rounding", "contracted by the model itself, they are rounded to nearest")
    floating, quantized = nnx.clone(model, graph=True), nnx.clone(model, graph=True)
    _initialize(quantized)
    for copy in (floating, quantized):
        copy.eval()
    for _, node in nnx.iter_modules(floating, graph=True):
        if isinstance(node, QuantProxyFromInjector):
            node.observing = True
    wanted = LayerRecords(floating, _layers, held)
    order = wanted.order()
    if not order:
        raise ValueError(
            f"{type(model).__name__} ran no layer of ours with a quantized weight of its own.\n"
            "  cure: quantize it first: jqinject.quantize(model, Rule(weight_quant=...))"
        )
    copies = _layers(quantized)
    for path in order:
        _insert(copies[path], kind, path)
    quantized.eval()
    now = LayerRecords(quantized, _layers, held)
    errors = {}
    for path in with_progress(tuple(order), "rounding", shown=progress):
        records = [
            Record(ours.given, theirs.returned)
            for ours, theirs in zip(now.of(path), wanted.of(path), strict=True)
        ]
        errors[path] = learn_layer(copies[path], records, recipe, kind, seed)
    layers = _layers(model)
    for path in order:
        _insert(layers[path], kind, path)
        _copy_values(copies[path].weight_quant, layers[path].weight_quant)
    model.eval()
    return RoundingReport(errors)


def _checked(steps: int, rate: float, weight: float, beta: tuple[float, float], warmup: float) -> Recipe:
    wrong = {
        "steps": (steps, isinstance(steps, int) and steps >= 1, "an int of at least 1"),
        "learning_rate": (rate, rate > 0, "above 0"),
        "regularization": (weight, weight >= 0, "at least 0"),
        "beta": (beta, len(beta) == 2 and min(beta) > 0, "two numbers above 0"),
        "warmup": (warmup, 0 <= warmup <= 1, "between 0 and 1"),
    }
    for name, (given, fits, expected) in wrong.items():
        if not fits:
            raise ValueError(f"learn_rounding: {name} must be {expected}, got {given!r}")
    return Recipe(steps, float(rate), float(weight), (float(beta[0]), float(beta[1])), float(warmup))


def _layers(model: nnx.Module) -> dict[str, QuantWeightLayer]:
    """Layers whose quantized weight may learn its rounding, by path."""
    found = modules_by_path(model, QuantWeightLayer)
    return {path: layer for path, layer in found.items() if _learns(layer) and not stack_of((layer,))}


def _learns(layer: QuantWeightLayer) -> bool:
    proxy = layer.weight_quant
    own = isinstance(proxy, WeightQuantProxyFromInjector) and proxy.is_quant_enabled
    return own and proxy.served_layers == 1 and layer.frozen is None


def _initialize(model: nnx.Module) -> None:
    """Initialize scales and zero points from their weights now, while these are rounded to nearest."""
    for layer in _layers(model).values():
        layer.weight_quant.set_attributes(use_running_average=False, raise_if_not_found=False)
        layer.quant_weight()


def _insert(layer: QuantWeightLayer, kind: LearnedRoundImplType, path: str) -> None:
    """Give a layer a quantizer with learned rounding and the same scales."""
    old = layer.weight_quant
    if rounding_of(old) is not None:
        return
    binding = old.binding.let(float_to_int_impl_type="learned_round", learned_round_impl_type=kind)
    reach = reach_of(binding.injector, module=layer, tracked_parameter_list=[layer.weight])
    if reach.works and "learned_round_impl_type" not in reach.names:
        raise ValueError(
            f"{path}: {old.binding.base.__name__} declares how it rounds as a component (float_to_int_impl), so its "
            "rounding cannot be learned.\n  cure: declare it by name: float_to_int_impl_type = 'round'"
        )
    new = type(old)(binding, layer)
    _copy_values(old, new)
    layer.weight_quant = new


def _copy_values(source: Any, target: Any) -> None:
    """Copy values with the source's placement: a new quantizer is on one device, its model may be on many."""
    found = dict(flat_parts(nnx.state(source, graph=True)))
    for path, variable in flat_parts(nnx.state(target, graph=True)):
        if path in found and found[path].get_value().shape == variable.get_value().shape:
            variable.set_value(found[path].get_value().astype(variable.dtype))
