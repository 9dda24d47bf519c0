"""A recipe holds the model twice, and what one site needs."""

import gc
from dataclasses import dataclass, field

import jax
import pytest
from flax import nnx

from jqinject import Rule, quant
from jqinject.recipes import GPTQ, Problem, Recipe, Solution, Solve

SITES, WIDTH, SAMPLES = 12, 128, 64
WEIGHT = 4 * WIDTH * WIDTH


def held() -> int:
    """Bytes of all arrays."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@dataclass
class Watched:
    """A solver that notes what is held before and after it has solved a site."""

    seen: list[int] = field(default_factory=list)
    statistics = ("hessian",)

    def __call__(self, problem: Problem) -> Solution:
        self.seen.append(held())
        solution = GPTQ()(problem)
        self.seen.append(held())
        return solution


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.lengthy
def test_memory_does_not_grow_with_the_sites_that_are_solved(on_host: bool) -> None:
    layers = [nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(i)) for i in range(SITES)]
    model = nnx.Sequential(*layers)
    batches = [jax.random.normal(jax.random.key(i), (SAMPLES, WIDTH)) for i in range(2)]
    rule = Rule(weight_quant=quant.Int8WeightPerChannelFloat.let(bit_width=4))
    solver = Watched()
    before = held()
    result = Recipe(Solve(solver)).apply(model, rule, batches, progress=False, on_host=on_host)
    after = held()
    assert len(solver.seen) == 2 * SITES
    floats = SITES * WEIGHT
    quantized = after - before
    assert quantized <= 1.1 * floats
    hessian, activations = WEIGHT, 4 * 2 * 2 * SAMPLES * WIDTH
    peak = max(solver.seen) - before  # the float model is held before
    assert peak + floats <= floats + hessian + activations + 1.2 * quantized
    del result
