"""Running a quantized cell over whole sequences: weights are quantized once, statistics move at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype

from jqinject.nn.recurrent._cell import QuantRecurrentCell
from jqinject.quant_tensor import as_array, on_integers


class Sequence(NamedTuple):
    """What a cell makes of a sequence.

    Attributes:
        outputs: the hidden states of all steps, an `IntQuantTensor` where they are quantized.
        output: the last one.
        memory: the last cell state; None of cells without one.
    """

    outputs: Any
    output: Any
    memory: Any


def run(
    cell: QuantRecurrentCell,
    inputs: Any,
    initial: tuple[Any, ...],
    *,
    time_axis: int,
    reverse: bool,
    quantize_input: bool,
) -> Sequence:
    """Run a cell along the time axis of its input.

    Args:
        cell: the cell; statistics of its quantizers move as if they were called step by step.
        inputs: float array or QuantTensor, (batch, time, features) or (time, batch, features).
        initial: the hidden state, and of a cell with a memory the cell state: arrays, or None for zeros.
        time_axis: which axis is time: 0 or 1.
        reverse: begin with the last step.
        quantize_input: whether the input goes through `io_quant`.
    """
    x = cell._quant_input(inputs) if quantize_input else inputs
    parameters = cell._quant_parameters(x)
    array = as_array(x)
    carry = _initial_carry(cell, array, initial, time_axis)
    projected = cell._projected(parameters, array)
    by_step = {name: jnp.moveaxis(part, time_axis, 0) for name, part in projected.items()}
    quantizers = dict(cell._quantizers())
    graphdef, state = nnx.split(quantizers, graph=True)
    output, memory = Parts(), Parts()

    def body(carried: Any, projected: Any) -> Any:
        state, carry = carried
        copies = nnx.merge(graphdef, state)
        result = cell._step(copies, parameters, carry, projected)
        made = output.take_apart(result.output), memory.take_apart(result.memory)
        return (nnx.state(copies, graph=True), result.carry), (as_array(result.output), *made)

    (state, carry), (values, of_output, of_memory) = jax.lax.scan(
        body, (state, carry), by_step, reverse=reverse
    )
    nnx.update(quantizers, state)
    last = 0 if reverse else -1
    cells = carry[0] if isinstance(carry, tuple) else None
    return Sequence(
        output.of_all(jnp.moveaxis(values, 0, time_axis), of_output),
        output.of_one(values[last], of_output, last),
        None if cells is None else memory.of_one(cells, of_memory, last),
    )


class Parts:
    """The QuantTensor that every step makes, split within the loop and merged after it."""

    def __init__(self) -> None:
        self.make: Callable[[Any, list[Any]], Any] = lambda value, _: value
        self.training = False

    def take_apart(self, tensor: Any) -> list[jax.Array]:
        """What an `IntQuantTensor` knows besides its value; nothing of an array."""
        if not on_integers(tensor):
            return []
        leaves, treedef = jax.tree.flatten(tensor)
        is_value = [leaf is tensor.value for leaf in leaves]
        self.training = tensor.training

        def make(value: Any, others: list[Any]) -> Any:
            rest = iter(others)
            return jax.tree.unflatten(treedef, [value if own else next(rest) for own in is_value])

        self.make = make
        return [leaf for leaf, own in zip(leaves, is_value, strict=True) if not own]

    def of_all(self, values: jax.Array, others: list[jax.Array]) -> Any:
        """All steps as one tensor; in training mode, where they differ, with the mean of their scales."""
        return self.make(values, [x.mean(axis=0) if self.training else x[0] for x in others])

    def of_one(self, value: jax.Array, others: list[jax.Array], step: int) -> Any:
        """One step's tensor."""
        return self.make(value, [x[step] for x in others])


def _initial_carry(
    cell: Any, x: jax.Array, initial: tuple[Any, ...], time_axis: int
) -> tuple[jax.Array, ...] | jax.Array:
    """The carry before the first step: zeros, or what was given, quantized."""
    steps, batch = x.shape[time_axis], x.shape[1 - time_axis]
    if steps == 0:
        raise ValueError(f"a recurrent layer needs at least one time step, got an input of shape {x.shape}")
    shape = (batch, cell.hidden_features)
    dtype = canonicalize_dtype(x, jnp.zeros((), cell.param_dtype), dtype=cell.dtype)
    slots = ("io_quant", "cell_state_quant")

    def state(given: Any, slot: str) -> jax.Array:
        if given is None:
            return jnp.zeros(shape, dtype)
        if given.shape != shape:
            raise ValueError(f"an initial state has to be (batch, hidden) = {shape}, got {given.shape}")
        proxy = getattr(cell, slot)
        return as_array(given if proxy is None else proxy(given)).astype(dtype)

    states = [state(given, slot) for given, slot in zip(initial, slots[: len(initial)], strict=True)]
    return (states[1], states[0]) if len(states) == 2 else states[0]
