"""Int8Training and BitNet158: what they compute, written out, in layers and by rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import Rule
from jqinject.dot import dot_general
from jqinject.nn import QuantLinear
from jqinject.quant import BitNet158, Fp8e4m3ActPerTensorCurrent, Int8Training
from jqinject.quant.aqt import config_v4

X = jax.random.normal(jax.random.key(0), (8, 32))
MATMUL = (((1,), (0,)), ((), ()))


def loss_of(layer: nnx.Module, x: jax.Array) -> jax.Array:
    return (layer(x) ** 2).sum()


@pytest.mark.heavy
def test_bitnet_is_its_paper() -> None:
    """W~ = round(W / mean |W|) in [-1, 1], x~ = round(127 x / max |x|) of each token; gradients straight through."""
    layer = QuantLinear(32, 16, use_bias=False, scheme=BitNet158, rngs=nnx.Rngs(0))
    w = np.asarray(layer.kernel[...], np.float64)
    x = np.asarray(X, np.float64)
    beta, gamma = np.abs(w).mean(), np.abs(x).max(-1, keepdims=True)
    ternary = np.clip(np.round(w / beta), -1, 1) * beta
    tokens = np.round(x * 127 / gamma) * gamma / 127
    y = tokens @ ternary
    np.testing.assert_allclose(layer(X), y, rtol=2e-5, atol=1e-5)
    _, (grads, dx) = nnx.value_and_grad(loss_of, argnums=(0, 1))(layer, X)
    np.testing.assert_allclose(grads["kernel"][...], tokens.T @ (2 * y), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dx, (2 * y) @ ternary.T, rtol=1e-4, atol=1e-4)


@pytest.mark.heavy
def test_int8_training_is_aqts_configuration() -> None:
    w = jax.random.normal(jax.random.key(1), (32, 16))
    key = jax.random.key(2)

    def grads(config):
        def f(x, w):
            return (dot_general(x, w, MATMUL, config=config, key=key) ** 2).sum()

        return jax.value_and_grad(f, argnums=(0, 1))(X, w)

    for one, other in zip(
        *(jax.tree.leaves(grads(each)) for each in (Int8Training, config_v4())), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.heavy
@pytest.mark.parametrize("scheme", [Int8Training, BitNet158])
def test_a_layer_with_a_scheme_is_the_layer_that_a_rule_makes(scheme) -> None:
    class Model(nnx.Module):
        def __init__(self):
            self.fc = nnx.Linear(32, 16, rngs=nnx.Rngs(0))
            self.head = nnx.Linear(16, 4, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.head(self.fc(x))

    model = jqinject.quantize(Model(), [Rule("head", scheme=None), Rule(scheme=scheme)], rngs=nnx.Rngs(0))
    layer = QuantLinear(32, 16, scheme=scheme, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(model.fc(X), layer(X))
    assert isinstance(model.head, nnx.Linear) and bool(jnp.any(model.fc(X) != Model().fc(X)))
    step = nnx.jit(lambda model, x: jqinject.value_and_grad(lambda model: loss_of(model, x))(model))
    _, grads = step(model, X)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"input_quant": Fp8e4m3ActPerTensorCurrent}, "input_quant"),
        ({"weight_quant": Fp8e4m3ActPerTensorCurrent}, "weight_quant"),
        ({"dot_general": dot_general}, "dot_general"),
    ],
)
def test_beside_a_scheme_nothing_else_quantizes_operands(given, named) -> None:
    with pytest.raises(ValueError, match=f"by itself, got {named} too.\n  cure: leave {named} out"):
        QuantLinear(32, 16, scheme=BitNet158, rngs=nnx.Rngs(0), **given)
    with pytest.raises(TypeError, match="config must be a Scheme"):
        QuantLinear(32, 16, scheme=Fp8e4m3ActPerTensorCurrent, rngs=nnx.Rngs(0))
