"""What users are told of ranges that never saw data."""

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

# Which were looked at, kept outside of them: an attribute more would be another graph, and a retrace.
LOOKED_AT: weakref.WeakSet[Any] = weakref.WeakSet()


class UncalibratedWarning(UserWarning):
    """A quantizer of activations whose range never saw data was used in evaluation, outside of compiled code."""


def warn_if_uncalibrated(holder: StaticRange, name: Callable[[], str], x: Any) -> None:
    """Warn, once for each `holder`, where it quantizes `x` in a range that never saw data.

    It is looked at when it first quantizes an array in evaluation. Of traced arrays nothing is read.

    Args:
        holder: what holds the range.
        name: returns what the user calls it.
        x: what it quantizes.
    """
    if holder in LOOKED_AT or not is_concrete(x):
        return
    LOOKED_AT.add(holder)
    if holder.has_range() is False:
        warnings.warn(
            f"{name()} quantizes in evaluation, and {UNSEEN}.\n  cure: {CURE}", UncalibratedWarning, 3
        )
