"""Activations as numbers of a table: in every place for a quantizer, forward, backward, frozen and reported."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import Rule, calibrate, freeze, load_state, quantize, report
from jqinject.inject import ExtendedInjector
from jqinject.nn import QuantIdentity, QuantLinear, QuantReLU
from jqinject.ops import NF4, TableGrid, normal_table
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
    LloydMaxDynamicActPerRowFloat,
    NF4DynamicActPerGroupFloat,
    NF4DynamicActPerRowFloat,
    NF4WeightPerChannelFloat,
    QuestActPerRowFloat,
    TurboQuant4Act,
)
from jqinject.quant.codebook import NF4Quant


class Groups(NF4DynamicActPerGroupFloat):
    group_size = 16


class Learned(NF4Quant, Int8ActPerTensorFloat):
    """A scale that calibration collects, and training learns."""


X = jax.random.normal(jax.random.key(0), (6, 32))
DYNAMIC = (
    NF4DynamicActPerRowFloat,
    Groups,
    LloydMaxDynamicActPerRowFloat,
    TurboQuant4Act,
    QuestActPerRowFloat,
)


def nearest(x: np.ndarray, table: TableGrid, scale: np.ndarray) -> np.ndarray:
    numbers = np.asarray(table.values)
    return scale * numbers[np.abs(x[..., None] / scale[..., None] - numbers).argmin(-1)]


def test_rows_and_groups_are_rounded_to_the_nearest_number() -> None:
    x = np.asarray(X, np.float64)
    by_row = nearest(x, NF4, np.abs(x).max(-1, keepdims=True))
    np.testing.assert_allclose(QuantIdentity(NF4DynamicActPerRowFloat)(X), by_row, rtol=1e-6)
    groups = x.reshape(6, 2, 16)
    by_group = nearest(groups, NF4, np.abs(groups).max(-1, keepdims=True)).reshape(x.shape)
    np.testing.assert_allclose(QuantIdentity(Groups)(X), by_group, rtol=1e-6)
    for bits in (1, 2, 3, 4):
        rms = np.sqrt((x**2).mean(-1, keepdims=True))
        found = QuantIdentity(LloydMaxDynamicActPerRowFloat, bit_width=bits)(X)
        np.testing.assert_allclose(found, nearest(x, normal_table(bits), rms), rtol=1e-5)
    zeros = QuantIdentity(LloydMaxDynamicActPerRowFloat)(jnp.zeros((2, 8)))
    np.testing.assert_array_equal(zeros, jnp.zeros((2, 8)))


@pytest.mark.heavy
@pytest.mark.parametrize("quantizer", DYNAMIC)
def test_layers_contract_the_numbers_of_the_table(quantizer: type[ExtendedInjector]) -> None:
    layer = QuantLinear(
        32, 8, weight_quant=Int8WeightPerChannelFloat, input_quant=quantizer, rngs=nnx.Rngs(0)
    )
    rounded, weight = QuantIdentity(quantizer)(X), layer.quant_weight().value
    expected = jnp.matmul(rounded, weight, precision="highest")
    np.testing.assert_allclose(layer(X), expected, rtol=1e-5, atol=1e-5)
    gradient = jax.grad(lambda x: layer(x).sum())(X)
    through = jnp.broadcast_to(weight.sum(-1), X.shape)
    if quantizer is QuestActPerRowFloat:  # it masks numbers that rounding moved far
        through = jnp.where(gradient == 0, 0.0, through)
    elif quantizer is NF4DynamicActPerRowFloat or quantizer is Groups:
        largest = jnp.abs(rounded) == jnp.abs(X)  # its own gradient is the scale's too
        gradient, through = (jnp.where(largest, 0.0, g) for g in (gradient, through))
    np.testing.assert_allclose(gradient, through, rtol=1e-4, atol=1e-5)
    layer.eval()
    before = layer(X)
    np.testing.assert_allclose(nnx.jit(lambda layer, x: layer(x))(layer, X), before, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(layer)(X[:, None])[:, 0], before, rtol=1e-5, atol=1e-5)
    served = freeze(layer)
    np.testing.assert_allclose(served(X), before, rtol=1e-5, atol=1e-5)
    row = report(served, X).layers[0]
    assert row.contraction == "float" and row.formats.startswith("4-bit table")
    assert row.note


@pytest.mark.heavy
def test_other_places_for_quantizers() -> None:
    rule = Rule(
        weight_quant=NF4WeightPerChannelFloat,
        input_quant=LloydMaxDynamicActPerRowFloat,
        output_quant=NF4DynamicActPerRowFloat,
    )
    model = nnx.Sequential(
        nnx.Linear(32, 16, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(16, 4, rngs=nnx.Rngs(1))
    )
    quantized = quantize(model, rule)
    first = quantized.layers[0]
    inner = QuantIdentity(LloydMaxDynamicActPerRowFloat)(X) @ first.quant_weight().value + first.bias[...]
    expected = QuantIdentity(NF4DynamicActPerRowFloat)(inner)
    np.testing.assert_allclose(first(X), expected, rtol=1e-4, atol=1e-4)
    quantized.eval()
    np.testing.assert_allclose(freeze(quantized)(X), quantized(X), rtol=1e-5, atol=1e-5)

    relu = QuantReLU(NF4DynamicActPerRowFloat, return_quant_tensor=True)
    assert relu(X).codes().dtype == jnp.uint8
    np.testing.assert_array_equal(relu(X).value, QuantIdentity(NF4DynamicActPerRowFloat)(nnx.relu(X)))

    # What undoes its transform leaves float weights as they are, so that a float checkpoint loads.
    rotated = quantize(model, Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=TurboQuant4Act))
    load_state(rotated, nnx.state(model))
    error = jnp.linalg.norm(rotated(X) - model(X)) / jnp.linalg.norm(model(X))
    assert float(error) < 0.2


@pytest.mark.heavy
def test_static_scales_of_tables_are_calibrated_and_learned() -> None:
    layer = QuantIdentity(Learned)
    calibrate(layer, [X, 2 * X], progress=False)
    largest = float(layer.act_quant.scale())
    assert 0 < largest <= 2 * float(jnp.abs(X).max())
    expected = nearest(np.asarray(X, np.float64), NF4, np.full((1, 1), largest))
    np.testing.assert_allclose(layer(X), expected, rtol=1e-5, atol=1e-6)
    layer.train()
    gradients: Any = nnx.grad(lambda layer: (layer(X) ** 2).sum())(layer)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradients))
