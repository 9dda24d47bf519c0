"""The kernel's product is that of integers: every rest of a tile, extremes, broadcasting, transformations, threads."""

import subprocess
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jqinject import native
from jqinject.native import int8_matmul

SIZES = (1, 2, 3, 4, 7, 8, 9, 63, 64, 65, 191, 192, 193, 255, 257, 2047, 2048, 2049, 4097)
SMALL = st.integers(1, 20)


def integers(seed, *shape):
    return np.random.default_rng(seed).integers(-128, 128, shape, np.int8)


def exact(lhs, rhs):
    """In int64, and then wrapped to 32 bits. Through float64, which holds these sums and is quicker."""
    product = np.asarray(lhs, np.float64) @ np.asarray(rhs, np.float64).swapaxes(-1, -2)
    assert np.abs(product).max(initial=0) < 2**53
    return product.astype(np.int64).astype(np.int32)


def check(lhs, rhs):
    """As it is and without -128, beside which AVX2 multiplies in another way."""
    for left in (lhs, np.maximum(lhs, -127)):
        got = int8_matmul(jnp.asarray(left), jnp.asarray(rhs))
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, exact(left, rhs))


@pytest.mark.heavy
@pytest.mark.parametrize("others", [(1, 1), (5, 70), (195, 67)], ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["m", "n", "k"])
def test_every_rest(kernel, axis, others):
    for size in SIZES:
        m, n, k = (*others[:axis], size, *others[axis:])
        check(integers(size, m, k), integers(size + 1, n, k))


@pytest.mark.parametrize(
    ("m", "n", "k"), [(193, 257, 2049), (4097, 9, 65), (3, 2049, 4097), (385, 513, 4096)]
)
def test_several_blocks_along_each_axis(kernel, m, n, k):
    check(integers(m, m, k), integers(n, n, k))


@pytest.mark.heavy
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(m=SMALL, n=SMALL, k=st.integers(1, 200), seed=st.integers(0, 99))
def test_any_small_product(kernel, m, n, k, seed):
    check(integers(seed, m, k), integers(seed + 1, n, k))


@pytest.mark.parametrize("left", [-128, 127])
@pytest.mark.parametrize("right", [-128, 127])
@pytest.mark.parametrize("k", [1, 64, 2049])
def test_extremes(kernel, left, right, k):
    check(np.full((4, k), left, np.int8), np.full((9, k), right, np.int8))


