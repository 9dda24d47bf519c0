"""Zero, constant, empty, denormal, infinite and nan tensors: defined results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import core
from jqinject.core.memory.memory_policy import MemoryPolicy, mean_after

FINITE = {
    "zeros": jnp.zeros((3, 4)),
    "negative zeros": -jnp.zeros((3, 4)),
    "constant": jnp.full((3, 4), 0.7),
    "negative": jnp.full((3, 4), -0.7),
    "denormal": jnp.full((3, 4), 1e-42),
    "tiny": jnp.full((3, 4), 1e-37),
    "one zero channel": jnp.ones((3, 4)).at[:, 1].set(0),
    "huge": jnp.full((3, 4), 1e37).at[0, 0].set(-1e37),
    "one row": jnp.array([[0.1, -0.2, 0.3, 0.0]]),
    "empty": jnp.zeros((0, 4)),
}


@pytest.mark.heavy
@pytest.mark.parametrize("x", FINITE.values(), ids=FINITE.keys())
def test_a_finite_tensor_has_a_finite_result_and_gradient(build, x):
    quant = build()
    step = nnx.value_and_grad(lambda q, x: (q(x).value.sum(), q(x).scale), argnums=(0, 1), has_aux=True)
    for mode in ("train", "train", "train", "train", "eval"):
        quant.train() if mode == "train" else quant.eval()
        (value, scale), grads = step(quant, x)
        assert bool(jnp.isfinite(value))
        assert bool(jnp.all(jnp.isfinite(scale) & (scale > 0)))
        assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(grads))
        assert quant(x).value.shape == x.shape


@pytest.mark.parametrize("name", ["zeros", "negative zeros"])
def test_zeros_are_quantized_to_zeros(build, name):
    quant = build()
    if "Binary" in type(quant).__name__:
        pytest.skip("two values, none of them 0")
    for _ in range(5):
        np.testing.assert_array_equal(quant(FINITE[name]).value, np.zeros((3, 4)))


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_nan_and_inf_never_enter_the_state(build, bad):
    quant = build()
    clean = jax.random.normal(jax.random.key(0), (16, 4))
    for _ in range(4):
        quant(clean.at[3, 2].set(bad))
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(nnx.state(quant)))
    for _ in range(4):
        result = quant(clean)
    assert bool(jnp.all(jnp.isfinite(result.value)))


def test_nan_shows_in_the_value(build):
    quant = build()
    clean = jax.random.normal(jax.random.key(0), (16, 4))
    for _ in range(5):
        quant(clean)
    assert bool(jnp.isnan(quant(clean.at[3, 2].set(jnp.nan)).value[3, 2]))


def test_a_bad_batch_does_not_count():
    scaling = core.ParameterFromRuntimeStatsScaling(2, core.AbsMax(), core.OverTensorView())
    for top in (jnp.nan, 3.0, jnp.inf, 5.0):
        scaling(jnp.array([top, 1.0]))
    assert scaling.counter.get_value() == 2
    np.testing.assert_allclose(scaling.buffer.get_value(), 0.9 * 3 + 0.1 * 5)


@pytest.mark.parametrize("bits", [2, 8, 16, 32])
@pytest.mark.parametrize("signed", [True, False])
def test_all_bit_widths_are_finite_on_tiny_tensors(bits, signed):
    quant = core.RescalingIntQuant(
        core.IntQuant(False, signed),
        core.StatsFromParameterScaling(core.AbsMax(), core.OverTensorView()),
        core.IntScaling(False, signed),
        core.ZeroZeroPoint(),
        core.BitWidthConst(bits),
    )
    for scale in (0.0, 1e-40, 1e-30, 1.0):
        result = quant(jnp.array([1.0, -0.5]) * scale)
        assert bool(jnp.all(jnp.isfinite(result.value)))
        assert result.scale > 0


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8, jnp.bool_])
def test_integers_are_refused(build, dtype):
    quant = build()
    with pytest.raises(TypeError, match=r"expected a float one.*astype\(jnp\.float32\)"):
        quant(jnp.ones((3, 4), dtype))


@pytest.mark.parametrize("batches, entered", [(2**24 - 1, True), (2**24, False)])
def test_a_mean_of_as_many_batches_as_float32_counts_is_final(batches, entered):
    sums, numbers = (jnp.float32(2**24), jnp.float32(-(2**24))), (jnp.float32(64.0), jnp.float32(-64.0))
    means, counted, totals, enters = mean_after(MemoryPolicy("mean"), numbers, jnp.float32(batches), sums)
    assert bool(enters) == entered and counted == 2**24
    assert totals == ((sums[0] + 64, sums[1] - 64) if entered else sums)
    assert means == (totals[0] / 2**24, totals[1] / 2**24)
