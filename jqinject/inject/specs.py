"""What an injector declares: `this` and `@value`, the arguments of what is called, and the kinds of declared names.

`this.other` is another name of the same injector, `this.table["k"].x` reads on from there, `this.sub.x` is a
name of the nested injector `sub`, and `(this << 1).x` is a name of the injector around a nested one.

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
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast
from weakref import WeakKeyDictionary

import numpy as np

from jqinject.inject.dependencies_library import (
    DependencyError,
    InjectorType,  # pyright: ignore[reportPrivateUsage]
    Operation,
    Package,
    This,
    Value,
)

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


def _read_class(cls: type) -> Arguments:
    constructor = _constructor(cls)
    if constructor is None:
        return Arguments()
    owner = f"{cls.__qualname__}.{constructor.__name__}"
    try:
        arguments = arguments_of_function(constructor, skip_first=True)
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


def arguments_of_function(function: Callable[..., object], *, skip_first: bool = False) -> Arguments:
    """The names that a `@value` function asks for, or a constructor beside its first."""
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


Step = tuple[str, Any]
PARENT: Step = (".", "__parent__")


class Link(This):
    """The type of `this` and of everything read from it: a path, compared by value, safe to copy and pickle."""

    def __init__(self, expression: tuple[Step, ...]) -> None:
        self.__expression__ = expression

    def __getattr__(self, attrname: str) -> "Link":
        if attrname.startswith("__") and attrname.endswith("__"):
            raise AttributeError(f"a link (`this`) has no {attrname!r}")
        return Link((*self.__expression__, (".", attrname)))

    def __getitem__(self, item: object) -> "Link":
        return Link((*self.__expression__, ("[]", item)))

    def __lshift__(self, num: object) -> "Link":
        if isinstance(num, bool) or not isinstance(num, int) or num <= 0:
            raise ValueError(f"`this << n` climbs n nested injectors: n is a positive int, got {num!r}")
        if any(step != PARENT for step in self.__expression__):
            raise ValueError(f"climb first, then read: write (this << {num}).name, got {self!r} << {num}")
        return Link(self.__expression__ + (PARENT,) * num)

    def __iter__(self) -> Any:
        raise TypeError(f"{self!r} is a link, not a sequence: it is followed when the injector is resolved")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, This) and self.__expression__ == other.__expression__

    def __hash__(self) -> int:
        return hash(tuple(repr(step) for step in self.__expression__))

    def __repr__(self) -> str:
        return link_text(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Link, (self.__expression__,)


if TYPE_CHECKING:
    this: Any  # a name of any type
else:
    this = Link(())


def link_text(link: This) -> str:
    """A link as it is written.

    >>> link_text((this << 1).scale["k"])
    "(this << 1).scale['k']"
    """
    steps = link.__expression__
    climbed = sum(1 for step in steps if step == PARENT)
    start = f"(this << {climbed})" if climbed else "this"
    rest = (f".{symbol}" if kind == "." else f"[{symbol!r}]" for kind, symbol in steps[climbed:])
    return start + "".join(rest)


def check_link(where: str, link: This) -> None:
    """Refuse a link that names nothing: bare `this`, bare `this << 1`, or an item that is not a name."""
    for step in link.__expression__:
        if step == PARENT:
            continue
        if not isinstance(step[1], str):
            raise DependencyError(
                f"{where} = {link_text(link)}: the first step of a link is a name, as in this.name"
            )
        return
    raise DependencyError(
        f"{where} = {link_text(link)} points to no name. Write this.other, this.sub.x or (this << 1).x."
    )


class ValueFunction(Value):
    """Compute a name of the injector by calling a function, whose arguments are names of the injector.

    A default of the function makes that name optional. If the function returns a class, that class is wired as a
    component (unless the name ends in `_class`, or the class is an injector, a dtype or an enum); if it returns
    `this.other`, that is followed. Names that only the other branch needs are not required.

    >>> from jqinject.inject import ExtendedInjector
    >>> class Q(ExtendedInjector):
    ...     bit_width = 4
    ...     @value
    ...     def levels(bit_width):
    ...         return 2 ** bit_width
    ...     largest = value(lambda levels: levels - 1)
    >>> Q.levels, Q.let(bit_width=8).largest
    (16, 255)

    Type checkers take the first argument of a function in a class body for the instance. They accept the form of
    `largest`; a function that is defined outside the class, `levels = value(levels_of)`; and `@value` above
    `@staticmethod`.

    Args:
        function: a plain function, or a static method, without `*args` and `**kwargs`.

    Raises:
        DependencyError: for a class, a method (an argument named `self`) or arbitrary arguments.
    """

    __function__: Callable[..., Any]
    choices: tuple[type, ...] | None = None

    def __init__(self, function: Callable[..., object]) -> None:
        function = function.__func__ if isinstance(function, staticmethod) else function
        if inspect.isclass(function) or not callable(function):
            raise DependencyError(
                f"@value decorates a function, got {function!r}. A class needs no decorator: write name = "
                "Class, and a plain value needs none either."
            )
        self.__function__ = function
        functools.update_wrapper(cast(Any, self), function, updated=())
        check_function(function)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ValueFunction) and self.__function__ == other.__function__

    def __hash__(self) -> int:
        return hash(self.__function__)

    def __repr__(self) -> str:
        return f"<@value {getattr(self.__function__, '__qualname__', self.__function__)}>"


if TYPE_CHECKING:

    def value(function: Callable[..., object]) -> Any:
        """See `ValueFunction`; its type is known only when it is resolved."""

else:
    value = ValueFunction


def choices(*classes: type) -> Callable[[Callable[..., Any]], Any]:
    """Declare that a `@value` function only chooses, and among which component classes.

    The check of overrides depends on the classes: a name that only one of them asks for is then known, whichever
    branch is taken. What is chosen depends on the arguments alone. Where these are plain names of the injector, the
    function is called once for the injector, not at every access.

    >>> class Wide:
    ...     def __init__(self, margin=0): ...
    >>> from jqinject.inject import ExtendedInjector, requested_names
    >>> class Q(ExtendedInjector):
    ...     @choices(Wide)
    ...     def impl(kind):
    ...         return Wide
    >>> sorted(requested_names(Q))
    ['impl', 'kind', 'margin']
    """
    for cls in classes:
        if not inspect.isclass(cls):
            raise DependencyError(f"@choices lists the classes a @value function may return, got {cls!r}")

    def decorate(function: Callable[..., object] | ValueFunction) -> Any:
        result = function if isinstance(function, ValueFunction) else ValueFunction(function)
        result.choices = classes
        return result

    return decorate


def check_function(function: Callable[..., object]) -> None:
    """Refuse arguments that cannot be wired by name: `self`, `*args`, `**kwargs`."""
    name = getattr(function, "__name__", repr(function))
    parameters = signature(function).parameters.values()
    if any(p.name == "self" for p in parameters):
        raise DependencyError(
            f"@value {name!r} has an argument 'self': the 'value' decorator cannot be used on methods, as "
            f"an injector has no instance. Ask for the names you need: def {name}(bit_width, signed=True)."
        )
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise DependencyError(
            f"@value {name!r} takes *args or **kwargs, which cannot be wired by name. Write the names out, "
            "with defaults for the optional ones."
        )


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
            raise DependencyError(
                f"component {self.target.__qualname__} cannot be wired: {arguments.refused}"
            )
        return arguments


class InjectorClass(InjectorType):
    """Declares the facts about an injector that the resolver and the checks read; `InjectorMeta` collects them.

    Attributes:
        __declared__: the names of its own class body, classified.
        __dependencies__: the names of all its bases, merged in MRO order.
        __defaults__: whether its names give way to those of all other bases.
        __deciders__: the injectors that it consists of: the first that declares a name decides it.
        __made_by__: the call that made it (`"let"`, `"and"` or `"nested"`, with the arguments); empty for a statement.
        __overrides__: the names that `let` redeclared on top of class statements, with the last value of each.
        __around__: the injector that it is nested in and the names passed there; empty if it is not nested.
        __chosen__: what functions of `@choices` selected from its plain names, as far as any was read.
        __binding__: its `Binding` without overrides, once there is one.
    """

    __declared__: Mapping[str, Spec]
    __dependencies__: Mapping[str, Spec]
    __defaults__: bool
    __deciders__: Sequence["InjectorClass"]
    __made_by__: tuple[Any, ...]
    __overrides__: Mapping[str, object]
    __around__: tuple[Any, Mapping[str, object]] | tuple[()]
    __chosen__: dict[str, Spec]
    __binding__: Any


def spec_of(name: str, declared: object) -> Spec:
    """Classify the declaration of `name`."""
    if isinstance(declared, type):
        if isinstance(declared, InjectorClass):
            return Spec("NESTED", declared, declared)
        kind: Kind = "COMPONENT" if is_component(name, declared) else "PLAIN"
        return Spec(kind, declared, declared)
    if isinstance(declared, This):
        check_link(name, declared)
        return Spec("LINK", declared, declared)
    if isinstance(declared, Value):
        function = declared.__function__
        check_function(function)
        return Spec("FUNCTION", function, declared)
    if isinstance(declared, (Operation, Package)):
        kind_name = type(declared).__name__
        raise DependencyError(
            f"{name!r} is a `{kind_name}` of the dependencies library, which these injectors do not take. "
            "Write a @value function that returns the function or imports the object."
        )
    return Spec("PLAIN", declared, declared)


def is_component(name: str, cls: type[Any]) -> bool:
    """Whether a class found under `name` is built, rather than passed on unchanged."""
    return not (
        name.endswith("_class")
        or isinstance(cls, InjectorType)
        or cls.__module__ == "builtins"
        or issubclass(cls, (np.generic, np.dtype, enum.Enum))
        # What stands for a dtype, like `jnp.int8`: a class with a dtype, compared by value.
        or (type(cls).__eq__ is not type.__eq__ and isinstance(getattr(cls, "dtype", None), np.dtype))
    )
