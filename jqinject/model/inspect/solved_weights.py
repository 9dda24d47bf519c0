"""Weights that a solver chose, beside the float weights that they were chosen for.

A solver leaves its numbers in the place of the float weights, so a report has to be handed these by another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core import CommittedQuant, QuantStat
from jqinject.model.walk import ModelIndex, Path
from jqinject.program import dotted, quantized_stack
from jqinject.proxy import WeightQuantProxyFromInjector, stack_of
from jqinject.quant_tensor import as_array


@final
class SolvedQuant(CommittedQuant):
    """Return the quantized weight that a solver chose, whatever weight it is called with.

    Args:
        committed: the weight's quantizer, with the scales that the solver chose.
        weight: the weight that it chose, on the quantizer's grid.
    """

    def __init__(self, committed: CommittedQuant, weight: jax.Array) -> None:
        self.quantizer = committed.quantizer
        self.committed_scale = committed.committed_scale
        self.committed_zero_point = nnx.data(committed.committed_zero_point)
        self.weight = QuantStat(weight)

    def _quantized(self, x: jax.Array, keep: bool) -> Any:
        return super()._quantized(self.weight.get_value(), keep)


def solved_weights(model: nnx.Module) -> Mapping[str, tuple[nnx.Param[Any], WeightQuantProxyFromInjector]]:
    """Find the weights of a model that are the numbers which a solver chose: path -> parameter and quantizer.

    Those that training has moved off the grid since are none of them.

    Args:
        model: in evaluation mode.
    """
    index = ModelIndex(model)
    paths = {id(node): path for path, node in reversed(index.places) if isinstance(node, nnx.Variable)}
    return dict(_solved(index, paths))


def _solved(index: ModelIndex, paths: Mapping[int, Path]) -> Iterator[tuple[str, Any]]:
    for holders in index.proxies:
        proxy, layer = holders.proxy, holders.layers[0]
        if not isinstance(proxy, WeightQuantProxyFromInjector) or not (
            proxy.committed and proxy.is_quant_enabled
        ):
            continue
        if id(layer.weight) in paths:
            weight, depth = layer.weight.get_value(), len(stack_of((layer,)))
            quantized = as_array(quantized_stack(nnx.clone(proxy, graph=True), weight, depth))
            if bool(jnp.array_equal(quantized, weight)):
                yield dotted(paths[id(layer.weight)]), (layer.weight, proxy)


def with_float_weights(model: nnx.Module, reference: nnx.Module) -> nnx.Module:
    """Copy a model, with the float weights of another in the place of those that a solver chose.

    The copy's quantizers still return what the solver chose.

    Args:
        model: in evaluation mode.
        reference: the float model.

    Raises:
        ValueError: it has no such parameter, or one of another shape; names it.
    """
    copy = nnx.clone(model, graph=True)
    floats = {
        dotted(path): node for path, node in ModelIndex(reference).places if isinstance(node, nnx.Param)
    }
    for path, (weight, proxy) in solved_weights(copy).items():
        solved = weight.get_value()
        value = floats[path].get_value() if path in floats else None
        if value is None or value.shape != solved.shape:
            kind = "none" if value is None else f"one of shape {value.shape}"
            raise ValueError(
                f"report(reference=...): {path} has shape {solved.shape} in the model, and the reference has {kind}; "
                "expected the float model whose weights were quantized.\n"
                "  cure: reference=result.float_model, of what Recipe.apply returned"
            )
        proxy.tensor_quant = nnx.data(SolvedQuant(proxy.tensor_quant, solved))
        weight.set_value(value.astype(solved.dtype))
    return copy
