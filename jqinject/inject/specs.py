"""The kinds of declared names: a plain value, a component to build, a function to call, a link, an injector.

| declared                                        | kind        | what reading the name gives            |
|-------------------------------------------------|-------------|----------------------------------------|
| a number, string, array, function, instance ... | `PLAIN`     | the object itself, never called        |
| a dtype (`jnp.int8`, `np.float32`, `float`)     | `PLAIN`     | the dtype itself                       |
| an enum class or member                         | `PLAIN`     | itself                                 |
| any class under a name ending in `_class`       | `PLAIN`     | the class itself                       |
| another class                                   | `COMPONENT` | a new instance, arguments wired by name |
| `@value`                                        | `FUNCTION`  | what it returns (see `value`)          |
| `this.other`                                    | `LINK`      | what the other name gives              |
| an injector                                     | `NESTED`    | that injector, with this one around it |
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np

from jqinject.inject import dependencies_library, functions, links
from jqinject.inject.arguments import Arguments, arguments_of_class, arguments_of_function

Kind = Literal["PLAIN", "COMPONENT", "FUNCTION", "LINK", "NESTED"]


@dataclass(eq=False)
class Spec:
    """A declaration, classified once.

    Attributes:
        kind: see the table of this module.
        target: the object: a value, a class, a function, a link or an injector.
        declared: the declaration itself.
        read: the names from which `@choices` chose it, itself aside.
    """

    kind: Kind
    target: Any
    declared: Any
    read: frozenset[str] = frozenset()

    @cached_property
    def arguments(self) -> Arguments:
        """The names that the component or function asks for.

        Raises:
            DependencyError: it cannot be wired by name.
        """
        if self.kind == "FUNCTION":
            return arguments_of_function(self.target)
        arguments = arguments_of_class(self.target) if self.kind == "COMPONENT" else Arguments()
        if arguments.refused:
            raise dependencies_library.DependencyError(
                f"component {self.target.__qualname__} cannot be wired: {arguments.refused}"
            )
        return arguments


class InjectorClass(Protocol):
    """The facts about an injector that the resolver and the checks read; `InjectorMeta` collects them.

    Attributes:
        __declared__: the names of its own class body, classified.
        __dependencies__: the names of all its bases, merged in MRO order.
        __deciders__: the injectors that it consists of: the first that declares a name decides it.
        __made_by__: the call that made it (`"let"`, `"and"` or `"nested"`, with the arguments); empty for a statement.
        __overrides__: the names that `let` redeclared, with the last value of each.
        __around__: the injector that it is nested in and the names passed there; empty if it is not nested.
        __chosen__: what functions of `@choices` selected from its plain names, as far as any was read.
    """

    @property
    def __name__(self) -> str: ...
    @property
    def __declared__(self) -> Mapping[str, Spec]: ...
    @property
    def __dependencies__(self) -> Mapping[str, Spec]: ...
    @property
    def __deciders__(self) -> Sequence["InjectorClass"]: ...
    @property
    def __made_by__(self) -> tuple[Any, ...]: ...
    @property
    def __overrides__(self) -> Mapping[str, object]: ...
    @property
    def __chosen__(self) -> dict[str, Spec]: ...


def spec_of(name: str, declared: object) -> Spec:
    """Classify the declaration of `name`."""
    if isinstance(declared, type):
        if isinstance(declared, dependencies_library.InjectorType) and is_ours(declared):
            return Spec("NESTED", declared, declared)
        kind: Kind = "COMPONENT" if is_component(name, declared) else "PLAIN"
        return Spec(kind, declared, declared)
    if isinstance(declared, dependencies_library.This):
        links.check_link(name, declared)
        return Spec("LINK", declared, declared)
    if isinstance(declared, dependencies_library.Value):
        function = declared.__function__
        functions.check_function(function)
        return Spec("FUNCTION", function, declared)
    if isinstance(declared, (dependencies_library.Operation, dependencies_library.Package)):
        kind_name = type(declared).__name__
        raise dependencies_library.DependencyError(
            f"{name!r} is a `{kind_name}` of the dependencies library, which these injectors do not take. "
            "Write a @value function that returns the function or imports the object."
        )
    return Spec("PLAIN", declared, declared)


def is_ours(injector: type) -> bool:
    """Whether an injector is an `ExtendedInjector`; a plain one of the library is passed on as a value."""
    return "__declared__" in injector.__dict__


def is_component(name: str, cls: type) -> bool:
    """Whether a class found under `name` is built, rather than passed on unchanged."""
    return not (
        name.endswith("_class")
        or isinstance(cls, dependencies_library.InjectorType)
        or cls.__module__ == "builtins"
        or issubclass(cls, (np.generic, np.dtype, enum.Enum))
        # What stands for a dtype, like `jnp.int8`: a class with a dtype, compared by value.
        or (type(cls).__eq__ is not type.__eq__ and isinstance(getattr(cls, "dtype", None), np.dtype))
    )
