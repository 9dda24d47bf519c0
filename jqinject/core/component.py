"""Components: values compared by their parts, or modules when one of the parts holds state.

If none of a component's parts is or holds a Variable, an array or an NNX module, the component is a *value*: frozen,
compared and hashed by its parts, and static in every module that holds it. NNX then does not walk it at each call of a
compiled function, and identical layers share one trace. Otherwise the same class makes an `nnx.Module`, a graph node.
Both are instances of the class.

Write a component as fields, each an argument of the constructor and an attribute (see `component`).

Setting one attribute of an NNX module checks it and registers it, which takes about 25 microseconds; a layer with three
quantizers sets forty. NNX checks and registers all attributes when `__init__` returns, so during construction they can
be set directly.
"""

import copyreg
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any, NoReturn, TypeVar, cast, dataclass_transform

import jax
from flax import nnx

from jqinject.core import check, flax_internals

_Class = TypeVar("_Class", bound=type)
_Method = TypeVar("_Method", bound=Callable[..., Any])


_SEALED = "_parts"  # a value's parts, by which it is compared; its presence makes it frozen
_HASH = "_hash"


class HiddenMethod:
    """A method that Flax's tools do not see.

    `nnx.tabulate` and `nnx.capture` replace the public functions of the classes of a model's modules. What they replace
    has to take and return arrays, outside of custom derivatives, which is not so between the parts of a quantizer.

    Args:
        method: the function.
    """

    def __init__(self, method: FunctionType) -> None:
        vars(self).update(vars(method), __doc__=method.__doc__, __wrapped__=method)
        self._method = method

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]:
        """Bind the method; of a class, return what can be called with an instance."""
        return functools.partial(self._method) if instance is None else MethodType(self._method, instance)


def hidden_method(method: _Method) -> _Method:
    """Hide one method, as a decorator; type checkers see the method."""
    return cast(_Method, HiddenMethod(cast(FunctionType, method)))


def hidden_methods(members: Iterable[tuple[str, object]]) -> dict[str, HiddenMethod]:
    """Return the functions of a class that Flax's tools would replace, hidden from them.

    Args:
        members: names and attributes of the class. `nnx.view_info` reads `set_view`, which stays as it is.
    """
    return {
        name: HiddenMethod(member)
        for name, member in members
        if isinstance(member, FunctionType) and (name == "__call__" or not name.startswith("_"))
        if name != "set_view"
    }


def set_view(self: Any, use_running_average: bool | None = None) -> None:
    """Switch between training and evaluation, for `nnx.view`.

    Args:
      use_running_average: evaluation mode: change no state; None keeps what is set.
    """  # indented as `nnx.view_info` expects it
    if use_running_average is not None:
        self.use_running_average = use_running_average


_MODES = ("deterministic", "in_step", "use_running_average")


@flax_internals.initialized_by_metaclass
class ComponentMeta(type(nnx.Module)):
    """Checks components under construction, and decides whether each is a value or an NNX module."""

    def __call__(cls: Any, *args: Any, **kwargs: object) -> Any:
        """Construct an NNX module if a part is state, else a value."""
        construct_module: Any = type(nnx.Module).__call__
        if issubclass(cls, nnx.Pytree):
            plain = vars(cls).get("_plain")
            return construct_module(cls, *args, **kwargs) if plain is None else plain(*args, **kwargs)
        instance = object.__new__(cls)
        cls._construct(instance, *args, **kwargs)
        if any(map(_holds_state, vars(instance).values())):
            return construct_module(vars(cls).get("_node") or node_class(cls), vars(instance))
        instance._seal()
        return instance

    def _construct(cls, self: object, *args: object, **kwargs: object) -> None:
        """Initialize an instance; NNX calls it for modules."""
        self.__init__(*args, **kwargs)
        attributes = vars(self)
        for name, part in tuple(attributes.items()) if dataclasses.is_dataclass(cls) else ():
            default = getattr(cls, name, dataclasses.MISSING)
            same = part is default or (
                type(part) is type(default) and not nnx.is_data(part) and part == default
            )
            if same and name not in _MODES:
                del attributes[name]

    def __init__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, object], **kwargs: object
    ) -> None:
        super().__init__(name, bases, namespace, **kwargs)
        if not issubclass(cls, nnx.Pytree):
            jax.tree_util.register_static(cls)


