"""The names that a component class or a `@value` function asks for; read once per class."""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

_OF_CLASS: "WeakKeyDictionary[type, Arguments]" = WeakKeyDictionary()
_TYPING = ("typing", "typing_extensions")


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a callable as names to wire.

    Attributes:
        named: (name, required) of every argument, in order.
        names: all names asked for, required or not.
        positional: how many of them are positional-only.
        defaults: the default of every argument that has one.
        refused: why the callable cannot be wired at all; empty if it can.
    """

    named: tuple[tuple[str, bool], ...] = ()
    names: tuple[str, ...] = ()
    positional: int = 0
    defaults: Mapping[str, object] | None = None
    refused: str = ""

    def call(self, function: Callable[..., object], values: dict[str, object]) -> Any:
        """Call `function` with the names found; the others take their defaults."""
        if not self.positional:
            return function(**values)
        leading = [name for name, _ in self.named[: self.positional]]
        last = max((index for index, name in enumerate(leading) if name in values), default=-1)
        defaults = self.defaults or {}
        args = [values.pop(name) if name in values else defaults[name] for name in leading[: last + 1]]
        return function(*args, **values)


def arguments_of_class(cls: type) -> Arguments:
    """The names that constructing `cls` asks for, from its `__init__`; a metaclass's call is not read."""
    arguments = _OF_CLASS.get(cls)
    if arguments is None:
        arguments = _OF_CLASS[cls] = _read_class(cls)
    return arguments


def arguments_of_function(function: Callable[..., object]) -> Arguments:
    """The names that a `@value` function asks for."""
    return _read(function, skip_first=False)


def _read_class(cls: type) -> Arguments:
    constructor = _constructor(cls)
    if constructor is None:
        return Arguments()
    owner = f"{cls.__qualname__}.{constructor.__name__}"
    try:
        arguments = _read(constructor, skip_first=True)
    except (TypeError, ValueError):
        return Arguments(
            refused=f"{owner} does not tell its arguments. Wrap the call in a @value function, or declare an "
            "instance."
        )
    return arguments if not arguments.refused else Arguments(refused=f"{owner} {arguments.refused}")


def _constructor(cls: type) -> Callable[..., object] | None:
    """The `__init__` (or `__new__`) that takes the arguments; None if there is only that of `object`."""
    for base in cls.__mro__:
        for name in ("__init__", "__new__"):
            if base is not object and name in base.__dict__:
                constructor = getattr(base, name)
                if getattr(constructor, "__module__", "") not in _TYPING:  # a Protocol's takes anything
                    return constructor
    return None


def signature(function: Callable[..., object]) -> inspect.Signature:
    """The signature of a function, whose annotations may use names that only a type checker imports."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(function)


def _read(function: Callable[..., object], *, skip_first: bool) -> Arguments:
    parameters = list(signature(function).parameters.values())
    if skip_first and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        parameters = parameters[1:]
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return Arguments(
            refused="takes *args or **kwargs, which cannot be wired by name. Write the arguments out, or "
            "declare an instance instead of the class."
        )
    return Arguments(
        named=tuple((p.name, p.default is p.empty) for p in parameters),
        names=tuple(p.name for p in parameters),
        positional=sum(1 for p in parameters if p.kind is p.POSITIONAL_ONLY),
        defaults={p.name: p.default for p in parameters if p.default is not p.empty},
    )
