"""A checkpoint under the adapters of a model that `jqinject.lora` made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.dot import FrozenParam
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.loading.loading_plan import Assignment
from jqinject.model.frozen_weights import put_in_place
from jqinject.model.walk import ModelIndex, dotted


def is_adapted(model: nnx.Module) -> bool:
    """Whether a model has adapters."""
    return any(isinstance(found.variable, nnx.LoRAParam) for found in ModelIndex(model).variables)


class _Parameter:
    """What is asked of the holder of a parameter that the model contracts by itself.

    Args:
        held: the parameter, frozen.
    """

    def __init__(self, held: FrozenParam) -> None:
        self.held = held

    @property
    def summed_axes(self) -> tuple[int, ...]:
        """Those that are stored last already."""
        return self.held.form.summed

    def axes_of_sums(self) -> None:
        """No sums are stored."""


def put_under_adapters(model: nnx.Module, arrays: Iterator[tuple[Assignment, Any]]) -> None:
    """Write the numbers of a checkpoint into the base of a model with adapters.

    Args:
        model: the model; it is written to.
        arrays: for each parameter, a function that makes its low-bit numbers, or its floats.

    Raises:
        CheckpointError: low-bit numbers for a parameter that the model keeps float.
    """
    index = ModelIndex(model)
    places = {dotted(path): node for path, node in reversed(index.places) if isinstance(node, nnx.Variable)}
    for each, made in arrays:
        held: Any = places[each.path]
        if not isinstance(made, np.ndarray):
            if not isinstance(held, FrozenParam):
                raise CheckpointError(
                    f"{each.path} is in low bits, but lora keeps it float.\n"
                    f"  cure: a rule with weight_quant for {each.path}, in lora(model, rules, ...)"
                )
            depth = len(held.shape) - len(held.form.shape)
            numbers, form = made(_Parameter(held), depth)
            put_in_place(index, held, FrozenParam.holding(numbers, form, held.get_metadata()))
        elif isinstance(held, FrozenParam):
            put_in_place(index, held, nnx.Param(jnp.asarray(made)))
        else:
            held.set_value(jnp.asarray(made))
