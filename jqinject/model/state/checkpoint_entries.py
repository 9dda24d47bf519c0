"""A user's state as a mapping from paths to values, and what is wrong with these."""

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from jqinject.core import FloatRestrictValue, IntRestrictValue, QuantParam, QuantStat
from jqinject.core.memory import memory, memory_policy
from jqinject.core.state import kind_of
from jqinject.dot import FrozenParam
from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.inject.errors import did_you_mean
from jqinject.model.walk import ModelIndex, Path, PlainArray, VariableEntry, is_finite, place_name
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import OpQuantizers
from jqinject.quant_tensor import is_concrete

LIST = "a list of numbers"
#: Path -> array.
Entries = dict[Path, Any]
#: The path of an entry, and what is wrong with it.
Problem = tuple[Path, str]


def flat_entries(state: object, caller: str = "load_state") -> Entries:
    """The arrays of a state by path.

    Args:
        state: an `nnx.State`, nested mappings and sequences of arrays, or a module.
        caller: the calling function's name, for the error text.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(state, nnx.Module):
        return {entry.path: entry.variable.get_value() for entry in ModelIndex(state).variables}
    if not isinstance(state, Mapping):
        of_file = isinstance(state, str | os.PathLike)
        cure = "nnx.state(model), or nnx.to_pure_dict(nnx.state(model))"
        raise TypeError(
            f"{caller} takes an nnx.State, a nested dict of arrays or a module, "
            f"got {type(state).__name__}.\n  cure: {'jqinject.formats.load(model, path)' if of_file else cure}"
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


def ill_formed(
    entries: Mapping[Path, object], by_path: Mapping[Path, VariableEntry]
) -> tuple[list[Problem], str]:
    """Find entries that would be recognized in another form: arrays in pieces, flat keys.

    Args:
        entries: from `flat_entries`.
        by_path: the model's Variables.

    Returns:
        The problems, and the cure.
    """
    pieces: dict[Path, str] = {}
    for path in entries:
        parent = next((path[:depth] for depth in range(1, len(path)) if path[:depth] in by_path), None)
        if path not in by_path and parent is not None:
            inside = path[len(parent)]
            pieces.setdefault(parent, LIST if inside.isdigit() else f"a mapping with {inside!r}")
    shapes = {path: tuple(by_path[path].variable.get_value().shape) for path in pieces}
    problems = [
        (path, f"is {what}, the model needs one array of shape {shapes[path]}")
        for path, what in pieces.items()
    ]
    unknown = (path for path in entries if path not in by_path)
    nested = {path: tuple(filter(None, ".".join(path).replace("/", ".").split("."))) for path in unknown}
    flat = {path: inner for path, inner in nested.items() if inner != path and inner in by_path}
    for path, inner in flat.items():
        shown = "".join(f"{{{name!r}: " for name in inner) + "..." + "}" * len(inner)
        problems.append((path, f"keys have to be nested: {shown}, got {', '.join(map(repr, path))}"))
    if flat:
        return problems, (
            "\n  cure: flax.traverse_util.unflatten_dict(state, sep='.') makes a nested dict of one with flat keys "
            "(sep='/' likewise; without sep where keys are tuples)"
        )
    return problems, "\n  cure: numpy.asarray(...) of each list" if LIST in pieces.values() else ""


def unwrapped(entries: Mapping[Path, object], paths: Collection[Path]) -> Entries:
    """Entries with `{"value": ...}` unwrapped: Orbax restores Variables this way without a target."""

    def unwrap(path: Path) -> Path:
        places = [at for at in (len(path) - 1, len(path) - 2) if at >= 0 and path[at] == "value"]
        candidates = [path, *(path[:at] + path[at + 1 :] for at in places)]
        return next((candidate for candidate in candidates if candidate in paths), path)

    return {unwrap(path): value for path, value in entries.items()}


def problem_of(value: object, target: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Return why a value cannot replace that of a Variable; None if it can."""
    if not isinstance(value, jax.Array | np.ndarray | np.generic | int | float):
        return f"is not an array: got {type(value).__name__}"
    if not is_concrete(value):
        return "is a tracer: load it outside of jit"
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


