"""`Binding`: an injector and its overrides as one frozen value, fit for the static part of a module.

Keys that compare and hash by value decide whether two bindings are equal:

| value                                  | its key                                             |
|----------------------------------------|-----------------------------------------------------|
| number, string, enum member, dtype     | the type and the value: `1`, `1.0` and `True` differ |
| array (numpy, jax, ...)                | its type, shape, dtype and bytes                    |
| list, tuple, set, dict                 | its type and the keys of its elements, in order     |
| frozen dataclass, partial              | its type and the keys of its fields                 |
| injector                               | see `injector_key`                                  |
| other object with its own equality     | its type and itself                                 |
| class, function, module, anything else | its identity                                        |
"""

import dataclasses
import enum
import functools
import struct
import types
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, final
from weakref import WeakValueDictionary

import numpy as np

from jqinject.inject.dependencies_library import This, Value
from jqinject.inject.errors import ArrayLike, brief
from jqinject.inject.injector import InjectorMeta
from jqinject.inject.resolver import resolve


@dataclasses.dataclass(slots=True, eq=False)
class Same:
    """An object compared by identity, and kept alive so that its id stays unique."""

    it: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.it is self.it

    def __hash__(self) -> int:
        return hash((Same, id(self.it)))


def key_of(value: object) -> Hashable:
    """The key of any value that can be declared or given.

    >>> key_of([1, {"a": 2.0}]) == key_of([1, {"a": 2.0}]), key_of(1) == key_of(True)
    (True, False)
    """
    for kinds, make in _TABLE:
        if isinstance(value, kinds):
            return make(value)
    if dataclasses.is_dataclass(value) and getattr(type(value), "__dataclass_params__").frozen:  # noqa: B009
        return type(value), tuple((f.name, key_of(getattr(value, f.name))) for f in dataclasses.fields(value))
    return _own_equality(value)


def injector_key(injector: InjectorMeta) -> Hashable:
    """The key of an injector: its identity if made by a class statement, else the call that made it.

    `Q.let(a=1).let(b=2)` has the key of `Q.let(a=1, b=2)`, and an injector without overrides that of its
    class.
    """
    overrides: dict[str, object] = {}
    while injector.__made_by__ and injector.__made_by__[0] == "let":
        overrides = {**injector.__made_by__[2], **overrides}
        injector = injector.__made_by__[1]
    recipe = injector.__made_by__
    root: Hashable = (recipe[0], *(key_of(part) for part in recipe[1:])) if recipe else injector
    return (
        (root, frozenset((name, key_of(value)) for name, value in overrides.items())) if overrides else root
    )


_COPIES: Mapping[object, Callable[[Iterable[object]], object]] = {
    kind: kind for kind in (list, tuple, set, frozenset)
}


def snapshot(value: Any) -> Any:
    """A value protected from later writes: numpy arrays become read-only copies, containers copies."""
    kind = value.__class__
    if kind is np.ndarray:
        copied = value.copy()
        copied.setflags(write=False)
        return copied
    if kind in _COPIES:
        return _COPIES[kind](snapshot(item) for item in value)
    if kind is dict:
        return {name: snapshot(item) for name, item in value.items()}
    return value


def _typed(value: object) -> Hashable:
    return type(value), value


def _bits(value: float | complex) -> Hashable:
    number = complex(value)
    return type(value), struct.pack("dd", number.real, number.imag)


def _array(value: object) -> Hashable:
    try:
        data = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # a tracer, a random key, an array on other hosts
        return Same(value)
    content = tuple(key_of(item) for item in data.ravel()) if data.dtype.hasobject else data.tobytes()
    return type(value), data.shape, data.dtype, content, getattr(value, "weak_type", None)


def _sequence(value: Iterable[object]) -> Hashable:
    return type(value), tuple(key_of(item) for item in value)


def _set(value: Iterable[object]) -> Hashable:
    return type(value), frozenset(key_of(item) for item in value)


def _mapping(value: Mapping[object, object]) -> Hashable:
    return type(value), tuple((key_of(name), key_of(item)) for name, item in value.items())


def _own_equality(value: object) -> Hashable:
    cls = type(value)
    if cls.__eq__ is object.__eq__ or cls.__hash__ is None:
        return Same(value)
    try:
        hash(value)
    except TypeError:
        return Same(value)
    return _typed(value)


