"""Which tensor of a checkpoint belongs to which parameter of a model: patterns of names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PLACE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Name:
    """A rule from names of a file to paths of a model.

    `{layer}` stands for one part of a name, the same on both sides. What only the file's name has numbers the matrices
    that a parameter stacks along its first axes.

    Attributes:
        file: the tensor's name; several of them are joined, above one another in their order.
        model: the parameter's path; several of them divide the rows of the tensor, in their order.
        axes: how rows (`outputs`) and columns (`inputs`) become the parameter's axes; None takes it from the shapes.
        sizes: of axes that the shapes leave open.
        rows: of each tensor that is joined. A file says it itself; `save` needs it where tensors differ in it (queries
            beside the keys and values of fewer heads), or where no axis of the parameter counts them.

    Example:
        >>> fused = Name("model.layers.{i}.self_attn.qkv_proj.weight", ("layers.{i}.q", "layers.{i}.k", "layers.{i}.v"))
        >>> fused.matches("model.layers.3.self_attn.qkv_proj.weight")
        (0, {'i': '3'})
    """

    file: str | tuple[str, ...]
    model: str | tuple[str, ...]
    axes: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    rows: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.file, str) and not isinstance(self.model, str):
            raise ValueError(
                f"a Name joins several tensors or divides one, not both: {self.file} -> {self.model}"
            )
        missing = {*PLACE.findall(" ".join(self.models))} - {*PLACE.findall(" ".join(self.files))}
        if missing:
            raise ValueError(f"{self.model!r} has {{{missing.pop()}}}, which {self.file!r} has not")
        if self.rows is not None and (len(self.rows) != len(self.files) or min(self.rows) < 1):
            raise ValueError(
                f"rows is {self.rows}, expected a positive number for each of {', '.join(self.files)}"
            )

    @property
    def files(self) -> tuple[str, ...]:
        """The patterns of tensors."""
        return (self.file,) if isinstance(self.file, str) else tuple(self.file)

    @property
    def models(self) -> tuple[str, ...]:
        """The patterns of paths."""
        return (self.model,) if isinstance(self.model, str) else tuple(self.model)

    def matches(self, name: str) -> tuple[int, dict[str, str]] | None:
        """Which of the file's patterns a name has, and what stands in its places; None if it has none."""
        for at, pattern in enumerate(self.files):
            found = compiled(pattern).fullmatch(name)
            if found:
                return at, found.groupdict()
        return None

    def stacked(self) -> tuple[str, ...]:
        """The places that number the matrices of a stack."""
        held = {*PLACE.findall(" ".join(self.models))}
        return tuple(place for place in dict.fromkeys(PLACE.findall(self.files[0])) if place not in held)


def compiled(pattern: str) -> re.Pattern[str]:
    """A pattern of names, with a group for each of its places."""
    parts, seen = [], set()
    for at, part in enumerate(PLACE.split(pattern)):
        if at % 2 == 0:
            parts.append(re.escape(part))
        else:
            parts.append(f"(?P={part})" if part in seen else f"(?P<{part}>[^.]+)")
            seen.add(part)
    return re.compile("".join(parts))


Names = Mapping[str, Any] | Sequence[Name]
"""A `Name` for each rule; or a mapping from names of the file to paths of the model, or to a path and axes."""


def checked_names(names: Names) -> tuple[Name, ...]:
    """Names as rules.

    Raises:
        TypeError: they are something else.
        ValueError: one contradicts itself.
    """
    if isinstance(names, Mapping):
        made = []
        for file, model in names.items():
            path, axes = (
                model
                if isinstance(model, tuple) and len(model) == 2 and "->" in str(model[1])
                else (model, None)
            )
            made.append(Name(file, path, axes))
        return tuple(made)
    alone = isinstance(names, str | Name) or not isinstance(names, Iterable)
    given: tuple[Any, ...] = (names,) if alone else tuple(names)
    for each in given:
        if not isinstance(each, Name):
            raise TypeError(f"names are jqinject.formats.Name rules, or a mapping of texts, got {each!r:.80}")
    return given
