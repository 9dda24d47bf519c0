"""Contractions of 8-bit floats against `lax.dot_general` on numbers that 8-bit floats hold exactly."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqinject.dot import float8_dot_general
from jqinject.quant_tensor import FloatQuantTensor, IntQuantTensor

CASES = {
    # name: (shape of lhs, shape of rhs, dimension numbers)
    "matrices": ((3, 4), (4, 5), (((1,), (0,)), ((), ()))),
    "both transposed": ((4, 3), (5, 4), (((0,), (1,)), ((), ()))),
    "vector": ((4,), (4, 5), (((0,), (0,)), ((), ()))),
    "inner product": ((4,), (4,), (((0,), (0,)), ((), ()))),
    "outer product": ((3,), (2,), (((), ()), ((), ()))),
    "batch": ((6, 3, 4), (6, 4, 5), (((2,), (1,)), ((0,), (0,)))),
    "batch in the middle": ((3, 6, 4), (4, 5, 6), (((2,), (0,)), ((1,), (2,)))),
    "two batches": ((2, 6, 4, 3), (6, 4, 2, 5), (((2,), (1,)), ((1, 0), (0, 2)))),
    "two sums": ((3, 4, 2), (2, 5, 4), (((1, 2), (2, 0)), ((), ()))),
    "two sums, crossed": ((2, 4, 3), (4, 2, 5), (((1, 0), (0, 1)), ((), ()))),
    "empty": ((0, 4), (4, 5), (((1,), (0,)), ((), ()))),
}
every_case = pytest.mark.parametrize(("lhs_shape", "rhs_shape", "numbers"), CASES.values(), ids=CASES)


def exact(shape: tuple[int, ...], seed: int, dtype: Any, scale: Any) -> FloatQuantTensor:
    """Small whole numbers, which every format holds, times a power of two."""
    whole = jax.random.randint(jax.random.key(seed), shape, -4, 5).astype(jnp.float32)
    return FloatQuantTensor(whole * scale, scale, dtype)


@pytest.mark.heavy
@every_case
@pytest.mark.parametrize("grad_dtype", [None, jnp.float8_e5m2], ids=["float-gradient", "e5m2-gradient"])
def test_as_of_floats(lhs_shape: Any, rhs_shape: Any, numbers: Any, grad_dtype: Any) -> None:
    lhs = exact(lhs_shape, 0, jnp.float8_e4m3fn, jnp.float32(0.5))
    rhs = exact(rhs_shape, 1, jnp.float8_e4m3fn, jnp.float32(0.25))
    expected, expected_pull = jax.vjp(lambda a, b: jax.lax.dot_general(a, b, numbers), lhs.value, rhs.value)

    def contract(a: Any, b: Any) -> Any:
        return float8_dot_general(lhs.set(value=a), rhs.set(value=b), numbers, grad_dtype=grad_dtype)

    (y, token), pull = jax.vjp(contract, lhs.value, rhs.value)
    np.testing.assert_array_equal(y, expected)
    assert token.shape == () and token.dtype == jnp.float32
    scale = jnp.float32(2.0)
    g = jax.random.randint(jax.random.key(2), y.shape, -4, 5).astype(jnp.float32) * scale
    for got, wanted in zip(pull((g, scale)), expected_pull(g), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.lengthy
@pytest.mark.parametrize("grad_dtype", [None, jnp.float8_e5m2], ids=["float-gradient", "e5m2-gradient"])
def test_scales_along_axes_that_are_not_summed_over(grad_dtype: Any) -> None:
    numbers = CASES["batch"][2]
    per_channel = 2.0 ** jnp.arange(-2.0, 3.0).reshape(1, 1, 5)
    per_batch = 2.0 ** jnp.arange(6.0).reshape(6, 1, 1)
    lhs = exact((6, 3, 4), 0, jnp.float8_e4m3fn, per_batch)
    rhs = exact((6, 4, 5), 1, jnp.float8_e4m3fn, per_channel)
    expected, expected_pull = jax.vjp(lambda a, b: jax.lax.dot_general(a, b, numbers), lhs.value, rhs.value)

    def contract(a: Any, b: Any) -> Any:
        return float8_dot_general(lhs.set(value=a), rhs.set(value=b), numbers, grad_dtype=grad_dtype)

    (y, _), pull = jax.vjp(contract, lhs.value, rhs.value)
    np.testing.assert_array_equal(y, expected)
    g = jax.random.randint(jax.random.key(2), y.shape, -4, 5).astype(jnp.float32)
    for got, wanted in zip(pull((g, jnp.float32(1))), expected_pull(g), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_the_sum_is_float32_and_the_output_what_was_asked_for() -> None:
    # 2**11 + 1 is no number of float16 or bfloat16.
    ones = FloatQuantTensor.from_payload(jnp.ones((2049,), jnp.float8_e4m3fn), 1.0, dtype=jnp.bfloat16)
    numbers = (((0,), (0,)), ((), ()))
    assert float(float8_dot_general(ones, ones, numbers, preferred_element_type=jnp.float32)[0]) == 2049
    assert float8_dot_general(ones, ones, numbers)[0].dtype == jnp.bfloat16


def test_what_can_not_be_contracted() -> None:
    tensor = FloatQuantTensor.from_payload(jnp.ones((2, 2), jnp.float8_e4m3fn), 1.0)
    numbers = (((1,), (0,)), ((), ()))
    along_the_sum = tensor.set(scale=jnp.ones((2, 1)))
    with pytest.raises(
        ValueError, match=r"varies along an axis that is summed over.*\n  cure: quantize per tensor"
    ):
        float8_dot_general(tensor, along_the_sum, numbers)
    integers = IntQuantTensor.from_int(jnp.ones((2, 2), jnp.int8), 1.0)
    with pytest.raises(TypeError, match="rhs must be a FloatQuantTensor, got IntQuantTensor"):
        float8_dot_general(tensor, integers, numbers)


@pytest.mark.heavy
def test_a_payload_and_its_scale_make_the_value() -> None:
    payload = jnp.array([1.5, -2.0], jnp.float8_e5m2)
    np.testing.assert_array_equal(FloatQuantTensor.from_payload(payload, 4.0).value, [6, -8])
