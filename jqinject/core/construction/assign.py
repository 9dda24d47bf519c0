"""Giving an NNX module its attributes at once, while it is constructed.

Setting one attribute of an NNX module checks it and registers it, which takes about 25 microseconds; a layer with three
quantizers sets forty. NNX checks and registers whatever it finds when `__init__` returns, so during construction the
attributes can be put in place directly.
"""

from __future__ import annotations

from typing import Any

from flax import nnx

from jqinject.core.construction.component import Component


def assign(module: nnx.Module | Component, **attributes: Any) -> None:
    """Set attributes of a module whose `__init__` is running.

    Args:
        module: the module; not for one that is constructed already, whose attributes NNX has registered.
        attributes: what to set. Those whose name ends in `_impl` are components, which are called.

    Raises:
        TypeError: a component is nothing that can be called.
    """
    for name, given in attributes.items():
        if given is not None and name.endswith("_impl") and not callable(given):
            raise TypeError(
                f"{type(module).__name__}: {name} must be a component, got {given!r} of type {type(given).__name__}.\n"
                f"  cure: declare its class, as in {name} = MyComponent, and its arguments as names of their own"
            )
    vars(module).update(attributes)


def set_given(module: nnx.Module | Component, **attributes: Any) -> None:
    """Set, as `assign`, the attributes that are given (not None) and differ from the default that the class holds.

    Args:
        module: the module, whose class holds a default of each attribute.
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
