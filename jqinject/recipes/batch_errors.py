"""The error of a quantized model's outputs as a function of numbers that a pass learns, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from flax import nnx

from jqinject.recipes.sensitivities import outputs_of
from jqinject.recipes.work import Work

Learned = TypeVar("Learned")
Distance = Callable[[list[jax.Array], list[jax.Array]], jax.Array]


class _Batch(NamedTuple):
    """One batch: its arrays, what the float model makes of them, and the compiled error and gradient."""

    error: Callable[..., jax.Array]
    gradient: Callable[..., Any]
    arrays: Any
    wanted: list[jax.Array]


class BatchErrors(Generic[Learned]):
    """How far the outputs of a quantized model are from the float model's; compiled once for calls of one kind.

    Args:
        work: with the float model and the data.
        quantized: the quantized model.
        values: from what is learned to parameters of the quantized model, by path as text.
        distance: from its outputs and the float model's to a number.
    """

    def __init__(
        self,
        work: Work,
        quantized: nnx.Module,
        values: Callable[[Learned], Mapping[str, jax.Array]],
        distance: Distance,
    ) -> None:
        made: dict[Any, tuple[Any, Any, Any]] = {}
        self._batches: list[_Batch] = []
        for call in work.calls:
            if call.frame not in made:
                outputs, floats = (outputs_of(model, call) for model in (quantized, work.model))
                error = partial(_error, outputs, values, distance)
                made[call.frame] = jax.jit(error), jax.jit(jax.grad(error)), jax.jit(partial(floats, {}))
            error_of, gradient_of, wanted_of = made[call.frame]
            self._batches.append(_Batch(error_of, gradient_of, call.arrays, wanted_of(call.arrays)))

    def error(self, learned: Learned) -> float:
        """The mean over all batches."""
        found = [float(each.error(learned, each.arrays, each.wanted)) for each in self._batches]
        return sum(found) / len(found)

    def gradient(self, step: int, learned: Learned) -> Learned:
        """The gradient of the error of one batch: they come in turn.

        Args:
            step: which step it is for.
            learned: where.
        """
        each = self._batches[step % len(self._batches)]
        return each.gradient(learned, each.arrays, each.wanted)


def _error(
    outputs: Callable[..., list[jax.Array]],
    values: Callable[[Any], Mapping[str, jax.Array]],
    distance: Distance,
    learned: Any,
    arrays: Any,
    wanted: list[jax.Array],
) -> jax.Array:
    return distance(outputs(values(learned), arrays), wanted)