@dataclass_transform(field_specifiers=(dataclasses.field, dataclasses.Field))
def component(cls: _Class) -> _Class:
    """Name each argument of a component once, as a field: the dataclass of a `Component` or an `InnerModule`.

    A field is an argument of the constructor and an attribute; `dataclasses.field(init=False)` is only an attribute,
    `dataclasses.InitVar` only an argument. Fields are checked by their annotations (see `jqinject.core.check`; what is
    named `..._impl` must be a component), then `__post_init__` makes Variables. An attribute equal to the class's own
    stays the class's: NNX handles each attribute of a module at every call of a compiled function. (Modes, which
    `train` and `eval` switch, stay the instance's.)

    Args:
        cls: the class.

    Returns:
        The same class. Facts about it have no annotation, so that they are not fields.

    Example:
        >>> @component
        ... class Power(Component):
        ...     base: float
        ...     exponent: int = 2
        ...     is_learned = False
        >>> Power(3.0), Power(3.0, exponent=3), Power(3.0).exponent
        (Power(base=3.0), Power(base=3.0, exponent=3), 2)
        >>> Power("3")
        Traceback (most recent call last):
        TypeError: Power: base must be a number, got '3' of type str.
    """
    # Frozen dataclasses assign as `object` does: nothing is checked or registered for each attribute.
    _checked(cls, eq=False, repr=False)
    del cls.__setattr__, cls.__delattr__  # type: ignore[attr-defined]
    return cls


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, dataclasses.Field))
def frozen_value(cls: _Class) -> _Class:
    """Make a frozen dataclass whose arguments are checked by their annotations: see `component`."""
    return _checked(cls)


def _checked(cls: Any, **options: bool) -> Any:
    after = getattr(cls, "__post_init__", None)
    if after is None or "checks" not in vars(after):

        def __post_init__(self: Any, *arguments: Any) -> None:
            check.fields(self, **type(self)._checks)
            if after is not None:
                after(self, *arguments)

        __post_init__.checks = True  # type: ignore[attr-defined]
        cls.__post_init__ = __post_init__
    dataclasses.dataclass(frozen=True, **options)(cls)
    cls._checks = check.of_fields(cls)
    return cls