def test_sums_wrap_around(kernel):
    """128 * 128 * 2^17 is 2^31: the least number that int32 does not hold."""
    ones = np.full((2, 2**17 + 65), -128, np.int8)
    for k in (2**17 - 1, 2**17, 2**17 + 65):
        check(ones[:, :k], ones[:, :k])
    assert int(int8_matmul(ones[:, : 2**17], ones[:, : 2**17])[0, 0]) == -(2**31)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((), ()),
        ((3,), (3,)),
        ((3,), (1,)),
        ((1,), (3,)),
        ((2, 3), (2, 3)),
        ((2, 1), (1, 3)),
        ((1, 3), (2, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize(("m", "n", "k"), [(5, 9, 70), (1, 40, 33)])
def test_leading_axes(kernel, left, right, m, n, k):
    lhs, rhs = integers(0, *left, m, k), integers(1, *right, n, k)
    check(lhs, rhs)


@pytest.mark.parametrize(("m", "n"), [(0, 4), (4, 0)])
def test_empty_outputs(kernel, m, n):
    assert int8_matmul(jnp.zeros((m, 8), jnp.int8), jnp.zeros((n, 8), jnp.int8)).shape == (m, n)


# --- transformations


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("axes", "left", "right"),
    [((0, None), (4, 5, 33), (9, 33)), ((None, 0), (5, 33), (4, 9, 33)), ((0, 0), (4, 5, 33), (4, 9, 33))],
    ids=["lhs", "rhs", "both"],
)
def test_vmap(kernel, axes, left, right, jitted):
    lhs, rhs = integers(0, *left), integers(1, *right)
    mapped = jax.vmap(int8_matmul, axes)
    np.testing.assert_array_equal((jax.jit(mapped) if jitted else mapped)(lhs, rhs), exact(lhs, rhs))


def test_nested_vmap(kernel):
    lhs, rhs = integers(0, 4, 5, 33), integers(1, 3, 9, 33)
    every = jax.vmap(jax.vmap(int8_matmul, (None, 0)), (0, None))(lhs, rhs)
    np.testing.assert_array_equal(every, exact(lhs[:, None], rhs[None]))
    inner = jax.vmap(jax.vmap(int8_matmul), in_axes=(1, None), out_axes=1)
    lhs = integers(2, 3, 4, 5, 33)
    np.testing.assert_array_equal(inner(lhs, rhs), exact(lhs, rhs[:, None]))


def test_scan(kernel):
    lhs, rhs = integers(0, 6, 5, 33), integers(1, 9, 33)

    @jax.jit
    def total(lhs, rhs):
        return jax.lax.scan(lambda sums, x: (sums + int8_matmul(x, rhs), None), jnp.zeros((5, 9), int), lhs)[
            0
        ]

    np.testing.assert_array_equal(total(lhs, rhs), exact(lhs, rhs).sum(0))


def test_gradients_pass_it_by(kernel):
    """Integers have no gradient; what is around them has."""

    def loss(x):
        y = int8_matmul(jnp.round(x).astype(jnp.int8), jnp.ones((3, 4), jnp.int8))
        return jnp.sum(x * jnp.sum(y).astype(x.dtype))

    np.testing.assert_array_equal(jax.grad(loss)(jnp.ones((2, 4))), np.full((2, 4), 24.0))


# --- many calls


def test_several_threads_at_once(kernel):
    operands = [(integers(i, 100 + i, 300), integers(50 + i, 200, 300)) for i in range(4)]
    call = jax.jit(int8_matmul)
    wrong, ready = [], threading.Barrier(len(operands))

    def work(lhs, rhs):
        with native.use(kernel):  # contexts are of a thread
            wanted = exact(lhs, rhs)
            ready.wait()
            for _ in range(25):
                if not np.array_equal(call(lhs, rhs), wanted):
                    wrong.append(lhs.shape)

    threads = [threading.Thread(target=work, args=pair) for pair in operands]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize(("size", "calls"), [(8, 100_000), (128, 2_000)])  # alone, and with other threads
def test_memory_does_not_grow(kernel, size, calls):
    lhs, rhs = integers(0, size, size), integers(1, size, size)

    @jax.jit
    def many(lhs, rhs):
        def body(i, sums):
            return sums + int8_matmul(lhs ^ i.astype(jnp.int8), rhs)

        return jax.lax.fori_loop(0, calls, body, jnp.zeros((size, size), jnp.int32))

    many(lhs, rhs).block_until_ready()
    before = resident()
    many(lhs, rhs).block_until_ready()
    # What belongs to a call takes about 100 bytes, what belongs to a thread more than this.
    assert resident() - before < 60 * 100_000


# --- what is refused


@pytest.mark.parametrize(
    ("left", "right"), [((3, 4), (3, 5)), ((2, 3, 4), (5, 4)), ((4,), (4,)), ((3, 0), (2, 0))]
)
def test_shapes_that_do_not_go_together(kernel, left, right):
    with pytest.raises(
        ValueError,
        match=r"takes \(\.\.\., m, k\) and \(\.\.\., n, k\), k at least 1, got .*\n  cure: as many axes",
    ):
        int8_matmul(jnp.zeros(left, jnp.int8), jnp.zeros(right, jnp.int8))


def test_leading_axes_that_do_not_go_together(kernel):
    with pytest.raises(ValueError, match="broadcast"):
        int8_matmul(jnp.zeros((2, 3, 4), jnp.int8), jnp.zeros((3, 3, 4), jnp.int8))


def test_other_dtypes_are_not_contracted_as_if_they_were_int8(kernel):
    with pytest.raises(TypeError, match="takes int8, got uint8 and int8"):
        int8_matmul(jnp.zeros((3, 4), jnp.uint8), jnp.zeros((3, 4), jnp.int8))


def test_without_a_kernel(tmp_path):
    zeros = jnp.zeros((3, 4), jnp.int8)
    with native.use(False), pytest.raises(RuntimeError, match=r"switched off.\n  cure: jax.lax.dot_general"):
        int8_matmul(zeros, zeros)
    with native.use(str(tmp_path / "none.so")):
        assert native.status() == "not compiled: python -m jqinject.native.build"
        with pytest.raises(RuntimeError, match=r"not compiled: python -m jqinject\.native\.build"):
            int8_matmul(zeros, zeros)


def test_the_library_needs_nothing_but_libc(compiled):
    found = subprocess.run(["ldd", compiled], capture_output=True, text=True, check=True).stdout
    names = {line.split()[0].rpartition("/")[2] for line in found.splitlines()}
    assert names <= {"linux-vdso.so.1", "libc.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2"}
