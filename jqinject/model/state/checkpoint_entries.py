"""A user's state as a mapping from paths to values, and what is wrong with these."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from jqinject.core import FloatRestrictValue, IntRestrictValue, QuantParam, QuantStat
from jqinject.core.memory import memory, memory_policy
from jqinject.core.state import kind_of
from jqinject.model.walk import ModelIndex, Path, VariableEntry, place_name
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import OpQuantizers
from jqinject.quant_tensor import is_concrete

LIST = "a list of numbers"
Problem = tuple[Path, str]
"""The path of an entry, and what is wrong with it."""


def flat_entries(state: object) -> dict[Path, Any]:
    """The arrays of a state by path.

    Args:
        state: an `nnx.State`, nested mappings and sequences of arrays, or a module.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(state, nnx.Module):
        return {entry.path: entry.variable.get_value() for entry in ModelIndex(state).variables}
    if not isinstance(state, Mapping):
        raise TypeError(
            "load_state takes an nnx.State, a nested dict of arrays or a module, "
            f"got {type(state).__name__}.\n  cure: nnx.state(model), or nnx.to_pure_dict(nnx.state(model))"
        )
    return dict(_flatten(state, ()))


def _flatten(node: object, path: Path) -> Iterator[tuple[Path, object]]:
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


def in_pieces(entries: Mapping[Path, object], paths: set[Path]) -> dict[Path, str]:
    """Variables that a state holds as a list of numbers or a mapping instead of one array, with a description.

    Args:
        entries: from `flat_entries`.
        paths: the model's paths.
    """
    pieces: dict[Path, str] = {}
    for path in entries:
        parent = next((path[:depth] for depth in range(1, len(path)) if path[:depth] in paths), None)
        if path not in paths and parent is not None:
            inside = path[len(parent)]
            pieces.setdefault(parent, LIST if inside.isdigit() else f"a mapping with {inside!r}")
    return pieces


def nested_path(path: Path) -> Path:
    """A path whose keys are split at dots and slashes."""
    return tuple(name for key in path for name in key.replace("/", ".").split(".") if name)


def unwrapped(entries: Mapping[Path, object], paths: set[Path]) -> dict[Path, Any]:
    """Entries with `{"value": ...}` unwrapped: Orbax restores Variables this way without a target."""

    def unwrap(path: Path) -> Path:
        places = [at for at in (len(path) - 1, len(path) - 2) if at >= 0 and path[at] == "value"]
        shorter = (path[:at] + path[at + 1 :] for at in places)
        return (
            path if path in paths else next((candidate for candidate in shorter if candidate in paths), path)
        )

    return {unwrap(path): value for path, value in entries.items()}


