"""Questions to number formats, until every format answers them itself."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.ops.codebook import Codebook
from jqinject.ops.float_format import LearnedFloatFormat
from jqinject.ops.float_grid import from_float_codes, to_float_codes, to_float_grid
from jqinject.ops.power import max_int, min_int


@dataclass(frozen=True)
class IntGrid:
    """The integers of a bit width."""

    bit_width: Any
    signed: bool = True
    narrow_range: bool = False


def _flatten(grid: IntGrid) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    learned = is_learned(grid)
    children = (grid.bit_width,) if learned else ()
    return children, (None if learned else grid.bit_width, grid.signed, grid.narrow_range)


def _unflatten(aux: tuple[Any, ...], children: Iterable[Any]) -> IntGrid:
    return IntGrid(*(*children, *aux[1:]) if aux[0] is None else aux)


jax.tree_util.register_pytree_node(IntGrid, _flatten, _unflatten)


def is_integer(grid: Any) -> bool:
    """Whether its numbers are integers."""
    return isinstance(grid, IntGrid)


def is_table(grid: Any) -> bool:
    """Whether it is a table."""
    return isinstance(grid, Codebook)


def is_learned(grid: Any) -> bool:
    """Whether a width is an array."""
    if isinstance(grid, IntGrid):
        return not isinstance(grid.bit_width, int)
    return isinstance(grid, LearnedFloatFormat)


def bounds(grid: Any, narrow_range: bool = False) -> tuple[Any, Any]:
    """The least and the greatest number."""
    if isinstance(grid, IntGrid):
        given = grid.signed, narrow_range, grid.bit_width
        return min_int(*given), max_int(*given)
    if isinstance(grid, Codebook):
        return grid.values[0], grid.values[-1]
    return (-grid.max_value if grid.signed else 0.0), grid.max_value


def signed(grid: Any) -> bool:
    """Whether there are numbers below 0."""
    return grid.values[0] < 0 if isinstance(grid, Codebook) else grid.signed


def rounded(grid: Any, steps: jax.Array) -> jax.Array:
    """Numbers of the grid, float32, clamped to its bounds."""
    if isinstance(grid, Codebook):
        return grid.decode(grid.encode(steps))
    return jnp.clip(to_float_grid(steps, grid.mantissa_bit_width, grid.bias, jnp.round), *bounds(grid))


def codes(grid: Any, steps: jax.Array) -> jax.Array:
    """Codes or indices of numbers."""
    return grid.encode(steps) if isinstance(grid, Codebook) else to_float_codes(steps, grid)


def decode(grid: Any, payload: jax.Array) -> jax.Array:
    """The numbers of a payload or codes, float32."""
    if jnp.issubdtype(payload.dtype, jnp.integer):
        return from_float_codes(payload, grid)
    return payload.astype(jnp.float32)
