"""Swapping the class of a module: one function that makes a subclass, once for each class, and one that swaps.

NNX carries the class of a module through its transformations, so that what a swapped class does is done wherever the
module is called. Next: `intercept`, which runs code around a method, and `model`, whose call is run as a program.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from typing import Any


class ClassMixin:
    """Abstract: what is added to the class of a module.

    Attributes:
        base_class: the class that it was added to.
    """

    __slots__ = ()  # an instance can only take a class of the same layout
    base_class: type

    @classmethod
    def method(cls, kind: type, name: str) -> Callable[..., Any]:
        """What takes the place of a method of the class `kind`: by default the mixin's own of that name."""
        return getattr(cls, name)


def derived_class(kind: type, mixin: type[ClassMixin], method: str = "__call__") -> type:
    """The subclass of `kind` and `mixin` with the mixin's `method`, named as `kind` is; the same one every time.

    It is pickled as what it was made from. The class comes before the mixin among the bases, as an instance can only
    take a class of the same layout.

    Args:
        kind: a class of modules.
        mixin: what is added.
        method: the method that is replaced.
    """
    return _derived(kind, mixin, method)


# NNX registers every class of modules with JAX for good, so there is one for each class, not one for each module.
@functools.cache
def _derived(kind: type, mixin: type[ClassMixin], method: str) -> type:
    body = {name: getattr(kind, name) for name in ("__doc__", "__module__", "__qualname__")}
    made = {"base_class": kind, method: mixin.method(kind, method), "_made_from": (kind, mixin, method)}
    return _picklable(type(kind))(kind.__name__, (kind, mixin), body | made)


@functools.cache
def _picklable(metaclass: Any) -> Any:
    """A metaclass whose classes are pickled by what `derived_class` made them from."""
    found = type(metaclass.__name__, (metaclass,), {})
    copyreg.pickle(found, lambda made: (_derived, made._made_from))  # pyright: ignore[reportAttributeAccessIssue]
    return found


def change_class(module: Any, kind: type) -> None:
    """Let a module be of another class; NNX's own setter would take the class for an attribute."""
    object.__setattr__(module, "__class__", kind)
