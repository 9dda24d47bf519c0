"""`Contraction.contract(..., permutation=...)`: operands in the other order give the bits of a transposition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqinject.dot import Contraction, Float8Numerics, IntNumerics, LocalAqt, OperandQuantizer
from jqinject.dot.geometry.dimensions import Dimensions

INT8, INT4 = OperandQuantizer(IntNumerics(8)), OperandQuantizer(IntNumerics(4))
FLOAT, FP8 = OperandQuantizer(), OperandQuantizer(Float8Numerics(jnp.float8_e4m3fn))

MATMUL = (((1,), (0,)), ((), ()))

# Left and right shape, dimension numbers.
PRODUCTS = [
    ((5, 40), (40, 3), MATMUL),
    ((2, 5, 40), (40, 3), (((2,), (0,)), ((), ()))),
    ((40, 5), (3, 4, 40), (((0,), (2,)), ((), ()))),
    ((2, 5, 40), (2, 40, 3), (((2,), (1,)), ((0,), (0,)))),
    ((5, 2, 40, 3), (3, 40, 4, 2), (((2, 3), (1, 0)), ((1,), (3,)))),
    ((40,), (40, 3), (((0,), (0,)), ((), ()))),
]
PAIRS = {"int8": (INT8, INT8), "int8, int4": (INT8, INT4), "int4, int8": (INT4, INT8)}


def operands(left, right):
    return (3.0 * jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate((left, right)))


def check(contraction, left, right, numbers, permutation=None, dtype=jnp.float32):
    x, w = operands(left, right)
    dims = Dimensions.of(len(left), len(right), numbers)
    permutation = dims.rhs_first if permutation is None else permutation
    permuted = jax.jit(lambda x, w: contraction(x, w, dims, dtype, permutation=permutation))(x, w)
    after = jax.jit(lambda x, w: contraction(x, w, dims, dtype).transpose(permutation))(x, w)
    assert permuted.dtype == dtype
    np.testing.assert_array_equal(permuted, after)
    assert bool(jnp.any(permuted != 0))


@pytest.mark.parametrize(("left", "right", "numbers"), PRODUCTS)
@pytest.mark.parametrize("pair", PAIRS)
def test_the_other_order_gives_the_same_bits(left, right, numbers, pair):
    check(Contraction(*PAIRS[pair]), left, right, numbers)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_other_dtypes(dtype):
    check(Contraction(INT8, INT4), *PRODUCTS[0], dtype=dtype)


@pytest.mark.parametrize("pair", [(FLOAT, INT8), (INT8, FLOAT), (FP8, FP8), (FLOAT, FLOAT)])
def test_what_are_no_integers_is_transposed(pair):
    check(Contraction(*pair), *PRODUCTS[3])


@pytest.mark.parametrize("permutation", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)])
def test_any_permutation(permutation):
    """Of a product with a batch axis only the last is that of the operands in the other order."""
    check(Contraction(INT8, INT4), *PRODUCTS[3], permutation=permutation)


@pytest.mark.parametrize("mode", ["this_input", "other_input"])
@pytest.mark.parametrize("side", [0, 1], ids=["left", "right"])
def test_scales_that_are_multiplied_in_before(mode, side):
    axes = "contracting" if mode == "this_input" else "remaining"
    pair = [INT8, INT8]
    pair[side] = OperandQuantizer(IntNumerics(8), dequant_mode=mode, calibration_axes=axes)
    check(Contraction(*pair), *PRODUCTS[0])


def test_one_scale_for_a_tensor():
    whole = OperandQuantizer(IntNumerics(8), calibration_axes="tensor")
    check(Contraction(whole, INT8), *PRODUCTS[1])
    check(Contraction(INT8, whole), *PRODUCTS[1])


def test_tiles():
    check(Contraction(INT8, INT8, local_aqt=LocalAqt(contraction_axis_shard_count=4)), *PRODUCTS[1])


@pytest.mark.parametrize("pair", [(INT8, INT4), (INT4, INT8)])
def test_the_range_of_each_operand_goes_with_it(pair):
    """36 products of up to 127 * 7 fit int16, 36 of 128 * 8, what the dtypes could hold, do not."""
    contraction = Contraction(*pair, accumulator_dtype=jnp.int16)
    check(contraction, (5, 36), (36, 3), MATMUL)
    left, right = (5, 40), (40, 3)
    dims = Dimensions.of(2, 2, MATMUL)
    for permutation in (None, dims.rhs_first):
        with pytest.raises(ValueError, match=r"int16 can overflow: 40 products of up to"):
            contraction(*operands(left, right), dims, jnp.float32, permutation=permutation)


def test_integers_are_not_transposed_in_the_program():
    """That is what it is for."""
    left, right, numbers = (5, 40), (3, 40), (((1,), (1,)), ((), ()))
    dims = Dimensions.of(2, 2, numbers)
    specs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (left, right)]

    def program(pair):
        def run(x, w):
            return Contraction(*pair)(x, w, dims, jnp.float32, permutation=dims.rhs_first)

        return str(jax.make_jaxpr(run)(*specs))

    # Each operand is laid out anew by the CPU's kernel, in the order that it has; the output is not.
    assert "transpose[permutation=(1, 0)]" not in program((INT8, INT8))
    assert "transpose[permutation=(1, 0)]" in program((FLOAT, FLOAT))
