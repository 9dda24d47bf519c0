"""Every tensor of a checkpoint and every parameter of a model is accounted for: what `load` does with it.

Rules, or the names of both, say which parameter a tensor is for, and which quantizer a scale of a cache is for.
"""

import math
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from jqinject.dot import FrozenParam
from jqinject.formats import layout_axes
from jqinject.formats.checkpoint import Checkpoint
from jqinject.formats.checkpoint_errors import CheckpointError, nearest
from jqinject.formats.loading import parameter_names
from jqinject.formats.loading.parameter_names import READY, Name
from jqinject.formats.stored_matrix import StoredMatrix
from jqinject.model.walk import ModelIndex, place_name
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import listed
from jqinject.terminal import table

T = TypeVar("T")
# Buffers that no parameter needs, and scales of caches, which are left unless a name or an attention layer takes them.
LEFT = (r".*\.rotary_emb\.inv_freq", r".*\.(k|v|q|kv)_scale", r".*rope_freqs\.weight")


# Names of parameters in the models of JAX that hold what a checkpoint calls a weight.
LEAVES = ("kernel", "embedding", "scale", "weight", "w", "value")
PREFIXES = ("", "model.", "language_model.model.", "model.language_model.", "transformer.")
CACHE_SCALE = re.compile(r"(?P<module>.*?)(?:\.[kv]_proj)?\.(?P<which>[kv])_scale")
#: The quantizers of an attention layer through which keys and values go into its cache.
PROXIES = {"k": "k_transposed_quant", "v": "v_quant"}

# Of a tensor: its place in the parameter's stack, and among the tensors that are joined.
Place = tuple[tuple[int | str, ...], int]
#: The model's parameters by their paths.
Parameters = Mapping[str, jax.ShapeDtypeStruct]


def stored_variables(
    index: ModelIndex,
) -> Iterator[tuple[str, nnx.Variable[Any], QuantWeightLayer[Any] | None]]:
    """Return the Variables of a model that a checkpoint has numbers for, each once, by its first path; and of a frozen
    weight the layer that holds it, whose further Variables follow."""
    floats = (entry for entry in index.variables if not isinstance(entry.variable, FrozenParam))
    visited = {id(entry.variable) for entry in floats if entry.in_quantizer}
    for place, node in index.places:
        layer = node if isinstance(node, QuantWeightLayer) and node.frozen is not None else None
        variable = node if layer is None else layer.frozen
        if isinstance(variable, nnx.Param | nnx.BatchStat | FrozenParam) and id(variable) not in visited:
            visited.add(id(variable))
            yield place_name(place if layer is None else (*place, layer.weight_name)), variable, layer


class IdleNameWarning(UserWarning):
    """A rule of `names` matches no tensor of the checkpoint, and may be misspelt."""


