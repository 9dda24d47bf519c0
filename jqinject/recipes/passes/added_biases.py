"""Gives layers of Flax without a bias one that is 0."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from jqinject.model.walk import ModelIndex
from jqinject.program import dotted
from jqinject.recipes.work import Work

BIASED = (nnx.Linear, nnx.Conv, nnx.ConvTranspose, nnx.LinearGeneral)
"""Layers that add a bias to their outputs' last axes if they have one."""


def add_biases(work: Work) -> frozenset[str]:
    """Give the layers whose weight is quantized a bias of 0, in the float model and in the quantized one.

    Args:
        work: of a recipe.

    Returns:
        The paths of the new biases.
    """
    quantized = set(work.parameters())
    found: dict[tuple[str, ...], Any] = {}
    for path, layer in ModelIndex(work.model).places:
        if isinstance(layer, BIASED) and dotted((*path, "kernel")) in quantized:
            shape = _bias_shape(layer)
            if layer.bias is None and shape is not None:
                found[tuple(map(str, path))] = shape
    for model in (work.model, work.quantized):
        for path, layer in ModelIndex(model).places:
            shape = found.get(tuple(map(str, path)))
            if shape is not None and layer.bias is None:
                layer.bias = nnx.Param(jnp.zeros(shape, layer.param_dtype))
                layer.use_bias = True
    return frozenset(dotted((*path, "bias")) for path in found)


def _bias_shape(layer: Any) -> tuple[int, ...] | None:
    """The shape of a layer's bias, with the axes that it is stacked along; None if it is not known."""
    out = layer.out_features if isinstance(layer.out_features, tuple) else (layer.out_features,)
    if isinstance(layer, nnx.LinearGeneral):
        if layer.batch_axis:
            return None
        inner = len(layer.axis) + len(out)
    else:
        inner = 2 if isinstance(layer, nnx.Linear) else 2 + len(layer.kernel_size)
    shape = layer.kernel.get_value().shape
    return (*shape[: len(shape) - inner], *out)
