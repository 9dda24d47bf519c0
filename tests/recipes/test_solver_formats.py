"""Every solver on every kind of grid: numbers of the grid, and an output no worse than with rounding to nearest."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from jqinject import Rule, freeze, load_state, quant, quantize
from jqinject.nn import QuantLinear
from jqinject.recipes import (
    GPFQ,
    GPTQ,
    HQO,
    QEP,
    RTN,
    AutoRound,
    Clip,
    LearnedRounding,
    LeastSquaresScales,
    MagR,
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
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.own = nnx.Param(jax.random.normal(keys[0], (WIDTH, WIDTH)))
        self.stack = nnx.Param(jax.random.normal(keys[1], (2, WIDTH, WIDTH)) / 12)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.layer(x)) @ self.own[...]
        return jax.lax.scan(lambda carry, w: (jnp.tanh(carry @ w), None), x, self.stack[...])[0]


WIDTH = 128
SERVED = {
    "int4 groups of 32": quant.Int4WeightPerGroupAbsMax.let(group_size=32),
    "int4 groups of 128": quant.Int4WeightPerGroupAbsMax.let(group_size=128),
    "int3 channels": quant.Int8WeightPerChannelFloat.let(bit_width=3),
    "one scale": FORMATS["one scale"],
    "zero points": FORMATS["zero points"],
    "zero points of groups": quant.ShiftedUint8WeightGroupQuantFloat.let(bit_width=4, group_size=32),
    "e4m3": FORMATS["e4m3"],
    "mx": FORMATS["mx"],
    "nvfp4": FORMATS["nvfp4"],
    "nf4": quant.NF4WeightPerGroupFloat.let(group_size=32),
    "a format of one's own": FORMATS["a format of one's own"],
}
DESCENT = (AutoRound(steps=20), LearnedRounding(steps=50))
ALL = (RTN(), *SOLVERS, MagR(GPTQ()), QEP(GPTQ()))
FREE = (LeastSquaresScales(importance=True), HQO(steps=5))
CHOSEN = [
    (name, solver)
    for name in SERVED
    for solver in (
        *ALL,
        *(DESCENT if name.startswith(("int", "one", "zero")) else ()),
        *(FREE if name not in SCALES_OF_8_BITS else ()),
    )
]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "solver"), CHOSEN, ids=lambda x: x if isinstance(x, str) else type(x).__name__
)
def test_what_was_chosen_is_served_and_saved_to_the_bit(name: str, solver: Any, tmp_path: Path) -> None:
    """In one piece and in slices, as weights of real sizes are frozen."""
    x, rule = jax.random.normal(jax.random.key(3), (160, WIDTH)), Rule(weight_quant=SERVED[name])
    solved = Recipe(Solve(solver)).apply(Solvable(), rule, [x], progress=False).model
    in_one, in_slices = (freeze(nnx.clone(solved), sliced_from=n) for n in (2**30, 1))
    assert nnx.graphdef(in_slices) == nnx.graphdef(in_one)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(in_slices), nnx.state(in_one))
    evaluated = solved.layer.kernel, solved.own, solved.stack
    for weight, stored in zip(evaluated, (in_one.layer.kernel, in_one.own, in_one.stack), strict=True):
        np.testing.assert_array_equal(stored[...], weight[...])
    np.testing.assert_allclose(in_one(x[:4]), solved(x[:4]), rtol=1e-5, atol=1e-5)

    restored = nnx.eval_shape(lambda: freeze(quantize(Solvable(), rule, inputs=(x,))))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "served", nnx.as_pure(nnx.state(in_slices)))
        checkpointer.wait_until_finished()
        load_state(restored, checkpointer.restore(tmp_path / "served"))
    np.testing.assert_array_equal(restored(x[:4]), in_slices(x[:4]))


@pytest.mark.heavy
def test_large_solved_weights_are_frozen() -> None:
    model, x = nnx.Linear(1024, 256, use_bias=False, rngs=nnx.Rngs(0)), jnp.ones((2, 1024))
    rule = Rule(weight_quant=FORMATS["mx"])
    solved = Recipe(Solve(RTN())).apply(model, rule, [x], progress=False).model
    np.testing.assert_allclose(freeze(nnx.clone(solved))(x), solved(x), rtol=1e-5, atol=1e-5)
