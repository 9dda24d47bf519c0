"""Swapping the class of a module: one function that makes a subclass, once for each class, and one that swaps.

NNX carries the class of a module through its transformations, so a swapped class is in effect wherever the module is
called. Next: `intercept`, which runs code around a method, and `model`, whose call is run as a program.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from typing import Any


class ClassMixin:
    """Abstract: an addition to the class of a module.

    Attributes:
        base_class: the class that it was added to.
    """

    __slots__ = ()  # an instance can only take a class of the same layout
    base_class: type

    @classmethod
    def method(cls, kind: type, name: str) -> Callable[..., Any]:
        """The replacement of a method of the class `kind`: by default the mixin's own method of that name."""
        return getattr(cls, name)


def derived_class(kind: type, mixin: type[ClassMixin], method: str = "__call__") -> type:
    """The subclass of `kind` and `mixin` with the mixin's `method` and the name of `kind`; cached.

    It is pickled as the arguments that it was made from. `kind` comes before the mixin among the bases, because an
    instance can only take a class of the same layout.

    Args:
        kind: a class of modules.
        mixin: the addition.
        method: the method to replace.
    """
    return _derived(kind, mixin, method)


# NNX registers every module class with JAX permanently, so there is one subclass per class, not per module.
@functools.cache
def _derived(kind: type, mixin: type[ClassMixin], method: str) -> type:
    body = {name: getattr(kind, name) for name in ("__doc__", "__module__", "__qualname__")}
    made = {"base_class": kind, method: mixin.method(kind, method), "_made_from": (kind, mixin, method)}
    return _picklable(type(kind))(kind.__name__, (kind, mixin), body | made)


@functools.cache
def _picklable(metaclass: Any) -> Any:
    """A metaclass whose classes are pickled as the arguments of `derived_class`."""
    found = type(metaclass.__name__, (metaclass,), {})
    copyreg.pickle(found, lambda made: (_derived, made._made_from))  # pyright: ignore[reportAttributeAccessIssue]
    return found


def change_class(module: Any, kind: type) -> None:
    """Change a module's class; NNX's own setter would treat `__class__` as an attribute."""
    object.__setattr__(module, "__class__", kind)