def with_checkpoint_defaults(index: ModelIndex, entries: Entries) -> Entries:
    """The entries, with those of each component completed by it.

    Args:
        index: of the model that is loaded into.
        entries: path -> array.

    Returns:
        The entries to check and write.
    """
    result = dict(entries)
    # Looked up on the class, not the instance: `nnx.Rngs` has a stream under any name.
    components = [
        place for place in index.first_places.items() if issubclass(type(place[1]), HasCheckpointDefaults)
    ]
    # Inner components first, so that outer ones see their completed entries.
    for path, component in sorted(reversed(components), key=lambda place: -len(place[0])):
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
OF_SCALES = (LEARNED, "buffer", "running_stats")
COUNTERS = ("counter", "count", "countdown")


def _stored_scales(index: ModelIndex) -> dict[Path, tuple[bool, bool]]:
    """Return by path whether a stored scale may be below 0, and whether it may be 0; not of those stored as logarithms.

    A learned one may be below 0: the forward pass uses its magnitude. One that is bounded before it is stored is not 0.
    """
    scales: dict[Path, tuple[bool, bool]] = {}
    for path, node in index.places:
        if isinstance(node, memory.Memory) and node.rule is not memory_policy.DISTANCE:
            restriction = node.rule.restrict_scaling_impl
            if isinstance(restriction, FloatRestrictValue | IntRestrictValue):
                scales[*path, LEARNED] = isinstance(restriction, FloatRestrictValue), False
                scales[*path, RECORD, "buffer"] = False, False
                scales[*path, RECORD, "running_stats"] = False, True
    return scales


def never_right(index: ModelIndex, entries: Mapping[Path, ArrayLike]) -> Iterator[Problem]:
    """Find entries that no model can have stored: nan, inf; counters, statistics, variances below 0; scales of 0.

    A learned scale whose magnitude is used may be below 0: an optimizer may have moved it there. A running statistic
    may be 0, that of zeros.

    Args:
        index: of the model that is loaded into.
        entries: path -> array, with the shapes and dtypes that the model needs.
    """
    scales = _stored_scales(index)
    variances = {(*path, "var") for path, node in index.places if isinstance(node, nnx.BatchNorm)}
    for path, value in entries.items():
        kind = kind_of(index.by_path[path].variable)
        if path in variances and _least(value) < 0:
            yield path, f"is a variance, and no variance is below 0: got {_least(value):.6g}"
        if not issubclass(kind, QuantParam | QuantStat):
            continue
        least, (negative, zero) = _least(value), scales.get(path, (True, True))
        # Other statistics may be nan until they have seen data.
        checked = issubclass(kind, QuantParam) or path[-1] in (*OF_SCALES, *COUNTERS)
        if checked and not is_finite(jnp.asarray(value)):
            yield path, "holds nan or inf, which no quantizer stores"
        elif path[-1] in COUNTERS and least < 0:
            yield path, f"is a counter, and counts from 0: got {least:.0f}"
        elif not negative and least < 0:
            yield path, f"is a scale, and no scale is below 0: got {least:.6g}"
        elif (not zero or path[-1] == "scale") and _least(abs(jnp.asarray(value))) == 0:
            yield path, "is a scale, and no scale is 0"
        elif path[-1] == "amax_history" and not least >= 0:
            yield path, f"is a record of magnitudes, none of which is below 0: got {least:.6g}"


def read_by_magnitude(index: ModelIndex, entries: Mapping[Path, ArrayLike]) -> list[Path]:
    """Return the paths of learned scales below 0, whose magnitude the forward pass uses."""
    learned = {path for path, (negative, _) in _stored_scales(index).items() if negative}
    return [
        path
        for path, value in entries.items()
        if path in learned
        and issubclass(kind_of(index.by_path[path].variable), QuantParam)
        and _least(value) < 0
    ]


def _least(value: ArrayLike) -> float:
    return float(jnp.min(jnp.asarray(value))) if np.size(value) else 0.0


def transformed_inputs(index: ModelIndex, entries: Mapping[Path, object]) -> Iterator[str]:
    """Find the quantizers whose transform a loaded float state knows nothing of; none if the state holds quantizers.

    A state without any number of a quantizer, for a model that has some, is taken for a float model's.

    Args:
        index: of the model.
        entries: of the state, by path.
    """
    of_quantizers = any(index.by_path[path].in_quantizer for path in entries)
    if not of_quantizers and any(entry.in_quantizer for entry in index.variables):
        yield from quantizers_with_transforms(index)


