"""How integers are contracted on each backend: one table, filled by measurement (`benchmarks/serve.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot.dimensions import Dimensions

Kernel = Callable[[jax.Array, jax.Array, Dimensions, np.dtype, Any], jax.Array]


def integer_contraction(
    lhs: jax.Array, rhs: jax.Array, dims: Dimensions, accumulator: np.dtype, out_sharding: Any = None
) -> jax.Array:
    """Products of integers summed in `accumulator`, by the kernel of the platform that the program is lowered for.

    Args:
        lhs, rhs: arrays of integer dtypes, not necessarily the same.
        dims: as for `lax.dot_general`.
        accumulator: a signed integer dtype that holds the sums.
        out_sharding: as for `lax.dot_general`.
    """

    def bound(kernel: Kernel) -> Callable[[jax.Array, jax.Array], jax.Array]:
        return lambda a, b: kernel(a, b, dims, accumulator, out_sharding)

    tables = {platform: bound(kernel) for platform, kernel in KERNELS.items()}
    return jax.lax.platform_dependent(lhs, rhs, default=bound(_as_it_is), **tables)


def _as_it_is(
    lhs: jax.Array, rhs: jax.Array, dims: Dimensions, accumulator: np.dtype, out_sharding: Any
) -> jax.Array:
    return jax.lax.dot_general(
        lhs, rhs, dims.numbers, preferred_element_type=accumulator, out_sharding=out_sharding
    )


def _on_cpu(
    lhs: jax.Array, rhs: jax.Array, dims: Dimensions, accumulator: np.dtype, out_sharding: Any
) -> jax.Array:
    # XLA has no product of two 4-bit arrays on CPUs (its verifier refuses the program).
    return _as_it_is(_at_least_a_byte(lhs), _at_least_a_byte(rhs), dims, accumulator, out_sharding)


def _at_least_a_byte(x: jax.Array) -> jax.Array:
    if jnp.iinfo(x.dtype).bits >= 8:
        return x
    return x.astype(jnp.int8 if jnp.issubdtype(x.dtype, jnp.signedinteger) else jnp.uint8)


KERNELS: dict[str, Kernel] = {"cpu": _on_cpu}
