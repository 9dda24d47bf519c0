"""Training of the byte-level language model, in steps that can be stopped and gone on with."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jqinject
from byte_lm.corpus import Corpus
from byte_lm.evaluation import log_losses


@dataclass(frozen=True)
class Schedule:
    """How a model is trained.

    Attributes:
        steps: of the optimizer: AdamW with a linear warm-up and a cosine.
        batch: windows a step.
        context: bytes that are predicted in each window.
        learning_rate: the largest.
        seed: of the windows.
    """

    steps: int = 3000
    batch: int = 8
    context: int = 256
    learning_rate: float = 4e-3
    seed: int = 0

    def optimizer(self, model: nnx.Module) -> nnx.Optimizer[Any]:
        """For the parameters of a model."""
        rate = optax.warmup_cosine_decay_schedule(
            0.0, self.learning_rate, max(1, self.steps // 20), max(2, self.steps), self.learning_rate / 20
        )
        decayed = optax.adamw(
            rate, b2=0.98, weight_decay=0.05, mask=lambda state: jax.tree.map(lambda x: x.ndim > 1, state)
        )
        return nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), decayed), wrt=nnx.Param)


@nnx.jit
def train_step(model: Any, optimizer: nnx.Optimizer[Any], windows: jax.Array) -> jax.Array:
    """One step; returns the mean cross-entropy in nats."""
    loss, gradients = jqinject.value_and_grad(lambda model: log_losses(model, windows).mean())(model)
    optimizer.update(model, gradients)
    return loss


class Training:
    """A model on its way.

    Args:
        model: to train, in place.
        schedule: how.
        corpus: of the windows.

    Attributes:
        done: steps taken.
    """

    def __init__(self, model: nnx.Module, schedule: Schedule, corpus: Corpus) -> None:
        self.model, self.schedule, self.corpus = model, schedule, corpus
        self.optimizer = schedule.optimizer(model)
        self.done = 0

    def run(self, until: int | None = None, after: Callable[[int, jax.Array], None] | None = None) -> None:
        """Take steps.

        Args:
            until: how many altogether; None for all.
            after: called with the number of steps taken and the loss, after each.
        """
        schedule = self.schedule
        for number in range(self.done, schedule.steps if until is None else until):
            windows = self.corpus.batch(number, schedule.batch, schedule.context, schedule.seed)
            loss = train_step(self.model, self.optimizer, windows)
            self.done = number + 1
            if after is not None:
                after(self.done, loss)

    def save(self, path: Path) -> None:
        """Write all that going on needs, at once or not at all."""
        leaves = [np.asarray(x) for x in jax.tree.leaves(nnx.state((self.model, self.optimizer)))]
        beside = path.with_suffix(".part")
        beside.write_bytes(pickle.dumps((self.schedule, self.corpus.sha256, self.done, leaves)))
        beside.replace(path)

    def resume(self, path: Path) -> None:
        """Go on from what `save` wrote, with as many steps as this schedule has.

        Raises:
            ValueError: the rest of the schedule differs, or the text.
        """
        schedule, sha256, done, leaves = pickle.loads(path.read_bytes())
        if (replace(schedule, steps=self.schedule.steps), sha256) != (self.schedule, self.corpus.sha256):
            raise ValueError(
                f"{path} is of {schedule} on the text {sha256[:16]}, this is {self.schedule} on "
                f"{self.corpus.sha256[:16]}.\n  cure: another file, or the same arguments and the same Python"
            )
        both = (self.model, self.optimizer)
        structure = jax.tree.structure(nnx.state(both))
        nnx.update(both, jax.tree.unflatten(structure, leaves))
        self.done = done
