"""Operators: what the integers of the result are. The reference's numbers are in tests/golden."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqinject.quant_tensor import (
    DifferentScalesWarning,
    IntQuantTensor,
    ceil_log2,
    larger,
    product_sum_bit_width,
    sum_bit_width,
)


def tensor(integers, scale=0.5, zero_point=0.0, bit_width=8, signed=True, training=False):
    return IntQuantTensor.from_int(
        jnp.array(integers), scale, zero_point, bit_width, signed=signed, training=training
    )


A, B = [1, -2, 100], [3, 4, -50]


def test_sum_and_difference():
    x, y = tensor(A), tensor(B, bit_width=4)
    assert ((x + y).bit_width, (x - y).bit_width) == (9, 9)
    np.testing.assert_array_equal((tensor(A) + tensor(B)).int(), np.add(A, B))
    np.testing.assert_array_equal((tensor(A) - tensor(B)).int(), np.subtract(A, B))


def test_zero_points_add_and_subtract():
    x, y = tensor([10, 20], zero_point=7.0, signed=False), tensor([1, 2], zero_point=5.0, signed=False)
    total, difference = x + y, x - y
    np.testing.assert_array_equal(total.int(), [11, 22])
    assert float(total.zero_point) == 12.0
    # The negative has integers and zero point of the other sign, so that the value is the negative.
    np.testing.assert_array_equal(difference.value, x.value - y.value)
    assert float(difference.zero_point) == 2.0
    assert difference.is_valid
    np.testing.assert_array_equal(difference.int(), [9, 18])


def test_different_scales_are_refused_in_evaluation_mode_with_both_numbers():
    with pytest.raises(
        ValueError, match=r"a \+ b: scaling factors are different, 0\.5 and 0\.25.*shared quantizer"
    ):
        tensor(A) + tensor(A, scale=0.25)
    with pytest.raises(ValueError, match=r"0\.5 and \[0\.5, 0\.5, 0\.25\]"):
        tensor(A) + tensor(A, scale=jnp.array([0.5, 0.5, 0.25]))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("signed", "by_signed"), [(True, False), (False, True), (True, True), (False, False)]
)
def test_a_quotient_goes_by_the_width_and_the_sign_of_its_divisor(signed, by_signed, traced):
    bits, by_bits = (jnp.float32(6), jnp.float32(4)) if traced else (6, 4)
    top, below = tensor([6, 3], 0.5, 0.0, bits, signed), tensor([3, 2], 0.25, 0.0, by_bits, by_signed)
    quotient = top / below
    np.testing.assert_array_equal(quotient.value, top.value / below.value)
    largest = 8 if by_signed else 16  # magnitudes that 4 bits hold
    assert float(quotient.scale) == 0.5 / (0.25 * largest)
    assert (float(quotient.bit_width), quotient.signed) == (10, signed or by_signed)


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True)])
def test_different_scales_are_averaged_in_training_mode(first, second):
    with pytest.warns(
        DifferentScalesWarning, match=r"0\.5 and 0\.25.*shared quantizer.*evaluation refuses it"
    ):
        total = tensor(A, training=first) + tensor(A, scale=0.25, training=second)
    assert float(total.scale) == 0.375
    assert total.training


def test_scales_are_not_compared_under_tracing():
    total = jax.jit(lambda x, y: x + y)(tensor(A), tensor(B, scale=0.25))
    assert not total.is_valid


def test_a_number_moves_the_zero_point():
    x = tensor(A, bit_width=8)
    for shifted, zero_point in [(x + 1.5, -3.0), (1.5 + x, -3.0), (x - 1.5, 3.0)]:
        assert float(shifted.zero_point) == zero_point
        np.testing.assert_array_equal(shifted.int(), A)
    back = 1.5 - x
    np.testing.assert_array_equal(back.value, 1.5 - x.value)
    np.testing.assert_array_equal(back.int(), np.negative(A))
    vector = x + jnp.array([0.5, 1.0, 1.5])
    assert vector.zero_point.shape == (3,)
    np.testing.assert_array_equal(vector.int(), A)
    assert isinstance(jnp.ones(3) + x, jax.Array)


def test_product_and_quotient():
    x, y = tensor(A), tensor([2, 3, -1], scale=0.25, bit_width=4)
    product = x * y
    assert (product.bit_width, float(product.scale)) == (12, 0.125)
    np.testing.assert_array_equal(product.int(), np.multiply(A, [2, 3, -1]))
    quotient = x / y
    assert (quotient.bit_width, float(quotient.scale)) == (12, 0.5 / (0.25 * 8))
    assert (
        isinstance(x * 2.0, jax.Array) and isinstance(2.0 * x, jax.Array) and isinstance(x / 2.0, jax.Array)
    )


@pytest.mark.parametrize("operation", ["*", "/"])
def test_products_refuse_zero_points(operation):
    x, y = tensor(A, zero_point=3.0), tensor(B)
    with pytest.raises(ValueError, match=rf"a \{operation} b: zero points .* non-zero, 3 and 0.*symmetric"):
        x * y if operation == "*" else x / y


def test_a_traced_product_of_tensors_with_zero_points_is_still_on_its_grid():
    x = tensor([10, 20], zero_point=7.0)
    product = jax.jit(lambda a: a * a)(x)
    assert product.is_valid
    np.testing.assert_array_equal(product.int(), [9, 169])


def test_negative():
    assert (-tensor(A)).bit_width == 8
    unsigned = -tensor([0, 255], signed=False)
    assert (unsigned.bit_width, unsigned.signed) == (9, True)
    np.testing.assert_array_equal(unsigned.int(), [0, -255])
    shifted = -tensor([3, 9], zero_point=4.0)
    np.testing.assert_array_equal(shifted.value, [0.5, -2.5])
    np.testing.assert_array_equal(shifted.int(), [-3, -9])
    # -(-128) does not fit 8 bits, and the tensor says so.
    assert (-tensor([-128])).is_valid is False


def test_absolute_value():
    x = abs(tensor(A))
    assert (x.bit_width, x.signed) == (7, False)
    np.testing.assert_array_equal(x.int(), np.abs(A))
    unsigned = abs(tensor([1, 3], zero_point=2.0, signed=False))
    assert (unsigned.bit_width, unsigned.signed) == (8, False)
    np.testing.assert_array_equal(unsigned.int(), [1, 1])
    with pytest.raises(ValueError, match="abs: the zero point is 2"):
        abs(tensor([3], zero_point=2.0))


def test_constant_widths_stay_python_ints_and_learned_ones_keep_their_gradient():
    assert type(sum_bit_width(3, True, 4, False)) is int
    assert type(product_sum_bit_width(9, 8, 4)) is int
    learned = sum_bit_width(jnp.float32(8.0), True, 8, True)
    assert learned.dtype == jnp.float32 and float(learned) == 9.0
    gradient = jax.grad(lambda b: product_sum_bit_width(6, b, 4))(jnp.float32(8.0))
    np.testing.assert_allclose(gradient, 256 / 255, rtol=1e-5)
    assert float(larger(jnp.float32(3.0), 5)) == 5.0
    assert jax.grad(lambda b: larger(b, 5))(jnp.float32(5.0)) == 1.0


@pytest.mark.parametrize("bits", range(1, 25))
def test_learned_and_constant_widths_agree(bits):
    span = 2**bits
    for exact in (span - 1, span, span + 1):
        if exact < 2**24:
            assert float(ceil_log2(jnp.float32(exact))) == ceil_log2(exact)
            assert float(jax.jit(ceil_log2)(jnp.float32(exact))) == ceil_log2(exact)
