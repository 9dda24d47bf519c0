"""Values in a few characters, for trees and reprs: an array is its dtype and shape, an object its class."""

import enum
from collections.abc import Collection, Mapping

import numpy as np

from jqinject.inject import arrays, dependencies_library, links

_PLAIN = (type(None), bool, int, float, complex, str, bytes, slice, range, type(Ellipsis))
_LIMIT = 60


def brief(value: object) -> str:
    """A short text for any value; never the contents of an array, never the repr of a layer.

    >>> import numpy as np
    >>> brief(np.ones((64, 32), np.float32)), brief((1, "a")), brief(np.dtype("int8")), brief(dict)
    ('float32[64,32]', "(1, 'a')", 'int8', 'dict')
    """
    text = _brief(value)
    return text if len(text) <= _LIMIT else text[: _LIMIT - 3] + "..."


def _brief(value: object) -> str:
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, arrays.ArrayLike):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, dependencies_library.This):
        return links.show(value)
    if isinstance(value, (list, tuple, set, frozenset, Mapping)):
        return _container(value)
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else f"<{type(value).__name__}>"


def _container(value: Collection[object]) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_brief(k)}: {_brief(v)}" for k, v in list(value.items())[:8]) + "}"
    inside = ", ".join(_brief(item) for item in list(value)[:16])
    if isinstance(value, tuple):
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return f"[{inside}]" if isinstance(value, list) else f"{{{inside}}}"
