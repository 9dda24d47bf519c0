"""The texts of wiring errors: what is missing, who needs it, and what was probably meant."""

import difflib
import re
from collections import Counter
from collections.abc import Iterable

from jqinject.inject.dependencies_library import DependencyError

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
