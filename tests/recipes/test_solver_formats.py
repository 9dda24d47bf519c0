"""Every solver on every kind of grid: numbers of the grid, and an output no worse than with rounding to nearest."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import Rule, freeze, quant
from jqinject.nn import QuantLinear
from jqinject.recipes import (
    GPFQ,
    GPTQ,
    HQO,
    RTN,
    AutoRound,
    Clip,
    LearnedRounding,
    Problem,
    Qronos,
    Recipe,
    Sharing,
    Solution,
    Solve,
)
from jqinject.recipes.quantized_parameter import QuantizedParameter
from jqinject.recipes.solvers.solver import MatrixGrid, Statistics, squared_errors
from tests.quant._own_format import Log2WeightPerGroup

FORMATS = {
    "int4 groups": quant.Int4WeightPerGroupAbsMax.let(group_size=16),
    "zero points": quant.ShiftedUint8WeightPerChannelFloat.let(bit_width=4),
    "one scale": quant.Int8WeightPerTensorFloat.let(bit_width=4),
    "e4m3": quant.Fp8e4m3WeightPerChannelFloat,
    "mx": quant.MXFloat4e2m1Weight,
    "nvfp4": quant.NVFP4Weight,
    "nf4": quant.NF4WeightPerGroupFloat.let(group_size=16),
    "a format of one's own": Log2WeightPerGroup,
}
SOLVERS = [GPTQ(), GPFQ(), Qronos(), Clip()]
OF_INTEGERS = [AutoRound(steps=20), LearnedRounding(steps=50)]
SCALES_OF_8_BITS = ("mx", "nvfp4")
INTEGERS = ("int4 groups", "zero points", "one scale")
X = jax.random.normal(jax.random.key(3), (96, 32))


def problem(name: str) -> Problem:
    layer = QuantLinear(32, 6, weight_quant=FORMATS[name], rngs=nnx.Rngs(0))
    layer.eval()
    parameter = QuantizedParameter("kernel", layer)
    x = jax.random.normal(jax.random.key(1), (96, 32)) @ jax.random.normal(jax.random.key(2), (32, 32))
    hessian = (x.T @ x)[None]
    weights = parameter.value.T[None]

    def measured(matrices: jax.Array) -> MatrixGrid:
        grid = parameter.measure(matrices[0].T)
        return MatrixGrid(grid.scale.T[None], grid.zero_point.T[None], parameter.grid)

    sharing = Sharing(lambda: parameter.owners().T[None], restricted=name in SCALES_OF_8_BITS)
    sums = Statistics(jnp.full(1, 96.0), {"hessian": hessian, "cross": hessian})
    return Problem(weights, weights, sums, measured, parameter.group_size, sharing)


@pytest.mark.heavy
def test_a_symmetric_range_is_rounded_as_a_call_does() -> None:
    """By the reciprocal of the scale: numbers halfway between two steps may differ from a division by it."""
    layer = QuantLinear(
        64,
        64,
        weight_quant=quant.Int8WeightPerTensorAbsMax.let(bit_width=4),
        use_bias=False,
        rngs=nnx.Rngs(0),
    )
    largest = np.linspace(1.0, 2.0, 64, dtype=np.float32)
    differ = 0
    for end in largest:
        halves = (np.arange(64 * 64, dtype=np.float32) % 14 - 6.5) * np.float32(end / 7.5)
        halves[0] = end
        layer.kernel[...] = jnp.asarray(halves.reshape(64, 64))
        parameter, called = QuantizedParameter("kernel", layer), layer.quant_weight()
        grid = MatrixGrid(called.scale, jnp.float32(0), parameter.grid, parameter.by_reciprocal)
        np.testing.assert_array_equal(grid.nearest(parameter.value), called.value)
        divided = replace(grid, by_reciprocal=False).nearest(parameter.value)
        differ += int(jnp.sum(divided != called.value))
    assert differ > 0


def error(found: Solution, given: Problem) -> float:
    hessian = given.statistics.mean("hessian")
    return float(squared_errors(found.values - given.original, hessian).sum())


@pytest.mark.lengthy
@pytest.mark.parametrize("name", FORMATS)
def test_outputs_are_no_worse_than_with_rounding_to_nearest(name: str) -> None:
    given = problem(name)
    nearest = error(RTN()(given), given)
    for solver in (*SOLVERS, *(OF_INTEGERS if name in INTEGERS else [])):
        found: Any = solver(given)
        assert error(found, given) <= nearest * (1 + 1e-5), solver
        grid = MatrixGrid(found.scale, found.zero_point, given.measure(given.weights).grid)
        np.testing.assert_allclose(grid.nearest(found.values), found.values, rtol=1e-6, atol=1e-7)
    if name not in SCALES_OF_8_BITS:
        found = HQO(steps=5)(given)
        wrong = [float(jnp.abs(each.values - given.weights).mean()) for each in (found, RTN()(given))]
        assert wrong[0] <= wrong[1]


class Solvable(nnx.Module):
    """A layer, a parameter that the model contracts by itself, and a stack of these."""

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(0), 2)
        self.layer = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
        self.own = nnx.Param(jax.random.normal(keys[0], (32, 32)))
        self.stack = nnx.Param(jax.random.normal(keys[1], (2, 32, 32)) / 6)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.layer(x)) @ self.own[...]
        return jax.lax.scan(lambda carry, w: (jnp.tanh(carry @ w), None), x, self.stack[...])[0]


CHOSEN = [(name, solver) for name in FORMATS for solver in (RTN(), *SOLVERS)]
CHOSEN += [(name, solver) for name in INTEGERS for solver in OF_INTEGERS]
CHOSEN += [(name, HQO(steps=5)) for name in FORMATS if name not in SCALES_OF_8_BITS]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "solver"), CHOSEN, ids=lambda x: x if isinstance(x, str) else type(x).__name__
)
def test_what_was_chosen_is_frozen_in_slices_to_the_bit(name: str, solver: Any) -> None:
    solved = (
        Recipe(Solve(solver)).apply(Solvable(), Rule(weight_quant=FORMATS[name]), [X], progress=False).model
    )
    whole, in_slices = (freeze(nnx.clone(solved), sliced_from=n) for n in (2**30, 1))
    assert nnx.graphdef(in_slices) == nnx.graphdef(whole)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(in_slices), nnx.state(whole))


@pytest.mark.heavy
def test_large_solved_weights_are_frozen() -> None:
    model, x = nnx.Linear(1024, 256, use_bias=False, rngs=nnx.Rngs(0)), jnp.ones((2, 1024))
    rule = Rule(weight_quant=FORMATS["mx"])
    solved = Recipe(Solve(RTN())).apply(model, rule, [x], progress=False).model
    np.testing.assert_allclose(freeze(nnx.clone(solved))(x), solved(x), rtol=1e-5, atol=1e-5)
