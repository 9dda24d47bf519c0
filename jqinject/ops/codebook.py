"""Tables of numbers: the nearest one's index, and tables for normal distributions.

Numbers from a table: the nearest of a few values, stored as its index.

Tables for numbers that are normally distributed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.ops.sharding import taken

MOST_VALUES = 256
MOST_COMPARED = 32
"""Values of a table that each number is compared with; in larger tables the place is found by halving."""


@dataclass(frozen=True)
class Codebook:
    """A table of numbers: static, compared by value.

    Attributes:
        values: finite, in ascending order, 2 to 256 of them.

    Raises:
        ValueError: other values.

    Example:
        >>> table = Codebook((-1.0, 0.0, 0.25, 1.0))
        >>> table.bit_width, str(table), table.encode(jnp.array([0.2, -3.0]))
        (2, '2-bit table', Array([2, 0], dtype=uint8))
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(float(value) for value in self.values))
        ascending = all(low < high for low, high in zip(self.values, self.values[1:], strict=False))
        finite = all(math.isfinite(value) for value in self.values)
        if not (2 <= len(self.values) <= MOST_VALUES and ascending and finite):
            raise ValueError(
                f"a codebook has 2 to {MOST_VALUES} finite numbers in ascending order, got {self.values!r:.120}"
            )

    @classmethod
    def of(cls, values: Codebook | Iterable[float]) -> Codebook:
        """Return the table of some numbers; a table is returned as it is."""
        return values if isinstance(values, Codebook) else cls(tuple(values))

    def __str__(self) -> str:
        return f"{self.bit_width}-bit table"

    @property
    def bit_width(self) -> int:
        """Bits of one index."""
        return (len(self.values) - 1).bit_length()

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return max(abs(self.values[0]), abs(self.values[-1]))

    @property
    def table(self) -> np.ndarray:
        """The values, float32."""
        return np.asarray(self.values, np.float32)

    def encode(self, x: jax.Array, *, ties_up: bool = False) -> jax.Array:
        """The index of the nearest value, uint8; on a tie, the lower one unless `ties_up`; for nan, the last."""
        between = jnp.asarray(self._halfway(up=ties_up))
        wide = jax.lax.stop_gradient(x).astype(jnp.float32)
        method = "compare_all" if len(self.values) <= MOST_COMPARED else "scan_unrolled"
        return jnp.searchsorted(between, wide, side="right" if ties_up else "left", method=method).astype(
            jnp.uint8
        )

    def _halfway(self, up: bool) -> np.ndarray:
        """Halfway between neighbours, float32: the nearest number that is not below it, or not above it."""
        table = self.table.astype(np.float64)
        exact = (table[1:] + table[:-1]) / 2
        near = exact.astype(np.float32)
        beyond = near < exact if up else near > exact
        return np.where(beyond, np.nextafter(near, np.float32(np.inf if up else -np.inf)), near)

    def decode(self, codes: jax.Array) -> jax.Array:
        """The values that indices stand for, float32."""
        return taken(jnp.asarray(self.table), codes.astype(jnp.int32))


NF4 = Codebook(
    (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    )
)
"""NormalFloat4: quantiles of a normal distribution, with a 0 (Dettmers et al., 2023, "QLoRA", appendix E)."""

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
