"""Drives auto-round's signed gradient descent: its first gradients and steps, and the loss that it ends with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.ops import IntGrid
from jqinject.recipes import RTN, AutoRound
from jqinject.recipes.solvers.rounding_descent import Descent, Offsets
from jqinject.recipes.solvers.solver import MatrixGrid
from tests.golden._config import reading
from tests.golden.adapters.ptq_cases import said
from tests.golden.adapters.ptq_matrices import problem_of, ranges, summed


@dataclass(frozen=True)
class Rounded:
    """What a config says."""

    bits: int
    group_size: int
    symmetric: bool
    solver: AutoRound

    def measure(self, matrices: jax.Array) -> MatrixGrid:
        """The larger side keeps its sign, so that it becomes the least code; or the whole range, with a zero point."""
        low, high = ranges(matrices, self.group_size, "group")
        grid = IntGrid(self.bits)
        if self.symmetric:
            signed = jnp.where(-low > high, -low, -high)
            return MatrixGrid(signed / 2 ** (self.bits - 1), jnp.zeros_like(low), grid)
        scale = (high - low) / (2**self.bits - 1)
        steps = -low / scale
        zero_point = steps + jax.lax.stop_gradient(jnp.round(steps) - steps)
        return MatrixGrid(scale, zero_point + grid.bounds[0], grid)


def rounded_of(config: dict[str, Any]) -> Rounded:
    """Read a config."""
    with reading(config, "auto-round") as given:
        given.choose("peer", {"auto-round": None})
        given.choose("algorithm", {"signround": None})
        given.choose("scale_dtype", {"float32": None})
        said(given, "batch", {"all 64 rows at every iteration": None})
        said(given, "driven", {"WrapperLinear + SignSGD of the package": None})
        said(given, "loss", {"mean squared output error": None})
        said(given, "schedule", {"linear from lr to 0 over iters": None})
        given.take("seed")
        tunes = given.choose("minmax_tuning", {True: True, False: False})
        rate, range_rate = given.take("lr"), given.take("minmax_lr")
        solver = AutoRound(given.take("iters"), rate, range_rate if tunes else 0.0)
        symmetric = given.choose("symmetric", {True: True, False: False})
        return Rounded(given.take("bits"), given.take("group_size"), symmetric, solver)


def run(case: dict[str, Any], inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """The outputs that are compared number by number, and the loss of the result."""
    stated = rounded_of(case["config"])
    weight, statistics = inputs["weight"], summed(inputs["x"])
    problem = problem_of(weight, statistics, stated.measure, stated.group_size)
    descent = Descent(problem, stated.solver)
    nearest = RTN()(problem)
    found: dict[str, Any] = {
        "rtn": nearest.values[0],
        "rtn_scale": nearest.scale[0, :, :: stated.group_size].reshape(-1, 1),
    }
    step = jax.jit(descent.step)
    offsets = descent.start()
    for count in range(5):
        offsets, _, _, gradient = step(offsets, count)
        if count == 0:  # the reference multiplies its loss by 1000
            found |= named("grad0", jax.tree.map(lambda x: 1000 * x, gradient), stated)
        if count in (0, 1, 4):
            found |= named(f"after{count + 1}", offsets, stated)
    wrong = np.asarray(stated.solver(problem).values)[0] - weight
    found["best_loss"] = float(np.mean((inputs["x"] @ wrong.T) ** 2))
    return found


def named(prefix: str, offsets: Offsets, stated: Rounded) -> dict[str, np.ndarray]:
    """Offsets as the reference writes them: a row for each group."""
    return {
        f"{prefix}.value": np.asarray(offsets.value).reshape(-1, stated.group_size),
        f"{prefix}.min_scale": np.asarray(offsets.low).reshape(-1),
        f"{prefix}.max_scale": np.asarray(offsets.high).reshape(-1),
    }
