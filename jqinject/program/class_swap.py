"""Swapping the class of a module: one function that makes a subclass, once for each class, and one that swaps.

NNX carries the class of a module through its transformations, so a swapped class is in effect wherever the module is
called. Next: `intercept`, which runs code around a method, and `model`, whose call is run as a program.
"""

import copyreg
import functools
import inspect
from collections.abc import Callable
from functools import partial

from flax import nnx

from jqinject.core.flax_internals import change_class


class ClassMixin:
    """Abstract: an addition to the class of a module.

    Attributes:
        _made_from: the arguments of `derived_class`: the class that it was added to, the addition, and the methods.
    """

    __slots__ = ()  # an instance can only take a class of the same layout
    _made_from: tuple[type, type, tuple[str, ...]]

    @classmethod
    def method(cls, kind: type, name: str) -> Callable[..., object]:
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
        kind = vars(kind)["_made_from"][0]
    return kind


# NNX registers every module class with JAX permanently, so there is one subclass per class, not per module.
@functools.cache
def _derived(kind: type, mixin: type[ClassMixin], methods: tuple[str, ...]) -> type:
    body = {name: getattr(kind, name) for name in ("__doc__", "__module__", "__qualname__")}
    replaced = {name: mixin.method(kind, name) for name in methods}
    return _picklable(type(kind))(
        kind.__name__, (kind, mixin), body | replaced | {"_made_from": (kind, mixin, methods)}
    )


@functools.cache
def _picklable(metaclass: type) -> type:
    """A metaclass whose classes are pickled as the arguments of `derived_class`."""
    picklable = type(metaclass.__name__, (metaclass,), {})
    copyreg.pickle(picklable, lambda kind: (_derived, kind._made_from))  # pyright: ignore[reportAttributeAccessIssue]
    return picklable


class _Intercepted(ClassMixin):
    """A module with an intercepted method; the interceptor that was added last runs first."""

    __slots__ = ()

    @classmethod
    def method(cls, kind: type, name: str) -> Callable[..., object]:
        own, attribute = inspect.getattr_static(kind, name), _attribute(name)

        def through(self: object, *args: object, **kwargs: object) -> object:
            call: Callable[..., object] = own.__get__(self, kind)
            for around in getattr(self, attribute):
                call = partial(around, self, call)
            return call(*args, **kwargs)

        return through


def _attribute(method: str) -> str:
    return f"_jqinject_around_{method}"


#: The methods by which layers are called.
METHODS = ("__call__", "attend")


def intercept(layer: nnx.Module, around: Callable[..., object], *methods: str) -> None:
    """Run `around` around the calls of a module, outside any earlier interceptors.

    It is called with the called module (inside a transformation, this is another object than outside); with the
    module's own call, or the next interceptor; and with the arguments of the call, which these take. It returns the
    result for the caller of the module.

    Args:
        layer: a module of a private copy of a model. Its class becomes a subclass, cached for each class and method,
            and `around` is stored in an attribute of the module: NNX carries both through transformations.
        around: the interceptor; a program that is traced again finds compiled parts again if it is equal by value.
        methods: names of the methods to intercept, as far as the module has them; none means `__call__`.
    """
    for method in methods or ("__call__",):
        if callable(getattr(type(layer), method, None)):
            attribute = _attribute(method)
            others = vars(layer).get(attribute)
            setattr(layer, attribute, (*(others or ()), around))
            if others is None:
                change_class(layer, derived_class(type(layer), _Intercepted, method))
