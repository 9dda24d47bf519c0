"""Order statistics, running means, attached gradients."""

import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

from jqinject.core import AbsMax, AbsPercentile, MinMax
from jqinject.ops import reductions as stats
from jqinject.ops.reductions import Over


@pytest.mark.lengthy
@given(hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32, allow_nan=False)), st.data())
def test_kth_smallest_of_small_tensors(x, data):
    k = data.draw(st.integers(1, x.size))
    assert stats.kth_smallest(jnp.asarray(x), k, Over()) == jnp.sort(x)[k - 1]


@pytest.mark.parametrize("k", [1, 2, 3, 700, 1500, 2998, 2999, 3000])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_kth_smallest_of_large_tensors(k, axis):
    x = np.array(jax.random.normal(jax.random.key(0), (3000, 3)))
    x[::7] = 0.0
    x[5, :] = np.inf
    x[6, :] = -1e-30
    if axis == 1:
        x = x.T
    expected = np.sort(x, axis=axis)
    got = jax.jit(lambda x: stats.kth_smallest(x, k, Over(axis)))(x)
    if axis is None:
        assert got == np.sort(x.reshape(-1))[k - 1]
    else:
        np.testing.assert_array_equal(got, np.take(expected, [k - 1], axis=axis))


# Elements in blocks alone, for most ranks, and behind them too.
@pytest.mark.parametrize("size", [2048, 4099])
@pytest.mark.parametrize("rank", [1, 2, 8])
def test_ranks_near_an_end_are_selected_exactly_without_a_loop(size, rank):
    x = np.array(jax.random.normal(jax.random.key(1), (size,)))
    x[-3:], x[100:110] = 2.5, x[50]  # ties, some of them behind the last block
    for k in (rank, size - rank + 1):
        selection = jax.jit(lambda x, k=k: stats.kth_smallest(x, k, Over()))
        assert selection(x) == np.sort(x)[k - 1]
        assert "while" not in selection.lower(x).as_text()


@pytest.mark.heavy
def test_kth_smallest_orders_nan_last():
    x = jnp.arange(5000.0).at[7].set(jnp.nan).at[8].set(-jnp.nan)
    assert stats.kth_smallest(x, 4998, Over()) == 4999
    assert stats.kth_smallest(x, 4999, Over()) == jnp.inf
    assert stats.kth_smallest(x, 1, Over()) == 0
    assert jnp.isnan(stats.kth_smallest(x[:8], 8, Over()))


def test_ranks():
    assert [stats.rank_high(q, 100) for q in (0.0, 50.0, 99.999, 100.0)] == [1, 50, 100, 100]
    assert [stats.rank_low(q, 100) for q in (0.0, 0.001, 5.0, 100.0)] == [1, 1, 5, 100]


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_an_element_of_a_rank_gives_the_gradient_to_the_first_of_equals(axis):
    x = jnp.array([[3.0, 1.0, 3.0], [3.0, 2.0, 0.0]])
    grad = jax.grad(lambda x: AbsPercentile(100.0, axis)(x).sum())(x)
    expected = {
        None: [[1, 0, 0], [0, 0, 0]],
        0: [[1, 0, 1], [0, 1, 0]],
        1: [[1, 0, 0], [1, 0, 0]],
    }
    np.testing.assert_array_equal(grad, expected[axis])


def test_the_largest_splits_the_gradient_between_equals():
    x = jnp.array([3.0, 1.0, 3.0])
    grad = jax.grad(lambda x: AbsMax(ties="near")(x))(x)
    np.testing.assert_array_equal(grad, [0.5, 0, 0.5])


def test_derivatives_of_an_element_work_forwards_and_under_vmap():
    x = jnp.array([[1.0, -3.0], [2.0, 0.5]])
    top = lambda x: MinMax(ties="first")(x)[1]  # noqa: E731
    np.testing.assert_array_equal(jax.vmap(jax.grad(top))(x), [[1, 0], [1, 0]])
    assert jax.jvp(top, (x[0],), (x[0],))[1] == 1


@pytest.mark.parametrize("statistic", [AbsPercentile(100.0), lambda x: AbsMax(ties="near")(x)])
def test_a_gradient_of_nan_stays_with_the_elements_that_have_weight(statistic):
    grad = jax.grad(lambda x: jnp.nan * statistic(x))(jnp.array([0.5, 1.0]))
    np.testing.assert_array_equal(grad, [0, jnp.nan])


@pytest.mark.heavy
@pytest.mark.parametrize("ties", ["first", "near"])
def test_the_largest_has_a_second_derivative(ties):
    x = jnp.array([[1.0, -3.0], [2.0, 0.5]])
    hessian = jax.hessian(lambda x: jnp.sum(AbsMax(stats_reduce_dim=1, ties=ties)(x) ** 2))(x)
    expected = np.zeros((2, 2, 2, 2))
    expected[0, 1, 0, 1] = expected[1, 0, 1, 0] = 2
    np.testing.assert_array_equal(hessian, expected)


@pytest.mark.parametrize("axes", [None, 1, (0, 1)])
def test_equal_elements_are_counted_exactly_and_the_first_is_located(axes):
    x = jax.random.randint(jax.random.key(0), (300, 70), 0, 30).astype(jnp.float32)
    value = jnp.full((300, 1) if axes == 1 else () if axes is None else (1, 1), 7.0)
    equal = np.asarray(x) == 7.0
    over = Over(axes)

    def count_and_place(x, in_floats):
        count = over.sum(1.0 - stats.missed(x, value))
        return count, stats.locate(x, value, over.positions(x, in_floats), over)

    first = equal.argmax(1)[:, None] if axes == 1 else equal.argmax()
    assert equal.any(1).sum() < 300  # so that in some rows there is none
    first = np.where(equal.any(1)[:, None], first, -1) if axes == 1 else first
    functions = count_and_place, jax.jit(count_and_place, static_argnums=1)
    for function, in_floats in itertools.product(functions, (False, True)):
        count, place = function(x, in_floats)
        np.testing.assert_array_equal(count, np.sum(equal, axis=axes, keepdims=axes is not None))
        place = np.where(np.asarray(place) < 70 * 300, place, -1)  # beyond all positions
        np.testing.assert_array_equal(np.squeeze(place), np.squeeze(first))


