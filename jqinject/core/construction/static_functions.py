"""Functions as components: frozen, compared by value."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jqinject.ops import exp2, log2
from jqinject.ops.stats import magnitude


@dataclass(frozen=True)
class Abs:
    """`|x|`, with the derivative 0 at 0.

    Example:
        >>> Abs()(jnp.array([-1.0, 2.0]))
        Array([1., 2.], dtype=float32)
    """

    def __call__(self, x: ArrayLike) -> jax.Array:
        """The magnitude."""
        return magnitude(jnp.asarray(x))


@dataclass(frozen=True)
class PowerOfTwo:
    """`2**x`, float32, exact where it can be.

    Example:
        >>> float(PowerOfTwo()(5.0))
        32.0
    """

    def __call__(self, x: ArrayLike) -> jax.Array:
        """The power."""
        return exp2(x)


@dataclass(frozen=True)
class LogTwo:
    """`log2(x)`, float32, exact where it can be.

    Example:
        >>> float(LogTwo()(8.0))
        3.0
    """

    def __call__(self, x: ArrayLike) -> jax.Array:
        """The logarithm."""
        return log2(x)
