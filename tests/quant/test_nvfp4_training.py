"""NVFP4 for training: block scales in two levels, in TransformerEngine's and torchao's order of float32 operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject.core import FourOverSixScales, LeastErrorScales, LeastNormalScales, NVFP4Scales
from jqinject.nn import QuantIdentity, QuantLinear
from jqinject.quant import NVFP4TrainingAct, NVFP4TrainingGrad, NVFP4TrainingWeight

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
IMPLS = {
    "folded": NVFP4Scales(),
    "divided": NVFP4Scales(folded=False),
    "four over six": FourOverSixScales("mse"),
    "least error": LeastErrorScales(),
    "256": FourOverSixScales("mae", e4m3_max=256, scaled_error=True),
    "torchao": LeastNormalScales(),
    "one level": LeastNormalScales(two_levels=False),
}


def quantized(x, **declared):
    injector = NVFP4TrainingAct.let(**declared) if declared else NVFP4TrainingAct
    return QuantIdentity(act_quant=injector, return_quant_tensor=True)(x)


@pytest.mark.heavy
@pytest.mark.parametrize("impl", IMPLS.values(), ids=IMPLS)
def test_eager_and_compiled_have_the_same_bits(impl):
    """The block scale goes through e4m3 and back, which a compiler must not leave out."""
    x = jax.random.normal(jax.random.key(0), (64, 256)) * jnp.exp2(jnp.arange(64.0) - 40)[:, None]

    def parts(x):
        made = quantized(x, block_scale_impl=impl)
        return made.codes(), made.value, *made.grouped.levels

    for eager, compiled in zip(parts(x), jax.jit(parts)(x), strict=True):
        np.testing.assert_array_equal(eager, compiled)


@pytest.mark.heavy
def test_scales_are_numbers_of_e4m3_and_values_are_products():
    x = jax.random.normal(jax.random.key(1), (8, 64), jnp.bfloat16)
    made = quantized(x)
    minifloats, block, shared = made.grouped.levels
    assert set(np.abs(np.unique(minifloats))) <= set(GRID)
    np.testing.assert_array_equal(block, block.astype(jnp.float8_e4m3fn).astype(jnp.float32))
    assert float(block.max()) == 448
    assert float(shared) == pytest.approx(float(jnp.abs(x).max()) / 2688, rel=1e-6)
    expected = (np.float64(minifloats) * np.float64(block) * np.float64(shared)).reshape(x.shape)
    np.testing.assert_allclose(np.float64(made.value), expected, rtol=2**-8)
    assert made.value.dtype == jnp.bfloat16


@pytest.mark.heavy
def test_four_over_six_never_has_more_error_than_six_alone():
    x = jax.random.normal(jax.random.key(2), (32, 128))
    blocks = (32, 8, 16)

    def errors(impl):
        return np.square(np.float64(quantized(x, block_scale_impl=impl).value - x)).reshape(blocks).sum(-1)

    six, either = errors(NVFP4Scales(folded=False)), errors(FourOverSixScales("mse"))
    assert (either <= six * (1 + 1e-5)).all()
    assert either.sum() < 0.95 * six.sum()


@pytest.mark.heavy
def test_the_least_error_is_that_of_the_best_of_all_numbers_of_e4m3():
    x = jax.random.t(jax.random.key(2), 3.0, (32, 128))
    x = jnp.concatenate([x, jnp.float32([[6.0, *[5.0] * 15, *[1.0] * 112]]), jnp.zeros((1, 128))])
    blocks = np.float64(x).reshape(-1, 16)
    value = quantized(x, block_scale_impl=LeastErrorScales()).value
    error = np.square(np.float64(value).reshape(-1, 16) - blocks).sum(-1)
    e4m3 = np.arange(1, 127, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float64)
    scales = e4m3 * float(jnp.abs(x).max()) / 2688
    between = (GRID[1:] + GRID[:-1]) / 2
    steps = np.abs(blocks)[None] / scales[:, None, None]
    tried = np.square(GRID[np.searchsorted(between, steps)] * scales[:, None, None] - np.abs(blocks)).sum(-1)
    np.testing.assert_allclose(error, tried.min(0), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("impl", [NVFP4Scales(), FourOverSixScales(), LeastErrorScales()])
def test_an_empty_tensor_stays_empty(impl):
    assert quantized(jnp.zeros((0, 16)), block_scale_impl=impl).value.shape == (0, 16)


@pytest.mark.heavy
def test_a_row_may_have_a_shared_scale_of_its_own():
    x = jnp.array([[1.0] * 16, [2.0**-20] * 16])
    together, apart = quantized(x), quantized(x, shared_per_row=True)
    np.testing.assert_array_equal(np.asarray(together.value)[1], 0)  # far below the first row
    np.testing.assert_allclose(apart.value, x, rtol=1e-6)
    assert apart.grouped.levels.shared.shape == (2, 1, 1)


@pytest.mark.heavy
def test_negative_zero():
    x = jnp.array([-0.0, -1e-6, 0.0, 6.0])
    assert quantized(x).codes().tolist() == [0, 8, 0, 7]
    assert quantized(x, block_scale_impl=LeastNormalScales()).codes().tolist() == [8, 8, 0, 7]


@pytest.mark.heavy
def test_gradients_pass_unchanged():
    x = jax.random.normal(jax.random.key(3), (4, 32))
    g = jax.random.normal(jax.random.key(4), (4, 32))
    identity = QuantIdentity(act_quant=NVFP4TrainingAct)
    np.testing.assert_array_equal(jax.vjp(identity, x)[1](g)[0], g)


@pytest.mark.heavy
def test_a_gradient_is_quantized_likewise():
    g = jax.random.normal(jax.random.key(5), (4, 32))
    identity = QuantIdentity(None, grad_quant=NVFP4TrainingGrad)
    (found,) = jax.vjp(identity, jnp.zeros((4, 32)))[1](g)
    np.testing.assert_array_equal(found, quantized(g).value)


@pytest.mark.heavy
def test_blocks_of_16_by_16():
    layer = QuantLinear(64, 48, weight_quant=NVFP4TrainingWeight.let(group_size=(16, 16)), rngs=nnx.Rngs(0))
    layer.kernel[...] = jax.random.normal(jax.random.key(6), (64, 48))
    found = np.asarray(layer.quant_weight().grouped.levels.block).reshape(4, 3, 16)
    largest = np.abs(layer.kernel[...]).reshape(4, 16, 3, 16).max((1, 3))
    np.testing.assert_array_equal(found, np.broadcast_to(found[..., :1], found.shape))
    np.testing.assert_allclose(found[..., 0], 448 * largest / largest.max(), rtol=2**-4)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: FourOverSixScales("mean"), "error must be 'mae' or 'mse', got 'mean'"),
        (lambda: FourOverSixScales(e4m3_max=240), "e4m3_max must be 448 or 256, got 240"),
        (lambda: quantized(jnp.ones(4), group_size=0), "group_size must be a whole number of at least 1"),
    ],
)
def test_wrong_arguments_are_named(made, message):
    with pytest.raises(ValueError, match=message):
        made()
