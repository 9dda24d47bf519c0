"""Clamping components: `tensor_clamp_impl(x, min_val, max_val)`, and clamps with fixed bounds."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax.typing import ArrayLike

from jqinject.core.construction import check
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.ops import clamp


@dataclass(frozen=True)
class Identity:
    """Returns its input.

    Example:
        >>> Identity()(3)
        3
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return `x`."""
        return x


@dataclass(frozen=True)
class TensorClamp:
    """Clamp; where it clamps, the gradient goes to the bound. See `jqinject.ops.tensor_clamp`.

    Example:
        >>> import jax.numpy as jnp
        >>> TensorClamp()(jnp.array([-3.0, 0.5, 3.0]), -2.0, 2.0)
        Array([-2. ,  0.5,  2. ], dtype=float32)
    """

    is_nearest = True
    passes_gradient = False

    def __call__(self, x: ArrayLike, min_val: ArrayLike, max_val: ArrayLike) -> jax.Array:
        """Clamp `x` to `min_val` .. `max_val`."""
        return clamp.tensor_clamp(x, min_val, max_val)


@dataclass(frozen=True)
class ClampBeforeRounding:
    """Clamps as `TensorClamp`; in an `IntQuant`, numbers beyond a bound before rounding count as clamped already.

    The values are the same, the gradient of a number within half a step beyond a bound is not: it goes to the bound.
    By itself, and after a rounding that has state, it is `TensorClamp`.

    Source: LSQ, `round(clamp(x / s))`.
    """

    is_nearest = True
    passes_gradient = False
    clamps_first = True

    def __call__(self, x: ArrayLike, min_val: ArrayLike, max_val: ArrayLike) -> jax.Array:
        """Clamp `x` to `min_val` .. `max_val`."""
        return clamp.tensor_clamp(x, min_val, max_val)


@dataclass(frozen=True)
class TensorClampSte:
    """Clamp; the gradient goes straight through to `x`. See `jqinject.ops.tensor_clamp_ste`."""

    is_nearest = True
    passes_gradient = True

    def __call__(self, x: ArrayLike, min_val: ArrayLike, max_val: ArrayLike) -> jax.Array:
        """Clamp `x` to `min_val` .. `max_val`."""
        return clamp.tensor_clamp_ste(x, min_val, max_val)


@checked_arguments
@dataclass(frozen=True)
class ScalarClampMinSte:
    """`max(x, min_val)` with gradient 1.

    Args:
        min_val: lower bound.
    """

    min_val: float

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Clamp `x` from below."""
        return clamp.scalar_clamp_min_ste(x, self.min_val)


@checked_arguments
@dataclass(frozen=True)
class ScalarSignedClampMinSte:
    """Keep `x` at least `min_val` away from zero, with gradient 1. See `jqinject.ops.signed_clamp_min_ste`.

    Args:
        min_val: lower bound of the magnitude; its sign is ignored.
    """

    min_val: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "min_val", abs(self.min_val))

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Clamp the magnitude of `x` from below."""
        return clamp.signed_clamp_min_ste(x, self.min_val)


@checked_arguments
@dataclass(frozen=True)
class ScalarClamp:
    """Clamp to fixed bounds; no gradient where it clamps.

    Args:
        min_val: lower bound.
        max_val: upper bound.

    Example:
        >>> import jax.numpy as jnp
        >>> ScalarClamp(-2.0, 2.0)(jnp.array([-3.0, 0.5, 3.0]))
        Array([-2. ,  0.5,  2. ], dtype=float32)
    """

    min_val: float
    max_val: float

    def __post_init__(self) -> None:
        check.ordered(self.min_val, self.max_val, "ScalarClamp", ("min_val", "max_val"))

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Clamp `x`."""
        return clamp.tensor_clamp(x, self.min_val, self.max_val)


@checked_arguments
@dataclass(frozen=True)
class ScalarClampSte:
    """Clamp to fixed bounds with gradient 1.

    Args:
        min_val: lower bound.
        max_val: upper bound.
    """

    min_val: float
    max_val: float

    def __post_init__(self) -> None:
        check.ordered(self.min_val, self.max_val, "ScalarClampSte", ("min_val", "max_val"))

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Clamp `x`."""
        return clamp.scalar_clamp_ste(x, self.min_val, self.max_val)


@checked_arguments
@dataclass(frozen=True)
class ClampMin:
    """`max(x, min_val)`; no gradient where it clamps.

    Args:
        min_val: lower bound.
    """

    min_val: float

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Clamp `x` from below."""
        return clamp.tensor_clamp(x, self.min_val, float("inf"))
