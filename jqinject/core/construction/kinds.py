"""Checks of arguments by annotation, and by the range implied by their name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer


def flag(value: Any, where: str, name: str) -> bool:
    """A boolean.

    Raises:
        TypeError: when it is something else, 0, 1 and None included.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(
            f"{where}: {name} must be True or False, got {value!r} of type {type(value).__name__}. "
            f"Write {name} = True or {name} = False."
        )
    return bool(value)


def integer(value: Any, where: str, name: str) -> int:
    """An integer as a Python int.

    Raises:
        TypeError: when it is something else, a boolean included.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{where}: {name} must be an int, got {value!r} of type {type(value).__name__}.")
    return int(value)


def bound(value: Any, where: str, name: str) -> None:
    """A number, which may be infinite.

    Raises:
        TypeError: when it is something else, a boolean included.
        ValueError: when it is nan.
    """
    array = isinstance(value, (np.ndarray, jax.Array)) and value.shape == ()
    if isinstance(value, (bool, np.bool_)) or not (array or isinstance(value, (int, float, np.number))):
        raise TypeError(f"{where}: {name} must be a number, got {value!r} of type {type(value).__name__}.")
    if not isinstance(value, Tracer) and math.isnan(float(value)):
        raise ValueError(f"{where}: {name} must be a number, got {value!r}.")


def number(value: Any, where: str, name: str) -> None:
    """A finite number.

    Raises:
        TypeError: when it is something else, a boolean included.
        ValueError: when it is nan or inf.
    """
    bound(value, where, name)
    if not isinstance(value, Tracer) and math.isinf(float(value)):
        raise ValueError(f"{where}: {name} must be a finite number, got {value!r}.")


def integers(value: Any, where: str, name: str) -> None:
    """A sequence of integers.

    Raises:
        TypeError: when it is something else.
    """
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
        raise TypeError(f"{where}: {name} must be a tuple of ints such as () or (1, 64), got {value!r}.")
    for item in value:
        integer(item, where, f"each of {name}")


def numbers(value: Any, where: str, name: str) -> None:
    """A sequence of finite numbers, at least one.

    Raises:
        TypeError: when it is something else.
        ValueError: when it is empty, or one is nan or inf.
    """
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
        raise TypeError(f"{where}: {name} must be a tuple of numbers, got {value!r}.")
    if not len(value):
        raise ValueError(f"{where}: {name} must have at least one number, got {value!r}.")
    for item in value:
        number(item, where, f"each of {name}")


def component(value: Any, where: str, name: str) -> None:
    """A component: a callable object.

    Raises:
        TypeError: when it is a class, or cannot be called.
    """
    if isinstance(value, type):
        raise TypeError(
            f"{where}: {name} must be a component, got the class {value.__name__}. Construct it: "
            f"{name}={value.__name__}(...)."
        )
    if not callable(value):
        raise TypeError(
            f"{where}: {name} must be a component, got {value!r} of type {type(value).__name__}.\n"
            f"  cure: declare its class, as in {name} = MyComponent, and its arguments as names of their own"
        )


def above_zero(value: Any, where: str, name: str) -> None:
    """A positive number, or several.

    Raises:
        ValueError: when one is not.
    """
    if not all(item > 0 for item in (value if isinstance(value, Sequence | np.ndarray) else (value,))):
        raise ValueError(f"{where}: {name} must be above 0, got {value!r}.")


def within(value: Any, where: str, name: str, *, ends: tuple[float, float]) -> None:
    """A number between two bounds, inclusive.

    Raises:
        ValueError: when it is outside.
    """
    low, high = ends
    if not low <= value <= high:
        expected = (
            f"in {low} .. {high}"
            if math.isfinite(low) and math.isfinite(high)
            else (f"at least {low}" if math.isfinite(low) else f"at most {high}")
        )
        raise ValueError(f"{where}: {name} must be {expected}, got {value!r}.")