@pytest.mark.parametrize("bad", [np.inf, -np.inf])
@pytest.mark.parametrize("ties", ["first", "shared", "near"])
@pytest.mark.parametrize("statistic", [AbsMax, MinMax])
def test_an_infinite_end_that_nothing_depends_on_has_no_gradient(statistic, ties, bad):
    x = jnp.array([1.0, bad, -2.0])
    ends, pull = jax.vjp(statistic(ties=ties), x)
    (change,) = pull(jax.tree.map(jnp.zeros_like, ends))  # of a memory that takes no infinite statistic
    np.testing.assert_array_equal(change, np.zeros(3))


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
def test_running_mean(momentum):
    buffer = jnp.float32(1.0)
    seen = [4.0, 2.0, 6.0]
    for count, update in enumerate(seen):
        buffer = stats.running_mean(buffer, jnp.float32(update), jnp.int32(count), momentum)
    expected = {0.1: 0.9 * (0.9 * 4 + 0.1 * 2) + 0.1 * 6, 1.0: 6.0, None: 4.0}[momentum]
    np.testing.assert_allclose(buffer, expected, rtol=1e-6)


@pytest.mark.heavy
@given(hnp.arrays(np.float32, (3, 4), elements=st.sampled_from([-2.0, -1.0, 0.5, 1.0, 2.0])))
def test_the_largest_along_axes_and_its_gradient(x):
    value, pull = jax.vjp(lambda x: MinMax((1,), keepdim=True)(x)[1], jnp.asarray(x))
    highest = x.max(axis=1, keepdims=True)
    np.testing.assert_array_equal(value, np.maximum(highest, 0))
    equal = (x == highest) & (highest > 0)
    expected = equal / np.maximum(equal.sum(axis=1, keepdims=True), 1)
    np.testing.assert_allclose(pull(jnp.ones((3, 1)))[0], expected, rtol=1e-6)


ENDS = [  # x, the largest or 0, the least or 0, their gradients: equals share one, and 0 takes half of it
    ([1.0, 3.0, 3.0, -2.0], 3, -2, [0, 0.5, 0.5, 0], [0, 0, 0, 1]),
    ([-1.0, -3.0, -3.0, -2.0], 0, -3, [0, 0, 0, 0], [0, 0.5, 0.5, 0]),
    ([1.0, 2.0, 3.0, 4.0], 4, 0, [0, 0, 0, 1], [0, 0, 0, 0]),
    ([0.0, -1.0, 0.0, -1.0], 0, -1, [0.25, 0, 0.25, 0], [0, 0.5, 0, 0.5]),
    ([1.0 - 2.0**-23, 1.0, 0.5, 1.0 - 2.0**-20], 1, 0, [0.5, 0.5, 0, 0], [0, 0, 0, 0]),
]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("case", ENDS, ids=lambda case: str(case[0]))
def test_ends_of_a_range_include_0_and_share_their_gradient(case, wrap):
    x, high, low, of_high, of_low = (jnp.float32(part) for part in case)
    (least, largest), pull = jax.vjp(wrap(MinMax((0,), keepdim=True)), x)
    np.testing.assert_array_equal((largest, least), [[high], [low]])
    one, nothing = jnp.ones(1), jnp.zeros(1)
    np.testing.assert_array_equal(pull((nothing, one))[0], of_high)
    np.testing.assert_array_equal(pull((one, nothing))[0], of_low)


@pytest.mark.parametrize("axes", [None, (0,), (1,), (0, 1), ()])
def test_ends_over_axes_are_those_of_numpy(axes):
    x = np.array(jax.random.normal(jax.random.key(0), (4, 5)))
    low, high = MinMax(axes, keepdim=True)(jnp.asarray(x))
    keeps = axes is not None
    np.testing.assert_array_equal(high, np.maximum(x.max(axes, keepdims=keeps), 0))
    np.testing.assert_array_equal(low, np.minimum(x.min(axes, keepdims=keeps), 0))
    assert not np.any(MinMax((0,))(jnp.zeros((0, 5))))


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_an_extreme_gives_its_change_to_the_first_of_equals_along_axes_and_to_all_of_a_tensor(axis):
    x, dx = jnp.array([[3.0, 1.0, 3.0], [3.0, 2.0, 0.0]]), jnp.arange(1.0, 7.0).reshape(2, 3)
    _, change = jax.jvp(AbsMax(axis, keepdim=True), (x,), (dx,))
    expected = {None: (1 + 3 + 4) / 3, 0: [[1, 5, 3]], 1: [[1], [4]]}[axis]
    np.testing.assert_allclose(change, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("ties", "expected"), [("first", 1), ("shared", (1 + 3) / 2), ("near", (1 + 2 + 3) / 3)]
)
def test_the_rule_for_ties_is_an_argument(ties, expected):
    x, dx = jnp.array([3.0, 3.0 * (1 - 2.0**-22), -3.0, 0.0]), jnp.array([1.0, 2.0, -3.0, 4.0])
    for axis in (None, 0):
        assert jax.jvp(AbsMax(axis, ties=ties), (x,), (dx,))[1] == jnp.float32(expected)
