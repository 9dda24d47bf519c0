"""Weights that a solver chose, beside the float weights that they were chosen for.

A solver leaves its numbers in the place of the float weights, so a report has to be handed these by another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core import QuantStat
from jqinject.core._protocols import grid_of, has_zero_point, number_format, scale_dtype
from jqinject.core.component import InnerModule
from jqinject.model.walk import ModelIndex, Path
from jqinject.program import dotted, quantized_stack
from jqinject.proxy import WeightQuantProxyFromInjector, stack_of
from jqinject.quant_tensor import as_array


@final
class SolvedQuant(InnerModule):
    """Return the quantized weight that a solver chose, whatever weight it is called with.

    Args:
        quantizer: the weight's quantizer, whose scale is committed.
        weight: the weight that the solver chose, on the quantizer's grid.
    """

    def __init__(self, quantizer: Any, weight: jax.Array) -> None:
        self.quantizer: Any = (
            nnx.data(quantizer) if isinstance(quantizer, nnx.Module) else nnx.static(quantizer)
        )
        self.weight = QuantStat(weight)
        self.has_zero_point = has_zero_point(quantizer)
        self.scale_dtype, self.grid = scale_dtype(quantizer), grid_of(quantizer)
        self.format = number_format(quantizer)

    def by_scale(self, x: jax.Array, scale: jax.Array, zero_point: jax.Array | None, keep: bool) -> Any:
        """See the quantizer."""
        return self.quantizer.by_scale(self.weight.get_value(), scale, zero_point, keep)


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
