"""Passes of recipes as functions: on a model that is quantized already, or in one step from a float model."""

import warnings
from collections.abc import Container, Iterable
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

from flax import nnx

from jqinject import quant
from jqinject.core import check
from jqinject.model import ContractionReport, walk
from jqinject.model import freeze as freeze_model
from jqinject.model.calibration import BatchCalls, CallBatch
from jqinject.model.inspect.report import report_of
from jqinject.model.quantizing.rules import Rule
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import CALL, Call, Method, checked_method
from jqinject.recipes.passes.batch_norm import CorrectBatchNorm, FoldBatchNorm, Pairs
from jqinject.recipes.passes.correct_biases import CorrectBiases
from jqinject.recipes.passes.solve import Solve, Solved
from jqinject.recipes.recipe import Step
from jqinject.recipes.solvers.rounding_descent import LearnedRounding
from jqinject.recipes.work import Work

Model = TypeVar("Model", bound=nnx.Module)
Activations = Literal["float", "dynamic", "static"]
ACTIVATIONS = {
    "float": None,
    "dynamic": quant.Int8DynamicActPerRowAbsMax,
    "static": quant.Int8ActPerTensorMinMax,
}


class SitesLeftWarning(UserWarning):
    """Quantized contractions have no bias to correct, and keep their shifted mean."""


def fold_batch_norm(
    model: nnx.Module,
    *inputs: object,
    pairs: Iterable[tuple[str, str]] | None = None,
    method: Method = CALL,
    **keywords: object,
) -> Pairs:
    """Fold batch normalizations into the weights and biases of the layers before them, in place.

    `jqinject.recipes.FoldBatchNorm` for one model, float or quantized. An abstract model (`nnx.eval_shape`) has no
    numbers to check.

    Args:
        model: an NNX module with Flax or jqinject layers.
        inputs, keywords: the model's arguments, used to find which layer precedes which normalization, and to compare
            outputs.
        pairs: paths (layer, normalization), as ("conv", "norm"); None finds them.
        method: the method that they are arguments of: its name, or a function that takes the model first.

    Returns:
        The pairs that were merged.

    Raises:
        TypeError: `model` is not an NNX module; a path leads to something else.
        ValueError: the model has no such method; see `FoldBatchNorm`. Nothing is changed then.

    Example:
        >>> import jax.numpy as jnp
        >>> model = nnx.Sequential(
        ...     nnx.Conv(1, 4, (3, 3), rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(0)), nnx.relu)
        >>> fold_batch_norm(model, jnp.ones((1, 8, 8, 1)))
        (('layers.0', 'layers.1'),)
        >>> type(model.layers[1]).__name__
        'MergedBatchNorm'
    """
    walk.check_module(model, "fold_batch_norm")
    call = Call(inputs, keywords, checked_method(model, method, "fold_batch_norm"))
    return FoldBatchNorm(None if pairs is None else tuple(pairs)).fold(model, call)


#: `fold_batch_norm` by the name that Brevitas has for it.
merge_batch_norm = fold_batch_norm


def calibrate_batch_norm(
    model: nnx.Module,
    batches: Iterable[object],
    *,
    method: Method = CALL,
    call: CallBatch | None = None,
    progress: bool = True,
) -> tuple[str, ...]:
    """Re-estimate the mean and variance of every batch normalization from its inputs in the quantized model, in place.

    `jqinject.recipes.CorrectBatchNorm` for a model that is quantized already.

    Args:
        model: an NNX module with `nnx.BatchNorm`s (or `QuantBatchNorm`s).
        batches: the model's arguments, as for `calibrate`.
        method: the method that batches are arguments of: its name, or a function that takes the model first.
        call: a function of the model and a batch, which calls the model; instead of `method`.
        progress: show a progress bar, if `rich` is installed.

    Returns:
        Paths of the batch normalizations.

    Raises:
        ValueError: the model has no such method; no batch normalization; no batch; a batch with nan or inf.
            Nothing is changed then.

    Example:
        >>> import jax.numpy as jnp
        >>> norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        >>> calibrate_batch_norm(norm, [jnp.full((4, 2), 1.0), jnp.full((4, 2), 3.0)], progress=False)
        ('the model itself',)
        >>> norm.mean[...]
        Array([2., 2.], dtype=float32)
    """
    calls = BatchCalls(model, method, call, "calibrate_batch_norm")
    norms = CorrectBatchNorm().correct(model, calls.of(batches, "batch statistics", progress=progress))
    return tuple(norm.name for norm in norms)


