"""How the weights of a layer are stored that have a scale for each group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jqinject.ops.cut import Cut
from jqinject.quant_tensor import Groups, GroupwiseQuantTensor, IntQuantTensor, on_integers

PER_AXIS = ("out_sharding", "sharding_names", "sharding")


@dataclass(frozen=True)
class ScaleForms:
    """What a quantizer promises of its scales and zero points, so that those of groups can be stored in a byte.

    Attributes:
        scale_dtype: an 8-bit float dtype that holds every scale, up to one factor for all unless it is
            `float8_e8m0fnu`; None if absent.
        whole_zero_point: every zero point is one of the integers.
    """

    scale_dtype: np.dtype | None = None
    whole_zero_point: bool = False

    def of_scale(self, scale: jax.Array, groups: Groups | None) -> tuple[jax.Array, jax.Array | None]:
        """The scales as stored, those of groups in a byte; and their common factor."""
        if groups is None or self.scale_dtype is None:
            return scale, None
        if self.scale_dtype == np.dtype(jnp.float8_e8m0fnu):
            return scale.astype(jnp.float8_e8m0fnu), None
        return in_two_levels(scale, self.scale_dtype)

    def of_zero_point(self, zero_point: jax.Array, dtype: DTypeLike, groups: Groups | None) -> jax.Array:
        """The zero points as stored: integer ones of groups as bytes, if the integers have at most 8 bits."""
        if groups is None or not self.whole_zero_point or jnp.iinfo(dtype).bits > 8:
            return zero_point
        signed = jnp.issubdtype(dtype, jnp.signedinteger)
        return zero_point.astype(jnp.int8 if signed else jnp.uint8)


def in_two_levels(scale: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
    """Scales that are minifloats times one float32 number, taken apart.

    The factor is searched among the neighbours of the quotient for the one whose products are the scales.

    Args:
        scale: float32, above 0.
        dtype: of the minifloats; the largest scale is its largest number.

    Returns:
        The minifloats, and the factor.

    Example:
        >>> codes, factor = in_two_levels(jnp.array([896.0, 3.0]), np.dtype(jnp.float8_e4m3fn))
        >>> codes, float(factor)
        (Array([448, 1.5], dtype=float8_e4m3fn), 2.0)
    """
    if scale.size == 0:
        return scale.astype(dtype), jnp.ones((), jnp.float32)
    guess = jnp.max(scale) / float(jnp.finfo(dtype).max)
    bits = jax.lax.bitcast_convert_type(guess, jnp.int32) + jnp.arange(-4, 5, dtype=jnp.int32)
    factors = jax.lax.bitcast_convert_type(bits, jnp.float32)

    def codes(factor: jax.Array) -> jax.Array:
        return (scale / factor).astype(dtype)

    def wrong(factor: jax.Array) -> jax.Array:
        return jnp.sum(codes(factor).astype(jnp.float32) * factor != scale)

    best = factors[
        jnp.argmin(jax.lax.map(wrong, factors))
    ]  # one by one: they need no memory beside each other
    return codes(best), best


def without_groups(weight: GroupwiseQuantTensor, cut: Cut) -> Any:
    """A weight in groups as a tensor of its shape, each of whose elements has the scale of its group.

    Args:
        weight: the weight.
        cut: how its groups lie.
    """
    if weight.as_it_lies is not None:
        return weight.as_it_lies
    grouped, value = weight.grouped, weight.value
    scale = cut.spread(grouped.scale, value)
    if not on_integers(grouped):
        return grouped.set(value=value, scale=scale)
    payload = None if grouped.payload is None else weight.groups.join(grouped.payload)
    zero = cut.spread(grouped.zero_point, value)
    fields = (grouped.bit_width, grouped.signed, grouped.training)
    return IntQuantTensor(value, scale, zero, *fields, payload)


def wide_metadata(metadata: Mapping[str, object], groups: Groups, ndim: int) -> dict[str, object]:
    """A weight's metadata for the weight in groups: what shards the axis shards its groups."""

    def widened(entry: Any) -> Any:
        if not isinstance(entry, tuple) or len(entry) < ndim:
            return entry
        place = len(entry) + groups.dim + 1
        return (*entry[:place], None, *entry[place:])

    return {name: widened(entry) if name in PER_AXIS else entry for name, entry in metadata.items()}
