"""`@value`: a name computed from other names; `@choices`: the same, declaring which classes it may return."""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from jqinject.inject.arguments import signature
from jqinject.inject.dependencies_library import DependencyError, Value


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
