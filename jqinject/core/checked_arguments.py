"""Checks constructor arguments against their annotations, and against the range implied by their names.

| annotation         | what is refused                                                        |
|--------------------|------------------------------------------------------------------------|
| `bool`             | everything but True and False: also 0, 1, None and "False"             |
| `int`              | floats, booleans                                                       |
| `float`            | nan, inf (but as a bound of a clamp), booleans, texts                  |
| `tuple[int, ...]`  | anything but a sequence of ints                                        |
| a component's kind | what cannot be called, and classes, which would have to be constructed |

`... | None` allows None. Arguments annotated `Any` are checked by the constructor itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, TypeVar

from jqinject.core import check
from jqinject.core import check as kinds

Check = Callable[[Any, str, str], object]
_Component = TypeVar("_Component")

KINDS: Mapping[str, Check] = {
    "bool": kinds.flag,
    "int": kinds.integer,
    "float": kinds.number,
    "tuple[int, ...]": kinds.integers,
    "Sequence[int]": kinds.integers,
    "tuple[float, ...]": kinds.numbers,
    **dict.fromkeys(
        (
            "Stat",
            "View",
            "Restrict",
            "Rounding",
            "Clamp",
            "GradientMask",
            "Scaling",
            "BitWidth",
            "ZeroPoint",
            "IntScalingImpl",
        ),
        kinds.component,
    ),
}
OPEN_ENDED = frozenset({"min_val", "max_val"})  # clamp bounds, which may be infinite
OWN_CHECK = frozenset({"bit_width", "min_bit_width", "group_size"})
RANGES: Mapping[str, tuple[float, float]] = {
    "quant_delay_steps": (0, check.MOST_STEPS),
    "collect_stats_steps": (-float("inf"), check.MOST_STEPS),
    "sigma": (0, float("inf")),
    "channel_axes": (0, float("inf")),
}
ABOVE_ZERO = frozenset(
    {
        "std_dev_epsilon",
        "non_zero_epsilon",
        "remove_zero_bit_width",
        "max_available_float",
        "p",
    }
)


def checked_arguments(component: type[_Component]) -> type[_Component]:
    """Check a component's constructor arguments before they are used.

    Args:
        component: the class; goes above other decorators (`@dataclass`).

    Raises:
        TypeError: (when constructed) an argument does not match its annotation.
        ValueError: (when constructed) a number is not finite or out of range.

    Example:
        >>> from dataclasses import dataclass
        >>> @checked_arguments
        ... @dataclass(frozen=True)
        ... class Twice:
        ...     signed: bool
        >>> Twice(signed=1)
        Traceback (most recent call last):
        TypeError: Twice: signed must be True or False, got 1 of type int. Write signed = True or signed = False.
    """
    construct = component.__init__
    parameters = list(inspect.signature(construct).parameters.values())[1:]
    names = tuple(parameter.name for parameter in parameters)
    checks = {p.name: check for p in parameters if (check := _check_of(p)) is not None}

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        where = type(self).__name__
        for name, given in chain(zip(names, args, strict=False), kwargs.items()):
            if name in checks:
                checks[name](given, where, name)
        construct(self, *args, **kwargs)

    type.__setattr__(component, "__init__", __init__)
    return component


def _check_of(parameter: inspect.Parameter) -> Check | None:
    name, annotation = parameter.name, str(parameter.annotation)
    kind, optional = annotation.removesuffix(" | None"), annotation.endswith(" | None")
    if name in OWN_CHECK or kind not in KINDS:
        return None
    if kind == "float" and name in OPEN_ENDED:
        return _optional(kinds.bound, optional)
    if name in ABOVE_ZERO:
        return _optional(_both(KINDS[kind], kinds.above_zero), optional)
    if name in RANGES:
        return _optional(kinds.between(*RANGES[name], KINDS[kind]), optional)
    return _optional(KINDS[kind], optional)


def _both(first: Check, second: Check) -> Check:
    def check(given: Any, where: str, name: str) -> None:
        first(given, where, name)
        second(given, where, name)

    return check


def _optional(check: Check, optional: bool) -> Check:
    if not optional:
        return check
    return lambda given, where, name: None if given is None else check(given, where, name)
