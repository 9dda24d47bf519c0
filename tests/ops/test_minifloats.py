"""Minifloats against their definition: every code decoded by hand, every number rounded to the nearest of them."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from scipy.stats import norm

from jqinject import ops
from jqinject.ops import NF4, FloatGrid, TableGrid, max_available_float, normal_table
from jqinject.ops.float_grid import DTYPE_GRIDS
from jqinject.ops.minifloat import exponent_of
from jqinject.optim import dynamic_table

# Compiled, each at once.
from_float_codes = jax.jit(lambda codes, form: form.decode(codes), static_argnums=1)
to_float_codes = jax.jit(lambda x, form: form.codes(x), static_argnums=1)
to_float_grid = jax.jit(ops.to_float_grid, static_argnums=(1, 2, 3))
FORMATS = [
    FloatGrid(1, 0),
    FloatGrid(3, 0),
    FloatGrid(2, 1),
    FloatGrid(3, 2, signed=False),
    FloatGrid(4, 3, 20),
    FloatGrid(5, 1, -3),
    FloatGrid(2, 6),
]
every_dtype = pytest.mark.parametrize("dtype", list(DTYPE_GRIDS), ids=str)


def by_hand(form):
    """All numbers of a format without a sign, by their codes, from the definition."""
    steps, found = 2**form.mantissa_bit_width, []
    for field in range(2**form.exponent_bit_width):
        for fraction in range(steps):
            whole = Fraction(fraction, steps) + (field > 0)
            found.append(float(whole * Fraction(2) ** (max(field, 1) - form.exponent_bias)))
    return np.array(found, np.float32)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_codes_and_numbers_are_those_of_the_definition(form):
    numbers = by_hand(form)
    codes = np.arange(len(numbers), dtype=form.code_dtype)
    np.testing.assert_array_equal(from_float_codes(jnp.asarray(codes), form), numbers)
    np.testing.assert_array_equal(to_float_codes(jnp.asarray(numbers), form), codes)
    assert (form.largest, form.smallest_subnormal) == (numbers.max(), numbers[numbers > 0].min())
    if form.signed:
        negative = to_float_codes(jnp.asarray(-numbers[1:]), form)
        np.testing.assert_array_equal(from_float_codes(negative, form), -numbers[1:])
    # To nearest: no number of the format is nearer than the one taken, and a tie goes to the even code.
    rng = np.random.default_rng(0)
    x = np.abs(rng.standard_normal(64) * numbers.max() * 2.0 ** rng.integers(-12, 1, 64)).astype(np.float32)
    x = np.minimum(np.concatenate([x, (numbers[1:] + numbers[:-1]) / 2]), numbers.max()).astype(np.float32)
    taken = np.asarray(to_float_grid(jnp.asarray(x), form.mantissa_bit_width, form.exponent_bias, jnp.round))
    distance = np.abs(numbers[None] - x[:, None])
    np.testing.assert_array_equal(np.abs(taken - x), distance.min(1))
    tie = (distance == distance.min(1, keepdims=True)).sum(1) == 2
    even = np.asarray(to_float_codes(jnp.asarray(taken), form)) % 2 == 0
    if form.mantissa_bit_width:  # without a mantissa, neighbours are as even
        assert even[tie].all()


@every_dtype
def test_a_dtype_is_its_format(dtype):
    form = DTYPE_GRIDS[dtype]
    info = ml_dtypes.finfo(dtype)
    assert (form.dtype, form.bit_width, form.largest) == (dtype, info.bits, float(info.max))
    assert form.smallest_subnormal == float(info.smallest_subnormal)
    codes = np.arange(2**form.bit_width, dtype=np.uint8)
    theirs = codes.view(dtype).astype(np.float32)
    ours = np.asarray(from_float_codes(jnp.asarray(codes), form))
    # A format without nan keeps it as the code of -0.
    minus_zero = codes == 2 ** (form.bit_width - 1)
    np.testing.assert_array_equal(ours[~minus_zero], theirs[~minus_zero])
    assert np.isnan(ours[minus_zero]) == (form.nan_values is None)
    x = np.random.default_rng(0).uniform(-1, 1, 500).astype(np.float32) * np.float32(form.largest)
    rounded = to_float_grid(jnp.asarray(x), form.mantissa_bit_width, form.exponent_bias, jnp.round)
    np.testing.assert_array_equal(rounded, x.astype(dtype).astype(np.float32))


@every_dtype
def test_what_is_no_number_comes_back(dtype):
    form = DTYPE_GRIDS[dtype]
    x = jnp.array([jnp.nan, jnp.inf, -jnp.inf])
    again = np.asarray(from_float_codes(to_float_codes(x, form), form))
    expected = [np.nan] * 3 if form.inf_values is None else [np.nan, np.inf, -np.inf]
    np.testing.assert_array_equal(again, expected)


def test_exponents_are_exact_beside_powers_of_two():
    powers = np.float32(2.0) ** np.arange(-125, 128, dtype=np.float32)
    below = np.nextafter(powers, np.float32(0))
    exact = np.log2(powers.astype(np.float64))
    np.testing.assert_array_equal(exponent_of(jnp.asarray(powers)), exact)
    np.testing.assert_array_equal(exponent_of(jnp.asarray(-below)), exact - 1)


def test_a_format_with_codes_that_are_numbers_keeps_the_numbers():
    form = FloatGrid(4, 3, nan_values=("111",))  # 480 has the code of nan: nothing ends before it
    numbers = jnp.array([480.0, -480.0, jnp.nan])
    np.testing.assert_array_equal(from_float_codes(to_float_codes(numbers, form), form), numbers)
    assert form.dtype is None


def test_which_formats_hardware_has():
    ocp = FloatGrid(4, 3, nan_values=("111",), max_available_float=448.0)
    fnuz = FloatGrid(5, 2, 16)
    assert (ocp.is_ocp, ocp.is_fnuz, ocp.dtype) == (True, False, jnp.float8_e4m3fn)
    assert (fnuz.is_ocp, fnuz.is_fnuz, fnuz.dtype) == (False, True, jnp.float8_e5m2fnuz)
    assert FloatGrid(4, 3).dtype is FloatGrid(2, 1, signed=False).dtype is None
    # An overflow to inf is none to nan.
    codes = {"inf_values": ("00",), "nan_values": ("01", "10", "11"), "max_available_float": 57344.0}
    assert FloatGrid(5, 2, saturating=False, **codes).dtype == jnp.float8_e5m2
    assert FloatGrid(4, 3, saturating=False, nan_values=("111",), max_available_float=448.0).dtype is not None


@pytest.mark.parametrize(
    ("widths", "error", "text"),
    [
        ((0, 3), ValueError, r"exponent_bit_width must be in 1 \.\. 8, got 0"),
        ((9, 3), ValueError, r"exponent_bit_width must be in 1 \.\. 8, got 9"),
        ((4, -1), ValueError, r"mantissa_bit_width must be in 0 \.\. 22, got -1"),
        ((4.5, 3), TypeError, r"exponent_bit_width must be an int, got 4\.5"),
        ((8, 7), ValueError, r"float32, in which it is computed, does not hold.*\n  cure: fewer bits"),
        ((4, 3, 200), ValueError, r"float32, in which it is computed, does not hold"),
    ],
)
def test_impossible_widths_are_refused(widths, error, text):
    with pytest.raises(error, match=text):
        FloatGrid(*widths)


@pytest.mark.parametrize(
    ("codes", "text"),
    [
        ({"nan_values": ("11",)}, r"the code '11' has 2 bits, the mantissa has 3"),
        ({"nan_values": ("12x",)}, r"a code is a text of 0s and 1s such as '111', got '12x'"),
        ({"inf_values": ("111",)}, r"codes for inf has some for nan too"),
        ({"saturating": False}, r"neither inf nor nan.*\n  cure: saturating = True"),
    ],
)
def test_impossible_codes_are_refused(codes, text):
    with pytest.raises(ValueError, match=text):
        FloatGrid(4, 3, **codes)


def test_the_largest_number_lies_below_the_codes():
    # e4m3: nan in one code, in two, in all of the largest exponent.
    assert [max_available_float(4, 3, 7, codes, None) for codes in (("111",), ("110", "111"))] == [
        448.0,
        416.0,
    ]
    assert max_available_float(4, 3, 7, tuple(format(c, "03b") for c in range(8)), None) == 240.0
    assert max_available_float(4, 3, 7, None, None) == 480.0


def test_a_learned_format_is_known_where_its_widths_are_whole():
    learned = FloatGrid(jnp.float32(4), jnp.float32(3), 7)
    assert learned.known() == FloatGrid(4, 3, 7) and float(learned.largest) == 480.0
    with pytest.raises(ValueError, match=r"widths 4 and 2\.5 and bias 7 has no codes"):
        FloatGrid(jnp.float32(4), jnp.float32(2.5), 7).known()


def normal_moments(table):
    """Of each cell of a table under a standard normal distribution: its mass, its mean and its squared error."""
    levels = np.array(table.values)
    ends = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    mass, first = np.diff(norm.cdf(ends)), -np.diff(norm.pdf(ends))
    second = mass - np.diff(np.where(np.isfinite(ends), ends, 0) * norm.pdf(ends))
    return mass, first / mass, (second - 2 * levels * first + levels**2 * mass).sum()


@pytest.mark.parametrize("bit_width", range(1, 9))
def test_numbers_of_a_normal_table_are_the_means_of_what_is_rounded_to_them(bit_width):
    table = normal_table(bit_width)
    _, means, error = normal_moments(table)
    np.testing.assert_allclose(table.values, means, rtol=0, atol=1e-10)
    np.testing.assert_array_equal(table.table, -table.table[::-1])
    # Panter and Dite's error for many numbers, which these approach from below; half as many make four times as much.
    assert 0.5 < error * 4**bit_width / (np.sqrt(3) * np.pi / 2) < 1


def test_lloyd_iterations_of_a_normal_table_begin_at_an_even_grid():
    once = normal_table(2, iterations=1)
    _, means, _ = normal_moments(TableGrid((-3.0, -1.0, 1.0, 3.0)))
    np.testing.assert_allclose(once.values, means, rtol=1e-12)
    errors = [normal_moments(normal_table(4, iterations=count))[2] for count in (1, 20, 300)]
    errors.append(normal_moments(normal_table(4))[2])
    assert errors == sorted(errors, reverse=True) and round(errors[-1], 6) == 0.009501


@pytest.mark.parametrize(
    "table", [NF4, normal_table(4), dynamic_table(8, signed=True), dynamic_table(8, signed=False)]
)
@pytest.mark.parametrize("ties_up", [False, True])
def test_numbers_beside_halfway_get_the_nearest_entry(table: TableGrid, ties_up: bool) -> None:
    values = table.table.astype(np.float64)
    near = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    for x in (np.nextafter(near, np.float32(-2)), near, np.nextafter(near, np.float32(2))):
        below, above = x - values[:-1], values[1:] - x
        goes_up = (above < below) | ((above == below) & ties_up)
        np.testing.assert_array_equal(
            table.encode(jnp.asarray(x), ties_up=ties_up), np.arange(near.size) + goes_up
        )


@pytest.mark.heavy
def test_the_gradient_of_rounding_is_finite_beside_the_least_normal_float():
    tiny = jnp.float32([1.2e-38, -1.5e-38, 0.0, 1.0])

    def rounded(x):
        return ops.to_float_grid(x, 3, 7, ops.round_ste).sum()

    np.testing.assert_array_equal(jax.grad(rounded)(tiny), jnp.ones(4))
