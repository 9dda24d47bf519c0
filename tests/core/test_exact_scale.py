"""Scales of least squared error, against a search of thousands of scales, and in quantizers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import quant
from jqinject.core import MSE, AbsMax, OverTensorView, least_squares_scales
from jqinject.core.statistics.exact_scale import levels_of
from jqinject.nn import QuantLinear
from jqinject.ops import NF4, FloatGrid, IntGrid, TableGrid

GRIDS = {
    "int2": IntGrid(2),
    "int4": IntGrid(4, narrow_range=True),
    "int8": IntGrid(8),
    "uint4": IntGrid(4, signed=False),
    "e2m1": FloatGrid(2, 1),
    "e4m3": FloatGrid(4, 3),
    "nf4": NF4,
    "binary": TableGrid((-1.0, 1.0)),
}
GENERATOR = np.random.default_rng(0)
X, H = (
    GENERATOR.standard_t(4, size=(3, 64)).astype(np.float32),
    GENERATOR.exponential(size=(3, 64)).astype(np.float32),
)


def error(x, scale, levels, importance):
    between = (levels[1:] + levels[:-1]) / 2
    q = levels[np.searchsorted(between, x / scale)]
    return (importance * np.square(x - scale * q)).sum()


@pytest.mark.parametrize("name", GRIDS)
def test_no_scale_of_thousands_has_less_error(name):
    levels = levels_of(GRIDS[name])
    x = X if levels[0] < 0 else np.abs(X)
    table = np.array(levels)
    for importance in (np.ones_like(H), H):
        scales = np.float64(least_squares_scales(jnp.asarray(x), levels, jnp.asarray(importance)))
        for row, of_row, scale in zip(np.float64(x), np.float64(importance), scales, strict=True):
            tried = np.abs(row).max() / np.abs(table).max() * np.linspace(0.01, 2.2, 4000)
            least = min(error(row, each, table, of_row) for each in tried)
            assert error(row, scale, table, of_row) <= least * (1 + 1e-4)


@pytest.mark.parametrize("name", ["int2", "int4", "e2m1", "nf4"])
def test_no_valley_is_missed_far_below_an_outlier(name):
    """Where many small numbers outweigh a large one, the best scale is a small part of the largest one."""
    levels, table = levels_of(GRIDS[name]), np.array(levels_of(GRIDS[name]))
    x = np.random.default_rng(1).standard_normal((50, 400)).astype(np.float32)
    x[:, 0] = np.linspace(5, 80, 50)
    scales = np.float64(least_squares_scales(jnp.asarray(x), levels))
    for row, scale in zip(np.float64(x), scales, strict=True):
        tried = np.abs(row).max() / np.abs(table).max() * np.geomspace(1 / 120, 2, 400)
        assert error(row, scale, table, 1.0) <= min(error(row, s, table, 1.0) for s in tried) * (1 + 1e-4)


def test_zero_points_move_the_integers_that_are_reached():
    zero_points, x = np.array([3, 8, 14]), np.float64(X)
    levels = levels_of(IntGrid(4, signed=False))
    scales = np.float64(least_squares_scales(jnp.asarray(X), levels, None, jnp.asarray(zero_points)))

    def moved(row, scale, zero_point):
        q = np.clip(np.round(row / scale) + zero_point, 0, 15) - zero_point
        return np.square(row - scale * q).sum()

    for row, scale, zero_point in zip(x, scales, zero_points, strict=True):
        tried = np.linspace(0.002, 3, 10000)
        assert moved(row, scale, zero_point) <= min(moved(row, s, zero_point) for s in tried) * (1 + 1e-4)


@pytest.mark.parametrize("x", [np.zeros((2, 4)), np.zeros((2, 0)), np.zeros((0, 4))])
def test_rows_of_nothing_have_the_scale_0(x):
    np.testing.assert_array_equal(
        least_squares_scales(jnp.asarray(x, jnp.float32), (-1.0, 0.0, 1.0)), np.zeros(len(x))
    )


def test_an_empty_weight_has_the_scale_of_another_search():
    def scale(method):
        layer = QuantLinear(
            0,
            4,
            weight_quant=quant.Int8WeightPerChannelFloatMSE,
            weight_mse_search_method=method,
            kernel_init=lambda key, shape, dtype: jnp.zeros(shape, dtype),
            rngs=nnx.Rngs(0),
        )
        return layer.quant_weight().scale

    np.testing.assert_array_equal(scale("exact"), scale("grid"))


def test_many_rows_are_sorted_a_few_at_a_time(monkeypatch):
    from jqinject.core.statistics import exact_scale

    at_once = least_squares_scales(jnp.asarray(X), levels_of(IntGrid(3)))
    monkeypatch.setattr(exact_scale, "MOST_BREAKPOINTS", 500)
    in_parts = least_squares_scales.__wrapped__(jnp.asarray(X), levels_of(IntGrid(3)))
    np.testing.assert_allclose(in_parts, at_once, rtol=1e-6)


QUANTIZERS = {
    "channels": quant.Int8WeightPerChannelFloatMSE.let(bit_width=3),
    "tensor": quant.Int8WeightPerTensorFloatMSE.let(bit_width=4),
    "groups": quant.IntWeightSymmetricGroupQuantMSE.let(bit_width=3, group_size=16),
    "powers of two": quant.Int8WeightPerChannelFixedPointMSE.let(bit_width=3),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", QUANTIZERS)
def test_an_exact_search_is_never_worse_than_another(name):
    def errors(**declared):
        kernel = jax.random.t(jax.random.key(1), 3.0, (64, 8))
        injector = QUANTIZERS[name].let(**declared)
        layer = QuantLinear(64, 8, weight_quant=injector, kernel_init=lambda *_: kernel, rngs=nnx.Rngs(0))
        wrong = np.square(np.float64(layer.quant_weight().value) - np.float64(layer.kernel.get_value()))
        return (
            wrong.sum()
            if name == "tensor"
            else wrong.reshape(4, 16, 8).sum(1 if name == "groups" else (0, 1))
        )

    exact, grid = errors(mse_search_method="exact"), errors()
    assert np.all(exact <= grid * (1 + 1e-5))
    if name != "powers of two":
        assert np.sum(exact) < 0.999 * np.sum(grid)


def test_what_an_exact_search_cannot_do_is_refused():
    with pytest.raises(ValueError, match="sorts a tensor on one device, got axis_name='data'"):
        MSE(AbsMax(), OverTensorView(), mse_search_method="exact", axis_name="data")
    with pytest.raises(ValueError, match=r"x of the shape \(4,\).*\n  cure: x.reshape\(1, -1\)"):
        least_squares_scales(jnp.ones(4), (-1.0, 0.0, 1.0))
    with pytest.raises(
        ValueError, match=r"levels \(1.0, 0.0\); expected rows of numbers, and at least two levels"
    ):
        least_squares_scales(jnp.ones((1, 4)), (1.0, 0.0))
    with pytest.raises(ValueError, match=r"at most 8 bits.\n  cure: mse_search_method = 'fibonacci'"):
        levels_of(IntGrid(16))

    shifted = quant.ShiftedUint8WeightPerTensorFloat.let(
        scaling_stats_impl=MSE(AbsMax(), OverTensorView(), 20, None, "exact")
    )
    with pytest.raises(ValueError, match="the exact search is of a scale without zero point"):
        QuantLinear(8, 4, weight_quant=shifted, rngs=nnx.Rngs(0)).quant_weight()
