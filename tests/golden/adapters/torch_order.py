"""Which of several equal elements is torch's k-th smallest.

A percentile is an element of the tensor, and where several are equal one of them gets its gradient: here the first, in
torch the one that its quickselect happens to end on. Values on a quantizer's grid are often equal, so cases whose
percentiles are taken of such values are compared with torch's choice put in the place of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core.statistics import extremes as percentiles
from jqinject.ops.reductions import Over


def quickselect(values: np.ndarray, k: int) -> int:
    """The place in `values` of what a quickselect with the median of three as pivot finds as k-th smallest (from 0)."""
    order = list(range(len(values)))
    low, high = 0, len(values) - 1

    def swap(i: int, j: int) -> None:
        order[i], order[j] = order[j], order[i]

    def greater(i: int, j: int) -> bool:
        return bool(values[order[i]] > values[order[j]])

    while high > low + 1:
        swap(low + (high - low) // 2, low + 1)
        for i, j in ((low + 1, high), (low, high), (low + 1, low)):
            if greater(i, j):
                swap(i, j)
        up, down = low + 1, high
        while True:
            up += 1
            while greater(low, up):
                up += 1
            down -= 1
            while greater(down, low):
                down -= 1
            if down < up:
                break
            swap(up, down)
        swap(low, down)
        low, high = (up if down <= k else low), (down - 1 if down >= k else high)
    if high == low + 1 and greater(low, high):
        swap(low, high)
    return order[k]


@contextmanager
def ties_as_torch() -> Iterator[None]:
    """While this lasts, percentiles over whole tensors give their gradient to the element that torch would choose."""
    ours = percentiles._place

    def place(x: jax.Array, value: jax.Array, k: int, positions: jax.Array, over: Over) -> jax.Array:
        if over.axes is not None:
            return ours(x, value, k, positions, over)

        def theirs(array: jax.Array) -> np.ndarray:
            return np.asarray(quickselect(np.asarray(array).reshape(-1), k - 1), np.int32)

        return jax.pure_callback(theirs, jax.ShapeDtypeStruct((), jnp.int32), x)

    with mock.patch.object(percentiles, "_place", place):
        yield
