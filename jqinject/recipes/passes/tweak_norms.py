"""`TweakNorms`: the gains of norms, adjusted to a quantized model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jqinject.model.calibration import with_progress
from jqinject.model.walk import ModelIndex
from jqinject.program import dotted
from jqinject.recipes.sensitivities import BatchErrors
from jqinject.recipes.stream.flat_program import Slot
from jqinject.recipes.work import Work


@dataclass(frozen=True)
class Tweaked:
    """Gains that were adjusted.

    Attributes:
        paths: of the gains.
        before, after: how far the channels of the outputs were from the float model's.
        steps: how many were taken until the best.
    """

    paths: tuple[str, ...]
    before: float
    after: float
    steps: int

    def __str__(self) -> str:
        moved = f"distance of the outputs' channels from {self.before:.3g} to {self.after:.3g}"
        return f"{', '.join(self.paths) or 'no gains'}: {moved}, after {self.steps} steps"


@dataclass(frozen=True)
class TweakNorms:
    """Adjusts the gains of norms in the quantized model until the channels of its outputs have their distribution back.

    The distance is `mean |m_q - m| + mean |v_q - v|`, by the mean `m` and the variance `v` of each channel (the last
    axis of an output) over a batch. Steps are Adam's, a batch each in turn; the gains with the least distance over all
    batches are kept. Gains are found from the program: parameters of one axis, without a quantizer, that values are
    multiplied by. It belongs at the end of a recipe: passes after it run the data through the gains as they were.

    Args:
        steps: of the descent.
        learning_rate: of Adam, relative to the largest magnitude of each gain.

    Raises:
        ValueError: numbers that make no sense.

    Source: Li et al., "Norm Tweaking: High-performance Low-bit Quantization of Large Language Models", 2023.

    Differs from the paper: the outputs of the model are compared, not those of each block; all gains are adjusted
    together.

    Example:
        >>> TweakNorms(steps=10)
        TweakNorms(steps=10, learning_rate=0.001)
    """

    steps: int = 50
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.learning_rate > 0:
            raise ValueError(
                f"TweakNorms: steps is {self.steps} and learning_rate {self.learning_rate}.\n"
                "  cure: at least one step; a rate above 0"
            )

    def __call__(self, work: Work) -> list[Any]:
        """See `Pass`."""
        variables = ModelIndex(work.quantized).by_name
        quantized = work.parameters()
        paths = tuple(path for path in gains_of(work) if path in variables and path not in quantized)
        if not paths:
            return [Tweaked((), 0.0, 0.0, 0)]
        start = {path: jnp.asarray(variables[path].get_value()) for path in paths}
        sizes = {
            path: jnp.maximum(jnp.abs(value.astype(jnp.float32)).max(), 1e-6) for path, value in start.items()
        }
        errors = BatchErrors[dict[str, jax.Array]](
            work, work.quantized, partial(_gains, start, sizes), _apart
        )
        optimizer = optax.adam(self.learning_rate)
        moved = {path: jnp.zeros(value.shape, jnp.float32) for path, value in start.items()}
        state, before = optimizer.init(moved), errors.error(moved)
        best, least, taken = moved, before, 0
        for step in with_progress(range(self.steps), "norms", shown=work.progress):
            gradients = errors.gradient(step, moved)
            with jax.numpy_dtype_promotion(
                "standard"
            ):  # optax raises floats to the power of an integer count
                updates, state = optimizer.update(gradients, state)
            moved = jax.tree.map(jnp.add, moved, updates)
            found = errors.error(moved)
            if found < least:
                best, least, taken = moved, found, step + 1
        for path in paths:
            variables[path].set_value(_at(start[path], best[path], sizes[path]))
        return [Tweaked(paths, before, least, taken)]


def gains_of(work: Work) -> list[str]:
    """The paths of parameters of one axis that values of the float model's program are multiplied by."""
    stream = work.float_stream(work.calls[:1])
    traced = stream.traced
    inputs = zip(traced.flat.inputs, traced.program.inputs, strict=True)
    owners: dict[Slot, frozenset[Slot]] = {}
    paths: dict[Slot, str] = {}
    for slot, given in inputs:
        if given.is_weight and jnp.ndim(given.value) == 1:
            owners[slot], paths[slot] = frozenset({slot}), dotted(given.weight_path)
    found: dict[str, None] = {}
    for step in traced.flat.steps:
        own = frozenset[Slot]().union(*(owners.get(slot, frozenset()) for slot in step.inputs))
        if step.outputs and step.outputs[0] in traced.found.fixed:
            owners.update(dict.fromkeys(step.outputs, own))
        elif step.name == "mul" and len(own) == 1:
            found[paths[next(iter(own))]] = None
    return list(found)


def _gains(
    start: dict[str, jax.Array], sizes: dict[str, jax.Array], moved: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """All gains that have moved."""
    return {path: _at(value, moved[path], sizes[path]) for path, value in start.items()}


def _at(value: jax.Array, moved: jax.Array, size: jax.Array) -> jax.Array:
    """A gain that has moved."""
    return (value.astype(jnp.float32) + size * moved).astype(value.dtype)


def _moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of each channel."""
    rows = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    return rows.mean(axis=0), rows.var(axis=0)


def _apart(found: list[jax.Array], wanted: list[jax.Array]) -> jax.Array:
    """How far the moments of outputs are from each other."""
    pairs = (zip(_moments(x), _moments(y), strict=True) for x, y in zip(found, wanted, strict=True))
    return sum((jnp.abs(a - b).mean() for pair in pairs for a, b in pair), jnp.float32(0))
