"""Batch normalizations: folded into the layers before them, or with statistics taken again."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.model.walk import modules_by_path
from jqinject.nn import QuantBatchNorm
from jqinject.nn.base.batch_norm_folding import FLOAT_LAYERS, merge_bn
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.nn.norms import MergedBatchNorm
from jqinject.ops.processes import on_host
from jqinject.program import Call, compiled_call, intercept, with_copied_modules
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant_tensor import as_array, is_concrete, is_quantized
from jqinject.recipes.passes.float_change import relative_change
from jqinject.recipes.solvers.solver import Checked
from jqinject.recipes.stream.flat_program import Note
from jqinject.recipes.work import Work

Pairs = tuple[tuple[str, str], ...]
#: The mean and the variance of each batch normalization, by path.
Statistics = dict[str, tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class FoldBatchNorm:
    """Folds batch normalizations into the weights and biases of the layers before them.

    Each normalization whose input is a layer's output is folded into that layer (see `jqinject.nn.merge_bn`), and is
    replaced by a `MergedBatchNorm`, which passes its input through (with the output quantizer of a `QuantBatchNorm`).
    In evaluation mode the model computes the same as before, up to quantization of the new weights; this is checked on
    the first batch with all quantizers off. After a pass that quantizes, the quantized model is folded too: learned and
    committed scales and bit widths of weights follow.

    Args:
        pairs: paths (layer, normalization), as ("conv", "norm"); None finds them.

    Raises:
        TypeError: (when applied) a path leads to something else.
        ValueError: (when applied) nothing to merge; a layer is called more than once or shared, or its output is also
            used outside the normalization; its quantizer learned something that cannot follow the weight
            (`jqinject.nn.merge_bn`).

    Example:
        >>> FoldBatchNorm()
        FoldBatchNorm(pairs=None)
    """

    pairs: Pairs | None = None

    def __call__(self, work: Work) -> list[Note]:
        """See `Pass`."""
        pairs = self.fold(work.model, work.calls[0])
        if work.is_quantized:
            self.fold(work.quantized, work.calls[0])
        return [Note(norm, "", f"in {layer}") for layer, norm in pairs]

    def fold(self, model: nnx.Module, example: Call) -> Pairs:
        """Fold the batch normalizations of a model, in place.

        Args:
            model: float or quantized; an abstract one (`nnx.eval_shape`) has no numbers to check.
            example: a call of it, which shows what layer precedes which normalization.

        Returns:
            The pairs that were merged.
        """
        calls, before = _called(model, example)
        pairs = _pairs(calls) if self.pairs is None else self.pairs
        if not pairs:
            raise ValueError(
                f"{type(model).__name__} has no batch norm that gets what a layer returns, so there is nothing to merge"
            )
        _check(calls, pairs)
        trial = nnx.clone(model, graph=True)
        _fold(trial, pairs)
        _compare(before, _called(trial, example)[1], pairs)
        _fold(model, pairs)
        return pairs


#: In order: the path of a layer or normalization, what a normalization gets, and what it returns.
_Calls = list[tuple[str, jax.Array | None, jax.Array]]


def _recorded(
    path: str, calls: _Calls, layer: object, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a layer or a normalization, and append the call; arrays stay alive, as they are compared by identity."""
    y = call(*args, **kwargs)
    x = as_array(args[0] if args else kwargs["x"]) if isinstance(layer, nnx.BatchNorm) else None
    calls.append((path, x, as_array(y)))
    return y


def _called(model: nnx.Module, example: Call) -> tuple[_Calls, list[jax.Array]]:
    """The calls of a model's parts, and what it computes, in evaluation mode with all quantizers off."""
    copy = nnx.clone(model, graph=True)
    copy.eval()
    (call,) = with_copied_modules([example])
    calls: _Calls = []
    for path, node in modules_by_path(copy, nnx.Module).items():
        if isinstance(node, QuantProxyFromInjector):
            node.disable_quant = True
        if isinstance(node, QuantWeightLayer | QuantBatchNorm | MergedBatchNorm):
            node.return_quant_tensor = False
        if isinstance(node, QuantWeightLayer | nnx.BatchNorm) or type(node) in FLOAT_LAYERS:
            intercept(node, partial(_recorded, path, calls))
    outputs = jax.tree.leaves(call(copy), is_leaf=lambda leaf: is_quantized(leaf))
    return calls, [as_array(output) for output in outputs]


def _pairs(calls: _Calls) -> Pairs:
    """(layer, normalization) for each normalization whose input was a layer's output."""
    layers = {
        norm: layer
        for place, (norm, x, _) in enumerate(calls)
        for layer, inputs, y in calls[:place]
        if inputs is None and y is x
    }
    return tuple((layer, norm) for norm, layer in layers.items())


