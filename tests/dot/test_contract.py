"""`contract`: which numbers two operands are contracted in, by which row of the table, and why not by a faster one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqinject.dot import FrozenParam, ScaleForms, contract
from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.kernels.convolution import Convolution
from jqinject.dot.tensors.choice import choose
from jqinject.quant_tensor import FloatQuantTensor, IntQuantTensor, in_groups

MATMUL = (((1,), (0,)), ((), ()))
DIMS = Dimensions.of(2, 2, MATMUL)


def integers(shape, scale=0.5, bits=8, seed=0):
    numbers = jax.random.randint(jax.random.key(seed), shape, -(2 ** (bits - 1)), 2 ** (bits - 1))
    return IntQuantTensor.from_int(numbers, scale, 0.0, bits)


def grouped(shape, size):
    split = integers((shape[0] // size, size, *shape[1:]))
    return in_groups(split, size, -len(shape), shape[0])


FLOATS = jax.random.normal(jax.random.key(1), (3, 256))
FP8 = FloatQuantTensor.from_payload(jnp.ones((3, 256), jnp.float8_e4m3fn), 0.5)
STORED = FrozenParam.of(
    integers((256, 4)), (0,), has_zero_point=False, forms=ScaleForms(whole_zero_point=True)
)
BY_ROW = FloatQuantTensor.from_payload(jnp.ones((256, 4), jnp.float8_e4m3fn), jnp.ones((256, 1)).at[0].set(2))

TABLE = {
    "integers": (integers((3, 256)), integers((256, 4)), "auto", "integers", ""),
    "stored integers": (integers((3, 256)), STORED, "auto", "integers", ""),
    "large groups": (integers((3, 256)), grouped((256, 4), 128), "auto", "integers", ""),
    "small groups": (integers((3, 256)), grouped((256, 4), 32), "auto", "floats", "fewer than 128 elements"),
    "small groups asked for": (integers((3, 256)), grouped((256, 4), 32), "int", "integers", ""),
    "8-bit floats": (FP8, FP8.T, "auto", "float8", ""),
    "scales along sums": (FP8, BY_ROW, "auto", "floats", "vary along what is summed over"),
    "one float": (FLOATS, integers((256, 4)), "auto", "floats", "the other operand is float"),
    "a stored one and a float": (FLOATS, STORED, "auto", "stored", "the other operand is float"),
    "16 bits": (integers((3, 256), bits=16), integers((256, 4)), "auto", "floats", "no payload in common"),
    "floats asked for": (integers((3, 256)), integers((256, 4)), "float", "floats", ""),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_table_says_which_kernel_and_why_no_faster_one(case):
    lhs, rhs, numbers, kernel, why = TABLE[case]
    chosen = choose(lhs, rhs, DIMS, numbers)
    assert chosen.kernel == kernel
    assert (why in chosen.why) if why else not chosen.why
    right = rhs.get_value() if isinstance(rhs, FrozenParam) else getattr(rhs, "value", rhs)
    exact = np.asarray(getattr(lhs, "value", lhs), np.float64) @ np.asarray(right, np.float64)
    np.testing.assert_allclose(contract(lhs, rhs, MATMUL, numbers=numbers), exact, rtol=1e-5, atol=1e-3)


@pytest.mark.heavy
def test_integers_that_no_quantizer_kept_wait_for_evaluation():
    x, w = (
        IntQuantTensor(y.value, y.scale, None, 8, True, True)
        for y in (integers((3, 256)), integers((256, 4)))
    )
    assert choose(x, w, DIMS).kernel == "integers"
    chosen = choose(x, w, DIMS, rounded=False)
    assert chosen.kernel == "floats" and "as in training" in chosen.why
    assert choose(x, STORED, DIMS, rounded=False).kernel == "integers"


def test_a_stored_operand_is_contracted_as_its_tensor_is_and_gets_no_gradient():
    x = integers((3, 256))
    np.testing.assert_array_equal(contract(x, STORED, MATMUL), contract(x, STORED.quant_tensor(), MATMUL))

    def loss(value):
        return contract(x.set(value=value), STORED, MATMUL).sum()

    np.testing.assert_allclose(
        jax.grad(loss)(x.value), jnp.broadcast_to(STORED.get_value().sum(1), x.shape), rtol=1e-6
    )


@pytest.mark.heavy
def test_convolutions_use_the_same_entry():
    x, w = integers((1, 5, 5, 2)), integers((3, 3, 2, 4))
    conv = Convolution.of(
        x.shape, w.shape, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), dtype=jnp.float32
    )
    np.testing.assert_array_equal(contract(x, w, conv), conv(x.value, w.value))
    assert "int8" in str(jax.make_jaxpr(lambda x, w: contract(x, w, conv))(x, w))
    with pytest.raises(ValueError, match="a convolution has no contraction of 8-bit floats"):
        contract(x, w, conv, numbers="fp8")


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        (
            "int",
            r"contraction='int' needs two IntQuantTensors.*got an array of float32 and integers of 8 bits",
        ),
        ("fp8", r"contraction='fp8' needs two FloatQuantTensors"),
        ("int8", r"contraction must be one of 'auto', 'float', 'int', 'fp8', got 'int8'"),
    ],
)
def test_numbers_that_the_operands_do_not_have_are_refused(numbers, text):
    with pytest.raises(ValueError, match=text):
        contract(FLOATS, integers((256, 4)), MATMUL, numbers=numbers)


@pytest.mark.heavy
@pytest.mark.parametrize("stored", [False, True])
def test_groups_of_the_left_operand_alone_are_contracted_as_those_of_the_right(stored):
    w, x = grouped((256, 4), 128).T, integers((256, 3))
    w = packed(w) if stored else w
    assert choose(w, x, DIMS, swaps=True).swapped
    y, pull = jax.vjp(lambda value: contract(w, x.set(value=value), MATMUL), x.value)
    exact = np.asarray(w.value, np.float64) @ np.asarray(x.value, np.float64)
    np.testing.assert_allclose(y, exact, rtol=1e-6, atol=1e-3)
    np.testing.assert_allclose(pull(jnp.ones_like(y))[0], w.value.T @ jnp.ones_like(y), rtol=1e-5, atol=1e-4)


def packed(w):
    """The tensor without its value, as it is stored."""
    return FrozenParam.of(w, (1,), has_zero_point=False).quant_tensor()
