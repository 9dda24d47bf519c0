"""What goes where: every tensor of a checkpoint and every parameter of a model is accounted for."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jqinject.formats.checkpoint import Checkpoint
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.loading.cache_names import CacheScale, cache_target, unused_scales
from jqinject.formats.loading.gguf_names import heads_in_turn, published_name
from jqinject.formats.loading.guessed_axes import axes_of_tree, guessed_axes
from jqinject.formats.loading.layout_axes import AxesOfLayout
from jqinject.formats.loading.matching import PREFIXES, by_likeness, by_rules, idle_rules
from jqinject.formats.loading.parameter_names import Name, Names, checked_names
from jqinject.terminal import table

# Buffers that no parameter needs, and scales of caches, which are left unless a name or an attention layer takes them.
LEFT = (r".*\.rotary_emb\.inv_freq", r".*\.(k|v|q|kv)_scale", r".*rope_freqs\.weight")


class IdleNameWarning(UserWarning):
    """A rule of `names` is for no tensor of the checkpoint; perhaps it is misspelt."""


@dataclass(frozen=True)
class Assignment:
    """A parameter, and the tensors that its numbers are made of.

    Attributes:
        path: of the parameter.
        shape: of the parameter.
        sources: names of the tensors, in the order of a stack and, within, of the rows; each with the rows that are
            taken of it, None for all.
        depth: of the stack: how many numbers each of its places has.
        axes: how rows and columns become the parameter's axes.
        sizes: of these axes.
        label: of the numbers, for reports; of floats that the parameter has fewer bits for, both dtypes.
        is_low: whether they are in low bits.
        heads: that llama.cpp keeps in another order of rows, which is turned back; 0 for rows as they lie.
    """

    path: str
    shape: tuple[int, ...]
    sources: tuple[tuple[str, tuple[int, int] | None], ...]
    depth: tuple[int, ...]
    axes: AxesOfLayout
    sizes: Mapping[str, int]
    label: str
    is_low: bool
    heads: int = 0

    def row(self) -> tuple[str, ...]:
        """What a table shows of it."""
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
    unknown: tuple[str, ...] = field(default=())
    caches: tuple[CacheScale, ...] = ()
    idle: tuple[str, ...] = ()
    needs_inputs: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [each.row() for each in self.assignments]
        lines = table(("parameter", "shape", "numbers", "axes", "tensors"), rows)
        lines += [f"scale of the cache {each.target}: {', '.join(each.sources)}" for each in self.caches]
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
    shapes: Mapping[str, tuple[int, ...]],
    names: Names | None,
    ignore: tuple[str, ...],
    proxies: Iterable[str] = (),
) -> LoadPlan:
    """What goes where.

    Args:
        checkpoint: the checkpoint.
        shapes: of the model's parameters, by their paths.
        names: rules; None for those that the names of both suggest.
        ignore: patterns of tensors that nothing needs.
        proxies: paths of the quantizers of keys and values that the model has.

    Raises:
        CheckpointError: two tensors are for one parameter; shapes do not fit.
        ValueError: a rule names a parameter that does not exist.
    """
    rules, ignored_by = None if names is None else checked_names(names), _patterns(ignore)
    taken: dict[str, dict[tuple[Any, ...], tuple[str, int, int, Name]]] = {}
    left, unknown = [], []
    known, caches = tuple(proxies), {}
    for name in checkpoint.names:
        ignored = any(pattern.fullmatch(name) for pattern in ignored_by)
        target = None if ignored else cache_target(name, rules, known, PREFIXES)
        if target is not None:
            caches.setdefault(target, []).append(name)
            continue
        if ignored or any(re.fullmatch(pattern, name) for pattern in LEFT):
            left.append(name)
            continue
        found = by_rules(name, rules, shapes) if rules is not None else by_likeness(name, shapes, checkpoint)
        if not found:
            unknown.append(name)
        for path, key, part, of, rule in found:
            held = taken.setdefault(path, {})
            if key in held:
                raise CheckpointError(f"{path} is for {held[key][0]} and for {name}")
            held[key] = name, part, of, rule
    made = tuple(_assignment(checkpoint, path, shapes, parts) for path, parts in sorted(taken.items()))
    missing = tuple(path for path in shapes if path not in taken)
    scales = tuple(CacheScale(target, tuple(held), target in known) for target, held in caches.items())
    idle = idle_rules(checkpoint.names, rules or ())
    return LoadPlan(made, tuple(left), missing, tuple(unknown), scales, idle)


def _patterns(ignore: tuple[str, ...]) -> list[re.Pattern[str]]:
    try:
        return [re.compile(pattern) for pattern in ignore]
    except (re.error, TypeError) as error:
        raise ValueError(f"ignore is {ignore!r}, expected regular expressions: {error}") from None


def _assignment(
    checkpoint: Checkpoint,
    path: str,
    shapes: Mapping[str, tuple[int, ...]],
    parts: dict[tuple[Any, ...], tuple[str, int, int, Name]],
) -> Assignment:
    stacks = sorted({key[0] for key in parts})
    depth = tuple(len({stack[at] for stack in stacks}) for at in range(len(stacks[0])))
    if math.prod(depth) != len(stacks):
        raise CheckpointError(
            f"{path} is a stack, of which tensors are missing: {len(stacks)} of {math.prod(depth)}"
        )
    ordered = [parts[key] for key in sorted(parts)]
    rule = ordered[0][3]
    if len(parts) != len(stacks) * len(rule.files):
        raise CheckpointError(f"{path} is joined from {len(rule.files)} tensors, of which some are missing")
    shape = shapes[path]
    if shape[: len(depth)] != depth:
        raise CheckpointError(f"{path} has the shape {shape}, but {depth} tensors are stacked for it")
    own = shape[len(depth) :]
    first = ordered[0][0]
    is_low = first in checkpoint.matrices
    held = [_shape(checkpoint, name) for name, *_ in ordered]
    _check_rows(path, ordered, rule, held)
    rows = sum(each[0] for each in held[: len(rule.files)]) if held[0] else 1
    own_axes = rule.axes or axes_of_tree(checkpoint, first, own)
    if ordered[0][2] > 1:
        sources, rows = _divided(checkpoint, path, ordered, rule, shapes)
    else:
        sources = [(name, None) for name, *_ in ordered]
    source = (rows, *held[0][1:])
    if checkpoint.is_tree and not is_low:
        source = (math.prod(source),)
    axes = AxesOfLayout.of(own_axes) if own_axes else guessed_axes(path, source, own, first)
    try:
        sizes = axes.sizes(source, own, dict(rule.sizes))
    except ValueError as error:
        raise CheckpointError(
            f"{first}, {source}, does not fit {path}, {own}: {error}.\n"
            "  cure: a model of the checkpoint's sizes, or a Name with other axes"
        ) from None
    label = checkpoint.matrices[first].format.label if is_low else checkpoint.tensors[first].dtype.name
    heads = {_heads(checkpoint, rule, name) for name, *_ in ordered}
    if len(heads) > 1:
        raise CheckpointError(f"{path} is made of tensors whose rows lie in different orders: {first}, ...")
    return Assignment(path, shape, tuple(sources), depth, axes, sizes, label, is_low, heads.pop())


def _check_rows(path: str, ordered: list[Any], rule: Name, held: list[tuple[int, ...]]) -> None:
    """Tensors that are joined have the rows that the rule says, if it does."""
    rows = rule.rows or ()
    for at, (name, *_) in enumerate(ordered if rows else ()):
        said = rows[at % len(rows)]
        if held[at][:1] != (said,):
            raise CheckpointError(f"{name} has the shape {held[at]}; its Name for {path} says {said} rows")


def _heads(checkpoint: Checkpoint, rule: Name, name: str) -> int:
    """Heads whose rows are turned back: those of a GGUF file for which a rule has the published name."""
    if checkpoint.method != "gguf" or rule.matches(name) is not None:
        return 0
    return heads_in_turn(name, checkpoint.config)


def _divided(
    checkpoint: Checkpoint, path: str, ordered: list[Any], rule: Name, shapes: Mapping[str, Any]
) -> Any:
    """The rows of a tensor that several parameters divide: as many for each as it has numbers."""
    name, part, _, _ = ordered[0]
    source = _shape(checkpoint, name)
    match = rule.matches(name) or rule.matches(published_name(name))
    assert match is not None, "it was found so"
    sizes = [math.prod(shapes[model.format(**match[1])]) // math.prod(source[1:]) for model in rule.models]
    if sum(sizes) != source[0]:
        raise CheckpointError(
            f"{name} has {source[0]} rows; its parameters need {' + '.join(map(str, sizes))}"
        )
    start = sum(sizes[:part])
    return [(each, (start, start + sizes[part])) for each, *_ in ordered], sizes[part]


def _shape(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    held = checkpoint.matrices.get(name)
    return checkpoint.tensors[name].shape if held is None else held.shape