@dataclass(frozen=True)
class Assignment:
    """A parameter, and the tensors that its numbers are made of.

    Attributes:
        path: of the parameter.
        shape, dtype: of the parameter.
        sources: names of the tensors, in the order of a stack and, within, of the rows; each with the rows that are
            taken of it, None for all.
        depth: of the stack: how many numbers each of its places has.
        axes: how rows and columns become the parameter's axes.
        sizes: of these axes.
        label: of the numbers, for reports; of floats that the parameter has fewer bits for, both dtypes.
        matrices: the tensors, if they are in low bits; empty for floats.
        heads: that llama.cpp keeps in another order of rows, which is turned back; 0 for rows in their order.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sources: tuple[tuple[str, tuple[int, int] | None], ...]
    depth: tuple[int, ...]
    axes: layout_axes.AxesOfLayout
    sizes: Mapping[str, int]
    label: str
    matrices: tuple[StoredMatrix, ...] = field(default=(), repr=False, compare=False)
    heads: int = 0

    @property
    def is_low(self) -> bool:
        """Whether the numbers are in low bits."""
        return bool(self.matrices)

    def layers(self, parts: Sequence[T]) -> list[Sequence[T]]:
        """Return what belongs to its sources, by the places of the stack."""
        share = len(parts) // max(math.prod(self.depth), 1)
        return [parts[at : at + share] for at in range(0, len(parts), share)]

    def row(self) -> tuple[str, ...]:
        """Return its row in a table."""
        names = [name for name, _ in self.sources]
        shown = ", ".join(names[:3]) + (f", {len(names) - 3} more" if len(names) > 3 else "")
        axes = f"{self.axes}, rows of {self.heads} heads turned back" if self.heads else str(self.axes)
        return self.path, "x".join(map(str, self.shape)), self.label, axes, shown


@dataclass(frozen=True)
class CacheScale:
    """A quantizer of keys or values, and the scales that it gets.

    Attributes:
        target: the path of an attention layer's quantizer; else the name of a cache, as `Rule(cache_quant=...)` knows
            it (`cache.layer_0.k`).
        sources: names of the tensors. Of several, for a cache that layers share, the largest scale counts.
        is_proxy: whether the target is a quantizer of the model.
    """

    target: str
    sources: tuple[str, ...]
    is_proxy: bool


@dataclass(frozen=True)
class LoadPlan:
    """What `load` does; `str()` shows it as a table.

    Attributes:
        assignments: one for each parameter that gets numbers.
        left: tensors that no parameter takes.
        missing: parameters that no tensor is for.
        unknown: tensors that should be for a parameter and are not, each with what is known.
        caches: quantizers of keys and values that get a scale of the checkpoint.
        idle: rules of names that no tensor has.
        needs_inputs: parameters and caches that no layer has, so that `load` needs the model's `inputs`.
    """

    assignments: tuple[Assignment, ...]
    left: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    caches: tuple[CacheScale, ...] = ()
    idle: tuple[str, ...] = ()
    needs_inputs: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [assignment.row() for assignment in self.assignments]
        lines = table(("parameter", "shape", "numbers", "axes", "tensors"), rows)
        lines += [f"scale of the cache {cache.target}: {', '.join(cache.sources)}" for cache in self.caches]
        lines += [f"not taken: {name}" for name in self.left]
        lines += [note] if (note := unused_scales(self.left)) else []
        lines += [f"no parameter for: {name}" for name in self.unknown]
        lines += [f"no tensor for: {path}" for path in self.missing]
        lines += [f"names: no tensor is called {rule}" for rule in self.idle]
        lines += [f"load needs inputs= for: {path}" for path in self.needs_inputs]
        return "\n".join(lines)

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise if a tensor or a parameter is not accounted for.

        Raises:
            CheckpointError: names them.

        Warns:
            IdleNameWarning: all are, but a rule of `names` is for no tensor.
        """
        lines = [f"names: no tensor is called {rule}" for rule in self.idle]
        if self.unknown or self.missing:
            lines += [f"no parameter of the model is for {name}" for name in self.unknown]
            lines += [f"no tensor is for the parameter {path}" for path in self.missing]
            shown = "\n  ".join(lines[:12] + ([f"and {len(lines) - 12} more"] if len(lines) > 12 else []))
            raise CheckpointError(
                f"{checkpoint.path} does not fit the model:\n  {shown}\n"
                "  cure: names={'file.name.{i}.weight': 'model.path.{i}.kernel'}, for each of them, or a ready table "
                "(formats.FUSED, TUNIX, TUNIX_GEMMA3); ignore=['file.name.*'] for tensors that the model does not need"
            )
        if lines:
            text = "\n  ".join([f"{checkpoint.path}:", *lines, "cure: correct them, or leave them out"])
            warnings.warn(text, IdleNameWarning, stacklevel=3)


def by_rules(name: str, rules: Iterable[Name], parameters: Parameters) -> Iterator[tuple[str, Place, Name]]:
    """Return the parameters that rules have for a tensor: the path of each, the tensor's place in it, and the rule with
    the parts of its name.

    Raises:
        ValueError: a rule names a parameter that does not exist.
    """
    for rule in rules:
        match = rule.matches(name) or rule.matches(parameter_names.published_name(name))
        if match is None:
            continue
        at, places = match
        stack = tuple(int(text) if (text := places[place]).isdigit() else text for place in rule.stacked())
        filled = rule.filled(places)
        for model, path in zip(rule.models, filled.models, strict=True):
            if path not in parameters:
                why = _deeper(model, places, parameters) or (
                    f"which is not a parameter of the model{nearest(path, parameters)}"
                )
                raise ValueError(f"names: {name} is for {path}, {why}")
            yield path, (stack, at), filled


