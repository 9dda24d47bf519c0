"""Quantized contractions through the kernel are those without it, to the bit: forward, both gradients, every layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jqinject import native
from jqinject.dot import LocalAqt, dot_general, einsum
from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.kernels.integer import integer_contraction
from jqinject.native.library import FUNCTION
from jqinject.quant.aqt import config_v4
from jqinject.quant_tensor import IntQuantTensor

MATMUL = (((1,), (0,)), ((), ()))
EXACT = config_v4(dlhs_bits=8, drhs_bits=8, rng_type=None)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def integers(seed, *shape, dtype=jnp.int8):
    low, high = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    return jax.random.randint(jax.random.key(seed), shape, int(low), int(high) + 1).astype(dtype)


def same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


EQUATIONS = [
    ("bd,df->bf", (3, 40), (40, 5)),  # a weight laid out (in, out)
    ("bd,fd->bf", (3, 40), (5, 40)),  # (out, in), as frozen
    ("df,bd->bf", (40, 5), (3, 40)),  # operands in the other order
    ("db,df->fb", (40, 3), (40, 5)),
    ("abc,cd->abd", (2, 3, 40), (40, 5)),
    ("abc,cde->abde", (2, 3, 40), (40, 4, 5)),
    ("abcd,cde->abe", (2, 3, 4, 10), (4, 10, 5)),  # two summed axes
    ("acbd,dce->abe", (2, 4, 3, 10), (10, 4, 5)),
    ("bqhd,bkhd->bhqk", (2, 3, 4, 20), (2, 6, 4, 20)),  # batch axes: attention
    ("bhqk,bkhd->bqhd", (2, 4, 3, 6), (2, 6, 4, 20)),
    ("aij,jia->a", (2, 3, 4), (4, 3, 2)),
    ("k,kj->j", (40,), (40, 5)),  # one row
    ("ik,k->i", (7, 40), (40,)),  # one column
]


@pytest.mark.heavy
@pytest.mark.parametrize(("equation", "left", "right"), EQUATIONS)
def test_all_three_contractions(both, equation, left, right):
    x, w = normal(0, *left), normal(1, *right)
    g = normal(2, *jax.eval_shape(lambda x, w: einsum(equation, x, w), x, w).shape)

    def step(x, w, g):
        y, pull = jax.vjp(lambda x, w: einsum(equation, x, w, config=EXACT), x, w)
        return y, *pull(g)

    calls, with_kernel, without = both(step, x, w, g)
    letters, output = equation.split("->")
    parts = [set(output), *map(set, letters.split(","))]
    # Every contraction that sums: the product of two of the three arrays, without what only they have.
    assert calls == sum(bool(parts[i] & parts[j] - parts[k]) for i, j, k in ((1, 2, 0), (0, 2, 1), (0, 1, 2)))
    same(with_kernel, without)
    assert all(bool(jnp.any(part != 0)) for part in with_kernel)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "config", [config_v4(dlhs_bits=8, drhs_bits=8), EXACT], ids=["stochastic", "nearest"]
)
def test_a_training_step(both, config):
    def loss(w, x, key):
        y = dot_general(x, w, MATMUL, config=config, key=key)
        return jnp.sum(jnp.sin(dot_general(jax.nn.relu(y), w.T, MATMUL, config=config, key=key)))

    calls, *results = both(jax.value_and_grad(loss), normal(0, 40, 70), normal(1, 9, 40), jax.random.key(2))
    assert calls == 2 + 1 + 2  # forward, gradients of what is between, gradients of the weight
    same(*results)


@pytest.mark.heavy
def test_tiles_of_the_summed_axis(both):
    config = config_v4(
        dlhs_bits=8,
        drhs_bits=8,
        rng_type=None,
        dlhs_local_aqt=LocalAqt(contraction_axis_shard_count=2),
        drhs_local_aqt=LocalAqt(contraction_axis_shard_count=2),
    )

    def step(x, w, g):
        return jax.vjp(lambda x, w: dot_general(x, w, MATMUL, config=config), x, w)[1](g)

    calls, with_kernel, without = both(step, normal(0, 256, 8), normal(1, 8, 256), normal(2, 256, 256))
    assert calls == 2
    # Each tile is exact; what is multiplied by its scales is summed in float32.
    for got, wanted in zip(with_kernel, without, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(wanted))))


@pytest.mark.heavy
def test_under_transformations(both):
    def loss(w, x):
        return jnp.sum(jnp.sin(dot_general(x, w, MATMUL, config=EXACT)))

    def step(w, xs):
        in_order = jax.lax.scan(lambda w, x: (w - 0.1 * jax.grad(loss)(w, x), loss(w, x)), w, xs)
        stacked = jax.vmap(jax.grad(loss), (None, 0))(w, xs)
        each = jax.vmap(jax.grad(loss))(jnp.stack([w, -w, 2 * w]), xs)
        twice = jax.vmap(jax.vmap(loss, (None, 0)), (0, None))(jnp.stack([w, -w]), xs)
        again = jax.grad(lambda w: jax.checkpoint(loss)(w, xs[0]))(w)
        return in_order, stacked, each, twice, again

    calls, *results = both(step, normal(0, 40, 5), normal(1, 3, 7, 40))
    assert calls >= 3 + 1 + 1 + 1 + 3
    same(*results)
    stacked, again = results[0][1], results[0][4]
    np.testing.assert_allclose(stacked[0], again, rtol=1e-5, atol=1e-6)


@pytest.mark.heavy
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_dimension_numbers(kernel, data):
    """Against NumPy's einsum in int64, with axes of any kind in any order."""
    names = "abcdef"[: data.draw(st.integers(1, 6))]
    sizes = {name: data.draw(st.sampled_from([1, 2, 3, 9])) for name in names}
    kinds = {name: data.draw(st.sampled_from(["left", "right", "batch", "summed"])) for name in names}
    left = data.draw(st.permutations([n for n in names if kinds[n] != "right"]))
    right = data.draw(st.permutations([n for n in names if kinds[n] != "left"]))
    batch, summed = ([n for n in names if kinds[n] == kind] for kind in ("batch", "summed"))
    places = [[side.index(n) for n in part] for part in (summed, batch) for side in (left, right)]
    dims = Dimensions.of(len(left), len(right), (places[:2], places[2:]))
    lhs, rhs = (integers(i, *(sizes[n] for n in side)) for i, side in enumerate((left, right)))
    got = integer_contraction(lhs, rhs, dims, np.dtype(np.int32))
    output = [*batch, *(n for n in left if kinds[n] == "left"), *(n for n in right if kinds[n] == "right")]
    wide = (np.asarray(x, np.int64) for x in (lhs, rhs))
    np.testing.assert_array_equal(
        got, np.einsum(f"{''.join(left)},{''.join(right)}->{''.join(output)}", *wide)
    )


