"""Every tensor of a checkpoint and every parameter of a model is accounted for: what `load` does with it."""

import math
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from jqinject.formats.checkpoint import Checkpoint
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.loading import layout_axes, parameter_names
from jqinject.formats.loading.matching import (
    CacheScale,
    Match,
    Parameters,
    by_likeness,
    by_rules,
    cache_target,
    idle_rules,
    unused_scales,
)
from jqinject.terminal import table

T = TypeVar("T")
# Buffers that no parameter needs, and scales of caches, which are left unless a name or an attention layer takes them.
LEFT = (r".*\.rotary_emb\.inv_freq", r".*\.(k|v|q|kv)_scale", r".*rope_freqs\.weight")


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
        is_low: whether they are in low bits.
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
    is_low: bool
    heads: int = 0

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
        idle = [f"names: no tensor is called {rule}" for rule in self.idle]
        if not self.unknown and not self.missing:
            if idle:
                shown = "\n  ".join(idle)
                warnings.warn(
                    f"{checkpoint.path}:\n  {shown}\n  cure: correct them, or leave them out",
                    IdleNameWarning,
                    stacklevel=3,
                )
            return
        lines = idle + [f"no parameter of the model is for {name}" for name in self.unknown]
        lines += [f"no tensor is for the parameter {path}" for path in self.missing]
        shown = "\n  ".join(lines[:12] + ([f"and {len(lines) - 12} more"] if len(lines) > 12 else []))
        raise CheckpointError(
            f"{checkpoint.path} does not fit the model:\n  {shown}\n"
            "  cure: names={'file.name.{i}.weight': 'model.path.{i}.kernel'}, for each of them, or a ready table "
            "(formats.FUSED, TUNIX, TUNIX_GEMMA3); ignore=['file.name.*'] for tensors that the model does not need"
        )


def plan_of(
    checkpoint: Checkpoint,
    parameters: Parameters,
    names: parameter_names.Names | None,
    ignore: tuple[str, ...],
    proxies: Collection[str] = (),
) -> LoadPlan:
    """Return what goes where.

    Args:
        checkpoint: the checkpoint.
        parameters: of the model, by their paths.
        names: rules; None for those that the names of both suggest.
        ignore: patterns of tensors that nothing needs.
        proxies: paths of the quantizers of keys and values that the model has.

    Raises:
        CheckpointError: two tensors are for one parameter; shapes do not fit.
        ValueError: a rule names a parameter that does not exist.
    """
    rules, patterns = None if names is None else parameter_names.checked_names(names), _patterns(ignore)
    matches: dict[str, dict[tuple[object, ...], tuple[str, Match]]] = {}
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
        fitting = (
            by_likeness(name, parameters, checkpoint) if rules is None else by_rules(name, rules, parameters)
        )
        if not fitting:
            unknown.append(name)
        for match in fitting:
            of_path = matches.setdefault(match.path, {})
            if match.place in of_path:
                raise CheckpointError(
                    f"both {of_path[match.place][0]} and {name} map to parameter {match.path}"
                )
            of_path[match.place] = name, match
    assignments = tuple(
        _assignment(checkpoint, path, parameters, [parts[place] for place in sorted(parts)])  # pyright: ignore
        for path, parts in sorted(matches.items())
    )
    missing = tuple(path for path in parameters if path not in matches)
    scales = tuple(CacheScale(target, tuple(names), target in proxies) for target, names in caches.items())
    idle = idle_rules(checkpoint.names, rules or ())
    return LoadPlan(assignments, tuple(left), missing, tuple(unknown), scales, idle)


def _patterns(ignore: tuple[str, ...]) -> list[re.Pattern[str]]:
    try:
        return [re.compile(pattern) for pattern in ignore]
    except (re.error, TypeError) as error:
        raise ValueError(f"ignore is {ignore!r}, expected regular expressions: {error}") from None


def _assignment(
    checkpoint: Checkpoint, path: str, parameters: Parameters, ordered: Sequence[tuple[str, Match]]
) -> Assignment:
    first, match = ordered[0]
    rule, shape, dtype = match.rule, parameters[path].shape, np.dtype(parameters[path].dtype)
    depth = _depth(path, shape, [match for _, match in ordered])
    inner = shape[len(depth) :]
    stored = [checkpoint.shape_of(name) for name, _ in ordered]
    for at, (name, _) in enumerate(ordered if rule.rows else ()):
        stated = (rule.rows or ())[at % len(rule.files)]
        if stored[at][:1] != (stated,):
            raise CheckpointError(
                f"{name} has the shape {stored[at]}; its Name for {path} says {stated} rows"
            )
    rows = sum(sizes[0] for sizes in stored[: len(rule.files)]) if stored[0] else 1
    own_rows = None
    if len(rule.models) > 1:
        own_rows = _own_rows(checkpoint, first, match, parameters)
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
    heads = {_heads(checkpoint, rule, name) for name, _ in ordered}
    if len(heads) > 1:
        raise CheckpointError(f"{path} is made of tensors whose rows lie in different orders: {first}, ...")
    label = _label(checkpoint.tensors[first].dtype, first, path, dtype) if matrix is None else matrix.label
    sources = tuple((name, own_rows) for name, _ in ordered)
    return Assignment(path, shape, dtype, sources, depth, axes, sizes, label, matrix is not None, heads.pop())


def _depth(path: str, shape: tuple[int, ...], matches: Sequence[Match]) -> tuple[int, ...]:
    """Return the sizes of the stack that matrices make up.

    Raises:
        CheckpointError: some are missing, or the parameter has another shape.
    """
    stacks = sorted({match.place[0] for match in matches})  # pyright: ignore
    depth = tuple(len({stack[at] for stack in stacks}) for at in range(len(stacks[0])))
    needed = math.prod(depth) * len(matches[0].rule.files)
    if len(matches) != needed:
        raise CheckpointError(f"{path} is made of {needed} tensors, of which there are {len(matches)}")
    if shape[: len(depth)] != depth:
        raise CheckpointError(f"{path} has the shape {shape}, but {depth} tensors are stacked for it")
    return depth


def _heads(checkpoint: Checkpoint, rule: parameter_names.Name, name: str) -> int:
    """Return heads whose rows are turned back: those of a GGUF file for which a rule has the published name."""
    if checkpoint.method != "gguf" or rule.matches(name) is not None:
        return 0
    return parameter_names.heads_in_turn(name, checkpoint.config)


def _own_rows(checkpoint: Checkpoint, name: str, match: Match, parameters: Parameters) -> tuple[int, int]:
    """Return the rows of one of the parameters that divide a tensor: as many for each as it has numbers."""
    source, paths = checkpoint.shape_of(name), match.rule.models
    sizes = [math.prod(parameters[path].shape) // math.prod(source[1:]) for path in paths]
    if sum(sizes) != source[0]:
        needed = " + ".join(map(str, sizes))
        raise CheckpointError(f"{name} has {source[0]} rows; its parameters need {needed}")
    part = paths.index(match.path)
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