_TABLE: tuple[tuple[Any, Callable[[Any], Hashable]], ...] = (
    (InjectorMeta, injector_key),
    (type, Same),
    (enum.Enum, lambda value: (value.__class__, value.name, key_of(value.value))),
    ((types.NoneType, bool, str, bytes, types.EllipsisType, np.dtype), _typed),
    ((np.ndarray, np.generic, ArrayLike), _array),
    (int, _typed),
    ((float, complex), _bits),
    ((list, tuple), _sequence),
    ((set, frozenset), _set),
    (Mapping, _mapping),
    (slice, lambda value: (slice, key_of((value.start, value.stop, value.step)))),
    (This, lambda value: (This, key_of(value.__expression__))),
    (Value, lambda value: (Value, Same(value.__function__))),
    (types.MethodType, lambda value: (types.MethodType, Same(value.__self__), Same(value.__func__))),
    (
        functools.partial,
        lambda value: (value.__class__, key_of(value.func), key_of(value.args), key_of(value.keywords)),
    ),
)


_Fact = TypeVar("_Fact")


@final
class Binding:
    """An injector with overrides, equal and hashed by value over everything that affects what it assembles.

    Two layers built in the same way hold equal bindings, so their graphdefs are equal and share one jit trace.
    Overrides compare with their types (`1`, `1.0` and `True` differ), arrays by shape, dtype and bytes,
    containers element by element, classes and functions by identity; see `key_of`. Numpy arrays
    and containers are copied, so that a later write to them reaches neither the binding nor its hash.

    >>> from jqinject.inject import Binding, ExtendedInjector
    >>> class Q(ExtendedInjector):
    ...     bit_width = 8
    >>> four = Binding(Q, {"bit_width": 4})
    >>> four == Binding(Q, {"bit_width": 4}), four == Binding(Q, {"bit_width": 4.0})
    (True, False)
    >>> four.resolve("bit_width"), four
    (4, Binding(Q, bit_width=4))

    Attributes:
        base: the injector as given.
        overrides: the names redeclared on top of it; read-only.
        injector: the injector with the overrides applied.
        overridden: what `let` redeclared on top of class statements, these overrides included; read-only.

    Raises:
        TypeError: `injector` is not an injector class.
        DependencyError: an override that no injector may declare.
    """

    _derived: WeakValueDictionary[Hashable, "Binding"]
    _facts: dict[Callable[[Any], object], Any]
    _hash: int
    _key: Hashable
    base: Any
    overrides: Mapping[str, Any]
    injector: Any
    overridden: Mapping[str, Any]

    def __init__(self, injector: object, overrides: Mapping[str, object] | None = None) -> None:
        if not isinstance(injector, InjectorMeta):
            raise TypeError(
                "a binding takes an injector (a class that derives from ExtendedInjector), got "
                f"{brief(injector)}"
            )
        overrides_by_name = {name: snapshot(value) for name, value in (overrides or {}).items()}
        applied = injector.let(**overrides_by_name) if overrides_by_name else injector
        key = injector_key(applied)
        named, overridden = map(MappingProxyType, (overrides_by_name, applied.__overrides__))
        vars(self).update(base=injector, overrides=named, injector=applied, overridden=overridden)
        vars(self).update(_key=key, _hash=hash(key), _facts={}, _derived=WeakValueDictionary())

    @classmethod
    def of(cls, injector: Any) -> "Binding":
        """The binding of an injector without overrides: one object, remembered by the injector."""
        binding = injector.__binding__ if isinstance(injector, InjectorMeta) else None
        if binding is None:
            binding = cls(injector)
            type.__setattr__(injector, "__binding__", binding)
        return binding

    def once(self, function: Callable[[Any], _Fact]) -> _Fact:
        """What a function of a module returns for `injector`: computed at the first call, then remembered."""
        if function not in self._facts:
            self._facts[function] = function(self.injector)
        return self._facts[function]

    def resolve(self, name: str, /, *, trace: set[str] | None = None, **names: object) -> Any:
        """The result of a name, with more names given for this access (see `jqinject.inject.resolve`)."""
        return resolve(self.injector, name, trace=trace, **names)

    def declares(self, name: str) -> bool:
        """Whether the injector or an override declares the name."""
        return name in self.injector.__dependencies__

    def let(self, **overrides: object) -> "Binding":
        """A binding with more overrides; the new ones win. Equal overrides give the same object, while it lives."""
        key = frozenset((name, key_of(value)) for name, value in overrides.items())
        derived = self._derived.get(key)
        if derived is None:
            derived = self._derived[key] = Binding(self.base, {**self.overrides, **overrides})
        return derived

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Binding) and self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"a binding is frozen: make another with binding.let(...), got {name} = {brief(value)}"
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a binding is frozen: {name!r} cannot be deleted")

    def __copy__(self) -> "Binding":
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> "Binding":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Binding, (self.base, dict(self.overrides))

    def __repr__(self) -> str:
        overrides = "".join(f", {name}={brief(value)}" for name, value in self.overrides.items())
        return f"Binding({self.base.__name__}{overrides})"