def problem_of(value: object, target: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Return why a value cannot replace that of a Variable; None if it can."""
    if not isinstance(value, jax.Array | np.ndarray | np.generic | int | float):
        return f"is not an array: got {type(value).__name__}"
    if not is_concrete(value):
        return "is a tracer: call load_state outside of jit"
    shape = np.shape(value)
    if shape != target.shape:
        return f"has shape {shape}, the model needs {tuple(target.shape)}"
    if not isinstance(value, jax.Array | np.ndarray | np.generic) or value.dtype == target.dtype:
        return None
    if jnp.issubdtype(value.dtype, jnp.floating) and jnp.issubdtype(target.dtype, jnp.floating):
        return None
    return f"has dtype {value.dtype}, the model needs {target.dtype}"


@runtime_checkable
class HasCheckpointDefaults(Protocol):
    """A component whose variables depend on each other: a loaded scale, say, means that calibration is over."""

    def complete_state(self, entries: dict[str, object]) -> dict[str, object]: ...


def with_checkpoint_defaults(index: ModelIndex, entries: dict[Path, Any]) -> dict[Path, Any]:
    """The entries, with those of each component completed by it.

    Args:
        index: of the model that is loaded into.
        entries: path -> array.

    Returns:
        The entries to check and write.
    """
    result = dict(entries)
    # Looked up on the class, not the instance: `nnx.Rngs` has a stream under any name.
    has_defaults = ((at, node) for at, node in index.places if issubclass(type(node), HasCheckpointDefaults))
    components = {id(node): (at, node) for at, node in reversed([*has_defaults])}
    # Inner components first, so that outer ones see their completed entries.
    for path, component in sorted(components.values(), key=lambda place: -len(place[0])):
        own = {p: result[p] for p in result if p[: len(path)] == path and len(p) > len(path)}
        if not own:
            continue
        named = {".".join(p[len(path) :]): value for p, value in own.items()}
        finished = component.complete_state(named)
        for p in own:
            del result[p]
        for name, value in finished.items():
            added = (*path, *name.split("."))
            is_own = any(value is entry for entry in own.values())
            result[added] = value if is_own else _stacked(value, index.by_path.get(added))
    return result


def _stacked(value: object, target: VariableEntry | None) -> Any:
    """A value that a component adds for one layer, repeated for every layer of a stack."""
    array = jnp.asarray(value)
    shape = array.shape if target is None else target.variable.get_value().shape
    return jnp.broadcast_to(array, shape) if shape[len(shape) - array.ndim :] == array.shape else array


# The names under which components store scales and zero points.
LEARNED = "value"
RECORD = "record"
COLLECTED = ("buffer", "running_stats")
OF_SCALES = (LEARNED, *COLLECTED)
COUNTERS = ("counter", "count", "countdown")


class StoredScales:
    """The paths of stored scales, by what their numbers cannot be; scales stored as logarithms are not among them.

    Args:
        index: of a model.

    Attributes:
        never_negative: statistics, and whole numbers.
        never_zero: those that are bounded away from 0 before they are stored.
        magnitudes: learned ones, which may be below 0: the forward pass uses their magnitude.
    """

    def __init__(self, index: ModelIndex) -> None:
        self.never_negative: set[Path] = set()
        self.never_zero: set[Path] = set()
        self.magnitudes: set[Path] = set()
        for path, node in index.places:
            restriction = (
                node.rule.restrict_scaling_impl
                if isinstance(node, memory.Memory) and node.rule is not memory_policy.DISTANCE
                else None
            )
            if isinstance(restriction, FloatRestrictValue | IntRestrictValue):
                learned = (*path, LEARNED)
                self.never_negative |= {(*path, RECORD, name) for name in COLLECTED}
                self.never_zero |= {learned, (*path, RECORD, "buffer")}
                is_float = isinstance(restriction, FloatRestrictValue)
                (self.magnitudes if is_float else self.never_negative).add(learned)


def never_right(index: ModelIndex, entries: Mapping[Path, ArrayLike]) -> Iterator[Problem]:
    """Find entries that no model can have stored: nan, inf; counters, statistics, variances below 0; scales of 0.

    A learned scale whose magnitude is used may be below 0: an optimizer may have moved it there. A running statistic
    may be 0, that of zeros.

    Args:
        index: of the model that is loaded into.
        entries: path -> array, with the shapes and dtypes that the model needs.
    """
    scales = StoredScales(index)
    variances = {(*path, "var") for path, node in index.places if isinstance(node, nnx.BatchNorm)}
    for path, value in entries.items():
        kind = kind_of(index.by_path[path].variable)
        if path in variances and _least(value) < 0:
            yield path, f"is a variance, and no variance is below 0: got {_least(value):.6g}"
        if not issubclass(kind, QuantParam | QuantStat):
            continue
        least = _least(value)
        # Other statistics may be nan until they have seen data.
        checked = issubclass(kind, QuantParam) or path[-1] in (*OF_SCALES, *COUNTERS)
        if checked and not _is_finite(value):
            yield path, "holds nan or inf, which no quantizer stores"
        elif path[-1] in COUNTERS and least < 0:
            yield path, f"is a counter, and counts from 0: got {least:.0f}"
        elif path in scales.never_negative and least < 0:
            yield path, f"is a scale, and no scale is below 0: got {least:.6g}"
        elif (path in scales.never_zero or path[-1] == "scale") and _least(abs(jnp.asarray(value))) == 0:
            yield path, "is a scale, and no scale is 0"
        elif path[-1] == "amax_history" and not least >= 0:
            yield path, f"is a record of magnitudes, none of which is below 0: got {least:.6g}"


def not_finite(entries: Mapping[Path, ArrayLike]) -> list[Path]:
    """Return the paths of the entries that hold nan or inf."""
    return [path for path, value in entries.items() if not _is_finite(value)]


def read_by_magnitude(index: ModelIndex, entries: Mapping[Path, ArrayLike]) -> list[Path]:
    """Return the paths of learned scales below 0, whose magnitude the forward pass uses."""
    learned = StoredScales(index).magnitudes
    return [
        path
        for path, value in entries.items()
        if path in learned
        and issubclass(kind_of(index.by_path[path].variable), QuantParam)
        and _least(value) < 0
    ]


def _is_finite(value: ArrayLike) -> bool:
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    return not jnp.issubdtype(array.dtype, jnp.inexact) or bool(jnp.isfinite(array).all())


def _least(value: ArrayLike) -> float:
    return float(jnp.min(jnp.asarray(value))) if np.size(value) else 0.0


def transformed_inputs(index: ModelIndex, entries: Mapping[Path, object]) -> tuple[str, ...]:
    """The quantizers whose transform a loaded float state knows nothing of; none if the state holds quantizers.

    A state without any number of a quantizer, for a model that has some, is taken for a float model's.

    Args:
        index: of the model.
        entries: of the state, by path.
    """
    by_path = index.by_path
    of_quantizers = any(by_path[path].in_quantizer for path in entries)
    if of_quantizers or not any(entry.in_quantizer for entry in index.variables):
        return ()
    return tuple(_with_transform(index))


def warn_of_transforms(transformed: tuple[str, ...]) -> None:
    """Warn that float weights were loaded into a model that keeps others.

    Args:
        transformed: see `transformed_inputs`.
    """
    if transformed:
        shown = ", ".join(transformed[:8]) + (", ..." if len(transformed) > 8 else "")
        warnings.warn(
            "load_state: the state holds weights and no quantizers, as a float model's does, and this model's weights "
            f"are stored for transforms of their inputs: {shown}. With other weights it computes something else.\n"
            "  cure: the recipe that made this model, on a float model with that state; or a state of this model",
            UserWarning,
            4,
        )


def _with_transform(index: ModelIndex) -> Iterator[str]:
    for path, node in index.places:
        if isinstance(node, QuantWeightLayer):
            if node.input_quant is not None and vars(node.input_quant).get("pre_transform") is not None:
                yield place_name((*path, "input_quant"))
        elif isinstance(node, OpQuantizers):
            for name, proxy in node.held.items():
                stem, _, side = name.rpartition("_")
                twin = f"{stem}_{'lhs' if side == 'rhs' else 'rhs'}"
                # Of a product of two activations both operands are transformed, and no weight.
                alone = side in ("lhs", "rhs") and twin not in node.held
                if alone and vars(proxy).get("pre_transform") is not None:
                    yield name
