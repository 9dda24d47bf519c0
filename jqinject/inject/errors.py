"""Texts of wiring: what is missing, who needs it, what was probably meant; and values in a few characters."""

import abc
import difflib
import enum
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import numpy as np

from jqinject.inject import specs
from jqinject.inject.dependencies_library import DependencyError, This

_CAPITALIZED = re.compile("[A-Z]+(?![a-z])|[A-Z][a-z0-9]*")  # the words of a class's name
_SLIP = 0.87  # by difflib's ratio: one letter of eight, or two of them swapped


class MissingNameError(DependencyError, AttributeError):
    """The name read from an injector is not declared there.

    It is an `AttributeError` too, so that `getattr(Q, name, default)` and tools that look for optional
    attributes work. A name missing deeper, while a declared one is built, is a plain `DependencyError`.
    """


def nearest(name: str, candidates: Iterable[str], limit: int = 3) -> list[str]:
    """The known names that look most like `name`, best first; case does not count.

    Names of classes that have all of its words, in any order, come first.

    >>> nearest("bit_widht", ["bit_width", "scaling_impl"])
    ['bit_width']
    >>> nearest("Int8ActDynamicPerRow", ["Int8ActPerRow", "Int8DynamicActPerRowFloat"])
    ['Int8DynamicActPerRowFloat', 'Int8ActPerRow']
    """
    by_folded: dict[str, str] = {}
    for candidate in sorted(candidates):
        by_folded.setdefault(candidate.lower(), candidate)
    folded_name = name.lower()
    close = difflib.get_close_matches(folded_name, by_folded, n=limit, cutoff=0.6)
    ratios = [difflib.SequenceMatcher(None, candidate, folded_name).ratio() for candidate in close]
    close = [candidate for candidate, ratio in zip(close, ratios, strict=True) if ratio > ratios[0] - 0.12]
    # A missing or extra underscore is the commonest slip, and the ratio penalizes short names most.
    bare = name.lower().replace("_", "")
    same = [folded for folded in by_folded if folded.replace("_", "") == bare and folded not in close]
    ordered = (
        *_with_the_same_words(name, by_folded.values()),
        *(by_folded[folded] for folded in (*same, *close)),
    )
    return list(dict.fromkeys(ordered))[:limit]


def _with_the_same_words(name: str, candidates: Iterable[str]) -> list[str]:
    words = Counter(_CAPITALIZED.findall(name))
    complete = [other for other in candidates if not words - Counter(_CAPITALIZED.findall(other))]
    return sorted(complete, key=len)[:2] if words.total() > 2 else []


def misspelling_of(name: str, candidates: Iterable[str]) -> str:
    """The known name that `name` probably misspells, or an empty string.

    A known name with an extra word before or after it is a different name.

    >>> misspelling_of("bit_widht", ["bit_width"]), misspelling_of("act_bit_width", ["bit_width"])
    ('bit_width', '')
    """
    for candidate in nearest(name, candidates):
        ratio = difflib.SequenceMatcher(None, candidate, name).ratio()
        longer = name.startswith(f"{candidate}_") or name.endswith(f"_{candidate}")
        if not longer and (ratio >= _SLIP or candidate.replace("_", "") == name.replace("_", "")):
            return candidate
    return ""


def did_you_mean(name: str, candidates: Iterable[str], prefix: str = "") -> str:
    """A line of help naming the nearest known names, or an empty string if none is near.

    >>> did_you_mean("bitwidth", ["bit_width"], prefix="weight_")
    "did you mean 'weight_bit_width'?"
    """
    close = nearest(name, candidates)
    return f"did you mean {' or '.join(repr(prefix + c) for c in close)}?" if close else ""


def lines(first: str, *others: str) -> str:
    """An error text: the first line, then the other non-empty lines, indented."""
    return "\n  ".join([first, *(text for text in others if text)])


class ArrayLike(abc.ABC):
    """Any instance whose class has `__array__`, `dtype` and `shape` (numpy, jax); only the class is inspected.

    A variable that forwards attribute reads to an array inside does not count: its array can change.

    >>> import numpy as np
    >>> isinstance(np.ones(2), ArrayLike), isinstance(np.float32, ArrayLike), isinstance([1.0], ArrayLike)
    (True, False, False)
    """

    dtype: Any
    shape: tuple[int, ...]

    @classmethod
    def __subclasshook__(cls, subclass: type) -> bool:
        names = {name for base in subclass.__mro__ for name in base.__dict__}
        return {"__array__", "dtype", "shape"} <= names


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
    if isinstance(value, ArrayLike):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, _PLAIN):
        return repr(cast(object, value))
    if isinstance(value, This):
        return specs.link_text(value)
    if isinstance(value, Mapping):
        pairs = list(cast(Mapping[object, object], value).items())[:8]
        return "{" + ", ".join(f"{_brief(k)}: {_brief(v)}" for k, v in pairs) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return _container(cast(Collection[object], value))
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else f"<{type(value).__name__}>"


def _container(value: Collection[object]) -> str:
    inside = ", ".join(_brief(item) for item in list(value)[:16])
    if isinstance(value, tuple):
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return f"[{inside}]" if isinstance(value, list) else f"{{{inside}}}"
