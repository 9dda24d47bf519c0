"""Giving an NNX module its attributes at once, while it is constructed.

Setting one attribute of an NNX module checks it and registers it, which takes about 25 microseconds; a layer with three
quantizers sets forty. NNX checks and registers whatever it finds when `__init__` returns, so during construction the
attributes can be put in place directly.
"""

from __future__ import annotations

from typing import Any

from flax import nnx


def assign(module: nnx.Module, **attributes: Any) -> None:
    """Set attributes of a module whose `__init__` is running.

    Args:
        module: the module; not for one that is constructed already, whose attributes NNX has registered.
        attributes: what to set.
    """
    vars(module).update(attributes)


def set_given(module: nnx.Module, **attributes: Any) -> None:
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
