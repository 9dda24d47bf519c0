"""`ExtendedInjector`: a class whose attributes are declared as choices and read as assembled objects."""

import copyreg
import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Never, NoReturn, Self, TypeVar

from jqinject.inject import errors, resolver, specs
from jqinject.inject.dependencies_library import DependencyError, Injector

# The names that Python itself writes into a class body, 3.11 to 3.14.
_PYTHONS_OWN = frozenset(
    (
        "__module__",
        "__qualname__",
        "__doc__",
        "__classcell__",
        "__classdictcell__",
        "__firstlineno__",
        "__static_attributes__",
        "__annotations__",
        "__annotate__",
        "__annotate_func__",
        "__annotations_cache__",
        "__conditional_annotations__",
        "__type_params__",
        "__orig_bases__",
    )
)
_Injector = TypeVar("_Injector", bound="ExtendedInjector")
_NOTHING_DECLARED: dict[str, object] = {
    "__dependencies__": {},
    "__declared__": {},
    "__defaults__": False,
    "__made_by__": (),
    "__overrides__": {},
    "__around__": (),
    "__deciders__": (),
    "__chosen__": {},
    "__binding__": None,
}

_HIDDEN = {*_NOTHING_DECLARED, "__wrapped__", "_subs_tree"}


class InjectorMeta(specs.InjectorClass):
    """The metaclass of injectors: collects declarations, resolves attributes, refuses changes."""

    def __new__(
        mcs, class_name: str, bases: tuple[type, ...], namespace: dict[str, object], *, defaults: bool = False
    ) -> "InjectorMeta":
        if bases == (Injector,):  # ExtendedInjector itself: an ordinary class body
            return type.__new__(mcs, class_name, bases, {**namespace, **_NOTHING_DECLARED})
        _check_bases(class_name, bases)
        python_names = {name: namespace[name] for name in namespace if name in _PYTHONS_OWN}
        own = {name: namespace[name] for name in namespace if name not in _PYTHONS_OWN}
        _check_names(class_name, own)
        declared = {name: specs.spec_of(name, dependency) for name, dependency in own.items()}
        facts = {**_NOTHING_DECLARED, "__declared__": declared, "__defaults__": defaults, "__chosen__": {}}
        cls = type.__new__(mcs, class_name, bases, {**python_names, **facts})
        injectors = [base for base in cls.__mro__ if isinstance(base, InjectorMeta)]
        deciders = sorted(injectors, key=lambda base: base.__defaults__)
        merged = {name: spec for base in reversed(deciders) for name, spec in base.__declared__.items()}
        type.__setattr__(cls, "__deciders__", deciders)
        type.__setattr__(cls, "__dependencies__", merged)
        return cls

    def __getattr__(cls, attrname: str) -> Any:
        if attrname.startswith("__") and attrname.endswith("__"):
            raise AttributeError(f"injector {cls.__name__!r} has no attribute {attrname!r}")
        return resolver.resolve(cls, attrname)

    def __contains__(cls, attrname: object) -> bool:
        return attrname in cls.__dependencies__

    def __dir__(cls) -> list[str]:
        return sorted(({*type.__dir__(cls)} - _HIDDEN) | {*cls.__dependencies__})

    def __and__(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls: type[_Injector],  # pyright: ignore[reportGeneralTypeIssues]
        right: "type[ExtendedInjector]",
    ) -> type[_Injector]:
        if not isinstance(right, InjectorMeta):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        return combine(cls, right)

    if not TYPE_CHECKING:  # for which what follows a call that never returns could not be reached

        def __call__(cls, *args: Any, **kwargs: object) -> NoReturn:
            raise DependencyError(
                f"{cls.__name__!r} is a declaration and is never instantiated. Read a name from the class "
                f"({cls.__name__}.tensor_quant), or change one with {cls.__name__}.let(name=...)."
            )

    def __setattr__(cls, attrname: str, value: object) -> NoReturn:
        raise DependencyError(
            f"{cls.__name__}.{attrname} = ... would change an injector, which others may build on. Make a "
            f"new one: {cls.__name__}.let({attrname}=...), or inherit and override."
        )

    def __delattr__(cls, attrname: str) -> NoReturn:
        raise DependencyError(
            f"del {cls.__name__}.{attrname} would change an injector, which others may build on"
        )

    def __repr__(cls) -> str:
        recipe = cls.__made_by__
        if not recipe:
            return type.__repr__(cls)
        if recipe[0] == "let":
            return f"{recipe[1]!r}.let({', '.join(f'{name}=...' for name in recipe[2])})"
        return (
            f"({recipe[1]!r} & {recipe[2]!r})"
            if recipe[0] == "and"
            else f"{recipe[1]!r} nested in {recipe[2]!r}"
        )

    def __nested__(cls, outer: "InjectorMeta", names: Mapping[str, object]) -> "InjectorMeta":
        """This injector as read from another one, to which its `this << 1` then leads."""
        return nest(cls, outer, dict(names))


