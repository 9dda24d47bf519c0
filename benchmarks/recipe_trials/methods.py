"""The algorithms: each makes a quantized model of a track's float one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax
from flax import nnx

import jqinject
from jqinject.recipes import (
    AWQ,
    GPFQ,
    GPTQ,
    RTN,
    AutoRound,
    FoldNorms,
    LowRank,
    Qronos,
    Recipe,
    Rotate,
    SmoothQuant,
    Solve,
)
from recipe_trials.formats import Format
from recipe_trials.tracks import Track

INTEGERS = ("W4A16", "W3A16", "W2A16", "W4A4")
RANK = 4
ROTATION = (FoldNorms(), Rotate("R1", "R2", "R4"))


@dataclass(frozen=True)
class Method:
    """An algorithm.

    Attributes:
        make: track, format, seed, steps of training -> the quantized model.
        formats: that it serves; all if empty.
        has_seed: whether the result depends on data.
    """

    make: Callable[[Track, Format, int, int], nnx.Module]
    formats: tuple[str, ...] = ()
    has_seed: bool = True

    def serves(self, format_: str) -> bool:
        """Whether it can make numbers of a format."""
        return not self.formats or format_ in self.formats


def by_recipe(*passes: Any, formats: tuple[str, ...] = (), has_seed: bool = True) -> Method:
    """Algorithms after training."""

    def make(track: Track, format_: Format, seed: int, steps: int) -> nnx.Module:
        batches = track.calibration(seed)
        return Recipe(*passes).apply(track.model, format_.rule(track.path), batches, progress=False).model

    return Method(make, formats, has_seed)


def trained(track: Track, format_: Format, seed: int, steps: int) -> nnx.Module:
    """Training with the quantizers in the loop, from the float weights: AdamW with a cosine."""
    model = jqinject.quantize(nnx.clone(track.model), format_.rule(track.path))
    model.train()
    rate = optax.cosine_decay_schedule(track.learning_rate, steps)
    optimizer = nnx.Optimizer(model, optax.adamw(rate, weight_decay=0.0), wrt=nnx.Param)
    for batch in track.training(seed, steps):
        _step(model, optimizer, batch, loss=track.loss)
    model.eval()
    return model


@partial(nnx.jit, static_argnames="loss")
def _step(model: Any, optimizer: nnx.Optimizer[Any], batch: Any, *, loss: Any) -> jax.Array:
    found, gradients = jqinject.value_and_grad(lambda model: loss(model, batch))(model)
    optimizer.update(model, gradients)
    return found


METHODS = {
    "RTN": by_recipe(Solve(RTN()), has_seed=False),
    "GPTQ": by_recipe(Solve(GPTQ())),
    "GPFQ": by_recipe(Solve(GPFQ())),
    "Qronos": by_recipe(Solve(Qronos())),
    "AWQ": by_recipe(AWQ(), Solve(RTN())),
    "SmoothQuant": by_recipe(SmoothQuant(), Solve(RTN())),
    "SmoothQuant, GPTQ": by_recipe(SmoothQuant(), Solve(GPTQ())),
    "rotation": by_recipe(*ROTATION, Solve(RTN()), has_seed=False),
    "rotation, GPTQ": by_recipe(*ROTATION, Solve(GPTQ())),
    "SVDQuant": by_recipe(SmoothQuant(), LowRank(rank=RANK), Solve(RTN())),
    "AutoRound": by_recipe(Solve(AutoRound()), formats=INTEGERS),
    "QAT": Method(trained),
}
"""Without a seed: nothing is collected from data, since the ranges of inputs are those of the tensor at hand."""
