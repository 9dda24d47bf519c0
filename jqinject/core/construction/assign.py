"""Setting an NNX module's attributes at once during construction.

Setting one attribute of an NNX module checks it and registers it, which takes about 25 microseconds; a layer with three
quantizers sets forty. NNX checks and registers all attributes when `__init__` returns, so during construction they can
be set directly.
"""

from __future__ import annotations

from typing import Any

from flax import nnx

from jqinject.core.construction.component import Component


def assign(module: nnx.Module | Component, **attributes: Any) -> None:
    """Set attributes of a module whose `__init__` is running.

    Args:
        module: the module; not one already constructed, whose attributes NNX has registered.
        attributes: what to set. Names that end in `_impl` are components, so callable.

    Raises:
        TypeError: a component is not callable.
    """
    for name, given in attributes.items():
        if given is not None and name.endswith("_impl") and not callable(given):
            raise TypeError(
                f"{type(module).__name__}: {name} must be a component, got {given!r} of type {type(given).__name__}.\n"
                f"  cure: declare its class, as in {name} = MyComponent, and its arguments as names of their own"
            )
    vars(module).update(attributes)


def set_given(module: nnx.Module | Component, **attributes: Any) -> None:
    """Like `assign`, but only for attributes that are not None and differ from the class's default.

    Args:
        module: the module, whose class has a default for each attribute.
        attributes: what to set.
    """
    defaults = type(module)
    assign(
        module,
        **{
            name: attribute
            for name, attribute in attributes.items()
            if attribute is not None and attribute != getattr(defaults, name)
        },
    )