def quantizers_with_transforms(index: ModelIndex) -> Iterator[str]:
    """Find the quantizers of inputs with a transform before them, for which weights are stored."""
    for path, node in index.places:
        if isinstance(node, QuantWeightLayer):
            if node.input_quant is not None and _stays_transformed(node.input_quant):
                yield place_name((*path, "input_quant"))
        elif isinstance(node, OpQuantizers):
            for name, proxy in node.held.items():
                stem, _, side = name.rpartition("_")
                twin = f"{stem}_{'lhs' if side == 'rhs' else 'rhs'}"
                # Of a product of two activations both operands are transformed, and no weight.
                alone = side in ("lhs", "rhs") and twin not in node.held
                if alone and _stays_transformed(proxy):
                    yield name


def _stays_transformed(quantizer: object) -> bool:
    """Whether what is quantized is transformed, and a weight has to be stored for it."""
    attributes = vars(quantizer)
    return attributes.get("pre_transform") is not None and not attributes.get("undo_transform")


def unfit(
    entries: Mapping[Path, object], index: ModelIndex, missing: nnx.filterlib.Filter
) -> Iterator[Problem]:
    """Find unknown entries, Variables that are not among the entries, and values of another shape or dtype.

    Args:
        entries: path -> array.
        index: of the model that is loaded into.
        missing: a filter for Variables that need not be there.
    """
    by_path, may_be_missing = index.by_path, nnx.filterlib.to_predicate(missing)
    names = [place_name(path) for path in by_path]
    for path in entries:
        if path not in by_path:
            hint = did_you_mean(place_name(path), names)
            yield path, "the model has no such variable" + (f"; {hint}" if hint else "")
    for entry in not_in(entries, index):
        optional = entry.in_quantizer or isinstance(entry.variable, PlainArray)
        if is_abstract(entry) or not (optional or may_be_missing(entry.path, entry.variable)):
            yield entry.path, f"is missing from the state ({_cure_of(entry)})"
    for path, value in entries.items():
        why = problem_of(value, by_path[path].variable.get_value()) if path in by_path else None
        if why:
            yield path, why


def not_in(entries: Mapping[Path, object], index: ModelIndex) -> Iterator[VariableEntry]:
    """The Variables of a model that a state does not hold."""
    return (entry for entry in index.variables if not any(path in entries for path in entry.paths))


def is_abstract(entry: VariableEntry) -> bool:
    """Whether a Variable has a shape and no numbers."""
    return isinstance(entry.variable.get_value(), jax.ShapeDtypeStruct)


def _cure_of(entry: VariableEntry) -> str:
    if is_abstract(entry):
        return "and an abstract model has no array to keep there; build it without nnx.eval_shape"
    for kind, name in ((nnx.RngState, "a random stream"), (nnx.BatchStat, "a running statistic")):
        if isinstance(entry.variable, kind):
            return f"missing=nnx.{kind.__name__} lets {name} stay as it is"
    return "missing=... names what may be"


def other_forms(state: object, index: ModelIndex) -> Iterator[Problem]:
    """Find frozen weights whose numbers mean something else in the model that the state is of."""
    source = ModelIndex(state).nodes if isinstance(state, nnx.Module) else {}
    for path, node in index.places:
        twin = source.get(path)
        if isinstance(node, FrozenParam) and isinstance(twin, FrozenParam):
            own, stored = _facts(node.form), _facts(twin.form)
            for name in {**own, **stored}:
                if stored.get(name) != own.get(name):
                    yield path, f"is frozen with {name}={stored.get(name)}, the model needs {own.get(name)}"


def _facts(form: FrozenForm) -> dict[str, Any]:
    """What is static in frozen numbers, by name; of their grid, what it consists of."""
    grid: Any = form.grid
    facts = {entry.name: getattr(x, entry.name) for x in (form, grid) for entry in fields(x)}
    return facts | {"grid": type(grid)}


def contradictions(
    entries: Mapping[Path, ArrayLike], by_path: Mapping[Path, VariableEntry]
) -> Iterator[Problem]:
    """Find shared Variables that the state holds under several paths with different numbers."""
    for path, value in entries.items():
        first = next(alias for alias in by_path[path].paths if alias in entries)
        if first != path and value is not entries[first] and not jnp.array_equal(value, entries[first]):
            yield path, f"is the same variable as {place_name(first)}, which the state gives other numbers"
