"""The catalogue of ready-made quantizers, read from a file beside this one: searched without importing JAX.

The file has an entry a line. `python -m jqinject.catalogue.write_index` makes it from the quantizers themselves, and a
test compares it with them.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from jqinject.catalogue.entry import FILTERS, Entry
from jqinject.catalogue.goals import goal_named
from jqinject.inject.errors import did_you_mean

INDEX = Path(__file__).with_name("index.jsonl")


@functools.cache
def all_entries() -> tuple[Entry, ...]:
    """Every ready-made quantizer, by name.

    Example:
        >>> all_entries()[0].kind in ("weight", "act", "bias", "grad", "trunc")
        True
    """
    lines = INDEX.read_text(encoding="utf-8").splitlines()
    read = (json.loads(line) for line in lines)
    return tuple(Entry(**{**fields, "formulas": tuple(fields["formulas"])}) for fields in read)


def entry_of(name: str) -> Entry:
    """The entry of one quantizer.

    Args:
        name: its name in `jqinject.quant`.

    Raises:
        ValueError: there is none of that name; the message suggests the nearest.

    Example:
        >>> entry = entry_of("Int8WeightPerChannelFloat")
        >>> entry.kind, entry.format, entry.granularity, entry.scaling
        ('weight', 'int8', 'channel', 'statistics')
    """
    known = {entry.name: entry for entry in all_entries()}
    if name not in known:
        hint = did_you_mean(name, known)
        raise ValueError(f"there is no quantizer {name!r}{': ' + hint if hint else ''}")
    return known[name]


def find(
    *,
    text: str = "",
    kind: str = "",
    format: str = "",
    granularity: str = "",
    scaling: str = "",
    goal: str = "",
) -> tuple[Entry, ...]:
    """The ready-made quantizers that match all criteria.

    Args:
        text: part of the name, in any case.
        kind, format, granularity, scaling: the entry's value, or its first words, in any case.
        goal: what they are for, one of `jqinject.catalogue.goals.GOALS`.

    Raises:
        ValueError: no quantizer has this kind, format, granularity or scaling, or there is no such goal; the message
            lists those that exist.

    Example:
        >>> [entry.name for entry in find(kind="bias", text="16")]
        ['Int16Bias']
        >>> [entry.name for entry in find(goal="train-fp8", kind="grad")]
        ['Fp8e5m2GradPerTensorCurrent', 'Fp8e5m2GradPerTensorDelayed']
    """
    asked = dict(zip(FILTERS, (kind, format, granularity, scaling), strict=True))
    known = all_entries()
    for name, wanted in asked.items():
        choices = sorted({getattr(entry, name) for entry in known})
        if wanted and not any(_is_of(choice, wanted) for choice in choices):
            raise ValueError(f"no quantizer has the {name} {wanted!r}; there are: {', '.join(choices)}")
    fitting = goal_named(goal).quantizers if goal else None
    return tuple(
        entry
        for entry in known
        if text.lower() in entry.name.lower()
        and (fitting is None or entry.name in fitting)
        and all(_is_of(getattr(entry, name), wanted) for name, wanted in asked.items())
    )


def _is_of(found: str, wanted: str) -> bool:
    return found.lower().startswith(wanted.lower())