def _check_bases(class_name: str, bases: Iterable[type]) -> None:
    for base in bases:
        if not isinstance(base, InjectorMeta) and base is not Injector:
            raise DependencyError(
                f"injector {class_name!r} can only inherit from other injectors (ExtendedInjector and what "
                f"derives from it), got {base!r}. A component is declared, not inherited: "
                f"name = {base.__name__}."
            )


def _check_names(class_name: str, names: Iterable[str]) -> None:
    for name in names:
        if name == "let":
            raise DependencyError(f"'let' redefinition is not allowed: {class_name!r} keeps let(**overrides)")
        if name.startswith("__") and name.endswith("__"):
            raise DependencyError(
                f"{class_name!r} declares {name!r}: magic methods are not allowed, as an injector has no "
                "instances. Write a component class and declare it under a name."
            )


def _make(
    bases: tuple[InjectorMeta, ...],
    made_by: tuple[object, ...],
    overrides: Mapping[str, object],
    own: Mapping[str, object] = MappingProxyType({}),
) -> Any:
    """A class made by a call, with the module and qualified name of its first base."""
    first = bases[0]
    place = {"__module__": first.__module__, "__qualname__": first.__qualname__, "__doc__": first.__doc__}
    cls = InjectorMeta(first.__name__, bases, {**place, **own})
    type.__setattr__(cls, "__made_by__", made_by)
    type.__setattr__(cls, "__overrides__", overrides)
    return cls


def override(base: Any, overrides: Mapping[str, object]) -> Any:
    """`base.let(**overrides)`."""
    _check_names(base.__name__, overrides)
    injector = _make((base,), ("let", base, dict(overrides)), {**base.__overrides__, **overrides}, overrides)
    # What was read from another injector stays nested in it.
    type.__setattr__(injector, "__around__", base.__around__)
    return injector


def combine(left: InjectorMeta, right: InjectorMeta) -> Any:
    """`left & right`: the names of both, those of the left first; it has the left one's class name."""
    if left is not right and issubclass(right, left):
        raise DependencyError(
            errors.lines(
                f"{left.__name__} & {right.__name__}: the right one inherits from the left one",
                f"cure: {right.__name__} alone has the names of both",
            )
        )
    bases = (left,) if issubclass(left, right) else (left, right)
    try:
        return _make(bases, ("and", left, right), {**right.__overrides__, **left.__overrides__})
    except TypeError as error:
        raise DependencyError(
            f"{left.__name__} & {right.__name__}: their bases stand in opposite orders ({error})"
        ) from None


def nest(cls: InjectorMeta, outer: InjectorMeta, names: dict[str, object]) -> Any:
    """The nested injector `cls` with `outer` around it."""
    nested = _make((cls,), ("nested", cls, outer, names), cls.__overrides__)
    type.__setattr__(nested, "__around__", (outer, names))
    type.__setattr__(nested, "__chosen__", cls.__chosen__)
    return nested


