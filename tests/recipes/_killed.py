"""A recipe that goes on from a folder: `python _killed.py FOLDER RESULTS SITES`.

It kills itself when its solver is asked for one more site than `SITES`, and otherwise writes what came out of it, and
of another run without the folder.
"""

import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from jqinject import Rule, quant
from jqinject.core.state import flat_parts
from jqinject.recipes import GPTQ, Problem, Qronos, Recipe, SmoothQuant, Solution, Solve


@dataclass(frozen=True)
class Mortal:
    """A solver that can end its process."""

    sites = 10**6
    calls = 0
    statistics = ("hessian", "cross")

    def __call__(self, problem: Problem) -> Solution:
        if Mortal.calls == Mortal.sites:
            os.kill(os.getpid(), signal.SIGKILL)
        Mortal.calls += 1
        return Qronos()(problem)


def applied(**how: Any) -> dict[str, np.ndarray]:
    """Every number of the model and of the report."""
    layers = [nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(4)]
    rule = Rule(
        weight_quant=quant.Int4WeightPerGroupAbsMax.let(group_size=4), input_quant=quant.Int8ActPerTensorFloat
    )
    batches = [jax.random.normal(jax.random.key(i), (32, 8)) for i in range(2)]
    recipe = Recipe(SmoothQuant(), Solve(Mortal()), Solve(GPTQ()))
    result = recipe.apply(nnx.Sequential(*layers), rule, batches, progress=False, **how)
    found = {
        "/".join(map(str, path)): np.asarray(x.get_value()) for path, x in flat_parts(nnx.state(result.model))
    }
    solved = [(site.nearest, site.solved) for step in result.report.steps[1:] for site in step.sites]
    return {**found, "report": np.array(solved)}


if __name__ == "__main__":
    Mortal.sites = int(sys.argv[3])
    again = applied(checkpoint=sys.argv[1])
    calls = Mortal.calls
    Mortal.sites = 10**6
    whole = applied()
    np.savez(
        sys.argv[2],
        calls=np.array(calls),
        **{f"again/{name}": x for name, x in again.items()},
        **{f"whole/{name}": x for name, x in whole.items()},
    )
