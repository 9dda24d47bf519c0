"""Quantizers without state are traced once for all tensors of a shape."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqinject.quant as q
from jqinject.core import RescalingIntQuant
from jqinject.nn import QuantIdentity
from jqinject.proxy import base

X = jax.random.normal(jax.random.key(0), (4, 8))


def evaluated(act: Any) -> Any:
    layer = QuantIdentity(act_quant=act, return_quant_tensor=True)
    layer.eval()
    return layer


@pytest.mark.parametrize("act", [q.Int8DynamicActPerRowAbsMax, q.Int8DynamicActPerTensorAbsMax])
def test_results_and_gradients_are_those_of_a_call(act: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = evaluated(act)

    def loss(x: jax.Array) -> Any:
        made = layer(x)
        return jnp.sum(made.value * X), (made.value, made.scale, made.int())

    found = jax.jit(jax.value_and_grad(loss, has_aux=True))(X)
    monkeypatch.setattr(base, "traced_once", lambda *_: None)
    wanted = jax.jit(jax.value_and_grad(loss, has_aux=True))(X)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_layers_of_one_kind_share_a_trace_that_keeps_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, traces = [evaluated(q.Int8DynamicActPerRowAbsMax) for _ in range(3)], []
    quantize = RescalingIntQuant.__call__

    def counted(self: Any, x: jax.Array, **how: Any) -> Any:
        traces.append(x.shape)
        return quantize(self, x, **how)

    monkeypatch.setattr(RescalingIntQuant, "__call__", counted)

    def run(x: jax.Array) -> Any:
        made = [layer(x) for layer in layers]
        assert all(not one.has_zero_point and one.bit_width == 8 for one in made)
        assert all(one.payload is not None for one in made)
        return [one.int() for one in made]

    for _ in range(2):
        first, *others = jax.jit(lambda x: run(x))(jnp.ones((3, 5)))
        for other in others:
            np.testing.assert_array_equal(first, other)
    assert traces == [(3, 5)]
