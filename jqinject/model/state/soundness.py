"""Numbers that a checkpoint may hold and that a quantizer can do nothing with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import FloatRestrictValue, IntRestrictValue, QuantParam, QuantStat
from jqinject.model.walk import Found, Path, dotted, walk

# What components store of scales and zero points, in their own words.
OF_SCALES = ("value", "buffer", "running_stats")


@runtime_checkable
class StoresScale(Protocol):
    """A component of scales, which says how those that it stores are read."""

    restrict_scaling_impl: Any


def never_right(model: Any, entries: Mapping[Path, Any], by_path: Mapping[Path, Found]) -> list[str]:
    """Why entries cannot be what a quantizer stored: counters or scales below 0, nan and inf.

    Args:
        model: the model that is loaded into.
        entries: path -> array, of the shapes and dtypes that the model needs.
        by_path: the model's Variables.
    """
    scales = set(_scales(model))
    found = []
    for path, value in entries.items():
        variable = by_path[path].variable
        if not isinstance(variable, QuantParam | QuantStat):
            continue
        # Other statistics may be nan as long as they have seen nothing.
        if not _is_finite(value) and (isinstance(variable, QuantParam) or path[-1] in OF_SCALES):
            found.append(f"{dotted(path)}: holds nan or inf, which no quantizer stores")
        elif jnp.issubdtype(variable.dtype, jnp.integer) and _least(value) < 0:
            found.append(f"{dotted(path)}: is a counter, and counts from 0: got {_least(value):.0f}")
        elif path in scales and _least(value) < 0:
            found.append(f"{dotted(path)}: is a scale, and no scale is below 0: got {_least(value):.6g}")
        elif path[-1] == "amax_history" and not _least(value) >= 0:
            found.append(
                f"{dotted(path)}: is a record of magnitudes, none of which is below 0: got {_least(value):.6g}"
            )
    return found


def not_finite(entries: Mapping[Path, Any]) -> list[Path]:
    """The entries that hold nan or inf."""
    return [path for path, value in entries.items() if not _is_finite(value)]


def _scales(model: Any) -> Iterator[Path]:
    """Where scales are stored as they are: not by their logarithm, and not with a sign of their own."""
    for path, node in walk(model):
        if isinstance(node, StoresScale) and isinstance(
            node.restrict_scaling_impl, FloatRestrictValue | IntRestrictValue
        ):
            yield from ((*path, name) for name in OF_SCALES)
            yield (*path, "runtime_stats", "running_stats")


def _is_finite(value: Any) -> bool:
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    return not jnp.issubdtype(array.dtype, jnp.inexact) or bool(jnp.isfinite(array).all())


def _least(value: Any) -> float:
    return float(jnp.min(jnp.asarray(value))) if np.size(value) else 0.0
