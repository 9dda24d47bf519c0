"""Checks of concrete numbers; under tracing, numbers cannot be compared."""

from typing import Any

import numpy as np
from jax.core import Tracer

from jqinject.ops.processes import lies_here, on_host


def is_concrete(*arrays: Any) -> bool:
    """Whether every one of `arrays` holds numbers (Python ints count), rather than a tracer."""
    return True not in [isinstance(array, Tracer) for array in arrays]


def known_different(a: Any, b: Any) -> bool:
    """Whether `a` and `b` are known to differ by more than float noise (1e-5 relative, 1e-8 absolute).

    False under tracing, where this is unknown. Arrays that do not broadcast against each other differ.
    """
    if not is_concrete(a, b):
        return False
    left, right = on_host(a).astype(np.float64), on_host(b).astype(np.float64)
    try:
        return not np.allclose(left, right, rtol=1e-5, atol=1e-8)
    except ValueError:
        return True


def known_nonzero(array: Any) -> bool:
    """Whether `array` is known to hold a nonzero number; False under tracing."""
    return is_concrete(array) and bool(np.any(on_host(array) != 0))


def hidden(x: Any) -> str:
    """Why the numbers of an array are not shown; empty if they are. Showing them never waits for other processes."""
    if not is_concrete(x):
        return "traced"
    return "" if lies_here(x) else "spread over processes"


def brief(x: Any) -> str:
    """The text that shows `x` in an error: a number, a short list of numbers, or shape and range."""
    if why := hidden(x):
        return f"{why}, shape {x.shape}"
    array = np.asarray(x)
    if array.size == 1:
        return f"{array.item():.6g}"
    if 0 < array.size <= 4:
        return "[" + ", ".join(f"{number:.6g}" for number in array.ravel()) + f"] (shape {array.shape})"
    if array.size == 0:
        return f"empty, shape {array.shape}"
    return f"{array.min():.6g} to {array.max():.6g} (shape {array.shape})"
