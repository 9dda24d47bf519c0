"""Warnings about ranges that never saw data."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

from jqinject.core._protocols import StaticRange
from jqinject.quant_tensor import is_concrete

UNSEEN = "its range never saw data: it is what it was initialized to, or that of the tensor at hand"
CURE = (
    "jqinject.calibrate(model, batches); or train it, or load a state with ranges (jqinject.load_state), before "
    "model.eval()"
)

# Those already checked, kept outside them: a new attribute would change the graph and retrace.
LOOKED_AT: weakref.WeakSet[Any] = weakref.WeakSet()


class UncalibratedWarning(UserWarning):
    """A quantizer of activations whose range never saw data was used in evaluation, outside of compiled code."""


def warn_if_uncalibrated(holder: StaticRange, name: Callable[[], str], x: Any) -> None:
    """Warn once per `holder` if it quantizes `x` in a range that never saw data.

    Checked when it first quantizes an array in evaluation. Traced arrays are not read.

    Args:
        holder: the owner of the range.
        name: returns its name in error messages.
        x: the tensor to quantize.
    """
    if holder in LOOKED_AT or not is_concrete(x):
        return
    LOOKED_AT.add(holder)
    if holder.has_range() is False:
        warnings.warn(
            f"{name()} quantizes in evaluation, and {UNSEEN}.\n  cure: {CURE}", UncalibratedWarning, 3
        )
