"""Elements that are exactly 0, and ranges of width 0: their derivatives in statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject.quant
from jqinject import core
from jqinject.nn import QuantLinear

PRUNED = [[0.0, 1.0, -2.0], [0.0, 0.0, 0.0]]
SLOPE = 2 * (np.abs(PRUNED) - 0.5) / (5 * np.sqrt(3.5 / 5))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("stat", "expected"),
    [
        (core.AbsAve(), np.sign(PRUNED) / 6),
        (core.AbsAve(stats_reduce_dim=1), np.sign(PRUNED) / 3),
        (core.MeanSigmaStd(2.0), np.sign(PRUNED) * (1 / 6 + SLOPE)),
        (core.AbsMax(stats_reduce_dim=1), [[0, 0, -1], [0, 0, 0]]),
        (core.AbsMaxAve(stats_reduce_dim=1), [[0, 0, -0.5], [0, 0, 0]]),
        (core.AbsPercentile(50.0), np.zeros((2, 3))),
        (core.L1Norm(stats_reduce_dim=1), np.sign(PRUNED)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_zero_moves_no_statistic_of_magnitudes(stat, expected):
    got = jax.grad(lambda x: stat(x).sum())(jnp.array(PRUNED))
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("stat", [core.AbsMinMax(stats_reduce_dim=1), core.PercentileInterval(0.0, 50.0, 1)])
def test_a_range_without_width_has_no_slope(stat):
    x = jnp.full((2, 3), -0.5)
    width, pull = jax.vjp(stat, x)
    np.testing.assert_array_equal(width, 0)
    np.testing.assert_array_equal(pull(jnp.ones(2))[0], 0)


@pytest.mark.heavy
def test_a_channel_of_one_negative_weight_passes_its_gradient():
    # The width of the range is 0 and the scale the least one. Slopes of +1/s and -1/s would swallow the 1 between them.
    layer = QuantLinear(1, 3, weight_quant=jqinject.quant.ShiftedUint8WeightPerChannelFloat, rngs=nnx.Rngs(0))
    layer.kernel[...] = jnp.array([[0.4, -0.5, -0.2]])
    grad = nnx.grad(lambda layer: layer.quant_weight().value.sum())(layer)["kernel"]
    np.testing.assert_allclose(grad[...], np.ones((1, 3)), rtol=1e-6)
