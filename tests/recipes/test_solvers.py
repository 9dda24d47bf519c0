"""What is true of solvers whatever the data: identities between them, and what they refuse."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import Rule, quant
from jqinject.ops import IntGrid
from jqinject.recipes import (
    GPFQ,
    GPTQ,
    QEP,
    RTN,
    AutoRound,
    LearnedRounding,
    MagR,
    NotSolved,
    Problem,
    Qronos,
    Recipe,
    Solve,
)
from jqinject.recipes.passes.smoothing import awq_scales
from jqinject.recipes.solvers.corrections import largest_eigenvalue
from jqinject.recipes.solvers.rounding_descent import Descent
from jqinject.recipes.solvers.solver import MatrixGrid, Statistics, output_error

RULE = Rule(weight_quant=quant.Int8WeightPerChannelFloat.let(bit_width=3))


def measure(matrices: jax.Array) -> MatrixGrid:
    largest = jnp.abs(matrices).max(-1, keepdims=True)
    return MatrixGrid(largest / 3, jnp.zeros_like(largest), IntGrid(3, narrow_range=True))


def problem(hessian: Any, cross: Any = None, rows: int = 6) -> Problem:
    weights = jax.random.normal(jax.random.key(0), (2, rows, 24))
    sums = Statistics(jnp.full(2, 60.0), {"hessian": hessian, "cross": hessian if cross is None else cross})
    return Problem(weights, weights, sums, measure)


def gram() -> jax.Array:
    x = jax.random.normal(jax.random.key(1), (2, 60, 24)) @ jax.random.normal(jax.random.key(2), (2, 24, 24))
    return jnp.einsum("sni,snj->sij", x, x)


def values(solver: Any, given: Problem) -> np.ndarray:
    return np.asarray(solver(given).values)


@pytest.mark.heavy
@pytest.mark.parametrize("solver", [GPTQ(), GPFQ(), Qronos(), GPTQ(act_order=True, scales="live")])
def test_inputs_that_do_not_mix_give_rounding_to_nearest(solver: Any) -> None:
    diagonal = jnp.broadcast_to(jnp.diag(jnp.arange(1.0, 25.0)), (2, 24, 24))
    given = problem(diagonal)
    np.testing.assert_allclose(values(solver, given), values(RTN(), given), rtol=1e-6)


def by_the_paper(given: Problem, damping: float, damp_dead: bool, zero_dead: bool) -> np.ndarray:
    """GPTQ column by column: Frantar et al., algorithm 1, with `damping` times the mean of the diagonal of H on it.

    H is `2 X X^T / n`. Inputs that were always 0 have 1 on its diagonal, which the mean counts with `damp_dead`, and
    weights of 0 with `zero_dead`, as in the paper's code.
    """
    solved = []
    sums, counts = np.float64(given.statistics.sums["hessian"]), np.float64(given.statistics.count)
    for weights, gram, count in zip(np.float64(given.weights), sums, counts, strict=True):
        diagonal = 2 * np.diag(gram) / count
        alive = np.where(diagonal == 0, 1.0, diagonal)
        damp = damping * np.mean(alive if damp_dead else diagonal)
        hessian = 2 * gram / count + np.diag(alive - diagonal + damp)
        upper = np.linalg.cholesky(np.linalg.inv(hessian)).T
        scale, rows = np.abs(weights).max(axis=1) / 3, np.where((diagonal == 0) & zero_dead, 0.0, weights)
        for column in range(rows.shape[1]):
            rounded = np.clip(np.round(rows[:, column] / scale), -3, 3) * scale
            error = (rows[:, column] - rounded) / upper[column, column]
            rows[:, column + 1 :] -= np.outer(error, upper[column, column + 1 :])
            rows[:, column] = rounded
        solved.append(rows)
    return np.stack(solved)


@pytest.mark.heavy
@pytest.mark.parametrize("damp_dead", [True, False])
@pytest.mark.parametrize("damping", [0.1, 1.0])
def test_gptq_damps_by_a_share_of_the_mean_of_the_diagonal(damping: float, damp_dead: bool) -> None:
    alive = (jnp.arange(24) >= 12).astype(jnp.float32)
    given = problem(gram() / 30 * alive[:, None] * alive, rows=64)
    for dead_inputs in ("nearest", "zero"):
        solver = GPTQ(damping=damping, damp_dead=damp_dead, dead_inputs=dead_inputs)
        expected = by_the_paper(given, damping, damp_dead, dead_inputs == "zero")
        np.testing.assert_allclose(values(solver, given), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "solver",
    [GPTQ(), GPTQ(act_order=True), GPFQ(), Qronos(), Qronos(act_order=True), QEP()],
)
def test_weights_of_inputs_that_were_always_0_are_rounded_to_nearest(solver: Any) -> None:
    alive = (jnp.arange(24) % 3 > 0).astype(jnp.float32)  # the first one is dead
    given = problem(gram() * alive[:, None] * alive, rows=64)
    nearest, dead = values(RTN(), given), np.asarray(alive) == 0
    np.testing.assert_array_equal(values(solver, given)[..., dead], nearest[..., dead])
    zeroed = values(replace(solver, dead_inputs="zero"), given)
    assert not zeroed[..., dead].any() and nearest[..., dead].any()
    with pytest.raises(ValueError, match="dead_inputs must be 'nearest' or 'zero', got 'none'"):
        replace(solver, dead_inputs="none")


@pytest.mark.heavy
def test_the_size_of_blocks_does_not_matter() -> None:
    given = problem(gram())
    for size in (5, 24):
        np.testing.assert_allclose(
            values(GPTQ(block_size=size), given), values(GPTQ(block_size=1), given), rtol=1e-6
        )
    np.testing.assert_allclose(values(Qronos(block_size=5), given), values(Qronos(), given), rtol=1e-6)


def test_nothing_corrected_and_nothing_scaled_is_rounding_to_nearest() -> None:
    given = problem(gram(), 1.2 * gram())
    np.testing.assert_array_equal(values(QEP(RTN(), factor=0.0), given), values(RTN(), given))
    inputs = np.float32([3.0, 0.1, 40.0])
    np.testing.assert_array_equal(awq_scales(inputs, None, 0.0), np.ones(3))


def test_qronos_on_equal_tracks_is_gptq() -> None:
    given = problem(gram())
    same = GPTQ(
        damping=1e-6 * 24
    )  # shares of the mean of the diagonal, and of the largest eigenvalue: both vanish
    equal = np.isclose(values(Qronos(), given), values(same, given), rtol=1e-6)
    # Factorizations differ between processors, and a number on a tie falls to either side: 2 of 288 were seen to.
    assert equal.mean() > 0.98


@pytest.mark.parametrize(
    "solver", [GPTQ(), GPFQ(), Qronos(), AutoRound(steps=50), LearnedRounding(regularization=0.1)]
)
def test_the_output_gets_better(solver: Any) -> None:
    given = problem(gram())

    def error(found: np.ndarray) -> float:
        return float(output_error(jnp.asarray(found) - given.weights, given.weights, given.statistics))

    assert error(values(solver, given)) < error(values(RTN(), given))


@pytest.mark.heavy
def test_a_power_iteration_nears_the_largest_eigenvalue_from_below() -> None:
    turned = jnp.linalg.qr(jax.random.normal(jax.random.key(3), (2, 24, 24)))[0]
    eigenvalues = jnp.stack([jnp.linspace(0.1, 4.0, 24), jnp.zeros(24)])
    matrices = jnp.einsum("sij,sj,skj->sik", turned, eigenvalues, turned)
    estimates = [largest_eigenvalue(matrices, steps) for steps in (1, 5, 30, 1000)]
    assert estimates[0][0] < estimates[1][0] < estimates[2][0] <= 4.0001
    np.testing.assert_allclose(estimates[-1], [4.0, 0.0], rtol=1e-5, atol=1e-6)
    given = problem(gram())
    exact = values(MagR(RTN(), alpha=0.1), given)
    np.testing.assert_allclose(values(MagR(RTN(), alpha=0.1, power_steps=1000), given), exact, rtol=1e-5)


@pytest.mark.heavy
def test_what_solvers_refuse() -> None:
    with pytest.raises(ValueError, match=r"power_steps must be at least 1, got 0.\n  cure: power_steps=30"):
        MagR(power_steps=0)
    with pytest.raises(ValueError, match=r"act_order=True.*\n  cure: GPTQ"):
        GPTQ(scales="block", act_order=True)
    with pytest.raises(ValueError, match="GPFQ has no blocks"):
        GPFQ(scales="block")
    rule = Rule(weight_quant=quant.Fp8e4m3WeightPerChannelFloat)
    with pytest.raises(ValueError, match=r"dot_general0 \(kernel\): AutoRound learns how integers"):
        Recipe(Solve(AutoRound())).apply(
            nnx.Linear(4, 3, rngs=nnx.Rngs(0)), rule, [jnp.ones((8, 4))], progress=False
        )


@pytest.mark.parametrize(
    ("solver", "x", "message"),
    [
        (
            GPTQ(damping=0.0),
            jnp.ones((8, 4)),
            r"dot_general0 \(layers.1.kernel\): the Hessian of its inputs is not",
        ),
        (
            RTN(),
            jnp.zeros((8, 4)),
            r"dot_general0 \(layers.1.kernel\): its inputs in the calibration data hold nan",
        ),
    ],
)
def test_unusable_data_is_refused_by_name_and_changes_nothing(
    solver: Any, x: jax.Array, message: str
) -> None:
    layer = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    model = nnx.Sequential(lambda x: 1 + jnp.log(x), layer)
    before = np.asarray(layer.kernel.get_value())
    with pytest.raises(ValueError, match=message):
        Recipe(Solve(solver)).apply(model, RULE, [x], progress=False)
    np.testing.assert_array_equal(layer.kernel.get_value(), before)
    assert type(model.layers[1]) is nnx.Linear


@pytest.mark.heavy
def test_zero_points_that_are_no_integers_are_learned_around() -> None:
    x = jax.random.normal(jax.random.key(10), (64, 32)) @ jax.random.normal(jax.random.key(11), (32, 32))
    rule = Rule(
        weight_quant=quant.ShiftedUint8WeightPerChannelFloat.let(bit_width=3, quantize_zero_point=False)
    )
    layer = nnx.Linear(32, 6, rngs=nnx.Rngs(0))
    for solver in (AutoRound(steps=50), LearnedRounding(steps=200)):
        result = Recipe(Solve(solver)).apply(layer, rule, [x], progress=False)
        (site,) = result.report.steps[0].sites
        assert site.solved < site.nearest
        np.testing.assert_array_equal(result.model.quant_weight().value, result.model.kernel.get_value())


class Experts(nnx.Module):
    """Two of three experts get rows."""

    def __init__(self) -> None:
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(5), (3, 8, 4)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, self.kernel.get_value(), jnp.array([20, 0, 12]))


@pytest.mark.heavy
def test_an_expert_that_saw_nothing_is_rounded_to_nearest() -> None:
    x = jax.random.normal(jax.random.key(6), (32, 8)) @ jax.random.normal(jax.random.key(7), (8, 8))
    solved, nearest = (
        Recipe(Solve(solver)).apply(Experts(), RULE, [x], progress=False) for solver in (GPTQ(), RTN())
    )
    (site,) = solved.report.steps[0].sites
    assert site.unseen == 1 and "1 matrices that no sample reached" in str(solved.report)
    left, right = (np.asarray(result.model.kernel.get_value()) for result in (solved, nearest))
    np.testing.assert_array_equal(left[1], right[1])
    assert np.abs(right[1]).max() > 0 and (left[0] != right[0]).any()


class Skipping(nnx.Module):
    """A layer that the call does not run."""

    def __init__(self) -> None:
        self.used = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        self.other = nnx.Linear(8, 4, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.used(x)


@pytest.mark.heavy
def test_what_no_site_solves_is_said() -> None:
    x = jax.random.normal(jax.random.key(8), (32, 8))
    with pytest.warns(UserWarning, match="other.kernel: rounded to nearest: no call of the calibration data"):
        result = Recipe(Solve(GPTQ())).apply(Skipping(), RULE, [x], progress=False)
    assert result.report.steps[0].sites[1] == NotSolved(
        "other.kernel", "no call of the calibration data contracts it"
    )


class Stacked(nnx.Module):
    """Layers in a stack, run by a scan."""

    def __init__(self) -> None:
        make = nnx.vmap(lambda key: nnx.Linear(8, 8, rngs=nnx.Rngs(key)))
        self.layers = make(jax.random.split(jax.random.key(0), 3))

    def __call__(self, x: jax.Array) -> jax.Array:
        def run(layer: Any, x: jax.Array) -> jax.Array:
            return 2 * nnx.tanh(layer(x))

        return nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)


@pytest.mark.lengthy
def test_each_layer_of_a_stack_has_its_own_input_quantizer() -> None:
    x = 3 * jax.random.normal(jax.random.key(9), (64, 8))
    rule = Rule(weight_quant=quant.Int8WeightPerChannelFloat, input_quant=quant.Int8ActPerTensorFloat)
    seen: list[Problem] = []

    class Keeps:
        statistics = ("hessian",)

        def __call__(self, given: Problem) -> Any:
            seen.append(given)
            return RTN()(given)

    result = Recipe(Solve(Keeps())).apply(Stacked(), rule, [x], progress=False)
    graphdef, state = nnx.split(result.model.layers)
    y = x
    for place, given in enumerate(seen):
        layer = nnx.merge(graphdef, jax.tree.map(lambda stacked, place=place: stacked[place], state))
        inputs = np.asarray(layer.input_quant(y).value)
        np.testing.assert_allclose(
            given.statistics.sums["hessian"][0], inputs.T @ inputs, rtol=1e-4, atol=1e-3
        )
        y = 2 * nnx.tanh(layer(y))


@pytest.mark.heavy
def test_equal_sites_share_the_program_of_a_descent(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Descent] = []
    step = Descent.step

    def seen(self: Descent, *given: Any) -> Any:
        traced.append(self)
        return step(self, *given)

    monkeypatch.setattr(Descent, "step", seen)
    model = nnx.Sequential(*(nnx.Linear(8, 8, rngs=nnx.Rngs(seed)) for seed in range(3)))
    rule = Rule(weight_quant=quant.ShiftedUint8WeightGroupQuantFloat.let(bit_width=4, group_size=4))
    x = jax.random.normal(jax.random.key(0), (16, 8))
    result = Recipe(Solve(AutoRound(steps=7))).apply(model, rule, [x], progress=False)
    assert len(result.report.steps[0].sites) == 3
    assert len({id(descent) for descent in traced}) == 1
