"""A saturating minifloat takes every finite number to a finite one; an infinity to what it has for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import ops, quant
from jqinject.core import AbsMaxRange
from jqinject.nn import QuantIdentity
from jqinject.quant_tensor import as_array
from tests.ranges import in_range


class E7m0(quant.Fp8e4m3Act):
    exponent_bit_width = 7
    mantissa_bit_width = 0


class E6m1(quant.Fp8e4m3Act):
    exponent_bit_width = 6
    mantissa_bit_width = 1


class SmallScale(quant.Fp8e4m3OCPActPerTensorFloat):
    """Its quotients are more than float32 holds."""

    scaling_impl_type = "const"
    scaling_init = 1e-3


DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
# quantizer -> the largest number without a scale
PLAIN = {
    quant.Fp8e4m3Act: 480.0,
    quant.Fp8e4m3OCPAct: 448.0,
    quant.Fp8e5m2OCPAct: 57344.0,
    quant.Fp8e4m3FNUZAct: 240.0,
    E7m0: 2.0**64,
    E6m1: 1.5 * 2.0**32,
    quant.Fp8e4m3ActPerTensorDelayed: 448.0,  # its first scale is 1
}
SCALED = [
    quant.Fp8e4m3ActPerTensorCurrent,
    quant.Fp8e4m3FNUZActPerTensorCurrent,
    quant.MXFloat8e4m3Act,
    quant.MXFloat8e5m2Act,
    quant.MXFloat4e2m1Act,
    quant.NVFP4Act,
]


def value_and_gradients(quantizer, x):
    graph, state = nnx.split(QuantIdentity(quantizer, rngs=nnx.Rngs(0)))

    def run(x, state):
        return as_array(nnx.merge(graph, jax.tree.map(lambda leaf: leaf, state))(x))

    y, pull = jax.vjp(run, x, state)
    return y, jax.tree.leaves(pull(jnp.full_like(y, 2.0**-10)))


def largest(dtype):
    return float(jnp.finfo(dtype).max)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("quantizer", PLAIN, ids=lambda quantizer: quantizer.__name__)
def test_what_is_too_large_becomes_the_largest_number(quantizer, dtype):
    top = largest(dtype)
    x = jnp.array([0.97 * top, top, -top, 2.0], dtype)
    y, gradients = value_and_gradients(quantizer, x)
    expected = np.minimum(PLAIN[quantizer], top)
    np.testing.assert_array_equal(y[1:].astype(jnp.float32), [expected, -expected, 2.0])
    assert np.all(np.isfinite(y))
    for gradient in gradients:
        assert np.all(np.isfinite(np.asarray(gradient, np.float32)))


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("quantizer", [*SCALED, SmallScale], ids=lambda quantizer: quantizer.__name__)
def test_a_scale_does_not_make_an_infinity(quantizer, dtype):
    top = largest(dtype)
    y, gradients = value_and_gradients(quantizer, jnp.array([0.97 * top, top, -top, 3.0] * 8, dtype))
    assert np.all(np.isfinite(y.astype(jnp.float32)))
    if quantizer in SCALED:
        np.testing.assert_allclose(y[1:3].astype(jnp.float32), [top, -top], rtol=0.3)
    for gradient in gradients:
        assert np.all(np.isfinite(np.asarray(gradient, np.float32)))


@pytest.mark.parametrize(
    ("quantizer", "expected"), [(quant.Fp8e4m3OCPAct, np.nan), (quant.Fp8e5m2OCPAct, np.inf)]
)
def test_an_infinity_is_not_hidden(quantizer, expected):
    y, _ = value_and_gradients(quantizer, jnp.array([jnp.inf, -jnp.inf, jnp.nan, 1.0]))
    np.testing.assert_array_equal(y, [expected, -expected, np.nan, 1.0])


@pytest.mark.heavy
def test_the_gradient_of_the_grid_at_the_largest_numbers():
    x = jnp.array([3.3e38, 2.0**100, 9.0])
    gradient = jax.grad(lambda x: jnp.sum(ops.to_float_grid(x, 3, 7, ops.round_ste)))(x)
    np.testing.assert_allclose(gradient, [2.0**128 / 3.3e38, 1.0, 1.0], rtol=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e4m3fnuz])
def test_operands_and_casts_saturate(dtype):
    x, scale = jnp.array([[3.3e38, -3.3e38, 1e-3]]), jnp.full((1, 1), 1e-3)
    expected = np.array([[1, -1, 0]]) * float(jnp.finfo(dtype).max) + np.array([[0, 0, 1]])
    np.testing.assert_array_equal(ops.to_float8(x, scale, dtype).astype(jnp.float32), expected)
    grid = ops.FloatGrid.of_dtype(dtype)
    for rounded in (
        ops.quantize_on_grid(x, grid, scale),
        ops.quantize_on_grid(x, grid, scale, None, ops.ceil_ste),
    ):
        np.testing.assert_array_equal(rounded[:, :2], (expected * scale)[:, :2])


def test_a_calibrated_range_of_float4():
    result = in_range(AbsMaxRange(), q_dtype=jnp.float4_e2m1fn)(jnp.array([3.4e38, -3.4e38, 0.0]))
    assert np.all(np.isfinite(result.value))


def test_a_scale_of_integers_far_too_small_has_a_gradient():
    gradient = jax.grad(
        lambda scale: ops.fake_quantize(jnp.array([3e38]), scale, jnp.float32(0), -128, 127).sum()
    )(jnp.float32(1e-3))
    assert gradient == 127.0


@pytest.mark.heavy
@pytest.mark.parametrize("quantizer", [quant.Int8DynamicActPerRowAbsMax, quant.Int8ActPerTensorAbsMax])
def test_the_lowest_integer_of_float16_stays_finite(quantizer):
    largest = float(jnp.finfo(jnp.float16).max)
    x = jnp.array([[-largest, largest, 1.0]], jnp.float16)
    y, slope = jax.value_and_grad(lambda x: as_array(QuantIdentity(quantizer)(x))[0, 0].astype(jnp.float32))(
        x
    )
    assert y == -largest
    assert np.isfinite(slope).all()
    assert not np.isfinite(as_array(QuantIdentity(quantizer)(x.at[0, 0].set(-jnp.inf)))[0, 0])
