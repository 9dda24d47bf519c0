"""Contractions of QuantTensors: integers with zero points and groups exactly, convolutions, 8-bit floats."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jqinject.dot import Affine, affine_dot_general, conv_general_dilated, dot_general, einsum
from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.quant_tensor import FloatQuantTensor, IntQuantTensor

MATMUL = (((1,), (0,)), ((), ()))
NHWC = ("NHWC", "HWIO", "NHWC")


def tensor(seed, shape, *, scale=0.25, zero_point=0.0, bits=8, signed=True):
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
    integers = jax.random.randint(jax.random.key(seed), shape, low, high)
    return IntQuantTensor.from_int(integers, scale, zero_point, bits, signed=signed)


def in_float64(lhs, rhs, equation):
    return np.einsum(equation, np.asarray(lhs.value, np.float64), np.asarray(rhs.value, np.float64))


@pytest.mark.heavy
@settings(max_examples=30)  # every kind of operand is compiled anew
@given(
    st.sampled_from([(2, True), (4, False), (8, True), (8, False)]),
    st.sampled_from([(2, False), (4, True), (8, True), (8, False)]),
    st.integers(-100, 100),
    st.integers(-100, 100),
    st.sampled_from([1, 64]),
)
def test_zero_points_are_corrected_exactly(left, right, lzero, rzero, summed):
    (lbits, lsigned), (rbits, rsigned) = left, right
    # Scales of powers of two: the only rounding left would be that of the sum.
    x = tensor(0, (3, summed), scale=0.25, zero_point=float(lzero), bits=lbits, signed=lsigned)
    w = tensor(1, (summed, 4), scale=0.5, zero_point=float(rzero), bits=rbits, signed=rsigned)
    np.testing.assert_array_equal(
        dot_general(x, w, MATMUL, contraction="int"), in_float64(x, w, "ij,jk->ik").astype(np.float32)
    )


def test_zero_points_for_each_channel():
    x = tensor(0, (3, 8), zero_point=jnp.array([[3.0], [-7.0], [0.0]]))
    w = tensor(1, (8, 4), scale=jnp.array([0.5, 1.0, 2.0, 4.0]), zero_point=jnp.array([1.0, -2.0, 9.0, 0.0]))
    np.testing.assert_array_equal(dot_general(x, w, MATMUL, contraction="int"), in_float64(x, w, "ij,jk->ik"))


@pytest.mark.heavy
def test_groups_of_a_weight():
    """A scale for each group of 4 inputs: the summed axis laid out as (groups, group)."""
    scale = 2.0 ** jax.random.randint(jax.random.key(2), (6, 1, 5), -3, 3).astype(jnp.float32)
    w = tensor(1, (6, 4, 5), scale=scale, bits=4)
    x = tensor(0, (3, 6, 4))
    numbers = (((1, 2), (0, 1)), ((), ()))
    np.testing.assert_array_equal(
        dot_general(x, w, numbers, contraction="int"), in_float64(x, w, "bgi,gio->bo")
    )
    np.testing.assert_array_equal(einsum("bgi,gio->bo", x, w), in_float64(x, w, "bgi,gio->bo"))
    text = jax.jit(lambda x, w: dot_general(x, w, numbers)).lower(x, w).as_text()
    assert "i32" in text


def test_batches_with_scales_of_their_own():
    x = tensor(0, (2, 3, 8), scale=jnp.array([0.5, 2.0]).reshape(2, 1, 1))
    w = tensor(1, (2, 8, 4), scale=jnp.array([1.0, 0.25]).reshape(2, 1, 1))
    got = dot_general(x, w, (((2,), (1,)), ((0,), (0,))), contraction="int")
    np.testing.assert_array_equal(got, in_float64(x, w, "bij,bjk->bik"))


@pytest.mark.heavy
def test_gradients_are_those_of_the_values():
    x, w = tensor(0, (3, 8), zero_point=5.0), tensor(1, (8, 4), scale=jnp.array([0.5, 1.0, 2.0, 4.0]))

    def loss(lhs, rhs, kind):
        y = dot_general(x.set(value=lhs), w.set(value=rhs), MATMUL, contraction=kind)
        return jnp.sum(jnp.sin(y / 100))

    for argument in (0, 1):
        ours, theirs = (jax.grad(loss, argument)(x.value, w.value, kind) for kind in ("int", "float"))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    with pytest.raises(TypeError, match="a contraction of integers has no second derivative"):
        jax.hessian(loss)(x.value, w.value, "int")


def test_what_is_contracted_by_itself():
    x, w, wide = tensor(0, (3, 8)), tensor(1, (8, 4)), tensor(1, (8, 4), bits=12)

    def dtypes(lhs, rhs, **how):
        jaxpr = str(jax.make_jaxpr(lambda lhs, rhs: dot_general(lhs, rhs, MATMUL, **how))(lhs, rhs))
        return "preferred_element_type=int32" in jaxpr

    assert dtypes(x, w)
    assert not dtypes(x, w, contraction="float")
    assert not dtypes(x, wide)
    assert not dtypes(x, w.value)
    np.testing.assert_allclose(dot_general(x, w.value, MATMUL), x.value @ w.value, rtol=1e-6)


@pytest.mark.parametrize(
    ("rhs", "kind", "text"),
    [
        (tensor(1, (8, 4), bits=12), "int", "got integers of 8 bits and integers of 12 bits"),
        (jnp.ones((8, 4)), "int", "got integers of 8 bits and an array of float32"),
        (tensor(1, (8, 4)), "fp8", "needs two FloatQuantTensors"),
        (tensor(1, (8, 4)), "bf16", "contraction must be one of 'auto', 'float', 'int', 'fp8', got 'bf16'"),
    ],
)
def test_contractions_that_can_not_be(rhs, kind, text):
    with pytest.raises(ValueError, match=text):
        dot_general(tensor(0, (3, 8)), rhs, MATMUL, contraction=kind)


def test_a_configuration_for_what_is_quantized_already():
    from jqinject.quant.aqt import config_v4

    with pytest.raises(
        TypeError, match=r"lhs is a IntQuantTensor, which is quantized already.*\n.*lhs.value"
    ):
        dot_general(tensor(0, (3, 8)), jnp.ones((8, 4)), MATMUL, config=config_v4())


def test_8_bit_floats():
    x = FloatQuantTensor.from_payload(jnp.ones((3, 8), jnp.float8_e4m3fn), 0.5)
    w = FloatQuantTensor.from_payload(jnp.full((8, 4), 2.0, jnp.float8_e5m2), jnp.array([1.0, 2.0, 3.0, 4.0]))
    np.testing.assert_array_equal(dot_general(x, w, MATMUL), 8 * jnp.array([[1.0, 2.0, 3.0, 4.0]] * 3))
    jaxpr = str(jax.make_jaxpr(lambda x, w: dot_general(x, w, MATMUL, contraction="fp8"))(x, w))
    assert "f8_e4m3fn" in jaxpr


def test_sums_that_are_known_are_not_made_again():
    payload = jnp.arange(-8, 8, dtype=jnp.int8).reshape(4, 4)
    x = Affine(payload, jnp.ones(()), jnp.float32(3))
    dims = Dimensions.of(2, 2, MATMUL)
    plain = Affine(payload, jnp.ones(()))
    known = plain._replace(sums=jnp.sum(payload.astype(jnp.int32), 0, keepdims=True))

    def run(weight):
        return affine_dot_general(x, weight, dims, jnp.float32)

    np.testing.assert_array_equal(run(plain), run(known))
    assert "reduce_sum" in str(jax.make_jaxpr(run)(plain))
    assert "reduce_sum" not in str(jax.make_jaxpr(run)(known))


# --- convolutions

CONVOLUTIONS = [
    {"window_strides": (1, 1), "padding": "SAME"},
    {"window_strides": (2, 2), "padding": "VALID"},
    {"window_strides": (2, 1), "padding": ((1, 2), (0, 3))},
    {"window_strides": (1, 1), "padding": "SAME", "rhs_dilation": (2, 1)},
    {"window_strides": (1, 1), "padding": ((2, 2), (2, 2)), "lhs_dilation": (2, 3)},
]


@pytest.mark.parametrize("options", CONVOLUTIONS)
@pytest.mark.parametrize(("signed", "zero_point"), [(True, 0.0), (True, 11.0), (False, 0.0), (False, 130.0)])
def test_convolutions_are_exact(options, signed, zero_point):
    x = tensor(0, (2, 7, 8, 4), zero_point=zero_point, signed=signed)
    w = tensor(1, (3, 3, 4, 5), scale=2.0 ** jnp.arange(-2.0, 3.0))
    got = conv_general_dilated(x, w, dimension_numbers=NHWC, contraction="int", **options)
    exact = conv_general_dilated(x.value, w.value, dimension_numbers=NHWC, **options)
    np.testing.assert_array_equal(got, exact)


def test_convolutions_in_groups_and_one_dimension():
    x, w = tensor(0, (2, 9, 6)), tensor(1, (3, 2, 9), scale=2.0 ** jnp.arange(-4.0, 5.0))
    how = {"dimension_numbers": ("NWC", "WIO", "NWC"), "feature_group_count": 3}
    got = conv_general_dilated(x, w, (1,), "SAME", contraction="int", **how)
    np.testing.assert_array_equal(got, conv_general_dilated(x.value, w.value, (1,), "SAME", **how))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("options", CONVOLUTIONS)
def test_zero_points_of_kernels(options, signed):
    x = tensor(0, (2, 7, 8, 4), zero_point=130.0, signed=False)
    w = tensor(1, (3, 3, 4, 5), zero_point=jnp.arange(5.0) * 20, signed=signed)

    def convolve(x, w, kind):
        return conv_general_dilated(x, w, dimension_numbers=NHWC, contraction=kind, **options)

    for got in (convolve(x, w, "int"), jax.jit(convolve, static_argnums=2)(x, w, "int")):
        np.testing.assert_array_equal(got, convolve(x, w, "float"))


@pytest.mark.heavy
@pytest.mark.parametrize("groups", [{"feature_group_count": 3}, {"batch_group_count": 3}])
def test_zero_points_of_kernels_in_groups(groups):
    x, w = tensor(0, (3, 9, 6), zero_point=5.0), tensor(1, (3, 6, 9), zero_point=jnp.arange(9.0))
    w = w if "batch_group_count" in groups else w[:, :2]
    how = {"dimension_numbers": ("NWC", "WIO", "NWC"), **groups}
    got = conv_general_dilated(x, w, (1,), "SAME", contraction="int", **how)
    np.testing.assert_array_equal(got, conv_general_dilated(x.value, w.value, (1,), "SAME", **how))


def test_gradients_of_convolutions():
    x, w = tensor(0, (2, 7, 8, 4), zero_point=3.0), tensor(1, (3, 3, 4, 5))

    def loss(lhs, rhs, kind):
        y = conv_general_dilated(
            x.set(value=lhs), w.set(value=rhs), (2, 2), "SAME", dimension_numbers=NHWC, contraction=kind
        )
        return jnp.sum(jnp.sin(y / 100))

    for argument in (0, 1):
        ours, theirs = (jax.grad(loss, argument)(x.value, w.value, kind) for kind in ("int", "float"))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("weight", "kind", "text"),
    [
        ({"bits": 9}, "int", r"needs two IntQuantTensors of at most 8 bits"),
        ({"scale": jnp.ones((3, 1, 1, 1))}, "int", r"one scale or one for each output feature"),
        ({}, "fp8", "a convolution has no contraction of 8-bit floats"),
        ({}, "tf32", "contraction must be one of"),
    ],
)
def test_convolutions_that_can_not_be(weight, kind, text):
    with pytest.raises(ValueError, match=text):
        conv_general_dilated(
            tensor(0, (2, 7, 8, 4)),
            tensor(1, (3, 3, 4, 5), **weight),
            (1, 1),
            "SAME",
            dimension_numbers=NHWC,
            contraction=kind,
        )
