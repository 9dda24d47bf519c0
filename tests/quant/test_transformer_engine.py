"""TransformerEngine's recipes under its names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import quant
from jqinject.dot import dot_general
from jqinject.nn import QuantLinear

DIMS = (((1,), (0,)), ((), ()))


def numbers(key, shape):
    return jax.random.normal(jax.random.key(key), shape)


def test_recipes_that_are_schemes_have_both_names():
    assert quant.Float8CurrentScaling is quant.Fp8CurrentTraining
    assert quant.MXFP8BlockScaling is quant.MXFP8Training
    assert quant.NVFP4BlockScaling is quant.NVFP4Training


def in_blocks(x, size):
    """e4m3 with a power of two for each block of a matrix, rounded up, in float64."""
    rows, columns = size
    blocks = np.float32(x).reshape(len(x) // rows, rows, -1, columns)
    scale = 2.0 ** np.ceil(np.log2(np.abs(blocks).max((1, 3), keepdims=True) / 448))
    return (np.float64((blocks / scale).astype(jnp.float8_e4m3fn)) * scale).reshape(x.shape)


@pytest.mark.heavy
def test_float8_block_scaling_rounds_scales_up_to_powers_of_two():
    x, w, g = numbers(0, (128, 256)), numbers(1, (256, 128)), numbers(2, (128, 128))
    y, pull = jax.vjp(lambda x, w: dot_general(x, w, DIMS, config=quant.Float8BlockScaling), x, w)
    row, square = (1, 128), (128, 128)
    expected = (
        in_blocks(x, row) @ in_blocks(w, square),
        in_blocks(g, row) @ in_blocks(w, square).T,
        in_blocks(x.T, row) @ in_blocks(g.T, row).T,
    )
    for found, exact in zip((y, *pull(g)), expected, strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-4)


@pytest.mark.heavy
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_delayed_scaling_takes_the_factor_from_earlier_steps(algorithm):
    scheme = quant.DelayedScaling.let(amax_history_len=2, amax_compute_algo=algorithm, margin=1)
    layer = QuantLinear(16, 8, scheme=scheme, use_bias=False, rngs=nnx.Rngs(0))
    g, w = numbers(1, (4, 8)), np.asarray(layer.kernel[...])

    @nnx.jit
    def step(layer, x):
        (_, y), grads = jqinject.value_and_grad(lambda m, x: (((y := m(x)) * g).sum(), y), has_aux=True)(
            layer, x
        )
        return y, grads.kernel[...]

    def rounded(x, dtype, amaxes):
        last = max(amaxes[-2:]) if algorithm == "max" else amaxes[-1]
        factor = np.float32(jnp.finfo(dtype).max) / np.float32(last) / 2 if last else np.float32(1)
        return np.float64((np.float32(x) * factor).astype(dtype)) / np.float64(factor)

    histories = {"x": [0.0], "w": [0.0], "g": [0.0]}
    for size in (1.0, 2.0, 0.5, 0.25):
        tensors = {"x": np.asarray(size * numbers(2, (4, 16))), "w": w, "g": np.asarray(g)}
        dtypes = {"x": jnp.float8_e4m3fn, "w": jnp.float8_e4m3fn, "g": jnp.float8_e5m2}
        low = {name: rounded(tensors[name], dtypes[name], histories[name]) for name in tensors}
        y, dw = step(layer, jnp.asarray(tensors["x"]))
        np.testing.assert_allclose(y, low["x"] @ low["w"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(dw, low["x"].T @ low["g"], rtol=1e-5, atol=1e-5)
        for name, x in tensors.items():
            histories[name].append(float(np.abs(x).max()))


def test_the_gradients_of_delayed_scaling_may_be_in_e4m3():
    e4m3 = quant.DelayedScaling.dgrad_grad.let(q_dtype=jnp.float8_e4m3fn)
    scheme = quant.DelayedScaling.let(dgrad_grad=e4m3, wgrad_grad=e4m3)
    table = str(jqinject.explain(scheme))
    assert table.count("float8_e4m3fn") == 4 and "e5m2" not in table
    layer = QuantLinear(16, 8, scheme=scheme, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="amax_compute_algo"):
        QuantLinear(16, 8, scheme=scheme.let(amax_compute_algo="mean"), rngs=nnx.Rngs(0))
    assert layer(jnp.ones((2, 16))).shape == (2, 8)