def learn_rounding(
    model: nnx.Module,
    batches: Iterable[object],
    *,
    method: Method = CALL,
    call: CallBatch | None = None,
    learned_round_impl_type: str | quant.LearnedRoundImplType = "hard_sigmoid",
    steps: int = 1000,
    learning_rate: float = 1e-2,
    regularization: float = 0.01,
    beta: tuple[float, float] = (20.0, 2.0),
    warmup: float = 0.2,
    progress: bool = True,
) -> Step:
    """Learn whether each quantized weight is rounded up or down, from unlabelled data (AdaRound), in place.

    `jqinject.recipes.Solve(LearnedRounding(...))` for a model that is quantized already: weights are learned in
    execution order, of layers, of the model's own code and of stacks, each with the inputs that it gets once those
    before it are learned. The float model is the same one with its quantizers off. The chosen numbers and their scales
    are committed: the weights hold them. The model is in evaluation mode afterwards. Recreate optimizers that were made
    before.

    Args:
        model: a quantized NNX module, calibrated and not frozen.
        batches: the model's arguments, as for `calibrate`; they are kept in memory.
        method: the method that batches are arguments of: its name, or a function that takes the model first.
        call: a function of the model and a batch, which calls the model; instead of `method`.
        learned_round_impl_type: "hard_sigmoid" (AdaRound), "sigmoid" or "identity" (no regularization).
        steps, learning_rate, regularization, beta, warmup: see `jqinject.recipes.LearnedRounding`.
        progress: show a progress bar, if `rich` is installed.

    Returns:
        What was done: `sites` has a `jqinject.recipes.Solved` for each weight, with the relative errors of its site's
        output with nearest and with learned rounding.

    Raises:
        ValueError: the model has no such method; it contracts no quantized weight; no batch; a batch with nan or inf; a
            number out of range; a quantizer with numbers of a table. Nothing is changed then.
        TypeError: a quantizer does not round to nearest on a grid that it knows.

    Warns:
        UserWarning: quantized weights that no call contracts, or that share a quantizer, keep nearest rounding.

    Source: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", 2020.

    Example:
        >>> import jax
        >>> from jqinject.nn import QuantLinear
        >>> layer = QuantLinear(16, 4, weight_bit_width=2, rngs=nnx.Rngs(0))
        >>> x = jax.random.normal(jax.random.key(1), (64, 16))
        >>> (site,) = learn_rounding(layer, [x], steps=100, progress=False).sites
        >>> site.solved < site.nearest
        True
    """
    solver = LearnedRounding(steps, learning_rate, regularization, beta, warmup, learned_round_impl_type)
    calls = BatchCalls(model, method, call, "learn_rounding").of(batches)
    work = Work.of_quantized(model, calls, progress=progress)
    sites = Solve(solver)(work)
    _check_done(model, "with a quantized weight", any(isinstance(site, Solved) for site in sites))
    work.write_to(model)
    model.eval()
    return Step(repr(solver), tuple(sites))


