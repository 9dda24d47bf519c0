"""A product of bytes with the operations around it: those of NumPy, one by one, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqinject.native.fused_matmul import FusedStep, StepKind, fused_matmul, row_amax
from tests.native.fused_steps import applied, cases, result, scales

SHAPES = [(1, 1, 1), (3, 70, 65), (17, 129, 64), (5, 300, 2049), (200, 40, 33)]


def planned(steps):
    return [FusedStep(kind, tuple(map(jnp.asarray, operands))) for kind, operands in steps]


def check(m, n, k):
    for lhs, rhs, before, after, dtype in cases(np.random.default_rng(m), m, n, k):
        steps = [planned(side) for side in (before, after)]
        got = fused_matmul(jnp.asarray(lhs), jnp.asarray(rhs), *steps, dtype)
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.asarray(got), result(lhs, rhs, before, after, dtype))


@pytest.mark.parametrize(("m", "n", "k"), SHAPES, ids=str)
def test_each_operation_in_its_order(kernel, m, n, k):
    check(m, n, k)


def test_without_avx512(fewer_vectors):
    vectors, _ = fewer_vectors
    for m, n, k in SHAPES if vectors == "avx2" else SHAPES[:3]:
        check(m, n, k)


ROUNDED = [0.5, 1.5, 2.5, -0.5, -1.5, 0.49999997, 8388607.5, 8388609.0, 1e30, -3.5, np.inf, -np.inf]


def test_ties_limits_and_nan(kernel):
    """Halves go to the even neighbour, what lies beyond int8 is clamped, and nan becomes 0."""
    x = np.asarray([[*ROUNDED, np.nan]], np.float32)
    limits = [jnp.full((1, 1), limit, jnp.float32) for limit in (-128, 127)]
    before = [
        FusedStep(StepKind.ROUND),
        FusedStep(StepKind.MAXIMUM, (limits[0],)),
        FusedStep(StepKind.MINIMUM, (limits[1],)),
    ]
    weight = np.eye(x.size, dtype=np.int8)
    got = fused_matmul(jnp.asarray(x), jnp.asarray(weight), before, [], jnp.float32)
    np.testing.assert_array_equal(got, np.nan_to_num(np.clip(np.rint(x), -128, 127), nan=0))


def test_an_empty_product(kernel):
    assert fused_matmul(jnp.zeros((0, 4)), jnp.zeros((3, 4), jnp.int8), [], [], jnp.float32).shape == (0, 3)


@pytest.mark.parametrize(
    ("lhs", "before", "after"),
    [
        ((2, 4), [FusedStep(StepKind.ADD, (jnp.ones((1, 3)),))], []),
        ((2, 4), [], [FusedStep(StepKind.ADD, (jnp.ones((1, 3), jnp.int32),))]),
        ((2, 4), [FusedStep(StepKind.SUBTRACT_INTEGER, (jnp.ones((1, 4), jnp.int32),))], []),
        ((2, 4), [], [FusedStep(StepKind.ADD)]),
        ((2, 5), [], []),
    ],
    ids=["shape", "dtype", "integers", "no operand", "depth"],
)
def test_operands_that_do_not_fit_are_refused(kernel, lhs, before, after):
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"fused_matmul takes \(m, k\), int8 \(n, k\)"):
        fused_matmul(jnp.ones(lhs), jnp.ones((3, 4), jnp.int8), before, after, jnp.float32)


def test_ranges_that_do_not_fit_are_refused(kernel):
    for steps in ([FusedStep(StepKind.ADD)], [FusedStep(StepKind.ADD, (jnp.ones((1, 2)),))]):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"row_amax takes float32 \(m, k\)"):
            row_amax(jnp.ones((3, 4)), steps)


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (64, 2048), (700, 100)], ids=str)
def test_the_largest_magnitude_of_each_row(kernel, shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    np.testing.assert_array_equal(row_amax(jnp.asarray(x)), np.abs(x).max(1, keepdims=True))
    x[0] = 0
    expected = applied(np.abs(x).max(1, keepdims=True), scales())
    np.testing.assert_array_equal(row_amax(jnp.asarray(x), planned(scales())), expected)
    x[0, -1] = np.nan
    assert np.isnan(row_amax(jnp.asarray(x))[0, 0]), "a nan is kept"