def _deeper(model: str, places: Mapping[str, str], parameters: Parameters) -> str:
    """Return what to do about a path that lies beyond the last of the model's layers; empty for other paths."""
    for place, text in places.items():
        pattern = parameter_names.compiled(model.format(**{**places, place: f"{{{place}}}"}))
        matches = (pattern.fullmatch(path) for path in parameters)
        numbers = [int(match[place]) for match in matches if match is not None and match[place].isdigit()]
        if text.isdigit() and numbers and int(text) > max(numbers):
            prefix = model.partition(f"{{{place}}}")[0].format(**places)
            return (
                f"and the model ends with {prefix}{max(numbers)}: the checkpoint has more layers.\n"
                "  cure: a model as deep as the checkpoint; or ignore=['...'] for tensors of further layers"
            )
    return ""


def likely_rules(name: str, parameters: Parameters, checkpoint: Checkpoint) -> list[Name]:
    """Return a rule for the parameter that has the same path, except for the names of the root and the leaf."""
    if checkpoint.is_tree and name in parameters:
        return [Name(name, name)]
    names = (parameter_names.published_name(name), name) if checkpoint.method == "gguf" else (name,)
    called = {path: likely for likely in names for path in _paths_like(likely)}
    paths = sorted(called.keys() & parameters.keys())
    if len(paths) > 1:
        raise CheckpointError(
            f"{name} may be for {' or '.join(paths)}.\n  cure: names={{{name!r}: {paths[0]!r}}}"
        )
    return [Name(called[path], path) for path in paths]


def _paths_like(name: str) -> set[str]:
    """Return paths that a tensor's parameter may have."""
    module, _, leaf = name.rpartition(".")
    places = _roots(module)
    leaves = LEAVES if leaf == "weight" else (leaf,)
    return {f"{place}.{end}" if place else end for place in places for end in leaves} | places - {""}


def _roots(module: str) -> set[str]:
    """Return the path of a module under each of the usual roots."""
    bare = {module.removeprefix(prefix) for prefix in PREFIXES if module.startswith(prefix)}
    return {f"{prefix}{path}".strip(".") for path in bare for prefix in PREFIXES}


def idle_rules(names: Collection[str], rules: Iterable[Name]) -> tuple[str, ...]:
    """Return the patterns of rules that no tensor has, each with the nearest tensor; ready tables are left out."""
    stored = {*names, *map(parameter_names.published_name, names)}
    idle = [
        pattern
        for rule in rules
        if rule not in READY
        for pattern in rule.files
        if not any(parameter_names.compiled(pattern).fullmatch(name) for name in stored)
    ]
    return tuple(pattern + nearest(pattern, stored) for pattern in idle)


def cache_target(name: str, rules: Sequence[Name] | None, proxies: Collection[str]) -> str | None:
    """Return what a scale of a cache is for; None if nothing says it.

    Args:
        name: of the tensor.
        rules: of names; None for the attention layer that has the same path.
        proxies: paths of quantizers that the model has.
    """
    scale = CACHE_SCALE.fullmatch(name)
    if scale is None:
        return None
    if rules is not None:
        matches = ((rule, rule.matches(name)) for rule in rules)
        return next((rule.models[0].format(**match[1]) for rule, match in matches if match is not None), None)
    leaf, places = PROXIES[scale["which"]], _roots(scale["module"])
    near = [
        path
        for path in proxies
        if path.endswith(f".{leaf}") and any(path.startswith(f"{place}.") for place in places)
    ]
    return near[0] if len(near) == 1 else None


