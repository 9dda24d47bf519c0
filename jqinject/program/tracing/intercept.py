"""Runs code around a method of one module, by giving that module a cached subclass of its class."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from flax import nnx

from jqinject.program.tracing.class_swap import ClassMixin, change_class, derived_class


class Around:
    """Abstract: code that runs around the calls of a module. Compared by identity, unless a class says otherwise."""

    @abstractmethod
    def __call__(self, layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run instead of a call.

        Args:
            layer: the called module; inside a transformation, this is another object than outside.
            call: the module's own call, or the next interceptor; takes `args` and `kwargs`.

        Returns:
            The result for the caller of the module.
        """


class _Intercepted(ClassMixin):
    """A module with an intercepted method; the interceptor that was added last runs first."""

    __slots__ = ()

    @classmethod
    def method(cls, kind: type, name: str) -> Callable[..., Any]:
        own, attribute = inspect.getattr_static(kind, name), _attribute(name)

        def through(self: Any, *args: Any, **kwargs: Any) -> Any:
            call: Callable[..., Any] = own.__get__(self, kind)
            for around in getattr(self, attribute):
                call = partial(around, self, call)
            return call(*args, **kwargs)

        return through


def _attribute(method: str) -> str:
    return f"_jqinject_around_{method}"


def intercept(layer: nnx.Module, around: Around, method: str = "__call__") -> None:
    """Run `around` around the calls of a module, outside any earlier interceptors.

    Args:
        layer: a module of a private copy of a model. Its class becomes a subclass, cached for each class and method,
            and `around` is stored in an attribute of the module: NNX carries both through transformations.
        around: the interceptor.
        method: the method to intercept.
    """
    attribute = _attribute(method)
    others = vars(layer).get(attribute)
    setattr(layer, attribute, (*(others or ()), around))
    if others is None:
        change_class(layer, derived_class(type(layer), _Intercepted, method))


def release(layer: nnx.Module, kind: type[Around], method: str = "__call__") -> None:
    """Remove the interceptors of a class from a method; has no effect if there are none.

    Args:
        layer: the module.
        kind: the class of interceptors to remove.
        method: the intercepted method.
    """
    attribute = _attribute(method)
    arounds = vars(layer).get(attribute, ())
    others = tuple(around for around in arounds if not isinstance(around, kind))
    if others:
        setattr(layer, attribute, others)
    elif arounds:
        delattr(layer, attribute)
        change_class(layer, type(layer)._base_class)  # pyright: ignore[reportAttributeAccessIssue]
