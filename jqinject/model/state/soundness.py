"""Finds numbers in a checkpoint that a quantizer cannot use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import FloatRestrictValue, IntRestrictValue, QuantParam, QuantStat
from jqinject.core.memory.memory import Memory
from jqinject.core.memory.memory_policy import DISTANCE
from jqinject.core.state import kind_of
from jqinject.model.walk import ModelIndex, Path, dotted

# The names under which components store scales and zero points.
LEARNED = "value"
RECORD = "record"
COLLECTED = ("buffer", "running_stats")
OF_SCALES = (LEARNED, *COLLECTED)
COUNTERS = ("counter", "count", "countdown")


def _scalings(index: ModelIndex) -> Iterator[tuple[Path, Any]]:
    """The components that store scales, and how these are restricted."""
    for path, node in index.places:
        if isinstance(node, Memory) and node.rule is not DISTANCE:
            yield path, node.rule.restrict_scaling_impl


def never_right(index: ModelIndex, entries: Mapping[Path, Any]) -> list[str]:
    """Errors of entries that no model can have stored: nan, inf; counters, statistics, variances below 0; scales of 0.

    A learned scale whose magnitude is used may be below 0: an optimizer may have moved it there. A running statistic
    may be 0, that of zeros.

    Args:
        index: of the model that is loaded into.
        entries: path -> array, with the shapes and dtypes that the model needs.
    """
    scales, divisors = set(_scales(index)), set(_divisors(index))
    variances = {(*path, "var") for path, node in index.places if isinstance(node, nnx.BatchNorm)}
    found = []
    for path, value in entries.items():
        variable = index.by_path[path].variable
        if path in variances and _least(value) < 0:
            found.append(
                f"{dotted(path)}: is a variance, and no variance is below 0: got {_least(value):.6g}"
            )
        if not issubclass(kind_of(variable), QuantParam | QuantStat):
            continue
        # Other statistics may be nan until they have seen data.
        if not _is_finite(value) and (
            issubclass(kind_of(variable), QuantParam) or path[-1] in (*OF_SCALES, *COUNTERS)
        ):
            found.append(f"{dotted(path)}: holds nan or inf, which no quantizer stores")
        elif path[-1] in COUNTERS and _least(value) < 0:
            found.append(f"{dotted(path)}: is a counter, and counts from 0: got {_least(value):.0f}")
        elif path in scales and _least(value) < 0:
            found.append(f"{dotted(path)}: is a scale, and no scale is below 0: got {_least(value):.6g}")
        elif (path in divisors or path[-1] == "scale") and _least(abs(jnp.asarray(value))) == 0:
            found.append(f"{dotted(path)}: is a scale, and no scale is 0")
        elif path[-1] == "amax_history" and not _least(value) >= 0:
            found.append(
                f"{dotted(path)}: is a record of magnitudes, none of which is below 0: got {_least(value):.6g}"
            )
    return found


def not_finite(entries: Mapping[Path, Any]) -> list[Path]:
    """The entries that hold nan or inf."""
    return [path for path, value in entries.items() if not _is_finite(value)]


def read_by_magnitude(index: ModelIndex, entries: Mapping[Path, Any]) -> list[Path]:
    """The entries that are learned scales below 0, whose magnitude the forward pass uses."""
    learned = {
        (*path, LEARNED)
        for path, restriction in _scalings(index)
        if isinstance(restriction, FloatRestrictValue)
    }
    return [
        path
        for path, value in entries.items()
        if path in learned
        and issubclass(kind_of(index.by_path[path].variable), QuantParam)
        and _least(value) < 0
    ]


def _scales(index: ModelIndex) -> Iterator[Path]:
    """Paths of stored scales that cannot be negative: statistics and whole numbers, unless stored as logarithms."""
    for path, restriction in _scalings(index):
        whole = isinstance(restriction, IntRestrictValue)
        if whole or isinstance(restriction, FloatRestrictValue):
            yield from ((*path, RECORD, name) for name in COLLECTED)
        if whole:
            yield (*path, LEARNED)


def _divisors(index: ModelIndex) -> Iterator[Path]:
    """Paths of stored scales that are bounded away from 0 before they are stored, and not stored as logarithms."""
    for path, restriction in _scalings(index):
        if isinstance(restriction, FloatRestrictValue | IntRestrictValue):
            yield from ((*path, LEARNED), (*path, RECORD, "buffer"))


def _is_finite(value: Any) -> bool:
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    return not jnp.issubdtype(array.dtype, jnp.inexact) or bool(jnp.isfinite(array).all())


def _least(value: Any) -> float:
    return float(jnp.min(jnp.asarray(value))) if np.size(value) else 0.0