def unused_scales(left: Sequence[str]) -> str:
    """Return what a report says of scales of caches that nothing takes; empty without any.

    Args:
        left: tensors that nothing takes.

    Example:
        >>> print(unused_scales(["model.layers.0.self_attn.k_scale"]))
        1 scale of a quantized cache is not used (model.layers.0.self_attn.k_scale): the model's caches stay float
          to use it: names={..., 'model.layers.{i}.self_attn.k_scale': 'cache.layer_{i}.k'}, the cache's name in inputs,
          which then hold one; and jqinject.quantized_cache(model, cache)
    """
    scales = [name for name in left if CACHE_SCALE.fullmatch(name)]
    if not scales:
        return ""
    pattern = re.sub(r"\.\d+\.", ".{i}.", scales[0])
    which = "k" if scales[0].endswith("k_scale") else "v"
    plural, verb, them = ("", "is", "it") if len(scales) == 1 else ("s", "are", "them")
    shown = listed(scales, 2)
    return (
        f"{len(scales)} scale{plural} of a quantized cache {verb} not used ({shown}): the model's caches stay float\n"
        f"  to use {them}: names={{..., '{pattern}': 'cache.layer_{{i}}.{which}'}}, the cache's name in inputs,\n"
        "  which then hold one; and jqinject.quantized_cache(model, cache)"
    )


def plan_of(
    model: nnx.Module,
    checkpoint: Checkpoint,
    names: parameter_names.Names | None,
    ignore: Iterable[str],
    proxies: Collection[str],
) -> LoadPlan:
    """Return what goes where.

    Args:
        model: that gets numbers, those of adapters aside.
        checkpoint: the checkpoint.
        names: rules; None for those that the names of both suggest.
        ignore: patterns of tensors that nothing needs.
        proxies: paths of the quantizers of keys and values that the model has.

    Raises:
        CheckpointError: two tensors are for one parameter; shapes do not fit.
        ValueError: a rule names a parameter that does not exist.
    """
    parameters = {
        path: jax.ShapeDtypeStruct(variable.shape, variable.dtype)
        for path, variable, _ in stored_variables(ModelIndex(model))
        if not isinstance(variable, nnx.LoRAParam)
    }
    rules, patterns = None if names is None else parameter_names.checked_names(names), _patterns(ignore)
    matches: dict[str, dict[Place, tuple[str, Name]]] = {}
    caches: dict[str, list[str]] = {}
    left, unknown = [], []
    for name in checkpoint.names:
        ignored = any(pattern.fullmatch(name) for pattern in patterns)
        target = None if ignored else cache_target(name, rules, proxies)
        if target is not None:
            caches.setdefault(target, []).append(name)
            continue
        if ignored or any(re.fullmatch(pattern, name) for pattern in LEFT):
            left.append(name)
            continue
        of_name = likely_rules(name, parameters, checkpoint) if rules is None else rules
        fitting = [*by_rules(name, of_name, parameters)]
        if not fitting:
            unknown.append(name)
        for path, place, rule in fitting:
            tensor = name, rule
            first = matches.setdefault(path, {}).setdefault(place, tensor)
            if first is not tensor:
                raise CheckpointError(f"both {first[0]} and {name} map to parameter {path}")
    assignments = tuple(
        _assignment(checkpoint, parameters, path, parts) for path, parts in sorted(matches.items())
    )
    missing = tuple(path for path in parameters if path not in matches)
    scales = tuple(CacheScale(target, tuple(names), target in proxies) for target, names in caches.items())
    idle = idle_rules(checkpoint.names, rules or ())
    return LoadPlan(assignments, tuple(left), missing, tuple(unknown), scales, idle)


def _patterns(ignore: Iterable[str]) -> list[re.Pattern[str]]:
    ignore = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    try:
        return [re.compile(pattern) for pattern in ignore]
    except (re.error, TypeError) as error:
        raise ValueError(f"ignore is {ignore!r}, expected regular expressions: {error}") from None