class InnerModule(nnx.Module, metaclass=ComponentMeta):
    """Base of the modules that quantizers and proxies consist of: Flax's tools list them within their layer."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, method in hidden_methods(tuple(vars(cls).items())).items():
            setattr(cls, name, method)


class Component(metaclass=ComponentMeta):
    """Base of the components that may or may not have state.

    Write `__init__` and `__call__` as for an `nnx.Module`. An instance without state is frozen after construction: make
    another instead of changing it. One with state is an ordinary `nnx.Module`.

    Example:
        >>> class Scaled(Component):
        ...     def __init__(self, factor):
        ...         self.factor = factor
        >>> Scaled(2.0) == Scaled(2.0), isinstance(Scaled(2.0), nnx.Module)
        (True, False)
        >>> learned = Scaled(nnx.Param(jax.numpy.ones(())))
        >>> isinstance(learned, Scaled), isinstance(learned, nnx.Module)
        (True, True)
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the result; subclasses define this.

        Raises:
            TypeError: the class does not define it.
        """
        raise TypeError(f"{type(self).__name__} has no __call__.\n  cure: define __call__")

    def _seal(self) -> None:
        names = sorted(vars(self))
        parts = [*map(vars(self).get, names)]
        vars(self)[_SEALED] = (type(self), *zip(names, map(type, parts), parts, strict=True))

    def __setattr__(self, name: str, value: object) -> None:
        if _SEALED in vars(self):
            self._refuse(f"{name} = {value!r}")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if _SEALED in vars(self):
            self._refuse(f"del {name}")
        super().__delattr__(name)

    def _refuse(self, change: str) -> NoReturn:
        raise AttributeError(
            f"{type(self).__name__} holds no Variables, so it is a value shared by identical layers: it "
            f"cannot be changed, got {change}.\n  cure: make another one, {type(self).__name__}(...), and assemble "
            "the quantizer with it"
        )

    def __eq__(self, value: object) -> bool:
        if self is value:
            return True
        if type(self) is not type(value):
            return NotImplemented
        return bool(vars(self)[_SEALED] == vars(value)[_SEALED])

    def __hash__(self) -> int:
        attributes = vars(self)
        if _HASH not in attributes:
            attributes[_HASH] = hash(attributes[_SEALED])
        return attributes[_HASH]

    def __deepcopy__(self, memo: dict[int, object]) -> "Component":
        return self

    def __getstate__(self) -> dict[str, Any]:
        return dict(parts_of(self))  # string hashes differ between processes

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._seal()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={part!r}' for name, part in parts_of(self))})"

    def train(self, **attributes: object) -> None:
        """Training mode: no effect on a value."""

    def eval(self, **attributes: object) -> None:
        """Evaluation mode: no effect on a value."""


_OF_MODULES = (
    *("__setattr__", "__delattr__", "__deepcopy__", "__getstate__", "__setstate__", "__repr__"),
    *("train", "eval"),
)


def node_class(cls: type[Component]) -> type[Component]:
    """The class of a component's instances that are NNX modules.

    Args:
        cls: the component's class.

    Returns:
        A cached subclass of it and of `nnx.Module`.
    """
    cached = vars(cls).get("_node")
    if cached is not None:
        return cached

    def __init__(self: object, attributes: dict[str, object]) -> None:
        for name, part in attributes.items():
            if isinstance(part, dataclasses.Field):  # nnx.data(...), nnx.static(...)
                setattr(self, name, part)
            else:
                vars(self)[name] = part

    namespace: dict[str, Any] = dict(hidden_methods(inspect.getmembers(cls)))
    namespace |= {name: getattr(nnx.Module, name) for name in _OF_MODULES}
    namespace |= {"__eq__": object.__eq__, "__hash__": object.__hash__}
    namespace |= {"__init__": __init__, "_plain": cls, "__doc__": cls.__doc__}
    namespace |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    derived = type(cls)(cls.__name__, (cls, nnx.Module), namespace)
    type.__setattr__(cls, "_node", derived)
    return derived


def _reduce_class(cls: ComponentMeta) -> object:
    plain = vars(cls).get("_plain")
    return cls.__qualname__ if plain is None else (node_class, (plain,))


copyreg.pickle(ComponentMeta, _reduce_class)  # type: ignore[arg-type]


def _holds_state(part: object) -> bool:
    if part is None or isinstance(part, bool | int | float | str):
        return False
    if isinstance(part, Component):
        return isinstance(part, nnx.Pytree)
    if nnx.is_data(part) or isinstance(part, dataclasses.Field):
        return True
    return isinstance(part, list | tuple | dict) and any(
        map(nnx.is_data, jax.tree.leaves(part, is_leaf=nnx.is_data))
    )


def parts_of(component: Component) -> list[tuple[str, Any]]:
    """The attributes of a value component, by name."""
    return [(name, part) for name, part in vars(component).items() if name not in (_SEALED, _HASH)]


def components_in(root: object) -> Iterator[Any]:
    """Every NNX module and value component below a component, itself included, once each.

    Unlike `nnx.iter_modules`, it also finds values.

    Args:
        root: a component or a module; anything else has none.
    """
    visited: set[int] = set()
    ahead = [root]
    while ahead:
        node = ahead.pop()
        if isinstance(node, list | tuple | dict):
            below = list(node.values() if isinstance(node, dict) else node)
        elif isinstance(node, Component | nnx.Pytree) and id(node) not in visited:
            visited.add(id(node))
            if not isinstance(node, nnx.List | nnx.Dict):
                yield node
            hidden = (_SEALED, _HASH, flax_internals.PYTREE_ATTRIBUTES)
            below = [part for name, part in vars(node).items() if not name.startswith(hidden)]
        else:
            continue
        ahead.extend(reversed(below))