def _check(calls: _Calls, pairs: Pairs) -> None:
    """Refuse layers and normalizations that run more than once, and layers with several normalizations."""
    count = Counter(path for path, _, _ in calls)
    for layer, norm in pairs:
        for path in (layer, norm):
            if count[path] > 1:
                raise ValueError(
                    f"{path} is called {count[path]} times, so {norm} cannot be merged into {layer}: it "
                    "would change the other calls too.\n  cure: leave it out, pairs=[...]"
                )
    for layer, norms in Counter(layer for layer, _ in pairs).items():
        if norms > 1:
            raise ValueError(f"{layer} is followed by several batch norms, and can take one")


def _fold(model: nnx.Module, pairs: Pairs) -> None:
    modules: dict[str, Any] = modules_by_path(model, nnx.Module)
    for layer, norm in pairs:
        for path in (layer, norm):
            if path not in modules:
                raise ValueError(
                    f"{type(model).__name__} has no module at {path!r}; known: {sorted(modules)}"
                )
        try:
            merge_bn(modules[layer], modules[norm])
        except (TypeError, ValueError) as error:
            raise type(error)(f"{layer}, before {norm}: {error}") from None
        owner, _, name = norm.rpartition(".")
        holder: Any = modules[owner] if owner else model
        merged = MergedBatchNorm(modules[norm])
        if isinstance(holder, nnx.List):
            holder[int(name)] = merged
        else:
            setattr(holder, name, merged)


def _compare(before: list[jax.Array], after: list[jax.Array], pairs: Pairs) -> None:
    outputs = zip(before, after, strict=True)
    if is_concrete(*before, *after) and any(relative_change(*pair, least=1.0) > 0.02 for pair in outputs):
        layers = ", ".join(layer for layer, _ in pairs)
        raise ValueError(
            f"with batch norms merged into {layers} the model computes something else: what one of these returns "
            "is used beside its batch norm too.\n  cure: leave that one out, pairs=[...]"
        )


@dataclass(frozen=True)
class CorrectBatchNorm(Checked):
    """Re-estimates the mean and variance of every batch normalization from its inputs in the quantized model.

    Quantized weights shift the distributions that a float model's statistics describe. Each statistic becomes its mean
    over all batches; everything else runs in evaluation mode and stays as it is. It takes up shifts that
    `CorrectBiases` would take back too: correct biases before it, not after.

    Args:
        variance: "measured", or the geometric mean of the measured one and the float model's ("geometric").

    Raises:
        ValueError: (when applied) the model has no batch normalization.

    Differs from Brevitas: `norm_correction_mode` keeps the geometric mean; and its variances are unbiased, as torch's
    are, where Flax's are not.

    Example:
        >>> CorrectBatchNorm()
        CorrectBatchNorm(variance='measured')
    """

    variance: Literal["measured", "geometric"] = "measured"

    def __call__(self, work: Work) -> list[Note]:
        """See `Pass`."""
        return self.correct(work.quantized, work.calls)

    def correct(self, model: nnx.Module, calls: Iterable[Call]) -> list[Note]:
        """Re-estimate the statistics of a quantized model, in place.

        Args:
            model: with `nnx.BatchNorm`s (or `QuantBatchNorm`s).
            calls: of it, which are taken one by one.
        """
        norms = modules_by_path(model, nnx.BatchNorm)
        if not norms:
            raise ValueError(
                f"{type(model).__name__} has no nnx.BatchNorm, so there are no statistics to take again"
            )
        copy = nnx.clone(model, graph=True)
        copy.eval()
        for norm in modules_by_path(copy, nnx.BatchNorm).values():
            norm.use_running_average = False
            norm.momentum = 0.0  # after a call the statistics are that batch's own
        step = compiled_call(_statistics_of)
        batches: list[Statistics] = [step(copy, call) for call in calls]
        mean = jax.tree.map(lambda *x: sum(x) / len(x), *batches)
        return [self._renormed(path, norm, *mean[path]) for path, norm in norms.items()]

    def _renormed(self, path: str, norm: nnx.BatchNorm, mean: jax.Array, var: jax.Array) -> Note:
        """Give a batch normalization its statistics."""
        old_mean, old_var = norm.mean.get_value(), norm.var.get_value()
        if self.variance == "geometric":
            var = jnp.sqrt(old_var * var)
        norm.mean.set_value(mean)
        norm.var.set_value(var)
        shifts = np.abs(on_host(mean - old_mean)) / np.sqrt(on_host(old_var) + norm.epsilon)
        factors = on_host(var) / np.maximum(on_host(old_var), norm.epsilon)
        variances = f"variances by {factors.min():.3g} to {factors.max():.3g}"
        return Note(path, "", f"means moved by at most {shifts.max():.3g} deviations, {variances}")


def _statistics_of(model: nnx.Module, call: Call) -> Statistics:
    """The mean and the variance that each batch normalization has after a call."""
    call(model)
    norms = modules_by_path(model, nnx.BatchNorm)
    return {path: (norm.mean.get_value(), norm.var.get_value()) for path, norm in norms.items()}
