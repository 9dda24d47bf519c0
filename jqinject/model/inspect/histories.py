"""State that quantizers keep: amax histories, scales and running statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import AmaxScaling, GradStat, QuantParam, QuantStat, StaticRange
from jqinject.core.memory.memory import Memory
from jqinject.core.state import state_parts
from jqinject.ops.processes import on_host
from jqinject.proxy import QuantProxyFromInjector

# Statistics of the current step, counters and formats of inputs: no history.
PASSING = ("pending", "counter", "count", "countdown", "input_format")


@dataclass(frozen=True)
class History:
    """Numbers that a quantizer keeps.

    Attributes:
        slot: the quantizer, as in "input_quant".
        name: their path within the quantizer.
        along: "steps" (oldest first, newest last) or "elements" (channels; stacked layers follow one another).
        values: the numbers; none while placeholders are in their place. For an amax per channel, the largest of each
            step.
    """

    slot: str
    name: str
    along: str
    values: tuple[float, ...]


def histories_of(slots: Iterable[tuple[str, Any]]) -> tuple[History, ...]:
    """The histories of quantizers.

    Args:
        slots: the slot and the quantizer of each; anything else is left out.
    """
    return tuple(
        found
        for slot, proxy in slots
        if isinstance(proxy, QuantProxyFromInjector) and isinstance(proxy.tensor_quant, nnx.Module)
        for found in _of_quantizer(slot, proxy.tensor_quant)
    )


def _of_quantizer(slot: str, quantizer: nnx.Module) -> Iterator[History]:
    nodes = [(path, node) for path, node in nnx.iter_graph(quantizer, graph=True)]
    for path, node in nodes:
        if isinstance(node, AmaxScaling):
            yield History(slot, ".".join(map(str, (*path, "amax_history"))), "steps", _steps(node))
    placeholders = tuple(_placeholders(nodes))
    for path, node in nodes:
        unfilled = any(path[: len(above)] == above for above in placeholders)
        for name, part in _numbers(path, node):
            numbers = on_host(part.get_value()).astype(np.float64).reshape(-1)
            yield History(slot, name, "elements", () if unfilled else tuple(numbers.tolist()))


def _placeholders(nodes: Iterable[tuple[tuple[Any, ...], Any]]) -> Iterator[tuple[Any, ...]]:
    """The paths below which no data or training has replaced initial numbers."""
    for path, node in nodes:
        # On the class: `nnx.Rngs` has a stream under any name.
        if issubclass(type(node), StaticRange) and node.has_range() is False:
            yield path
        if isinstance(node, Memory):
            yield from ((*path, name) for name in node.unfilled())


def _numbers(path: tuple[Any, ...], node: Any) -> Iterator[tuple[str, Any]]:
    """The statistics and learned numbers of a Variable that are no history, by name."""
    if not isinstance(node, QuantParam | QuantStat | GradStat):
        return
    for below, part in state_parts(node):
        above = path[:-1] if below else path
        name = ".".join(map(str, (*above, *below)))
        other = name.rpartition(".")[2] in (*PASSING, "amax_history")
        if not other and jnp.issubdtype(part.dtype, jnp.floating) and part.size:
            yield name, part


def _steps(scaling: AmaxScaling) -> tuple[float, ...]:
    """The largest amax of each step, oldest first, without the leading zeros of steps not yet taken."""
    held = on_host(scaling.amax_history.get_value()).astype(np.float64)
    axis = held.ndim - 1 - len(scaling.scaling_shape)
    steps = np.moveaxis(held, axis, 0).reshape(held.shape[axis], -1)
    largest = np.roll(steps.max(axis=1, initial=0.0), -1)  # element 0 is the newest, element 1 the oldest
    return tuple(np.trim_zeros(largest, "f").tolist())
