"""Layers whose gradients are integers contract them as integers, like a scheme with the same quantizers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject.quant as q
from jqinject.dot import QConvGeneralDilated, QDotGeneral, Scheme
from jqinject.nn import QuantConv, QuantLinear

W8, A8, G8 = q.Int8WeightPerTensorFloat, q.Int8DynamicActPerTensorFloat, q.Int8DynamicGradPerTensorFloat
WIDE_GROUPS = q.MXInt8Grad.let(group_size=128)


def gradients(model, x):
    """Return the gradients of kernel and input, and the program that computes them."""
    graphdef, state = nnx.split(model)
    y = jax.eval_shape(model, x)
    cotangent = jax.random.normal(jax.random.key(2), y.shape).astype(y.dtype)

    def both(state, x):
        model = nnx.merge(graphdef, state)
        of_model, dx = nnx.grad(lambda model, x: (model(x) * cotangent).sum(), argnums=(0, 1))(model, x)
        return of_model["kernel"][...], dx

    return jax.jit(both)(state, x), str(jax.make_jaxpr(both)(state, x))


def count(jaxpr, dtype):
    """How many products have arrays of this dtype; sums that are made as products with numbers do not count."""
    made = [line for line in jaxpr.splitlines() if "= dot_general" in line]
    return sum(f":{dtype}[" in line and f":{dtype}[]" not in line for line in made)


def layer_of(weight, act, grad, **given):
    quantizers = {"weight_quant": weight, "input_quant": act, "grad_quant": grad}
    return QuantLinear(64, 256, **quantizers, rngs=nnx.Rngs(0), **given)


def scheme_of(weight, act, grad):
    operands = {"fprop_rhs": weight, "dgrad_grad": grad, "wgrad_grad": grad}
    return Scheme.let(**operands, **({} if act is None else {"fprop_lhs": act}))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("act", "grad", "integers"),
    [(A8, G8, 3), (None, G8, 1), (A8, q.Int8DynamicGradPerRowFloat, 2), (A8, WIDE_GROUPS, 2)],
    ids=["per tensor", "float input", "per row", "in groups"],
)
def test_products_of_integers(act, grad, integers):
    x = jax.random.normal(jax.random.key(1), (16, 64))
    (dw, dx), jaxpr = gradients(layer_of(W8, act, grad, use_bias=False), x)
    assert (count(jaxpr, "i32"), count(jaxpr, "f32")) == (integers, 3 - integers)
    by_scheme = nnx.Linear(
        64, 256, use_bias=False, dot_general=QDotGeneral(scheme_of(W8, act, grad)), rngs=nnx.Rngs(0)
    )
    (dw_by_scheme, dx_by_scheme), _ = gradients(by_scheme, x)
    np.testing.assert_array_equal(dx, dx_by_scheme)
    if (
        act is not None and grad is G8
    ):  # others are rounded once by a layer, along every product's sum by a scheme
        np.testing.assert_array_equal(dw, dw_by_scheme)


@pytest.mark.heavy
def test_one_rounding_for_both_products_and_the_bias():
    layer = layer_of(W8, A8, q.Int8DynamicGradPerTensorFloatStochastic)
    x, cotangent = (
        jax.random.normal(jax.random.key(1), (16, 64)),
        jax.random.normal(jax.random.key(2), (16, 256)),
    )
    of_layer, dx = nnx.grad(lambda layer, x: (layer(x) * cotangent).sum(), argnums=(0, 1))(layer, x)
    scale = jnp.abs(cotangent).max() / 127
    rounded = (of_layer["bias"][...] / scale).astype(jnp.float32)
    np.testing.assert_allclose(rounded, jnp.round(rounded), atol=1e-2)
    assert jnp.isfinite(dx).all()


@pytest.mark.heavy
def test_a_convolution():
    keywords = {"kernel_size": (3, 3), "use_bias": False}
    x = jax.random.normal(jax.random.key(1), (2, 6, 6, 4))
    quantizers = {"weight_quant": W8, "input_quant": A8, "grad_quant": G8}
    found, jaxpr = gradients(QuantConv(4, 8, **keywords, **quantizers, rngs=nnx.Rngs(0)), x)
    assert jaxpr.count("preferred_element_type=int32") >= 3
    op = QConvGeneralDilated(scheme_of(W8, A8, G8))
    by_scheme, _ = gradients(nnx.Conv(4, 8, **keywords, conv_general_dilated=op, rngs=nnx.Rngs(0)), x)
    for of_layer, of_scheme in zip(found, by_scheme, strict=True):
        np.testing.assert_allclose(of_layer, of_scheme, rtol=1e-6, atol=1e-6)


@pytest.mark.heavy
def test_bfloat16():
    x = jax.random.normal(jax.random.key(1), (16, 64), jnp.bfloat16)
    (dw, dx), jaxpr = gradients(layer_of(W8, A8, G8, dtype=jnp.bfloat16), x)
    in_float32, _ = gradients(layer_of(W8, A8, G8), x.astype(jnp.float32))
    assert jaxpr.count("preferred_element_type=int32") == 3 and dx.dtype == jnp.bfloat16
    for found, expected in zip((dw, dx), in_float32, strict=True):
        np.testing.assert_allclose(
            found.astype(jnp.float32), expected, rtol=2e-2, atol=2e-2 * jnp.abs(expected).max()
        )
