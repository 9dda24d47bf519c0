"""Numbers from a table: the nearest of a few values, stored as its index."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.ops.devices.explicit_axes import taken

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
