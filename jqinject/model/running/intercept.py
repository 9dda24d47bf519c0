"""Runs code around a method of one module, by giving that module a cached subclass of its class."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from flax import nnx

AROUND = "_jqinject_around"


class Around:
    """Abstract: what is done around the calls of a layer. Compared by identity."""

    @abstractmethod
    def __call__(self, layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take the place of a call.

        Args:
            layer: the layer as it is where it is called: within a transformation another object than outside.
            call: what the layer does when called; to be called with `args` and `kwargs`.

        Returns:
            What the caller of the layer gets.
        """


def intercept(layer: nnx.Module, around: Around, method: str = "__call__") -> None:
    """From now on, let the calls of a layer go through `around`.

    Args:
        layer: a layer of a private copy of a model. Its class becomes another, which NNX carries through its
            transformations; the class that it had stays as it is.
        around: what is done.
        method: the method whose calls go through it; one a layer.
    """
    setattr(layer, AROUND, around)
    layer.__class__ = _intercepted(type(layer), method)


# NNX registers every class of modules with JAX for good, so there is one a kind and method, not one a layer.
@cache
def _intercepted(kind: type, method: str) -> type:
    call: Callable[..., Any] = getattr(kind, method)

    def through(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, AROUND)(self, partial(call, self), *args, **kwargs)

    return type(kind.__name__, (kind,), {method: through, "__module__": kind.__module__})
