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
        _base_class: the class that it was added to.
    """

    __slots__ = ()  # an instance can only take a class of the same layout
    _base_class: type

    @classmethod
    def method(cls, kind: type, name: str) -> Callable[..., Any]:
        """The replacement of a method of the class `kind`: by default the mixin's own method of that name."""
        return getattr(cls, name)


def derived_class(kind: type, mixin: type[ClassMixin], *methods: str) -> type:
    """The subclass of `kind` and `mixin` with the mixin's `methods` and the name of `kind`; cached.

    It is pickled as the arguments that it was made from. `kind` comes before the mixin among the bases, because an
    instance can only take a class of the same layout.

    Args:
        kind: a class of modules.
        mixin: the addition.
        methods: names of the methods to replace; none means `__call__`.
    """
    return _derived(kind, mixin, tuple(sorted(set(methods or ("__call__",)))))


def original_class(kind: type) -> type:
    """The class that `kind` was derived from, by whatever additions; `kind` itself if there are none."""
    while "_made_from" in vars(kind):
        kind = vars(kind)["_base_class"]
    return kind


# NNX registers every module class with JAX permanently, so there is one subclass per class, not per module.
@functools.cache
def _derived(kind: type, mixin: type[ClassMixin], methods: tuple[str, ...]) -> type:
    body = {name: getattr(kind, name) for name in ("__doc__", "__module__", "__qualname__")}
    replaced = {name: mixin.method(kind, name) for name in methods}
    made = {"_base_class": kind, "_made_from": (kind, mixin, methods)}
    return _picklable(type(kind))(kind.__name__, (kind, mixin), body | replaced | made)


@functools.cache
def _picklable(metaclass: Any) -> Any:
    """A metaclass whose classes are pickled as the arguments of `derived_class`."""
    found = type(metaclass.__name__, (metaclass,), {})
    copyreg.pickle(found, lambda made: (_derived, made._made_from))  # pyright: ignore[reportAttributeAccessIssue]
    return found
