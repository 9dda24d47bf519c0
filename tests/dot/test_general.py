"""Quantized contractions of arrays: exact integers, unbiased gradients, every transform."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jqinject.core import FixedRange
from jqinject.dot import QDotGeneral, QuantMode, Scheme, dot_general, einsum
from jqinject.inject import Binding
from jqinject.quant.aqt import OperandInjector, config_fwd_fp8, config_v4

MATMUL = (((1,), (0,)), ((), ()))
EXACT = config_v4(dlhs_bits=8, drhs_bits=8, rng_type=None)
in_one_program = jax.jit(
    partial(dot_general, dimension_numbers=MATMUL), static_argnames=("preferred_element_type", "config")
)


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def reference(x, w, bits=8):
    """`x @ w` in integers, by NumPy."""
    bound = 2 ** (bits - 1) - 0.5
    sx = np.maximum(np.abs(x).max(1, keepdims=True), 0) / np.float32(bound)
    sw = np.abs(w).max(0, keepdims=True) / np.float32(bound)
    sx, sw = (np.where(s == 0, 1, s) for s in (sx, sw))
    q = [
        np.clip(np.round(a / s), -(bound - 0.5), bound - 0.5).astype(np.int64) for a, s in ((x, sx), (w, sw))
    ]
    return (q[0] @ q[1]) * sx * sw


@pytest.mark.heavy
@settings(max_examples=30)  # every shape is compiled anew
@given(
    st.sampled_from([1, 4]),
    st.sampled_from([1, 33]),
    st.sampled_from([1, 3]),
    st.sampled_from([2, 4, 8]),
    st.integers(0, 99),
)
def test_it_is_the_product_of_integers(rows, summed, columns, bits, seed):
    x, w = np.asarray(normal(seed, rows, summed)), np.asarray(normal(seed + 1, summed, columns))
    got = in_one_program(x, w, config=config_v4(fwd_bits=bits, rng_type=None))
    # Where the largest magnitude lies on a tie, one unit either way is right.
    atol = 1.01 * np.abs(x).max() * np.abs(w).max() * 2 / (2 ** (bits - 1) - 0.5)
    np.testing.assert_allclose(got, reference(x, w, bits), rtol=1e-4, atol=1e-5 if bits == 8 else atol)


def test_accumulators_do_not_wrap_around():
    x = jnp.ones((2, 4096))
    config = config_v4(rng_type=None, fwd_accumulator_dtype=None)
    np.testing.assert_allclose(
        dot_general(x, x.T, MATMUL, config=config), 4096 * (127 / 127.5) ** 2 * np.ones((2, 2)), rtol=1e-5
    )


def test_an_accumulator_that_is_too_small():
    x = jnp.ones((2, 64))
    config = config_v4(rng_type=None, fwd_accumulator_dtype=jnp.int16)
    with pytest.raises(
        ValueError, match=r"int16 can overflow: 64 products of up to 128 \* 128 need 22 bits.*\n.*int32"
    ):
        dot_general(x, x.T, MATMUL, config=config)


@pytest.mark.heavy
def test_bfloat16_is_divided_in_float32():
    """AQT divides bfloat16 operands in bfloat16; the error of the gradient is smaller here."""
    x, w, g = normal(0, 64, 48), normal(1, 48, 32), normal(2, 64, 32)
    lowered = [a.astype(jnp.bfloat16) for a in (x, w, g)]
    y, pull = jax.vjp(lambda x, w: in_one_program(x, w, config=EXACT), *lowered[:2])
    assert y.dtype == jnp.bfloat16
    exact = [a.astype(jnp.float32) for a in lowered]
    got = pull(lowered[2])[0].astype(jnp.float32)

    def in_bfloat16(a, axis):
        scale = jnp.max(jnp.abs(a), axis, keepdims=True) / jnp.bfloat16(127.5)
        return jnp.clip(jnp.round(a / scale), -127, 127).astype(jnp.float32) * scale.astype(jnp.float32)

    theirs = in_bfloat16(lowered[2], 1) @ in_bfloat16(lowered[1], 1).T
    error, their_error = (jnp.sqrt(jnp.mean((a - exact[2] @ exact[1].T) ** 2)) for a in (got, theirs))
    assert error < their_error


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtypes(dtype):
    x, w = normal(0, 3, 8, dtype=dtype), normal(1, 8, 5, dtype=dtype)
    y, pull = jax.vjp(lambda x, w: in_one_program(x, w, config=EXACT), x, w)
    assert (y.dtype, *(g.dtype for g in pull(y))) == (dtype,) * 3
    wide = in_one_program(x, w, preferred_element_type=jnp.float32, config=EXACT)
    assert wide.dtype == jnp.float32


@pytest.mark.heavy
def test_zeros_and_empty_arrays():
    zeros = jnp.zeros((3, 4))
    np.testing.assert_array_equal(dot_general(zeros, zeros.T, MATMUL, config=EXACT), np.zeros((3, 3)))
    gradient = jax.grad(lambda x: in_one_program(x, zeros.T, config=EXACT).sum())(zeros)
    assert bool(jnp.all(jnp.isfinite(gradient)))
    for rows, summed, columns in ((0, 4, 2), (3, 0, 2), (3, 4, 0)):
        y = in_one_program(jnp.ones((rows, summed)), jnp.ones((summed, columns)), config=EXACT)
        assert y.shape == (rows, columns)
        assert not np.any(y)


# --- gradients


def test_gradients_quantize_their_own_operands():
    x, w, g = normal(0, 6, 8), normal(1, 8, 5), normal(2, 6, 5)
    _, pull = jax.vjp(lambda x, w: in_one_program(x, w, config=EXACT), x, w)
    of_x, of_w = pull(g)
    np.testing.assert_allclose(of_x, reference(np.asarray(g), np.asarray(w).T), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(of_w, reference(np.asarray(x).T, np.asarray(g)), rtol=1e-4, atol=1e-5)


@pytest.mark.heavy
def test_stochastic_rounding_needs_a_key_only_for_gradients():
    x = normal(0, 3, 4)
    dot_general(x, x.T, MATMUL, config=config_v4())
    with pytest.raises(ValueError, match=r"stochastic rounding needs a key.*\n.*rngs=nnx.Rngs"):
        jax.grad(lambda x: dot_general(x, x.T, MATMUL, config=config_v4()).sum())(x)


@pytest.mark.heavy
def test_integers_are_rounded_before_they_are_transposed():
    """One loop for both writes bytes one by one into other rows, which takes six times as long on a CPU."""
    config = config_v4(drhs_bits=8, rng_type=None)
    step = jax.jit(jax.grad(lambda x, w: (dot_general(x, w, MATMUL, config=config) ** 2).sum(), (0, 1)))
    program = step.lower(normal(0, 256, 128), normal(1, 128, 256)).compile().as_text()
    loops = [loop for loop in program.split("\n\n") if "ENTRY" not in loop and " transpose(" in loop]
    assert loops and not any("round-nearest-even(" in loop for loop in loops)


@pytest.mark.lengthy
@pytest.mark.parametrize("rng_type", ["jax.uniform", "custom-1", "bits-8"])
def test_stochastic_rounding_is_unbiased_and_reproducible(rng_type):
    config = config_v4(drhs_bits=8, rng_type=rng_type)
    x, w, g = normal(0, 16, 8), normal(1, 8, 6), normal(2, 16, 6)

    @jax.jit
    def pulled(key):
        return jax.vjp(lambda x, w: dot_general(x, w, MATMUL, config=config, key=key), x, w)[1](g)

    keys = jax.random.split(jax.random.key(5), 500)
    drawn = jax.vmap(pulled)(keys)
    still = config_v4(drhs_bits=8, rng_type=None)
    # The mean is the product with only the other operand rounded.
    scale_w = jnp.abs(w).max(1, keepdims=True) / 127.5
    rounded_w = jnp.clip(jnp.round(w / scale_w), -127, 127) * scale_w
    error = jnp.std(drawn[0], 0) / jnp.sqrt(len(keys)) + 1e-6
    # Clipping takes up to half a step from the largest magnitude of each row.
    clipped = jnp.abs(g).max(1, keepdims=True) / 127.5 * jnp.abs(w).max() * 0.5
    assert float(jnp.max((jnp.abs(drawn[0].mean(0) - g @ rounded_w.T) - clipped) / error)) < 5
    again = pulled(keys[0])
    for a, b in zip(again, pulled(keys[0]), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(again[0], pulled(keys[1])[0])
    deterministic = jax.vjp(lambda x, w: in_one_program(x, w, config=still), x, w)[1](g)
    assert not np.array_equal(again[1], deterministic[1])


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_stochastic_rounding_of_8_bit_floats_is_unbiased(dtype):
    """Also just above a power of two, below which the numbers lie closer, and among the smallest."""
    largest, draws = float(jnp.finfo(dtype).max), 4000
    operand = OperandInjector.let(
        bits=dtype, rng_type="jax.uniform", calibration=FixedRange(-largest, largest), shared_axes=(0,)
    )
    exact = jnp.array([0.0, 1.0, -2.0, 0.25, float(jnp.finfo(dtype).tiny)])
    between = jnp.array([1.02, -1.02, 0.26, 1.97, -2.1, 3e-3, 3e-5])
    x = jnp.concatenate([exact, between])

    def rounded(key):
        return Binding(operand).resolve("tensor_quant", rngs=nnx.Rngs(key))(x).value

    drawn = np.asarray(jax.vmap(rounded)(jax.random.split(jax.random.key(0), draws)), np.float64)
    np.testing.assert_array_equal(drawn[:, : exact.size], np.tile(np.asarray(exact), (draws, 1)))
    error = drawn.std(0)[exact.size :] / np.sqrt(draws)
    np.testing.assert_array_less(np.abs(drawn.mean(0)[exact.size :] - np.asarray(between)), 4 * error)


@pytest.mark.heavy
def test_frozen_operands_have_no_gradient_and_pass_it_on():
    x, w = normal(0, 4, 8), normal(1, 8, 5)
    config = config_v4(dlhs_bits=None, rng_type=None)
    op = QDotGeneral(config, rhs_quant_mode=QuantMode.CONVERT)
    expected = dot_general(x, w, MATMUL, config=config)
    np.testing.assert_array_equal(op(x, w, MATMUL), expected)
    op.rhs_quant_mode = QuantMode.SERVE
    np.testing.assert_array_equal(op(x, jnp.zeros_like(w), MATMUL), expected)
    gradients = jax.grad(lambda x, w: op(x, w, MATMUL).sum(), (0, 1))(x, w)
    right = op.rhs_freezer.get()[...]
    np.testing.assert_allclose(gradients[0], jnp.ones((4, 5)) @ right.T, rtol=1e-5)
    np.testing.assert_array_equal(gradients[1], 0 * w)


@pytest.mark.heavy
def test_no_second_derivative():
    with pytest.raises(TypeError, match=r"a quantized contraction has no second derivative"):
        jax.hessian(lambda x: dot_general(x, x.T, MATMUL, config=EXACT).sum())(normal(0, 2, 3))


# --- dimension numbers

SHAPES = [
    ((5, 7), (7, 3), MATMUL),
    ((7, 5), (7, 3), (((0,), (0,)), ((), ()))),
    ((5, 7), (3, 7), (((1,), (1,)), ((), ()))),
    ((2, 5, 7), (7, 3), (((2,), (0,)), ((), ()))),
    ((2, 5, 7), (2, 7, 3), (((2,), (1,)), ((0,), (0,)))),
    ((5, 2, 7), (7, 3, 2), (((2,), (0,)), ((1,), (2,)))),
    ((2, 3, 4), (4, 2, 6), (((0, 2), (1, 0)), ((), ()))),
    ((7,), (7,), (((0,), (0,)), ((), ()))),
    ((3,), (4,), (((), ()), ((), ()))),
]


@pytest.mark.lengthy
@pytest.mark.parametrize(("lhs", "rhs", "numbers"), SHAPES)
@pytest.mark.parametrize("config", [EXACT, config_fwd_fp8()], ids=["int8", "fp8"])
def test_dimension_numbers(lhs, rhs, numbers, config):
    x, w = normal(0, *lhs), normal(1, *rhs)
    y, pull = jax.vjp(lambda x, w: dot_general(x, w, numbers, config=config), x, w)
    g = normal(2, *y.shape)
    exact, size = (
        jax.vjp(lambda x, w: jax.lax.dot_general(x, w, numbers), *operands)
        for operands in ((x, w), (jnp.abs(x), jnp.abs(w)))
    )
    wanted, sizes = (exact[0], *exact[1](g)), (size[0], *size[1](jnp.abs(g)))
    share = 0.02 if config is EXACT else 0.1  # of the sum of magnitudes, that rounding may make
    for a, b, magnitude in zip((y, *pull(g)), wanted, sizes, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=share * float(jnp.max(magnitude)))


@pytest.mark.parametrize(
    ("numbers", "error", "text"),
    [
        (
            (((1,), (1,)), ((), ())),
            ValueError,
            "summed axes differ in length: axis 1 of lhs has 7, axis 1 of rhs has 3",
        ),
        ((((5,), (0,)), ((), ())), ValueError, r"lhs has shape \(5, 7\) and no axis 5"),
        ((((1,), ()), ((), ())), ValueError, r"lhs has 1 summed axes .* they go in pairs"),
        ((((1, -1), (0, 0)), ((), ())), ValueError, "name an axis of lhs twice"),
        ("ij,jk", TypeError, r"dimension_numbers must be \(\(lhs_contract"),
    ],
)
def test_dimension_numbers_that_do_not_fit(numbers, error, text):
    with pytest.raises(error, match=text):
        dot_general(jnp.ones((5, 7)), jnp.ones((7, 3)), numbers, config=EXACT)


# --- einsum

EQUATIONS = [
    ("bd,df->bf", (3, 4), (4, 5)),
    ("df,bd->bf", (4, 5), (3, 4)),
    ("abc,cd->abd", (2, 3, 4), (4, 5)),
    ("bqhd,bkhd->bhqk", (2, 3, 4, 5), (2, 6, 4, 5)),
    ("bhqk,bkhd->bqhd", (2, 4, 3, 6), (2, 6, 4, 5)),
    ("...d,df->...f", (2, 3, 4), (4, 5)),
    ("...d,...d", (2, 3, 4), (3, 4)),
    ("ba,cb", (2, 3), (4, 2)),
    ("iij,j->ij", (2, 2, 3), (3,)),
    ("iji,jk->ik", (2, 3, 2), (3, 4)),
    ("ijk,k->j", (2, 3, 4), (4,)),
    ("i,j->ji", (2,), (3,)),
    ("...ij,...jk->...ik", (5, 1, 2, 3), (4, 3, 2)),
    ("ij,ij->", (2, 3), (2, 3)),
    ("ij,kj->ik", (2, 1), (4, 3)),
    ("aij,jia->a", (2, 3, 4), (4, 3, 2)),
    (" i j , j -> i ", (2, 3), (3,)),
]


@pytest.mark.parametrize(("equation", "lhs", "rhs"), EQUATIONS)
def test_einsum_is_jnps(equation, lhs, rhs):
    x, w = normal(0, *lhs), normal(1, *rhs)
    np.testing.assert_allclose(einsum(equation, x, w), jnp.einsum(equation, x, w), rtol=1e-4, atol=1e-5)
    assert einsum(equation, x, w, config=EXACT).shape == jnp.einsum(equation, x, w).shape


def test_the_configuration_follows_the_operand():
    x, w = normal(0, 3, 8), normal(1, 8, 5)
    coarse = {"fwd_bits": 8, "rng_type": None}
    one = einsum("bd,df->bf", x, w, config=config_v4(**coarse).let(fwd_rhs_bits=2))
    other = einsum("df,bd->bf", w, x, config=config_v4(**coarse).let(fwd_lhs_bits=2))
    np.testing.assert_allclose(one, other, rtol=1e-6)
    assert not np.allclose(one, einsum("bd,df->bf", x, w, config=config_v4(**coarse)), rtol=1e-3)


@pytest.mark.parametrize(
    ("equation", "error", "text"),
    [
        ("ij,jk,kl->il", ValueError, "contracts two operands, got 3"),
        ("ij->ji", ValueError, "contracts two operands, got 1"),
        ("ij,jk->iz", ValueError, r"the output names \['z'\], which no operand has"),
        ("ij,jk->ii", ValueError, "the output names an axis twice"),
        ("ij,ik->jk", ValueError, "axis 'i' is 2 long in one place and 3 in another"),
        ("ijk,jk->i", ValueError, r"an operand of shape \(2, 3\) does not have 3 axes"),
        (None, TypeError, "an einsum equation must be a string"),
    ],
)
def test_equations_that_do_not_fit(equation, error, text):
    with pytest.raises(error, match=text):
        einsum(equation, jnp.ones((2, 3)), jnp.ones((3, 4)), config=EXACT)


# --- transforms


@pytest.mark.lengthy
def test_under_transforms():
    x, w = normal(0, 4, 8), normal(1, 8, 5)

    def loss(w, x):
        return jnp.sum(jnp.sin(dot_general(x, w, MATMUL, config=EXACT)))

    expected = jax.grad(loss)(w, x)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(w, x), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.grad(jax.checkpoint(loss))(w, x), expected, rtol=1e-6)
    stacked = jax.vmap(jax.grad(loss), in_axes=(None, 0))(w, jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(stacked[0], expected, rtol=1e-5, atol=1e-6)
    shape = jax.eval_shape(jax.grad(loss), w, x)
    assert (shape.shape, shape.dtype) == (w.shape, w.dtype)


@pytest.mark.skipif(jax.device_count() < 8, reason="the mesh has 8 devices")
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_batches(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    x, w = normal(0, 16, 8), normal(1, 8, 5)
    step = jax.jit(jax.value_and_grad(lambda w, x: jnp.sum(jnp.sin(dot_general(x, w, MATMUL, config=EXACT)))))
    expected = step(w, x)
    with jax.set_mesh(mesh):
        spread = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
        got = step(jax.device_put(w, jax.NamedSharding(mesh, jax.P())), spread)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)


def test_integers_reach_the_program():
    x, w = normal(0, 4, 8), normal(1, 8, 5)
    text = jax.jit(lambda x, w: dot_general(x, w, MATMUL, config=EXACT)).lower(x, w).compile().as_text()
    assert "s32[4,5]" in text
    assert "s8[" in text


def test_modes_of_dequantization_agree():
    """Scales multiplied in at the output, or at the input as fake quantization does it."""
    x, w = normal(0, 4, 8), normal(1, 8, 5)
    outputs = []
    for mode in ("output", "this_input"):
        operand = OperandInjector.let(dequant_mode=mode)
        outputs.append(dot_general(x, w, MATMUL, config=Scheme.let(fprop_lhs=operand, fprop_rhs=operand)))
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-6)
