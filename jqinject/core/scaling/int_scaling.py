"""How many integer steps a scale spans: `int_scaling_impl(bit_width)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jqinject.core.construction import check
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.ops.int_range import max_int, min_int


def _signedness(given: bool | None, own: bool | None, where: str) -> bool:
    signed = own if given is None else given
    if signed is None:
        raise ValueError(
            f"{where}: whether the integers are signed is not known. Build it with signed=True or False."
        )
    return signed


@checked_arguments
@dataclass(frozen=True)
class IntScaling:
    """Steps from zero to the end of the range: `-min_int` if signed, `max_int` if not.

    | bits | signed | signed, narrow | unsigned | unsigned, narrow |
    |------|--------|----------------|----------|------------------|
    | 8    | 128    | 127            | 255      | 254              |
    | 4    | 8      | 7              | 15       | 14               |

    Args:
        narrow_range: whether one value of the range is left out.
        signed: whether the integers have a sign; may be passed in the call instead.

    Example:
        >>> IntScaling(narrow_range=True, signed=True)(8)
        127
    """

    is_constant = True
    narrow_range: bool
    signed: bool | None = None

    def __call__(self, bit_width: int | jax.Array, signed: bool | None = None) -> int | jax.Array:
        """The number of steps: a Python int for an int bit width, else a float32 array.

        Raises:
            ValueError: when signedness is unknown, or the range has no steps (1 bit, narrow).
        """
        if _signedness(signed, self.signed, "IntScaling"):
            steps = -min_int(True, self.narrow_range, bit_width)
        else:
            steps = max_int(False, self.narrow_range, bit_width)
        if isinstance(steps, int) and steps == 0:
            raise ValueError(
                f"IntScaling: {bit_width} bit with narrow_range=True leaves 0 as the only integer. "
                "Use narrow_range=False, "
                "more bits, or BinaryQuant for the two values -scale and +scale."
            )
        return steps


@checked_arguments
@dataclass(frozen=True)
class PowerOfTwoIntScaling:
    """Steps as a power of two: `max_int + 1` of the full range, 128 for signed 8 bits and 256 for unsigned.

    Args:
        signed: whether the integers have a sign; may be passed in the call instead.

    Example:
        >>> PowerOfTwoIntScaling(signed=True)(8)
        128
    """

    is_constant = True
    signed: bool | None = None

    def __call__(self, bit_width: int | jax.Array, signed: bool | None = None) -> int | jax.Array:
        """The number of steps: a Python int for an int bit width, else a float32 array.

        Raises:
            ValueError: when signedness is unknown.
        """
        return max_int(_signedness(signed, self.signed, "PowerOfTwoIntScaling"), False, bit_width) + 1


@checked_arguments
@dataclass(frozen=True)
class MaxIntScaling:
    """The largest integer: 127 of signed 8 bits, whether or not -128 is used; 1 of signed 2 bits.

    Args:
        narrow_range: whether one value of the range is left out.
        signed: whether the integers have a sign; may be passed in the call instead.

    Example:
        >>> MaxIntScaling(narrow_range=False, signed=True)(8)
        127
    """

    is_constant = True
    narrow_range: bool
    signed: bool | None = None

    def __call__(self, bit_width: int | jax.Array, signed: bool | None = None) -> int | jax.Array:
        """The largest integer: a Python int for an int bit width, else a float32 array.

        Raises:
            ValueError: when signedness is unknown, or it is 0 (1 bit).
        """
        most = max_int(_signedness(signed, self.signed, "MaxIntScaling"), self.narrow_range, bit_width)
        if isinstance(most, int) and most == 0:
            raise ValueError(
                f"MaxIntScaling: {bit_width} bit has no integer above 0. Use more bits, or BinaryQuant for the two "
                "values -scale and +scale."
            )
        return most


@checked_arguments
@dataclass(frozen=True)
class SingleArgStatelessBuffer:
    """A constant instead of a one-argument component: `int_scaling_impl` for scales that already count floats per step.

    Args:
        value: the constant.

    Example:
        >>> SingleArgStatelessBuffer(1.0)(8)
        1.0
    """

    is_constant = True
    value: float

    def __post_init__(self) -> None:
        check.positive(self.value, "SingleArgStatelessBuffer", "value")

    def __call__(self, bit_width: Any = None) -> float:
        """The constant."""
        return self.value
