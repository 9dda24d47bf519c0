"""`product`: operands in the other order give the bits of a transposition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqinject.dot import LocalAqt, QDotGeneral, Scheme
from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.tensors.labelled_tensor import LabelledTensor, in_tiles
from jqinject.dot.tensors.product import PLAIN, Sums, product
from jqinject.inject import Binding
from jqinject.quant.aqt import OperandInjector

INT8, INT4, FLOAT = OperandInjector, OperandInjector.let(bits=4), None
FP8 = OperandInjector.let(bits="e4m3")

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


def quantized(operand, x, axes):
    """One scale for what is summed over, or of the whole tensor."""
    if operand is None:
        return x
    axes = tuple(range(x.ndim)) if operand.calibration_axes == "tensor" else axes
    found = Binding(operand, {"shared_axes": axes}).resolve("tensor_quant")
    return found(x, keep=True).quant_tensor(training=False)


def contract(pair, x, w, dims, dtype, permutation, sums=PLAIN):
    a, b = LabelledTensor(x, dims.lhs), LabelledTensor(w, dims.rhs)
    a, b = in_tiles(sums.tiles, dims.summed, a, b)
    a, b = (
        LabelledTensor(quantized(operand, t.tensor, tuple(map(t.axis, dims.summed))), t.labels)
        for operand, t in zip(pair, (a, b), strict=True)
    )
    return product(a, b, tuple(dims.out[axis] for axis in permutation), dtype, sums)


def rhs_first(dims):
    """The right operand's free axes before the left's."""
    places = [dims.out.index(label) for label in dims.swapped().result]
    return tuple(places)


def check(pair, left, right, numbers, permutation=None, dtype=jnp.float32, sums=PLAIN):
    x, w = operands(left, right)
    dims = Dimensions.of(len(left), len(right), numbers)
    permutation = rhs_first(dims) if permutation is None else permutation
    same = tuple(range(len(dims.out)))
    permuted = jax.jit(lambda x, w: contract(pair, x, w, dims, dtype, permutation, sums))(x, w)
    after = jax.jit(lambda x, w: contract(pair, x, w, dims, dtype, same, sums).transpose(permutation))(x, w)
    assert permuted.dtype == dtype
    if sums.tiles is None:
        np.testing.assert_array_equal(permuted, after)
    else:  # XLA may fuse the product by the scales of a tile into the float sum over tiles: one rounding less
        np.testing.assert_allclose(permuted, after, rtol=1e-6, atol=1e-6 * float(jnp.max(jnp.abs(after))))
    assert bool(jnp.any(permuted != 0))


@pytest.mark.heavy
@pytest.mark.parametrize(("left", "right", "numbers"), PRODUCTS)
@pytest.mark.parametrize("pair", PAIRS)
def test_the_other_order_gives_the_same_bits(left, right, numbers, pair):
    check(PAIRS[pair], left, right, numbers)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_other_dtypes(dtype):
    check((INT8, INT4), *PRODUCTS[0], dtype=dtype)


@pytest.mark.parametrize("pair", [(FLOAT, INT8), (INT8, FLOAT), (FP8, FP8), (FLOAT, FLOAT)])
def test_what_are_no_integers_is_transposed(pair):
    check(pair, *PRODUCTS[3])


@pytest.mark.parametrize("permutation", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)])
def test_any_permutation(permutation):
    """Of a product with a batch axis only the last is that of the operands in the other order."""
    check((INT8, INT4), *PRODUCTS[3], permutation=permutation)


@pytest.mark.heavy
@pytest.mark.parametrize("mode", ["this_input", "other_input"])
@pytest.mark.parametrize("side", ["fprop_lhs", "fprop_rhs"])
def test_scales_that_are_multiplied_in_before(mode, side):
    """Then values are contracted: the product of the dequantized operands, to float rounding."""
    shapes = PRODUCTS[0][:2]
    axes = "contracting" if mode == "this_input" else "remaining"
    one = {side: INT8.let(dequant_mode=mode, calibration_axes=axes)}
    op = QDotGeneral(Scheme.let(**{"fprop_lhs": INT8, "fprop_rhs": INT8} | one))
    x, w = operands(*shapes)
    assert op.explain(x, w, MATMUL)[0].kind == "float"
    shared = {"fprop_lhs": 1, "fprop_rhs": 0}
    shared |= {} if mode == "this_input" else {side: 1 - shared[side]}
    left, right = (quantized(INT8, t, (axis,)).value for t, axis in zip((x, w), shared.values(), strict=True))
    np.testing.assert_allclose(op(x, w, MATMUL), np.asarray(left) @ np.asarray(right), rtol=1e-5, atol=1e-4)


def test_one_scale_for_a_tensor():
    whole = INT8.let(calibration_axes="tensor")
    check((whole, INT8), *PRODUCTS[1])
    check((INT8, whole), *PRODUCTS[1])


def test_tiles():
    check((INT8, INT8), *PRODUCTS[1], sums=Sums(tiles=LocalAqt(contraction_axis_shard_count=4)))


def test_integers_are_not_transposed_in_the_program():
    """That is what it is for."""
    left, right, numbers = (5, 40), (3, 40), (((1,), (1,)), ((), ()))
    dims = Dimensions.of(2, 2, numbers)
    specs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (left, right)]

    def program(pair):
        return str(jax.make_jaxpr(lambda x, w: contract(pair, x, w, dims, jnp.float32, (1, 0)))(*specs))

    # Each operand is laid out anew by the CPU's kernel, in the order that it has; the output is not.
    assert "transpose[permutation=(1, 0)]" not in program((INT8, INT8))
    assert "transpose[permutation=(1, 0)]" in program((FLOAT, FLOAT))
