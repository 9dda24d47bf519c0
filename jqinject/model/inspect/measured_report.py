"""Measures the quantization error of each layer of a model, and of the model."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import QuantStat
from jqinject.model import from_payload, frozen_weights
from jqinject.model.frozen_weights import WeightHolder
from jqinject.model.inspect import layer_numbers
from jqinject.model.inspect.layer_numbers import Clipped, LayerNumbers
from jqinject.model.inspect.observed_runs import ObservedRuns, Observer, Records
from jqinject.model.walk import ModelIndex, place_name
from jqinject.program import HELD, Call, intercept, listed
from jqinject.proxy import QuantProxyFromInjector, WeightQuantProxyFromInjector
from jqinject.quant_tensor import as_array, is_concrete

ADVICE = (
    "report(numbers=True) failed while it ran a copy of the model with quantizers switched off: no layer of jqinject's "
    "may be needed quantized by code that is not in a layer of jqinject's.\n  cure: report(model, ...) without numbers"
)


def sqnr_db(reference: Sequence[np.ndarray], quantized: Sequence[np.ndarray]) -> float:
    """`10 log10(sum(y**2) / sum((y - q)**2))` over all elements of some arrays, in decibels.

    Args:
        reference: y, float64.
        quantized: q, of the same shapes.

    Returns:
        inf if they are equal, -inf if only y is 0, nan if there is a nan or both have an inf.

    Example:
        >>> sqnr_db([np.array([3.0, 4.0])], [np.array([3.0, 3.5])])
        20.0
    """
    with np.errstate(all="ignore"):
        signal = sum(float(np.sum(np.square(y))) for y in reference)
        noise = sum(float(np.sum(np.square(y - q))) for y, q in zip(reference, quantized, strict=True))
    if noise == 0:
        return math.inf
    return -math.inf if signal == 0 else 10 * (math.log10(signal) - math.log10(noise))


def measurable(model: nnx.Module, call: Call, reference: nnx.Module | None) -> nnx.Module:
    """A copy of a model in evaluation mode, with float weights in the place of frozen ones and of those of a solver.

    The floats of frozen weights are those kept, or the stored values on committed scales: the same function. The
    quantizers of weights that a solver chose still return these.

    Args:
        model: not changed.
        call: of it.
        reference: has the float weights in whose place are frozen ones, or those that a solver chose; or None.

    Raises:
        TypeError: an input or a Variable of the model is not a concrete array.
        ValueError: without `reference`, frozen layers or parameters whose float numbers are gone, and weights in whose
            place are the numbers that a solver chose; a reference whose parameters do not fit.
    """
    frozen = frozen_weights.without_masters(ModelIndex(model)) if reference is None else {}
    if frozen:
        raise ValueError(
            "report(numbers=True) compares with the float model, and the float weights "
            f"{listed(tuple(map(place_name, frozen)))} are gone: frozen.\n"
            "  cure: keep the model that is not frozen, and ask it: freeze(nnx.clone(model)), "
            "post_training_quantize(..., freeze=False); or freeze(model, keep_masters=True); or "
            "reference=float_model"
        )
    arrays = "give it arrays, best a batch of data as the model will see"
    weights = "a model with its weights, not one from nnx.eval_shape and not inside of jax.jit"
    inputs = jax.tree_util.tree_leaves_with_path((call.args, call.kwargs))
    state = nnx.to_flat_state(nnx.state(model))
    leaves = [
        (f"input {jax.tree_util.keystr(path[1:2], simple=True)}", leaf, arrays) for path, leaf in inputs
    ]
    leaves += [(place_name(path), leaf, weights) for path, x in state for leaf in jax.tree.leaves(x)]
    for name, leaf, cure in leaves:
        if isinstance(leaf, jax.ShapeDtypeStruct) or not is_concrete(leaf):
            kind = "a ShapeDtypeStruct" if isinstance(leaf, jax.ShapeDtypeStruct) else "traced"
            raise TypeError(
                f"report(numbers=True) runs the model and needs numbers; {name} is {kind} "
                f"({leaf.dtype}{list(leaf.shape)}).\n  cure: {cure}; or leave numbers=True away"
            )
    copy = nnx.clone(model, graph=True)
    if ModelIndex(copy).frozen_parameters:
        from_payload.unfreeze_from_payload(ModelIndex(copy))
        frozen_weights.restore_masters(ModelIndex(copy))
    copy.eval()
    solved = solved_weights(copy)
    if reference is not None:
        _take_float_weights(solved, reference)
        return copy
    if solved:
        raise ValueError(
            "report(numbers=True) compares with the float model, and the float weights of "
            f"{listed(tuple(solved))} are gone: a recipe put the numbers that it chose in their place.\n"
            "  cure: report(result.model, ..., numbers=True, reference=result.float_model), of what Recipe.apply "
            "returned"
        )
    return copy


def measure(model: nnx.Module, call: Call, sites: Mapping[str, str]) -> tuple[dict[str, LayerNumbers], float]:
    """Run a model in float, quantized, and with each entry switched.

    Returns:
        Path -> numbers of every quantized layer, and of whatever else is quantized; and the ratio of the quantized
        model's output against the float model's, in decibels.

    Args:
        model: see `measurable`; not changed.
        call: of it, with arrays.
        sites: see `ObservedRuns`.
    """
    runs = ObservedRuns(model, call, sites)
    try:
        observer, quantized, output = runs.recorded(True)
        _, floating, floats = runs.recorded(False)
        entries: dict[str, LayerNumbers] = {}
        recorded = {entry for entry, _ in quantized}
        for entry in runs.entries[:-1]:
            histories = layer_numbers.histories_of(_slots(model, runs, observer, entry))
            entries[entry] = replace(_measured(entry, floating, quantized), histories=histories)
            # Also of entries that are read where they cannot be measured by themselves.
            if entry in recorded:
                alone, without = (runs.mixed(on) for on in ({entry}, {*runs.entries} - {entry}))
                ratios = {"only_quantized": sqnr_db(floats, alone), "only_float": sqnr_db(floats, without)}
                entries[entry] = replace(entries[entry], **ratios)
    except Exception as error:
        error.add_note(ADVICE)
        raise
    return entries, sqnr_db(floats, output)


def _slots(model: nnx.Module, runs: ObservedRuns, observer: Observer, entry: str) -> list[tuple[str, object]]:
    """The quantizers of an entry, by slot."""
    quantizers = vars(model).get(HELD, {})
    own = vars(runs.nodes[entry]).items() if entry in runs.nodes else ()
    between = observer.slots.get(entry, {}).items()
    return [*own, *((slot, quantizers[site]) for site, slot in between if site in tuple(quantizers))]


def _measured(entry: str, floating: Records, quantized: Records) -> LayerNumbers:
    """The numbers of an entry from its records."""

    def calls(records: Records, what: str) -> list[list[np.ndarray]]:
        return [[x.astype(np.float64) for x in arrays] for arrays in records.get((entry, what), ())]

    outputs, there = calls(floating, "float"), calls(quantized, "quantized")
    parts = {
        part: [Clipped(*arrays) for arrays in calls(quantized, part) if arrays[0].shape == arrays[1].shape]
        for part in ("weight", "input", "output")
    }
    isolated = accumulated = None
    if outputs and there:
        isolated = sqnr_db([y for y, _ in outputs], [q for _, q in outputs])
    if there and [y.shape for y, _ in outputs] == [q.shape for (q,) in there]:
        accumulated = sqnr_db([y for y, _ in outputs], [q for (q,) in there])
    weight = parts["weight"]
    return LayerNumbers(
        calls=len(there),
        isolated_sqnr_db=isolated,
        accumulated_sqnr_db=accumulated,
        weight_sqnr_db=sqnr_db([c.x for c in weight], [c.value for c in weight]) if weight else None,
        saturation=layer_numbers.Saturation(*map(layer_numbers.saturation, parts.values())),
        histograms=layer_numbers.Histograms(*map(layer_numbers.histogram, parts.values())),
    )


def solved_weights(model: nnx.Module) -> dict[str, WeightHolder]:
    """Find the weights of a model that are the numbers which a solver chose, by path, with what quantizes each.

    Those that training has moved off the grid since are none of them.

    Args:
        model: in evaluation mode.
    """
    index = ModelIndex(model)
    paths = {id(node): path for path, node in index.first_places.items()}
    solved: dict[str, WeightHolder] = {}
    for holder in frozen_weights.quantized_weights(index):
        proxy, path = holder.weight_quant, paths.get(id(holder.weight))
        if path is not None and isinstance(proxy, WeightQuantProxyFromInjector) and proxy.committed:
            quantized = as_array(frozen_weights.through_quantizer(holder))
            if bool(jnp.array_equal(quantized, holder.weight.get_value())):
                solved[place_name(path)] = holder
    return solved


def _take_float_weights(solved: Mapping[str, WeightHolder], reference: nnx.Module) -> None:
    """Put the float weights of a model in the place of those that a solver chose, which the quantizers still return.

    Args:
        solved: of a model in evaluation mode.
        reference: the float model.

    Raises:
        ValueError: it has no such parameter, or one of another shape; names it.
    """
    floats = ModelIndex(reference).by_name
    for path, holder in solved.items():
        weight, proxy = holder.weight, holder.weight_quant
        chosen, variable = weight.get_value(), floats.get(path)
        value = variable.get_value() if isinstance(variable, nnx.Param) else None
        if value is None or value.shape != chosen.shape:
            kind = "none" if value is None else f"one of shape {value.shape}"
            raise ValueError(
                f"report(reference=...): {path} has shape {chosen.shape} in the model, and the reference has {kind}; "
                "expected the float model whose weights were quantized.\n"
                "  cure: reference=result.float_model, of what Recipe.apply returned"
            )
        setattr(proxy, SOLVED, QuantStat(chosen))
        intercept(proxy, _of_solved)
        weight.set_value(value.astype(chosen.dtype))


SOLVED = "solved_weight"  # the attribute of a quantizer that has the weight which a solver chose, on its grid


def _of_solved(
    proxy: QuantProxyFromInjector, call: Callable[..., object], weight: object, *more: object
) -> object:
    """The quantized weight that a solver chose, whatever weight the quantizer is called with; see `intercept`."""
    return call(vars(proxy)[SOLVED].get_value() if proxy.is_quant_enabled else weight, *more)
