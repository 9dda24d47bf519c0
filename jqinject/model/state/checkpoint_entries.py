"""Flattens a user's state to a mapping from paths to values."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.model.walk import ModelIndex, Path
from jqinject.quant_tensor import is_concrete

LIST = "a list of numbers"


def flat_entries(state: Any) -> dict[Path, Any]:
    """The arrays of a state by path.

    Args:
        state: an `nnx.State`, nested mappings and sequences of arrays, or a module.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(state, nnx.Module):
        return {found.path: found.variable.get_value() for found in ModelIndex(state).variables}
    if not isinstance(state, Mapping):
        raise TypeError(
            "load_state takes an nnx.State, a nested dict of arrays or a module, "
            f"got {type(state).__name__}.\n  cure: nnx.state(model), or nnx.to_pure_dict(nnx.state(model))"
        )
    return dict(_flatten(state, ()))


def _flatten(node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(node, nnx.Variable):
        yield from _flatten(node.get_raw_value(), path)
    elif isinstance(node, Mapping):
        for key, child in node.items():
            flat = ".".join(map(str, key)) if isinstance(key, tuple) else str(key)
            yield from _flatten(child, (*path, flat))
    elif isinstance(node, list | tuple):
        for index, child in enumerate(node):
            yield from _flatten(child, (*path, str(index)))
    elif node is not None:
        yield path, node


def in_pieces(entries: Mapping[Path, Any], known: set[Path]) -> dict[Path, str]:
    """Variables that a state holds as a list of numbers or a mapping instead of one array, with a description.

    Args:
        entries: from `flat_entries`.
        known: the model's paths.
    """
    found: dict[Path, str] = {}
    for path in entries:
        whole = next((path[:depth] for depth in range(1, len(path)) if path[:depth] in known), None)
        if path not in known and whole is not None:
            inside = path[len(whole)]
            found.setdefault(whole, LIST if inside.isdigit() else f"a mapping with {inside!r}")
    return found


def nested_path(path: Path) -> Path:
    """A path whose keys are split at dots and slashes."""
    return tuple(name for key in path for name in key.replace("/", ".").split(".") if name)


def unwrapped(entries: Mapping[Path, Any], known: set[Path]) -> dict[Path, Any]:
    """Entries with `{"value": ...}` unwrapped: Orbax restores Variables this way without a target."""

    def unwrap(path: Path) -> Path:
        places = [at for at in (len(path) - 1, len(path) - 2) if at >= 0 and path[at] == "value"]
        shorter = (path[:at] + path[at + 1 :] for at in places)
        return path if path in known else next((found for found in shorter if found in known), path)

    return {unwrap(path): value for path, value in entries.items()}


def problem_of(value: Any, held: Any) -> str | None:
    """Why a value cannot replace the one held; None if it can."""
    if not isinstance(value, jax.Array | np.ndarray | np.generic | int | float):
        return f"is not an array: got {type(value).__name__}"
    if not is_concrete(value):
        return "is a tracer: call load_state outside of jit"
    shape = np.shape(value)
    if shape != held.shape:
        return f"has shape {shape}, the model needs {tuple(held.shape)}"
    given = getattr(value, "dtype", None)
    if given is None or given == held.dtype:
        return None
    if _is_float(given) and _is_float(held.dtype):
        return None
    return f"has dtype {given}, the model needs {held.dtype}"


def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))
