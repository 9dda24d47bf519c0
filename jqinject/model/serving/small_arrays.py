"""Small arrays packed into a few flat ones: every argument of a compiled function costs time in each call."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

SMALL = 4096
"""Bytes up to which an array is packed: a program copies so few in less time than another argument takes."""


@dataclass(frozen=True)
class PackedPlaces:
    """Where arrays lie.

    Attributes:
        flat: for each flat array, the numbers of the arrays in it, in order.
        whole: the numbers of the arrays that are not packed.
        shapes: of all arrays.
    """

    flat: tuple[tuple[int, ...], ...]
    whole: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, arrays: Sequence[jax.Array]) -> PackedPlaces:
        """Those of some arrays: small ones lie together by dtype and device."""
        alike = defaultdict(list)
        for number, x in enumerate(arrays):
            if _is_small(x):
                alike[x.dtype, x.sharding, x.committed].append(number)
        flat = tuple(tuple(numbers) for numbers in alike.values() if len(numbers) > 1)
        packed = {number for numbers in flat for number in numbers}
        whole = tuple(number for number in range(len(arrays)) if number not in packed)
        return cls(flat, whole, tuple(x.shape for x in arrays))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedArrays:
    """Arrays, the small ones copied into flat arrays. A pytree whose structure says where each of them lies.

    Attributes:
        flat: the flat arrays.
        whole: the other arrays as they are.
        places: where the arrays lie.

    Example:
        >>> packed = PackedArrays.of((jnp.ones(2), jnp.arange(2.0)))
        >>> packed.flat, packed.arrays()[1]
        ((Array([1., 1., 0., 1.], dtype=float32),), Array([0., 1.], dtype=float32))
    """

    flat: tuple[Any, ...]
    whole: tuple[Any, ...]
    places: PackedPlaces = field(metadata={"static": True})

    @classmethod
    def of(cls, arrays: Sequence[jax.Array]) -> PackedArrays:
        """Pack some arrays.

        Args:
            arrays: concrete ones.
        """
        places = PackedPlaces.of(arrays)
        flat = tuple(_joined([arrays[at] for at in numbers]) for numbers in places.flat)
        return cls(flat, tuple(arrays[at] for at in places.whole), places)

    def arrays(self) -> tuple[Any, ...]:
        """The arrays, in their order."""
        places, found = self.places, {}
        found.update(zip(places.whole, self.whole, strict=True))
        for flat, numbers in zip(self.flat, places.flat, strict=True):
            start = 0
            for at in numbers:
                end = start + math.prod(places.shapes[at])
                found[at] = jax.lax.slice(flat, (start,), (end,)).reshape(places.shapes[at])
                start = end
        return tuple(found[at] for at in range(len(places.shapes)))


@jax.jit
def _joined(arrays: list[jax.Array]) -> jax.Array:
    return jnp.concatenate([x.reshape(-1) for x in arrays])


def _is_small(x: jax.Array) -> bool:
    """Whether an array is packed: a small one on one device, of plain numbers that know their dtype."""
    on_one = isinstance(x.sharding, jax.sharding.SingleDeviceSharding)
    plain = not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return on_one and plain and not jax.typeof(x).weak_type and x.nbytes <= SMALL
