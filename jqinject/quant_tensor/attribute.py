"""`attribute`: a read-only property that forwards to a stored attribute."""

from operator import attrgetter
from typing import Any


def attribute(path: str, doc: str) -> Any:
    """A read-only property that reads another attribute; its annotation says the type.

    It is read in C, without a Python frame: every call of every layer reads several.

    Args:
        path: the attribute, with dots for one of an attribute.
        doc: the docstring.

    Example:
        >>> class Tensor:
        ...     def __init__(self, scale: float) -> None:
        ...         self._scale = scale
        ...     scale: float = attribute("_scale", "Float per integer step.")
        >>> Tensor(0.5).scale, Tensor.scale.__doc__
        (0.5, 'Float per integer step.')
    """
    return property(attrgetter(path), doc=doc)
