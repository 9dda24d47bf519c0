"""Keys that compare and hash by value: they decide whether two bindings are equal.

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
from typing import Any

import numpy as np

from jqinject.inject import arrays, dependencies_library
from jqinject.inject.injector import InjectorMeta


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


def snapshot(value: Any) -> Any:
    """A value protected from later writes: numpy arrays become read-only copies, containers copies."""
    if type(value) is np.ndarray:
        copied = value.copy()
        copied.setflags(write=False)
        return copied
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(snapshot(item) for item in value)
    if type(value) is dict:
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
    (enum.Enum, lambda value: (type(value), value.name, key_of(value.value))),
    ((types.NoneType, bool, str, bytes, types.EllipsisType, np.dtype), _typed),
    ((np.ndarray, np.generic, arrays.ArrayLike), _array),
    (int, _typed),
    ((float, complex), _bits),
    ((list, tuple), _sequence),
    ((set, frozenset), _set),
    (Mapping, _mapping),
    (slice, lambda value: (slice, key_of((value.start, value.stop, value.step)))),
    (dependencies_library.This, lambda value: (dependencies_library.This, key_of(value.__expression__))),
    (dependencies_library.Value, lambda value: (dependencies_library.Value, Same(value.__function__))),
    (types.MethodType, lambda value: (types.MethodType, Same(value.__self__), Same(value.__func__))),
    (
        functools.partial,
        lambda value: (type(value), key_of(value.func), key_of(value.args), key_of(value.keywords)),
    ),
)
