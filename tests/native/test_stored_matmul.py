"""Rows times numbers as they are stored, in bytes and in 4 bits: every rest of a tile, tables, groups, zero points."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
import jqinject.quant as q
from jqinject import native
from jqinject.native.stored_matmul import (
    INT4,
    UINT4,
    Scales,
    StoredRows,
    float_matmul,
    group_matmul,
    int4_matmul,
    takes_stored,
    three_bits,
)
from jqinject.nn import QuantLinear
from jqinject.ops import IntGrid, normal_table

E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
WIDE = (-128, 127, *range(-7, 7))


def halves(seed, *shape):
    """Indices in 4 bits, and the same packed."""
    indices = np.random.default_rng(seed).integers(0, 16, shape).astype(np.uint8)
    return indices, np.asarray(IntGrid(4).pack(jnp.asarray(indices)))


def integers(seed, *shape):
    return np.random.default_rng(seed).integers(-128, 128, shape, np.int8)


def close(got, lhs, rhs):
    """To float32 rounding of a sum of these products, taken in any order."""
    lhs, rhs = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    terms = lhs.shape[-1] + 8
    bound = np.abs(lhs) @ np.abs(rhs.T) * terms * 2.0**-24
    assert np.all(np.abs(np.asarray(got, np.float64) - lhs @ rhs.T) <= bound)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(3, 0), (2, 8), (5, 88), (7, 3, 96), (129, 1040)])
def test_three_bits_become_four(kernel, signed, shape):
    """The last shape is of several parts, whose last words are not read beyond their end."""
    three, four = IntGrid(3, signed), IntGrid(4, signed)
    numbers = np.random.default_rng(0).integers(*three.bounds, shape, three.storage, endpoint=True)
    np.testing.assert_array_equal(
        three_bits(three.pack(jnp.asarray(numbers)), signed), four.pack(jnp.asarray(numbers))
    )


SHAPES = [(1, 9, 1), (2, 33, 127), (3, 5, 128), (7, 70, 129), (16, 8, 300), (17, 19, 65), (197, 9, 2305)]


@pytest.mark.parametrize("table", [INT4, UINT4, E2M1_TWICE, WIDE])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_four_bits_are_exact(kernel, table, m, n, k):
    x, (indices, packed) = integers(m, m, k), halves(n, n, k)
    wanted = x.astype(np.int64) @ np.asarray(table, np.int64)[indices].T
    np.testing.assert_array_equal(int4_matmul(x, packed, table), wanted)


def test_four_bits_of_extremes_and_leading_axes(kernel):
    x = np.full((3, 1, 2, 200), -128, np.int8)
    _, packed = halves(0, 1, 4, 5, 200)
    packed = np.full_like(packed, 0x88)
    np.testing.assert_array_equal(int4_matmul(x, packed, INT4), np.full((3, 4, 2, 5), 128 * 8 * 200))


GROUPS = [(300, 0), (129, 0), (160, 16), (320, 32), (192, 64), (384, 128), (768, 384)]


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("k", "group"), GROUPS)
def test_groups(kernel, k, group, bits, by_column):
    """Floats and integers, few rows and many, with zero points and without, against the dequantized product."""
    stored, n, number = StoredRows(INT4 if bits == 4 else None, group, by_column), 19, k // (group or k)
    if bits == 4:
        indices, payload = halves(k, n, k)
        numbers = np.asarray(INT4)[indices]
    else:
        payload = numbers = integers(k, n, k)
    draw = np.random.default_rng(group)
    scale = draw.uniform(0.5, 2, (number, n)).astype(np.float32)
    zero = draw.integers(-8, 8, (number, n)).astype(np.float32)
    for m, with_zero in ((1, False), (3, True), (6, False), (16, True), (21, False)):
        wide, zeros = (np.repeat(x, k // number, 0).T for x in (scale, zero * with_zero))
        weight = (numbers - zeros.astype(np.float64)) * wide
        laid_out = [jnp.asarray(x.T if by_column else x) for x in (scale, zero)]
        scales = Scales(laid_out[0], laid_out[1] if with_zero else None)
        if takes_stored(stored, k, m, floats=True):
            x = draw.normal(size=(m, k)).astype(np.float32)
            close(float_matmul(x, payload, scales, stored), x, weight)
        if takes_stored(stored, k, m, floats=False):
            x = integers(m, m, k)
            x[: m // 2] = np.maximum(x[: m // 2], -127)  # beside -128 AVX2 multiplies in another way
            for of_x in (1, number):
                x_scale = draw.uniform(0.5, 2, (m, of_x)).astype(np.float32)
                got = group_matmul(x, x_scale, payload, scales, stored)
                close(got, x * np.repeat(x_scale, k // of_x, 1).astype(np.float64), weight)


def test_many_rows_of_floats_and_leading_axes(kernel):
    """More rows than a block has, and several matrices, whose last tiles are cut off."""
    x = np.random.default_rng(0).normal(size=(2, 1, 205, 130)).astype(np.float32)
    indices, payload = halves(1, 1, 3, 40, 130)
    scale = np.random.default_rng(2).uniform(0.5, 2, (1, 3, 1, 40)).astype(np.float32)
    got = float_matmul(x, payload, Scales(scale), StoredRows(INT4))
    for i in range(2):
        for j in range(3):
            close(got[i, j], x[i, 0], np.asarray(INT4)[indices[0, j]] * scale[0, j].T)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("k", "group", "bits"), [(2305, 0, 4), (2560, 1280, 8), (2112, 8, 4), (2052, 4, 8), (2176, 128, 4)]
)
def test_many_rows_of_groups(kernel, k, group, bits):
    """More rows than a block has, several matrices, groups of several pieces and pieces of several groups."""
    m, n, number, stored = 199, 70, k // (group or k), StoredRows(INT4 if bits == 4 else None, group)
    draw, x = np.random.default_rng(k), integers(0, 2, 1, m, k)
    x[0, 0, :3] = -128
    if bits == 4:
        indices, payload = halves(1, 1, 3, n, k)
        numbers = np.asarray(INT4)[indices]
    else:
        payload = numbers = integers(1, 1, 3, n, k)
    scale = draw.uniform(0.5, 2, (1, 3, number, n)).astype(np.float32)
    zero = draw.integers(-8, 8, scale.shape).astype(np.int8)
    for of_x, with_zero in ((1, False), (1, True), (number, True)):
        x_scale = draw.uniform(0.5, 2, (2, 1, m, of_x)).astype(np.float32)
        got = group_matmul(x, x_scale, payload, Scales(scale, zero if with_zero else None), stored)
        for i in range(2):
            left = x[i, 0] * np.repeat(x_scale[i, 0], k // of_x, 1).astype(np.float64)
            for j in range(3):
                wide, zeros = (np.repeat(x[0, j], k // number, 0).T for x in (scale, zero * with_zero))
                close(got[i, j], left, (numbers[0, j] - zeros.astype(np.float64)) * wide)


@pytest.mark.parametrize("by_column", [False, True])
def test_scales_and_zero_points_in_a_byte(kernel, by_column):
    """The same bits as those of the floats that they stand for; every code is one of the scales."""
    n, k = 37, 256
    x = np.random.default_rng(0).normal(size=(2, k)).astype(np.float32)
    _, payload = halves(1, n, k)
    for group, dtype, of_zero in (
        (16, jnp.float8_e4m3fn, jnp.int8),
        (32, jnp.float8_e8m0fnu, jnp.uint8),
        (128, jnp.float8_e4m3fn, jnp.uint8),
    ):
        shape = (n, k // group) if by_column else (k // group, n)
        codes = np.arange(shape[0] * shape[1], dtype=np.int64).reshape(shape) + (119 if group == 128 else 0)
        zero = jnp.asarray(codes % 23 - (8 if of_zero == jnp.int8 else 0)).astype(of_zero)
        scale = jax.lax.bitcast_convert_type(jnp.asarray(codes, jnp.uint8), dtype)
        wide = Scales(scale.astype(jnp.float32), zero.astype(jnp.float32))
        stored = StoredRows(INT4, group, by_column)
        for rows in (x[:1], x, np.repeat(x, 4, 0)):
            if takes_stored(stored, k, len(rows), floats=True):
                got, wanted = (float_matmul(rows, payload, s, stored) for s in (Scales(scale, zero), wide))
                np.testing.assert_array_equal(got, wanted)


STATUS = {
    "avx2": "in use, with AVX2: ",
    "few": "in use up to 16 rows, without AVX-512 or AVX2: ",
}


@pytest.mark.heavy
def test_without_avx512(fewer_vectors):
    """The same of the kernels for other processors; those without vectors are for a few rows."""
    vectors, copy = fewer_vectors
    assert native.status().startswith(STATUS[vectors])
    for table, (m, n, k) in zip((INT4, UINT4, E2M1_TWICE, WIDE), (SHAPES[1], *SHAPES[3:]), strict=False):
        test_four_bits_are_exact(copy, table, m, n, k)
    for m, n, k in ((1, 1, 1), (3, 9, 31), (2, 5, 4200)):
        lhs, rhs = integers(m, m, k), integers(n, n, k)
        lhs[0], rhs[0] = -128, -128  # two such products do not fit in 16 bits
        for left in (lhs, np.maximum(lhs, -127)):
            np.testing.assert_array_equal(native.int8_matmul(left, rhs), left.astype(int) @ rhs.T.astype(int))
    for k, group, bits in (
        (300, 0, 4),
        (129, 0, 8),
        (160, 16, 8),
        (320, 32, 4),
        (384, 128, 4),
        (4608, 512, 8),
    ):
        test_groups(copy, k, group, bits, by_column=bits == 8)
    test_scales_and_zero_points_in_a_byte(copy, by_column=False)
    if vectors == "avx2":
        test_many_rows_of_floats_and_leading_axes(copy)
    else:
        assert not takes_stored(StoredRows(), 64, 5, True) and not takes_stored(StoredRows(), 64, 17, False)


def test_which_groups_fit(kernel):
    four, eight = StoredRows(INT4, 8), StoredRows(None, 8)
    assert (
        takes_stored(four, 64, 1, True)
        and takes_stored(eight, 64, 1, False)
        and not takes_stored(eight, 64, 1, True)
    )
    assert not takes_stored(StoredRows(INT4, 48), 96, 1, True)  # neither fills a step nor is filled by some
    assert not takes_stored(StoredRows(INT4, 32), 48, 1, True)
    assert not takes_stored(StoredRows(INT4, 16), 16 * 1025, 1, True)
    with native.use(False):
        assert not takes_stored(four, 64, 1, True)


class Int4(q.Int8WeightPerChannelFloat):
    bit_width = 4


class Table3(q.NF4WeightPerGroupFloat):
    codebook = normal_table(3)


ROWS = q.Int8DynamicActPerRowFloat
GROUPED = q.IntWeightSymmetricGroupQuant
LAYERS = {
    "int8, floats": ({"weight_quant": q.Int8WeightPerChannelFloat}, "float_matmul"),
    "int4, floats": ({"weight_quant": Int4}, "float_matmul"),
    "int4, rows": ({"weight_quant": Int4, "input_quant": ROWS}, "int4_matmul"),
    "int3, rows": ({"weight_quant": Int4, "weight_bit_width": 3, "input_quant": ROWS}, "three_bits"),
    "table of 3 bits": ({"weight_quant": Table3}, "three_bits"),
    "groups of 128, rows": (
        {"weight_quant": GROUPED, "weight_bit_width": 4, "weight_group_size": 128, "input_quant": ROWS},
        "group_matmul",
    ),
    "groups of both": (
        {"weight_quant": q.MXInt8Weight, "input_quant": q.MXInt8Act, "contraction": "int"},
        "group_matmul",
    ),
    "zero points": (
        {
            "weight_quant": q.ShiftedUint8WeightGroupQuantFloat,
            "weight_bit_width": 4,
            "weight_group_size": 32,
        },
        "float_matmul",
    ),
    "uint8": ({"weight_quant": q.ShiftedUint8WeightPerTensorFloat}, "float_matmul"),
    "int8, bfloat16": ({"weight_quant": q.Int8WeightPerChannelFloat, "dtype": jnp.bfloat16}, "float_matmul"),
    "int4, float16": (
        {"weight_quant": Int4, "dtype": jnp.float16, "param_dtype": jnp.float16},
        "float_matmul",
    ),
    "NF4, bfloat16": (
        {"weight_quant": q.NF4WeightPerGroupFloat, "dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16},
        "float_matmul",
    ),
    "groups of 128, rows, bfloat16": (
        {
            "weight_quant": GROUPED,
            "weight_bit_width": 4,
            "weight_group_size": 128,
            "input_quant": ROWS,
            "dtype": jnp.bfloat16,
            "param_dtype": jnp.bfloat16,
        },
        "group_matmul",
    ),
    "NF4": ({"weight_quant": q.NF4WeightPerGroupFloat}, "float_matmul"),
    "zero points of 3 bits, bfloat16": (
        {
            "weight_quant": q.ShiftedUint8WeightGroupQuantFloat,
            "weight_bit_width": 3,
            "weight_group_size": 32,
            "dtype": jnp.bfloat16,
        },
        "three_bits",
    ),
    "MX": ({"weight_quant": q.MXFloat4e2m1Weight}, "float_matmul"),
    "NVFP4": ({"weight_quant": q.NVFP4Weight}, "float_matmul"),
}


NARROW = {jnp.bfloat16: 2.0**-7, jnp.float16: 2.0**-10}
"""Two roundings to the dtype, relative."""


def as_float32(x):
    return np.asarray(x, np.float32)


@pytest.mark.heavy
@pytest.mark.parametrize("name", LAYERS)
def test_frozen_layers(both, name):
    """By the kernel and by XLA: the output, and the gradient of the input."""
    arguments, function = LAYERS[name]
    dtype = arguments.get("dtype", jnp.float32)
    x = jax.random.normal(jax.random.key(0), (5, 256), dtype)
    layer = QuantLinear(256, 9, **arguments, rngs=nnx.Rngs(0))
    layer(x)
    layer.eval()
    evaluated = layer(x)
    graphdef, state = nnx.split(jqinject.freeze(layer))

    def call(state, x):
        y, pull = jax.vjp(lambda x: nnx.merge(graphdef, state)(x), x)
        return y, pull(jnp.cos(y))[0]

    assert f"jqinject_{function}" in jax.jit(call).lower(state, x).as_text()
    calls, with_kernel, without = both(call, state, x)
    assert calls >= 1
    # XLA rounds a narrow output, and the dequantized weights of floats; the kernel rounds the output alone.
    near = (
        {"rtol": 1e-5, "atol": 1e-5}
        if dtype == jnp.float32
        else dict.fromkeys(("rtol", "atol"), NARROW[dtype])
    )
    for got, wanted in zip(map(as_float32, with_kernel), map(as_float32, without), strict=True):
        np.testing.assert_allclose(got, wanted, **near)
    np.testing.assert_allclose(as_float32(with_kernel[0]), as_float32(evaluated), **near)
    assert with_kernel[0].dtype == evaluated.dtype == dtype


@pytest.mark.heavy
def test_derivatives_of_floats_by_the_kernel(kernel):
    """It is linear: derivatives of both modes and of second order are those of the dequantized product."""
    layer = QuantLinear(64, 3, weight_quant=Int4, rngs=nnx.Rngs(0))
    frozen = jqinject.freeze(layer)
    weight, bias = frozen.kernel[...], frozen.bias[...]
    x, along = (jax.random.normal(jax.random.key(i), (2, 64)) for i in range(2))

    def loss(product):
        return lambda x: jnp.sum(jnp.sin(product(x)))

    for wanted, got in zip(
        *(
            (
                jax.jvp(loss(product), (x,), (along,))[1],
                jax.jvp(jax.grad(loss(product)), (x,), (along,))[1],
                jax.vmap(loss(product))(jnp.stack([x, along])),
            )
            for product in (lambda x: x @ weight + bias, frozen)
        ),
        strict=True,
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