@pytest.mark.heavy
def test_empty_operands(both):
    for rows, summed, columns in ((0, 4, 2), (3, 0, 2), (3, 4, 0)):
        operands = integers(0, rows, summed), integers(1, summed, columns)
        dims = Dimensions.of(2, 2, MATMUL)
        calls, *results = both(
            lambda x, w, d=dims: integer_contraction(x, w, d, np.dtype(np.int32)), *operands
        )
        assert calls == 0 and results[0].shape == (rows, columns)
        same(*results)


@pytest.mark.parametrize(
    ("left", "right", "calls"),
    [
        (jnp.int8, jnp.int8, 1),
        (jnp.int4, jnp.int4, 1),
        (jnp.int8, jnp.int4, 1),
        (jnp.uint8, jnp.int8, 0),
        (jnp.uint8, jnp.uint8, 0),
        (jnp.uint4, jnp.int4, 1),
        (jnp.int16, jnp.int8, 0),
    ],
)
def test_other_integers(both, left, right, calls):
    x, w = integers(0, 3, 40, dtype=left), integers(1, 40, 5, dtype=right)
    dims = Dimensions.of(2, 2, MATMUL)
    found, *results = both(lambda x, w: integer_contraction(x, w, dims, np.dtype(np.int32)), x, w)
    assert found == calls
    same(*results)
    np.testing.assert_array_equal(results[0], np.asarray(x, np.int64) @ np.asarray(w, np.int64))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("zero_points", [(0.0, 0.0), (7.0, 0.0), (-100.0, 33.0)])
def test_quant_tensors_with_zero_points(both, signed, zero_points):
    low = -128 if signed else 0
    payloads = [
        jax.random.randint(jax.random.key(i), s, low, low + 256) for i, s in enumerate([(3, 64), (64, 5)])
    ]
    scale = jnp.array([1.0, 2.0, 4.0, 8.0, 0.5])

    def contract(q, r):
        x = IntQuantTensor.from_int(q, 0.25, zero_points[0], 8, signed=signed)
        w = IntQuantTensor.from_int(r, scale, zero_points[1], 8, signed=True)
        return dot_general(x, w, MATMUL, contraction="int")

    q, r = payloads[0], payloads[1] - (0 if signed else 128)
    calls, with_kernel, without = both(contract, q, r)
    assert calls == 1
    same(with_kernel, without)
    # Scales of powers of two, and sums that float32 holds: nothing is rounded.
    steps = (np.asarray(q) - zero_points[0]) @ ((np.asarray(r) - zero_points[1]) * np.asarray(scale))
    np.testing.assert_array_equal(with_kernel, steps * 0.25)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_operands_are_left_to_xla(runs, kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    x, w = normal(0, 16, 40), normal(1, 40, 5)

    def loss(w, x):
        return jnp.sum(jnp.sin(dot_general(x, w, MATMUL, config=EXACT)))

    def step(w, x):
        return dot_general(x, w, MATMUL, config=EXACT), jax.grad(loss)(w, x)

    expected = jax.jit(step)(w, x)
    with native.use(runs), jax.set_mesh(mesh):
        spread = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
        whole = jax.device_put(w, jax.NamedSharding(mesh, jax.P()))
        lowered = jax.jit(step).lower(whole, spread)
        assert FUNCTION not in lowered.as_text()
        output, gradient = lowered.compile()(whole, spread)
    assert len(output.sharding.device_set) == 8
    np.testing.assert_array_equal(output, expected[0])
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-4, atol=1e-5)


def test_axes_of_a_mesh_in_the_types(kernel):
    """Operands with explicit axes are XLA's even on what looks like one device."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    x, w = integers(0, 16, 40), integers(1, 40, 5)
    dims = Dimensions.of(2, 2, MATMUL)
    with jax.set_mesh(mesh):
        spread = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
        whole = jax.device_put(w, jax.NamedSharding(mesh, jax.P()))
        lowered = jax.jit(lambda x, w: integer_contraction(x, w, dims, np.dtype(np.int32))).lower(
            spread, whole
        )
        assert FUNCTION not in lowered.as_text()
        got = lowered.compile()(spread, whole)
    np.testing.assert_array_equal(got, np.asarray(x, np.int64) @ np.asarray(w, np.int64))
