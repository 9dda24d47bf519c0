"""What the library knows of Flax's internals, in one file: an upgrade of Flax that moves them fails in one place.

`tests/core/test_flax_internals.py` has a test for each assumption.
"""

import functools
import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype as canonicalize_dtype
from flax.nnx.nn.dtypes import promote_dtype as promote_dtype

_Class = TypeVar("_Class", bound=type)
# Prefix of the attributes in which NNX notes what the other attributes of a module are.
PYTREE_ATTRIBUTES = "_pytree__"


# Holds the code by which `nnx.to_pure_dict` reads a Variable. Nothing else tells its call from a model's own.
READERS_OF_PURE_DICTS = nnx.to_pure_dict.__code__.co_consts
# The code by which `nnx.bridge.to_linen` reads a Variable to store it among Linen's, where the Variable itself goes.
READER_OF_LINEN = nnx.bridge.variables.to_linen_var.__code__


def metadata_of(variable: nnx.Variable[object]) -> dict[str, Any]:
    """Return the metadata of a Variable without its own `__getattr__`."""
    return object.__getattribute__(variable, "_var_metadata")


def initialized_by_metaclass(metaclass: _Class) -> _Class:
    """Let NNX initialize the modules of a metaclass by its method `_construct(self, *args, **kwargs)`."""
    metaclass._pytree_meta_construct = metaclass._construct  # pyright: ignore[reportAttributeAccessIssue]
    return metaclass


def note_child(module: nnx.Module, name: str, child: object) -> None:
    """Tell NNX that an attribute with a descriptor holds data or not.

    From Flax 0.12.10 on such an attribute is the descriptor's own, and NNX would take it for static metadata. NNX
    restores the note by itself where it makes a copy.
    """
    attributes = vars(module)
    nodes = attributes.get("_pytree__nodes")
    if nodes is not None and name not in nodes:
        attributes["_pytree__nodes"] = nodes.update({name: nnx.is_data(child)})


def change_class(module: object, kind: type) -> None:
    """Change a module's class; NNX's own setter would treat `__class__` as an attribute."""
    object.__setattr__(module, "__class__", kind)


class ParameterView:
    """A layer with other parameters, on which the forward of a Flax layer is run instead of the layer.

    Args:
        layer: the layer; whatever is not in `parameters` is its own.
        parameters: attribute -> what is read instead.
    """

    def __init__(self, layer: object, parameters: Mapping[str, object]) -> None:
        self.__dict__.update(vars(layer), _layer=layer, **parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


@functools.cache
def flax_layer(layer: type) -> type[nnx.Module] | None:
    """Return the layer of Flax that a class of layers derives from; None without one."""
    parent = next(cls for cls in layer.__mro__ if cls.__module__.startswith("flax."))
    return None if parent is nnx.Module else parent


@functools.cache
def flax_parameters(layer: type) -> dict[str, inspect.Parameter]:
    """Return the parameters of a Flax layer's constructor, those that it hands to its bases included."""
    parameters: dict[str, inspect.Parameter] = {}
    for cls in layer.__mro__:
        if "__init__" in vars(cls):
            _, *own = inspect.signature(cls.__init__).parameters.values()
            parameters = {p.name: p for p in own if p.kind is not p.VAR_KEYWORD} | parameters
            if all(p.kind is not p.VAR_KEYWORD for p in own):
                break
    return parameters


def init_flax(layer: nnx.Module, arguments: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """Make the layer of Flax that a layer derives from; nothing without one.

    Args:
        layer: under construction.
        arguments: the `locals()` of `__init__`.
        further: the user's further keywords.

    Returns:
        The keywords that are not Flax's: overrides of quantizers.
    """
    parent = flax_layer(type(layer)) or nnx.Module
    of_flax, overrides = {}, dict(further)
    for name in flax_parameters(parent):
        if name in arguments:
            of_flax[name] = arguments[name]
        elif name in overrides:
            of_flax[name] = overrides.pop(name)
    parent.__init__(layer, **of_flax)
    return overrides
