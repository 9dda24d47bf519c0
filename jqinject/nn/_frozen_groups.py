"""How the weights of a layer are stored that have a scale for each group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.quant_tensor import Groups

PER_AXIS = ("out_sharding", "sharding_names", "sharding")


@dataclass(frozen=True)
class ScaleForms:
    """What a quantizer promises of its scales and zero points, so that those of groups can be stored in a byte.

    Attributes:
        power_of_two: every scale is a power of two.
        whole_zero_point: every zero point is one of the integers.
    """

    power_of_two: bool = False
    whole_zero_point: bool = False

    def of_scale(self, scale: jax.Array, groups: Groups | None) -> jax.Array:
        """The scales as they are stored: powers of two of groups as `float8_e8m0fnu`."""
        return scale.astype(jnp.float8_e8m0fnu) if groups is not None and self.power_of_two else scale

    def of_zero_point(self, zero_point: jax.Array, dtype: Any, groups: Groups | None) -> jax.Array:
        """The zero points as they are stored: whole ones of groups as bytes, where the integers are bytes at most."""
        if groups is None or not self.whole_zero_point or jnp.iinfo(dtype).bits > 8:
            return zero_point
        signed = jnp.issubdtype(dtype, jnp.signedinteger)
        return zero_point.astype(jnp.int8 if signed else jnp.uint8)


def wide_axes(axes: tuple[int, ...], groups: Groups, ndim: int) -> tuple[int, ...]:
    """Axes of a weight as axes of the weight in groups, both of the axis that is cut.

    Example:
        >>> wide_axes((0, 1), Groups(size=32, dim=-2, length=64), 2)
        (0, 1, 2)
    """
    cut = groups.dim % ndim
    return tuple(wide for axis in axes for wide in wide_axis(axis % ndim, cut))


def wide_axis(axis: int, cut: int) -> tuple[int, ...]:
    """Where an axis is when another, `cut`, has become two."""
    return (axis, axis + 1) if axis == cut else (axis + (axis > cut),)


def wide_metadata(metadata: Mapping[str, Any], groups: Groups, ndim: int) -> dict[str, Any]:
    """A weight's metadata for the weight in groups: what shards the axis shards its groups."""

    def widened(found: Any) -> Any:
        if not isinstance(found, tuple) or len(found) < ndim:
            return found
        place = len(found) + groups.dim + 1
        return (*found[:place], None, *found[place:])

    return {name: widened(found) if name in PER_AXIS else found for name, found in metadata.items()}
