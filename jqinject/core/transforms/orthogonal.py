"""A transform by a matrix of its own, whose inverse is its transpose."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jqinject.core.state.variables import QuantStat
from jqinject.core.transforms.transform import Transform

ORTHOGONAL = 1e-4
"""How far `R^T R` may be from the identity."""


class Orthogonal(Transform):
    """`x R` for an orthogonal matrix `R`: a learned rotation, for example.

    Args:
        channels: the size of the matrix.

    Attributes:
        matrix: float32, `(channels, channels)`; the identity until `put`.

    Example:
        >>> turn = Orthogonal(2)
        >>> turn.put(jnp.array([[0.0, 1.0], [-1.0, 0.0]]))
        >>> y = turn(jnp.array([[1.0, 2.0]]))
        >>> y.tolist(), turn.inverse(y).tolist()
        ([[-2.0, 1.0]], [[1.0, 2.0]])
    """

    def __init__(self, channels: int) -> None:
        self.channels = channels
        self.matrix = QuantStat(jnp.eye(channels, dtype=jnp.float32))

    def put(self, matrix: jax.Array) -> None:
        """Set the matrix.

        Args:
            matrix: orthogonal, `(channels, channels)`.

        Raises:
            ValueError: another shape, or `R^T R` is not the identity.
        """
        held = self.matrix.get_value()
        matrix = jnp.asarray(matrix, jnp.float32)
        if matrix.shape != held.shape:
            raise ValueError(f"Orthogonal: expected a matrix of shape {held.shape}, got {matrix.shape}")
        product = jnp.matmul(matrix.T, matrix, precision="highest")
        off = float(jnp.abs(product - jnp.eye(held.shape[-1])).max())
        if not off <= ORTHOGONAL:
            raise ValueError(
                f"Orthogonal: R^T R is {off:.2g} away from the identity, and at most {ORTHOGONAL} is rounding.\n"
                "  cure: jnp.linalg.qr(R)[0]"
            )
        self.matrix.set_value(matrix)

    def __call__(self, x: jax.Array) -> jax.Array:
        """See `Transform`."""
        return self._times(x, self.matrix.get_value())

    def inverse(self, x: jax.Array) -> jax.Array:
        """See `Transform`."""
        return self._times(x, self.matrix.get_value().T)

    def _times(self, x: jax.Array, matrix: jax.Array) -> jax.Array:
        made = jnp.matmul(x.astype(jnp.float32), matrix, precision=jax.lax.Precision.HIGHEST)
        return made.astype(x.dtype)