def _assignment(
    checkpoint: Checkpoint, parameters: Parameters, path: str, tensors: Mapping[Place, tuple[str, Name]]
) -> Assignment:
    """Return what a parameter is made of: tensors in the order of its stack and, within, of its rows."""
    places = sorted(tensors)  # pyright: ignore
    names, (first, rule) = [tensors[place][0] for place in places], tensors[places[0]]
    shape, dtype = parameters[path].shape, np.dtype(parameters[path].dtype)
    depth = _depth(path, shape, places, len(rule.files))
    inner = shape[len(depth) :]
    stored = [checkpoint.shape_of(name) for name in names]
    for name, in_file, (_, part) in zip(names, stored, places, strict=True):
        if rule.rows and in_file[:1] != rule.rows[part : part + 1]:
            raise CheckpointError(
                f"{name} has the shape {in_file}; its Name for {path} says {rule.rows[part]} rows"
            )
    rows = sum(sizes[0] for sizes in stored[: len(rule.files)]) if stored[0] else 1
    own_rows = None
    if len(rule.models) > 1:
        own_rows = _own_rows(first, stored[0], path, rule, parameters)
        rows = own_rows[1] - own_rows[0]
    matrix = checkpoint.matrices.get(first)
    source = (rows, *stored[0][1:])
    if checkpoint.is_tree and matrix is None:
        source = (math.prod(source),)
    of_tree = None if matrix is None or matrix.parameter_shape != inner else matrix.axes
    text = rule.axes or of_tree
    axes = layout_axes.AxesOfLayout.of(text) if text else layout_axes.axes_by_name(path, source, inner, first)
    try:
        sizes = axes.sizes(source, inner, rule.sizes)
    except ValueError as error:
        raise CheckpointError(
            f"{first}, {source}, does not fit {path}, {inner}: {error}.\n"
            "  cure: a model of the checkpoint's sizes, or a Name with other axes"
        ) from None
    # Rows are turned back where a rule has the published name of a GGUF file's tensor.
    turned = [name for name in names if checkpoint.method == "gguf" and rule.matches(name) is None]
    heads = {
        parameter_names.heads_in_turn(name, checkpoint.config) if name in turned else 0 for name in names
    }
    if len(heads) > 1:
        raise CheckpointError(f"{path} is made of tensors whose rows lie in different orders: {first}, ...")
    low = tuple(checkpoint.matrices[name] for name in names if name in checkpoint.matrices)
    matrices = low if len(low) == len(names) else ()
    label = "low bits and floats" if low else _label(checkpoint.tensors[first].dtype, first, path, dtype)
    label = matrices[0].label if matrices else label
    sources = tuple((name, own_rows) for name in names)
    return Assignment(path, shape, dtype, sources, depth, axes, sizes, label, matrices, heads.pop())


def _depth(path: str, shape: tuple[int, ...], places: Sequence[Place], joined: int) -> tuple[int, ...]:
    """Return the sizes of the stack that matrices make up, or as many joined ones each.

    Raises:
        CheckpointError: some are missing, or the parameter has another shape.
    """
    depth = tuple(len({*axis}) for axis in zip(*(stack for stack, _ in places), strict=True))
    needed = math.prod(depth) * joined
    if len(places) != needed:
        raise CheckpointError(f"{path} is made of {needed} tensors, of which there are {len(places)}")
    if shape[: len(depth)] != depth:
        raise CheckpointError(f"{path} has the shape {shape}, but {depth} tensors are stacked for it")
    return depth


def _own_rows(
    name: str, source: tuple[int, ...], path: str, rule: Name, parameters: Parameters
) -> tuple[int, int]:
    """Return the rows of one of the parameters that divide a tensor: as many for each as it has numbers."""
    sizes = [math.prod(parameters[model].shape) // math.prod(source[1:]) for model in rule.models]
    if sum(sizes) != source[0]:
        needed = " + ".join(map(str, sizes))
        raise CheckpointError(f"{name} has {source[0]} rows; its parameters need {needed}")
    part = rule.models.index(path)
    return sum(sizes[:part]), sum(sizes[: part + 1])


def _label(stored: np.dtype, name: str, path: str, dtype: np.dtype) -> str:
    """Return the dtype of a tensor, and that of its parameter if it is rounded to it.

    Raises:
        CheckpointError: integers are for a parameter of floats.
    """
    if dtype.kind not in "iub" and stored.kind in "iub":
        raise CheckpointError(
            f"{name} is {stored.name}, and {path} takes floats ({dtype.name}).\n  cure: its settings; or ignore"
        )
    return stored.name if dtype.itemsize >= stored.itemsize else f"{stored.name}, rounded to {dtype.name}"
