"""Calibrated ranges, their averages, and quantization within them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jqinject.core import (
    AbsMaxRange,
    AbsMeanRange,
    AbsPercentileRange,
    ClippingRange,
    FixedRange,
    MinMaxRange,
    MSERange,
    RMSRange,
    RoundToOddSte,
    SimpleMovingAverage,
    scale_and_zero_point,
)
from jqinject.inject import Binding
from jqinject.quant import Int8ActPerTensorMSE
from tests.ranges import in_range

X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)

RANGES = {
    "absmax": (AbsMaxRange(0.8), lambda x: (None, 0.8 * np.abs(x).max(1))),
    "rms": (RMSRange(3.0), lambda x: (None, 3 * np.sqrt((x**2).mean(1)))),
    "minmax": (MinMaxRange(), lambda x: (np.minimum(x.min(1), 0), np.maximum(x.max(1), 0))),
    "percentile": (AbsPercentileRange(75.0), lambda x: (None, np.percentile(np.abs(x), 75, axis=1))),
    "fixed": (FixedRange(-1.0, 2.0), lambda x: (np.full(1, -1.0), np.full(1, 2.0))),
}


@pytest.mark.parametrize("name", RANGES)
def test_a_range_is_what_its_formula_says(name: str) -> None:
    method, expected = RANGES[name]
    found = jax.jit(lambda x: method(x, (1,)))(jnp.asarray(X))
    low, high = expected(X)
    np.testing.assert_allclose(np.ravel(found.high), high, rtol=1e-6)
    assert (found.low is None) == (low is None)
    if low is not None:
        np.testing.assert_allclose(np.ravel(found.low), low, rtol=1e-6)


@pytest.mark.parametrize("name", RANGES)
def test_a_range_of_one_end_has_no_zero_point(name: str) -> None:
    method, expected = RANGES[name]
    quant = in_range(method)
    assert quant.has_zero_point == (expected(X)[0] is not None)
    if not quant.has_zero_point:
        assert quant(jnp.asarray(X)).zero_point is None
        assert not in_range(method, q_dtype=jnp.float8_e4m3fn).has_zero_point


CUT = {name: method for name, (method, _) in RANGES.items()}
CUT |= {
    "ties": AbsMaxRange(),
    "mean": AbsMeanRange(),
    "mean of all": AbsMeanRange(count_zeros=True),
    "error": MSERange(4),
}


@pytest.mark.heavy
@pytest.mark.skipif(jax.device_count() < 8, reason="groups cross shards on several devices")
@pytest.mark.parametrize("name", CUT)
def test_groups_that_cross_shards_have_the_range_of_whole_ones(name: str) -> None:
    quant = in_range(CUT[name], channelwise_axes=(1,), group_size=24, group_dim=0, group_padding=True)
    x = jax.random.normal(jax.random.key(0), (80, 3)).at[72:, 0].set(0.0).at[74:, 1].add(-9.0)
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    sharded = jax.device_put(x, NamedSharding(mesh, P("model")))

    def run(x: jax.Array) -> tuple[jax.Array, object]:
        result, found = quant(x, keep=True), quant.scaling_impl.clipping_range(x)
        return jnp.sum(jnp.sin(result.value)), (result, found)

    of = jax.jit(jax.value_and_grad(run, has_aux=True))
    found, expected = jax.tree.leaves(of(sharded)), jax.tree.leaves(of(x))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_range_of_least_squared_error_beats_the_largest_magnitude() -> None:
    x = jnp.asarray(np.random.default_rng(1).standard_t(3, size=(2, 500)).astype(np.float32))
    errors = [
        jnp.sum((in_range(method, bit_width=4, channelwise_axes=(0,))(x).value - x) ** 2, 1)
        for method in (MSERange(4), AbsMaxRange())
    ]
    assert jnp.all(errors[0] < errors[1])


@pytest.mark.parametrize(
    "names",
    [
        {"bit_width": 4},
        {"bit_width": 3, "narrow_range": True, "range_steps": 3.0},
        {"q_dtype": np.dtype(jnp.float8_e4m3fn)},
        {"q_dtype": np.dtype(jnp.float8_e5m2)},
        {"bit_width": 3, "narrow_range": True, "range_steps": 4.0, "preserve_zero": False},
    ],
    ids=str,
)
def test_the_range_of_least_squared_error_is_searched_with_the_numbers_of_its_quantizer(names: Any) -> None:
    x = jnp.asarray(np.random.default_rng(3).standard_t(3, size=(500,)).astype(np.float32))
    fractions = (1.0, 0.8, 0.65, 0.5, 0.35, 0.2)
    largest = float(jnp.max(jnp.abs(x)))
    quantizer = {name: number for name, number in names.items() if name != "preserve_zero"}
    quantizer |= {} if names.get("preserve_zero", True) else {"float_to_int_impl": RoundToOddSte()}
    errors = [
        float(jnp.sum((in_range(FixedRange(-high, high), **quantizer)(x).value - x) ** 2))
        for high in (fraction * largest for fraction in fractions)
    ]
    found = MSERange(fractions=fractions, **names)(x, (0,)).high
    np.testing.assert_allclose(found, [largest * fractions[int(np.argmin(errors))]], rtol=1e-6)


def test_a_search_takes_the_bits_of_its_quantizer() -> None:
    four = Binding(Int8ActPerTensorMSE, {"bit_width": 4}).resolve("tensor_quant")
    assert four.scaling_impl.calibration_impl == MSERange(4)


@pytest.mark.parametrize("method", [m for m, _ in RANGES.values()] + [MSERange()])
def test_zeros_and_empty_tensors_have_a_finite_scale(method: object) -> None:
    for shape in ((3, 4), (0, 4)):
        result = in_range(method)(jnp.zeros(shape))  # pyright: ignore[reportArgumentType]
        assert result.value.shape == shape
        assert jnp.all(jnp.isfinite(result.scale)) and jnp.all(result.scale > 0)
        np.testing.assert_array_equal(result.value, np.zeros(shape))


@pytest.mark.parametrize("low", [0.0, -3.0])
def test_zero_is_exact_and_the_ends_are_reached(low: float) -> None:
    x = jnp.array([low, 0.0, 5.0])
    result = in_range(MinMaxRange())(x)
    np.testing.assert_allclose(result.value, x, atol=float(result.scale[0]) / 2)
    assert result.value[1] == 0.0
    assert result.zero_point == jnp.round(result.zero_point)


def test_scale_and_zero_point_of_known_ranges() -> None:
    scale, zero = scale_and_zero_point(ClippingRange(jnp.float32(127.5)), 8)
    assert (float(scale), zero) == (1.0, None)
    scale, zero = scale_and_zero_point(ClippingRange(jnp.float32(255.0), jnp.float32(0.0)), 8)
    assert (float(scale), float(zero)) == (1.0, -128.0)  # pyright: ignore[reportArgumentType]


def test_the_average_counts_the_present_batch_and_stands_still_in_evaluation() -> None:
    quantizer = in_range(AbsMaxRange(), SimpleMovingAverage())
    seen = []
    for top in (1.0, 3.0, 8.0):
        quantizer(jnp.array([[top, 0.0], [-top, 0.0]]))
        seen.append(float(quantizer.scaling_impl.averaged_range().high))
    assert seen == [1.0, 2.0, 4.0]
    quantizer.eval()
    assert float(quantizer(jnp.full((2, 2), 100.0)).value.max()) == pytest.approx(4.0, rel=1e-2)
    assert int(quantizer.scaling_impl.averaging_impl.counter[...]) == 3


def test_every_sample_of_a_batch_counts_alike() -> None:
    quantizer = in_range(AbsMaxRange(), SimpleMovingAverage(), batch_axes=(0,))
    quantizer(jnp.array([[1.0, 0.0], [-3.0, 0.5]]))
    assert float(quantizer.scaling_impl.averaged_range().high) == 2.0


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_batch_that_is_not_finite_stays_out_of_the_average(bad: float) -> None:
    average = SimpleMovingAverage()
    average(ClippingRange(jnp.float32(2.0)), update=True)
    average(ClippingRange(jnp.float32(bad)), update=True)
    assert (int(average.counter[...]), float(average.sum_of_max[...])) == (1, 2.0)


def test_a_momentum_weighs_the_newest_batch() -> None:
    average = SimpleMovingAverage(momentum=0.25)
    found = [float(average(ClippingRange(jnp.float32(x)), update=True).high) for x in (4.0, 8.0, 0.0)]
    assert found == [4.0, 5.0, 3.75]


def test_a_restarted_average_is_that_of_the_last_batch() -> None:
    average = SimpleMovingAverage(restart=True)
    for top in (1.0, 5.0):
        found = average(ClippingRange(jnp.float32(top)), update=True)
    assert (float(found.high), int(average.counter[...])) == (5.0, 1)


def test_the_gradient_passes_inside_the_range_alone() -> None:
    quantizer = in_range(FixedRange(-1.0, 1.0))
    gradient = jax.grad(lambda x: quantizer(x).value.sum())(jnp.array([-2.0, -0.3, 0.9, 1.5]))
    np.testing.assert_array_equal(gradient, [0.0, 1.0, 1.0, 0.0])


@pytest.mark.heavy
def test_the_largest_element_of_its_own_range_keeps_its_gradient() -> None:
    x = jnp.array([0.5, -2.0, 1.0])
    for stop in (False, True):
        quantizer = in_range(AbsMaxRange(), scale_stop_grad=stop)
        np.testing.assert_array_equal(jax.grad(lambda x, q=quantizer: q(x).value.sum())(x)[::2], [1.0, 1.0])
    np.testing.assert_array_equal(jax.grad(lambda x: quantizer(x).value.sum())(x), [1.0, 1.0, 1.0])


def test_rows_have_ranges_of_their_own() -> None:
    x = jnp.array([[1.0, 0.5], [100.0, 50.0]])
    result = in_range(AbsMaxRange(), shared_axes=(-1,))(x)
    assert result.scale.shape == (2, 1)
    np.testing.assert_allclose(result.value, x, rtol=1e-2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_arithmetic_is_float32_and_the_output_has_the_input_s_dtype(dtype: jnp.dtype) -> None:
    result = in_range(MinMaxRange())(jnp.asarray(X, dtype))
    assert (result.value.dtype, result.scale.dtype) == (dtype, jnp.float32)


def test_a_stack_of_quantizers_keeps_one_average_each() -> None:
    @nnx.vmap(in_axes=0, out_axes=0, axis_size=3)
    def make(_: jax.Array) -> Any:
        return in_range(AbsMaxRange(), SimpleMovingAverage())

    stack = make(jnp.zeros(3))
    values = nnx.vmap(lambda q, x: q(x).value)(stack, jnp.arange(6.0).reshape(3, 2))
    assert values.shape == (3, 2)
    np.testing.assert_array_equal(stack.scaling_impl.averaging_impl.counter[...], [1, 1, 1])


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: FixedRange(1.0, 2.0), ValueError, r"must contain 0"),
        (lambda: AbsMaxRange(0.0), ValueError, r"factor must be a positive number"),
        (lambda: AbsPercentileRange(101.0), ValueError, r"from 0 to 100"),
        (lambda: in_range(bit_width=1), ValueError, r"bit_width must be in 2"),
        (lambda: in_range(bit_width=25), ValueError, r"at most 24"),
        (lambda: in_range(q_dtype=jnp.bfloat16), TypeError, r"bfloat16 is no minifloat"),
        (
            lambda: in_range(None, SimpleMovingAverage(), channelwise_axes=(0,)),
            ValueError,
            r"cure: averaging_impl=None",
        ),
        (
            lambda: in_range(MinMaxRange(), q_dtype=jnp.float8_e4m3fn)(jnp.ones(2)),
            ValueError,
            r"have no zero point",
        ),
        (lambda: in_range()(jnp.ones(2, jnp.int32)), TypeError, r"expected a float"),
        (lambda: SimpleMovingAverage(momentum=2.0), ValueError, r"momentum must be in"),
    ],
)
def test_what_can_not_be(make: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()  # pyright: ignore[reportCallIssue]


def test_a_batch_whose_end_would_overflow_the_sum_stays_out() -> None:
    mean, huge = SimpleMovingAverage(), ClippingRange(jnp.float32(1.0), jnp.float32(-3e38))
    for _ in range(3):
        found = mean(huge, update=True)
    assert found.low is not None and float(found.low) == float(jnp.float32(-3e38))
    assert int(mean.counter[...]) == 1


def test_the_largest_finite_tensors_enter_as_the_first_batch() -> None:
    """Both ends of a symmetric range are finite, though they lie further apart than float32 reaches."""
    mean, huge = SimpleMovingAverage(), ClippingRange(jnp.float32(3e38))
    assert float(mean(huge, update=True).high) == float(jnp.float32(3e38))
    assert int(mean.counter[...]) == 1
    quantizer = in_range(AbsMaxRange(), SimpleMovingAverage())
    x = jnp.array([-3e38, 1e38])
    result = quantizer(x)
    assert np.abs(result.value - x).max() <= float(result.scale)
