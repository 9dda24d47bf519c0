"""Runs code around a method of one module, by giving that module a cached subclass of its class."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from flax import nnx

from jqinject.program.class_swap import ClassMixin, change_class, derived_class


class Around:
    """Abstract: what is done around the calls of a module. Compared by identity, unless a class says otherwise."""

    @abstractmethod
    def __call__(self, layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take the place of a call.

        Args:
            layer: the module as it is where it is called: within a transformation another object than outside.
            call: what the module does when called; to be called with `args` and `kwargs`.

        Returns:
            What the caller of the module gets.
        """


class _Intercepted(ClassMixin):
    """A module one of whose methods goes through what is done around it, the last that was added first."""

    __slots__ = ()

    @classmethod
    def method(cls, kind: type, name: str) -> Callable[..., Any]:
        own, attribute = getattr(kind, name), _attribute(name)

        def through(self: Any, *args: Any, **kwargs: Any) -> Any:
            call: Callable[..., Any] = partial(own, self)
            for around in getattr(self, attribute):
                call = partial(around, self, call)
            return call(*args, **kwargs)

        return through


def _attribute(method: str) -> str:
    return f"_jqinject_around_{method}"


def intercept(layer: nnx.Module, around: Around, method: str = "__call__") -> None:
    """From now on, let the calls of a module go through `around`, before what they went through already.

    Args:
        layer: a module of a private copy of a model. Its class becomes a subclass, the same one for all modules of the
            class, and what is done stands in an attribute of the module: NNX carries both through transformations.
        around: what is done.
        method: the method whose calls go through it.
    """
    attribute = _attribute(method)
    others = vars(layer).get(attribute)
    setattr(layer, attribute, (*(others or ()), around))
    if others is None:
        change_class(layer, derived_class(type(layer), _Intercepted, method))


def release(layer: nnx.Module, kind: type[Around], method: str = "__call__") -> None:
    """Take away what `intercept` put around a method; does nothing where there is none of it.

    Args:
        layer: the module.
        kind: the class of what is taken away.
        method: the method that was intercepted.
    """
    attribute = _attribute(method)
    arounds = vars(layer).get(attribute, ())
    others = tuple(around for around in arounds if not isinstance(around, kind))
    if others:
        setattr(layer, attribute, others)
    elif arounds:
        delattr(layer, attribute)
        change_class(layer, type(layer).base_class)  # pyright: ignore[reportAttributeAccessIssue]
