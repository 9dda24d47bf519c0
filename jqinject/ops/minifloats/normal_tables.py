"""Tables for numbers that are normally distributed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from jqinject.ops.minifloats.nearest_code import Codebook

_DENSITY_AT_0 = 1 / math.sqrt(2 * math.pi)


def half_integers(bit_width: int) -> Codebook:
    """`2^b` numbers 1 apart, symmetric about 0: odd multiples of one half.

    Args:
        bit_width: b, 1 to 8.

    Example:
        >>> half_integers(2).values
        (-1.5, -0.5, 0.5, 1.5)
    """
    half = 2 ** (bit_width - 1)
    return Codebook(tuple(k + 0.5 for k in range(-half, half)))


def normal_table(bit_width: int, iterations: int = 20) -> Codebook:
    """`2^b` numbers for a standard normal distribution: Lloyd's iterations from an even grid on ±3.

    Args:
        bit_width: b, 1 to 8.
        iterations: how many; more approach the least squared error.

    Source: Lloyd, 1957, "Least squares quantization in PCM"; with 20 iterations the levels of QuEST's
    `GaussianTrustQuantizer`.

    Example:
        >>> [round(value, 3) for value in normal_table(2).values]
        [-1.51, -0.453, 0.453, 1.51]
    """
    count = 2**bit_width
    levels = [-3 + 6 * i / (count - 1) for i in range(count)]
    for _ in range(iterations):
        levels = [
            (_density(left) - _density(right)) / mass if (mass := _mass(left, right)) > 1e-10 else level
            for level, (left, right) in zip(levels, _cells(levels), strict=True)
        ]
    return Codebook(tuple(levels))


def widest_gap(values: Codebook | Iterable[float]) -> float:
    """Return the largest distance between neighbours of a table.

    Example:
        >>> widest_gap(half_integers(3)), widest_gap((-1, 0, 2))
        (1.0, 2.0)
    """
    return max(high - low for low, high in itertools.pairwise(Codebook.of(values).values))


def largest_of(values: Codebook | Iterable[float]) -> float:
    """Return the largest magnitude of a table."""
    return Codebook.of(values).largest


def _cells(levels: Sequence[float]) -> list[tuple[float, float]]:
    """The interval that is rounded to each level."""
    between = [(low + high) / 2 for low, high in itertools.pairwise(levels)]
    return list(zip([-math.inf, *between], [*between, math.inf], strict=True))


def _density(x: float) -> float:
    return _DENSITY_AT_0 * math.exp(-x * x / 2)


def _mass(left: float, right: float) -> float:
    return (math.erf(right / math.sqrt(2)) - math.erf(left / math.sqrt(2))) / 2
