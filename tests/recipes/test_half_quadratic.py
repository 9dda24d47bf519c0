"""HQO: less mean error than what the quantizer measures, on whatever grid has free scales."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import Rule, quant
from jqinject.recipes import HQO, RTN, Recipe, Solve

GRIDS = {
    "zero points": quant.ShiftedUint8WeightPerChannelFloat.let(bit_width=3, quantize_zero_point=False),
    "integer zero points": quant.ShiftedUint8WeightPerChannelFloat.let(bit_width=3),
    "a table": quant.NF4WeightPerGroupFloat.let(group_size=16),
}


def layer() -> nnx.Linear:
    made = nnx.Linear(32, 6, rngs=nnx.Rngs(0))
    made.kernel.set_value(jax.random.t(jax.random.key(1), 3.0, (32, 6)))
    return made


def solved(solver: Any, grid: Any) -> Any:
    x = jnp.ones((4, 32))
    return Recipe(Solve(solver)).apply(layer(), Rule(weight_quant=grid), [x], progress=False).model


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.lengthy
def test_the_mean_error_gets_smaller_and_numbers_stay(name: str) -> None:
    weights = layer().kernel.get_value()
    found, nearest = (solved(solver, GRIDS[name]) for solver in (HQO(steps=30), RTN()))
    errors = [float(jnp.abs(each.kernel.get_value() - weights).mean()) for each in (found, nearest)]
    assert errors[0] < errors[1]
    np.testing.assert_array_equal(found.quant_weight().value, found.kernel.get_value())
    if name == "integer zero points":
        held = np.asarray(found.weight_quant.record[...]["zero_point"])
        np.testing.assert_array_equal(held, np.round(held))


@pytest.mark.heavy
def test_it_finds_what_a_quantizer_that_searches_by_itself_finds() -> None:
    grid = quant.ShiftedUint8WeightPerTensorFloat.let(bit_width=3, quantize_zero_point=False)
    itself = quant.ShiftedUint8WeightPerTensorFloatHQO.let(bit_width=3)
    found, wanted = solved(HQO(), grid), solved(RTN(), itself)
    np.testing.assert_allclose(found.kernel.get_value(), wanted.kernel.get_value(), rtol=1e-4, atol=1e-4)


@pytest.mark.heavy
@pytest.mark.parametrize("grid", [quant.MXFloat4e2m1Weight, quant.NVFP4Weight])
def test_scales_that_are_numbers_of_a_format_are_refused(grid: Any) -> None:
    with pytest.raises(ValueError, match=r"dot_general0 \(kernel\): HQO looks for any scale.*\n  cure: GPTQ"):
        solved(HQO(), grid)
    with pytest.raises(ValueError, match="HQO: kappa must be a number above 0"):
        HQO(kappa=0.0)