def correct_biases(
    model: nnx.Module,
    batches: Iterable[object],
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
    calls = BatchCalls(model, method, call, "correct_biases").of(batches)
    work = Work.of_quantized(model, calls, progress=progress)
    paths = _corrected(work)
    work.write_to(model)
    layers = walk.modules_by_path(model, QuantWeightLayer)
    return tuple(_layer_of(path, layers) for path in paths)


class PostTrainingOptions(TypedDict, total=False):
    """The further keywords of `post_training_quantize`."""

    batches: Iterable[object] | None
    method: Method
    call: CallBatch | None
    weight_quant: quant.QuantizerLike
    act_quant: quant.QuantizerLike
    keep_float: str | None
    bias_correction: bool
    freeze: bool
    progress: bool


@overload
def post_training_quantize(
    model: Model,
    activations: Activations = "float",
    *,
    report: Literal[False] = False,
    **options: Unpack[PostTrainingOptions],
) -> Model: ...


@overload
def post_training_quantize(
    model: Model,
    activations: Activations = "float",
    *,
    report: Literal[True],
    **options: Unpack[PostTrainingOptions],
) -> tuple[Model, ContractionReport]: ...


def post_training_quantize(
    model: Any,
    activations: Activations = "float",
    *,
    batches: Iterable[object] | None = None,
    method: Method = CALL,
    call: CallBatch | None = None,
    weight_quant: quant.QuantizerLike = quant.Int8WeightPerChannelFloat,
    act_quant: quant.QuantizerLike = None,
    keep_float: str | None = None,
    bias_correction: bool = False,
    freeze: bool = True,
    report: bool = False,
    progress: bool = True,
) -> Any:
    """Quantize, calibrate and freeze a float model.

    | activations | what is quantized |
    |---|---|
    | "float" | weights only |
    | "dynamic" | the inputs of layers too, each row in its own range, found at run time |
    | "static" | the inputs of layers too, in ranges collected from `batches` |

    The steps are those of a `jqinject.recipes.Recipe`, with `CorrectBiases(inputs="quantized", add=False)` as its pass
    if biases are corrected, and `freeze`.

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
    check.among(ACTIVATIONS)(activations, "post_training_quantize", "activations")
    data = None if batches is None else list(batches)
    from_data = {"static ranges": activations == "static", "biases": bias_correction, "a report": report}
    needed = [what for what, on in from_data.items() if on]
    if needed and not data:
        raise ValueError(
            f"{' and '.join(needed)} are made from data, and batches is {'empty' if data == [] else 'None'}.\n"
            "  cure: batches=[x, ...], what the model is called with; or activations='dynamic', which needs none"
        )
    inputs = None if activations == "float" else act_quant or ACTIVATIONS[activations]
    rules = [Rule(weight_quant=weight_quant, input_quant=inputs)]
    rules = rules if keep_float is None else [Rule(keep_float), *rules]
    work = Work.of_float(model, rules, data or None, method, call, "post_training_quantize")
    work.progress = progress
    if bias_correction:
        _corrected(work)
    numbers = report_of(work.quantized, work.calls[0], True) if report else None
    served = freeze_model(work.quantized) if freeze else work.quantized
    return served if numbers is None else (served, numbers)


def _corrected(work: Work) -> list[str]:
    """Correct the biases of a quantized model; the paths of those that were."""
    report = CorrectBiases(inputs="quantized", add=False)(work)
    paths = list(dict.fromkeys(x.path for x in report if not x.reason))
    _check_done(work.quantized, "whose output a bias is added to", bool(paths))
    left = [f"  {x}" for x in report if x.reason]
    if left:
        text = "correct_biases changes biases, and leaves as they are:\n" + "\n".join(left)
        warnings.warn(text, SitesLeftWarning, stacklevel=3)
    return paths


def _check_done(model: nnx.Module, which: str, done: bool) -> None:
    if not done:
        raise ValueError(
            f"{type(model).__name__} ran no quantized contraction {which}.\n"
            "  cure: quantize it first: jqinject.quantize(model, Rule(weight_quant=...))"
        )


def _layer_of(path: str, layers: Container[str]) -> str:
    """The layer that holds a bias; the bias's own path if none does."""
    holder, _, name = path.rpartition(".")
    layer = holder or "the model itself"
    return layer if name == "bias" and layer in layers else path
