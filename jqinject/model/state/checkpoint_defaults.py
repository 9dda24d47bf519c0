"""Lets components complete their checkpoint entries, for variables that depend on each other."""

from typing import Any, Protocol, cast, runtime_checkable

import jax.numpy as jnp

from jqinject.model.walk import ModelIndex, Path, VariableEntry


@runtime_checkable
class HasCheckpointDefaults(Protocol):
    """A component whose variables depend on each other: a loaded scale, say, means that calibration is over."""

    def complete_state(self, entries: dict[str, Any]) -> dict[str, Any]: ...


def with_checkpoint_defaults(index: ModelIndex, entries: dict[Path, Any]) -> dict[Path, Any]:
    """The entries, with those of each component completed by it.

    Args:
        index: of the model that is loaded into.
        entries: path -> array.

    Returns:
        The entries to check and write.
    """
    result = dict(entries)
    for path, component in _components(index):
        own = {p: result[p] for p in result if p[: len(path)] == path and len(p) > len(path)}
        if not own:
            continue
        named = {".".join(p[len(path) :]): value for p, value in own.items()}
        finished = component.complete_state(named)
        for p in own:
            del result[p]
        for name, value in finished.items():
            added = (*path, *name.split("."))
            given = any(value is entry for entry in own.values())
            result[added] = value if given else _stacked(value, index.by_path.get(added))
    return result


def _stacked(value: Any, target: VariableEntry | None) -> Any:
    """A value that a component adds for one layer, repeated for every layer of a stack."""
    array = jnp.asarray(value)
    shape = array.shape if target is None else target.variable.get_value().shape
    return jnp.broadcast_to(array, shape) if shape[len(shape) - array.ndim :] == array.shape else array


def _components(index: ModelIndex) -> list[tuple[Path, HasCheckpointDefaults]]:
    found: dict[int, tuple[Path, HasCheckpointDefaults]] = {}
    for path, node in index.places:
        # Looked up on the class, not the instance: `nnx.Rngs` has a stream under any name.
        if issubclass(type(node), HasCheckpointDefaults):
            found.setdefault(id(node), (path, cast(HasCheckpointDefaults, node)))
    # Inner components first, so that outer ones see their completed entries.
    return sorted(found.values(), key=lambda item: -len(item[0]))