def reduced(cls: Any) -> Any:
    """Pickle by reference; a class made by a call is remade by the same call."""
    recipe = cls.__made_by__
    if not recipe:
        owner, _, name = cls.__qualname__.rpartition(".")
        around = _found(cls.__module__, owner)
        inside = isinstance(around, InjectorMeta) and name in around
        return (_declared_in, (around, name)) if inside else cls.__qualname__
    return {"let": override, "and": combine, "nested": nest}[recipe[0]], recipe[1:]


def _found(module: str, path: str) -> Any:
    """The object at a path of plain classes and injectors in a loaded module; None if the path breaks off."""
    where: Any = sys.modules.get(module)
    for part in path.split("."):
        where = _declared_in(where, part) if isinstance(where, InjectorMeta) else getattr(where, part, None)
    return where


def _declared_in(injector: InjectorMeta, name: str) -> Any:
    """The declaration itself, unresolved: how an injector written inside another one is found again."""
    spec = injector.__dependencies__.get(name)
    return spec.declared if spec else None


copyreg.pickle(InjectorMeta, reduced)  # type: ignore[arg-type]


if TYPE_CHECKING:

    def _of_any_type() -> Any: ...


class ExtendedInjector(Injector, metaclass=InjectorMeta):
    """Base of all injectors: a flat list of named choices that assembles itself.

    Attributes are declarations. A class is built with its constructor arguments looked up by name; `@value`
    computes; `this.other` points; another injector nests; everything else is a plain value (see
    `jqinject.inject.specs` for the table). Reading an attribute resolves it: a component is a new instance at
    every access, while within one access a name is built once and all its consumers share it. Inheritance
    follows the real MRO, `A & B` combines, `let(name=...)` overrides, and nothing ever changes an injector.
    Declarations of a class with `defaults=True` count only if no other class of an injector declares the name, so
    it may come anywhere among the bases.

    >>> from jqinject.inject import ExtendedInjector, value
    >>> class Scaling:
    ...     def __init__(self, bit_width, signed=True):
    ...         self.levels = 2 ** (bit_width - signed)
    >>> class Int8(ExtendedInjector):
    ...     scaling = Scaling
    ...     bit_width = 8
    >>> class UInt4(Int8):
    ...     bit_width = 4
    ...     signed = False
    >>> Int8.scaling.levels, UInt4.scaling.levels, Int8.let(bit_width=2).scaling.levels
    (128, 16, 2)
    >>> class Defaults(ExtendedInjector, defaults=True):
    ...     bit_width, narrow_range = 8, True
    >>> class Int2(Defaults, Int8.let(bit_width=2)): ...
    >>> Int2.bit_width, Int2.narrow_range
    (2, True)
    >>> Int8.scaling is Int8.scaling, "signed" in Int8, Int8.let(bit_width=2).bit_width, Int8.bit_width
    (False, False, 2, 8)

    Differs from Brevitas: diamonds follow the MRO, resolution leaves no trace in the class, and dtypes and
    enums are never called.
    """

    if TYPE_CHECKING:
        # There are no instances, but the first argument of a `@value` function in a class body is taken for one. It is
        # a name of any type.
        def __init__(self, *, a_declaration_is_never_instantiated: Never) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
        def __len__(self) -> int: ...
        def __index__(self) -> int: ...
        def __int__(self) -> int: ...
        def __float__(self) -> float: ...

        __call__ = __getitem__ = __iter__ = __lt__ = __le__ = __gt__ = __ge__ = _of_any_type()
        __neg__ = __invert__ = __abs__ = __add__ = __radd__ = __sub__ = __rsub__ = _of_any_type()
        __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _of_any_type()
        __mod__ = __rmod__ = __pow__ = __rpow__ = __lshift__ = __rlshift__ = __rshift__ = _of_any_type()

    @classmethod
    def let(cls, /, **overrides: object) -> type[Self]:
        """A new injector with some names redeclared; this one stays as it is."""
        return override(cls, overrides)
