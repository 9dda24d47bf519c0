"""Ranges that are cut: found by the error of the output, kept by what comes after."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import Rule, quant
from jqinject.recipes import AWQ, GPTQ, RTN, Clip, LeastSquaresScales, Problem, Recipe, Solve
from jqinject.recipes.solvers import solver
from jqinject.recipes.solvers.solver import MatrixGrid, Statistics
from tests.recipes.test_solvers import measure


def problem() -> Problem:
    """Rows with one large number each, whose input is nearly always 0."""
    weights = jax.random.normal(jax.random.key(0), (1, 4, 12)).at[:, :, 3].set(8.0)
    hessian = jnp.eye(12).at[3, 3].set(1e-4)[None]
    return Problem(weights, weights, Statistics(jnp.ones(1), {"hessian": hessian, "cross": hessian}), measure)


@pytest.mark.heavy
def test_a_range_is_cut_to_the_share_with_the_least_error() -> None:
    given = problem()
    found = Clip(steps=5)(given)
    largest = np.asarray(jnp.abs(given.weights).max(-1, keepdims=True))
    weights, hessian = np.asarray(given.weights), np.asarray(given.statistics.mean("hessian"))[0]

    def error(share: float) -> np.ndarray:
        scale = share * largest / 3
        wrong = np.clip(np.round(weights / scale), -3, 3) * scale - weights
        return np.einsum("sri,ij,srj->sr", wrong, hessian, wrong)

    shares = np.float32([1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
    best = shares[np.argmin([error(share) for share in shares], axis=0)]
    np.testing.assert_allclose(found.scale[..., :1], (best[..., None] * largest) / 3, rtol=1e-6)
    assert (best < 1).all()


def test_ranges_that_cannot_be_cut_stay() -> None:
    given = problem()
    kept = measure(given.weights)
    fixed = Problem(
        given.weights,
        given.weights,
        given.statistics,
        lambda _: MatrixGrid(kept.scale, kept.zero_point, kept.grid),
    )
    np.testing.assert_array_equal(Clip()(fixed).values, RTN()(fixed).values)
    with pytest.raises(ValueError, match=r"Clip: smallest must be between 0 and 1, got 1.5.\n  cure"):
        Clip(smallest=1.5)


@pytest.mark.heavy
@pytest.mark.parametrize("importance", [False, True])
def test_scales_of_least_squared_error_are_no_worse_than_any_share(importance: bool) -> None:
    given = problem()
    diagonal = np.asarray(solver.diagonal_of(given.statistics.mean("hessian")))[:, None]
    h = diagonal if importance else np.ones_like(diagonal)

    def errors(values: jax.Array) -> np.ndarray:
        return (h * np.square(np.float64(values) - np.float64(given.weights))).sum(-1)

    best = LeastSquaresScales(importance=importance)(given)
    largest = jnp.abs(given.weights).max(-1, keepdims=True)
    for share in np.linspace(0.02, 1.5, 200):
        scale = share * largest / 3
        tried = jnp.clip(jnp.round(given.weights / scale), -3, 3) * scale
        assert (errors(best.values) <= errors(tried) * (1 + 1e-4)).all()
    then_gptq = LeastSquaresScales(GPTQ(), importance)(given)
    np.testing.assert_array_equal(then_gptq.scale, best.scale)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("weight_quant", "text"),
    [
        (quant.Int4WeightPerGroupAbsMax.let(group_size=12, group_padding=True), None),
        (quant.ShiftedUint8WeightPerChannelFloat.let(bit_width=3), None),
        (quant.NF4WeightPerGroupFloat, None),
        (quant.NVFP4Weight, r"the scales of this quantizer are others.\n  cure: Clip\(\)"),
    ],
)
def test_a_model_has_less_error_in_its_weights(weight_quant: type, text: str | None) -> None:
    model = nnx.Linear(64, 8, rngs=nnx.Rngs(0))
    model.kernel.set_value(jax.random.t(jax.random.key(1), 3.0, (64, 8)))
    rule, x = Rule(weight_quant=weight_quant), jax.random.normal(jax.random.key(2), (96, 64))

    def error(algorithm: solver.Solver) -> float:
        solved = Recipe(Solve(algorithm)).apply(model, rule, [x], progress=False).model
        return float(jnp.square(solved.quant_weight().value - model.kernel.get_value()).sum())

    if text is None:
        assert error(LeastSquaresScales()) < 0.99 * error(RTN())
    else:
        with pytest.raises(ValueError, match=text):
            error(LeastSquaresScales())


@pytest.mark.lengthy
def test_a_solver_after_awq_keeps_the_ranges_that_it_cut() -> None:
    model = nnx.Sequential(nnx.LayerNorm(32, rngs=nnx.Rngs(0)), nnx.Linear(32, 8, rngs=nnx.Rngs(0)))
    model.layers[1].kernel.set_value(jax.random.t(jax.random.key(1), 2.0, (32, 8)))
    x = jax.random.normal(jax.random.key(2), (64, 32)) @ jax.random.normal(jax.random.key(3), (32, 32))
    rule = Rule(weight_quant=quant.Int4WeightPerGroupAbsMax.let(bit_width=3, group_size=16))
    result = Recipe(AWQ(grid=4, clip=True), Solve(GPTQ())).apply(model, rule, [x], progress=False)
    cut, solved = (step.sites[-1] for step in result.report.steps)
    assert solved.solved < cut.solved < cut.nearest
    np.testing.assert_allclose(solved.nearest, cut.solved, rtol=1e-5)
    tensor = result.model.layers[1].quant_weight()
    np.testing.assert_array_equal(tensor.value, result.model.layers[1].kernel.get_value())
