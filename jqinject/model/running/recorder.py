"""Records intermediate arrays of a compiled model, also inside loops and maps."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import BinaryQuant, ClampedBinaryQuant, TernaryQuant
from jqinject.ops.processes import from_holder, spans_processes
from jqinject.quant_tensor import (
    as_array,
)

Arrays = tuple[np.ndarray, ...]
ONE_STEP = (BinaryQuant, ClampedBinaryQuant, TernaryQuant)


class Recorder:
    """Arrays by layer and by kind, in call order."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], list[tuple[int, Arrays]]] = defaultdict(list)
        self._traced: Counter[tuple[str, str]] = Counter()

    def note(self, layer: str, what: str, *arrays: Any) -> None:
        """Keep arrays whenever the traced program runs; in a loop those of every iteration."""
        key = (layer, what)
        # Keep the order of the trace: a compiled program may call back in another order.
        order = self._traced[key]
        self._traced[key] += 1
        jax.debug.callback(partial(self._keep, key, order), *map(jnp.asarray, arrays))

    def _keep(self, key: tuple[str, str], order: int, *arrays: Any) -> None:
        self._kept[key].append((order, tuple(map(np.asarray, arrays))))

    def finish(self, *given: Any) -> None:
        """Wait for the started programs; afterwards every process holds all their records.

        Args:
            given: pytrees of the programs' arguments.
        """
        jax.effects_barrier()
        if spans_processes(given):
            # If a program spans several processes, only one is called back, with whole arrays.
            self._kept = defaultdict(list, from_holder(dict(self._kept), bool(self._kept)))

    def of(self, layer: str, what: str) -> list[Arrays]:
        """The kept arrays, float64, once the program has run."""
        kept = sorted(self._kept[layer, what], key=lambda entry: entry[0])
        return [tuple(array.astype(np.float64) for array in arrays) for _, arrays in kept]

    def calls(self, layer: str, what: str) -> int:
        """The number of records."""
        return len(self._kept[layer, what])

    def clear(self) -> None:
        """Drop all arrays: NNX's caches may keep the recorder alive."""
        self._kept.clear()


class Listener:
    """A proxy that records its inputs and outputs, and otherwise behaves like the proxy that it wraps."""

    def __init__(self, proxy: Any, recorder: Recorder, layer: str, part: str) -> None:
        self._proxy = proxy
        self._note = partial(recorder.note, layer, part)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proxy, name)

    def __call__(self, x: Any, *more: Any) -> Any:
        """Call the proxy and record; weights that depend on the format of their input are called with it."""
        made = self._proxy(x, *more)
        if self._proxy.is_quant_enabled:
            self._note(*clipped_fields(self._proxy, as_array(x), made))
        return made


def clipped_fields(proxy: Any, x: jax.Array, made: Any) -> tuple[Any, ...]:
    """The fields of `Clipped`: a quantizer's input, its output and its range.

    Args:
        proxy: the quantizer's; None if it is gone.
        x: the input.
        made: the same quantized, a QuantTensor.
    """
    if proxy is not None and isinstance(proxy.tensor_quant, ONE_STEP):
        low, high = -1, 1
    else:
        grid = made.grid
        if grid.is_integer and proxy is not None and proxy.is_narrow_range:
            grid = replace(grid, narrow_range=True)
        low, high = grid.bounds
    return x, made.value, made.scale, made.zero_point, low, high
