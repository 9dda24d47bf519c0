"""`Binding`: an injector and its overrides as one frozen value, fit for the static part of a module."""

from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, final
from weakref import WeakValueDictionary

from jqinject.inject import keys, show
from jqinject.inject.injector import InjectorMeta
from jqinject.inject.resolver import resolve

_Fact = TypeVar("_Fact")


@final
class Binding:
    """An injector with overrides, equal and hashed by value over everything that affects what it assembles.

    Two layers built in the same way hold equal bindings, so their graphdefs are equal and share one jit trace.
    Overrides compare with their types (`1`, `1.0` and `True` differ), arrays by shape, dtype and bytes,
    containers element by element, classes and functions by identity; see `jqinject.inject.keys`. Numpy arrays
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
                f"{show.brief(injector)}"
            )
        overrides_by_name = {name: keys.snapshot(value) for name, value in (overrides or {}).items()}
        applied = injector.let(**overrides_by_name) if overrides_by_name else injector
        key = keys.injector_key(applied)
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
        key = frozenset((name, keys.key_of(value)) for name, value in overrides.items())
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
            f"a binding is frozen: make another with binding.let(...), got {name} = {show.brief(value)}"
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
        overrides = "".join(f", {name}={show.brief(value)}" for name, value in self.overrides.items())
        return f"Binding({self.base.__name__}{overrides})"
