"""The order in which columns are rounded, and inputs that calibration never saw."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def by_importance(hessian: jax.Array, wanted: bool) -> jax.Array:
    """Places of the columns in the order in which they are rounded: largest `hessian[j, j]` first, or as they are."""
    diagonal = jnp.diagonal(hessian)
    return jnp.argsort(-diagonal, stable=True) if wanted else jnp.arange(diagonal.size)


def without_dead_inputs(hessian: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A Hessian with 1 on its diagonal for inputs that were always 0, and weights of 0 for these."""
    dead = jnp.diagonal(hessian) == 0
    return hessian + jnp.diag(dead.astype(hessian.dtype)), jnp.where(dead[None], 0.0, weights)


def inverse_factor(hessian: jax.Array) -> jax.Array:
    """The upper triangular `U` with `U^T U = hessian^-1`; nan if the Hessian is not positive definite."""
    lower = jnp.linalg.cholesky(hessian)
    eye = jnp.eye(hessian.shape[0], dtype=hessian.dtype)
    half = jax.scipy.linalg.solve_triangular(lower, eye, lower=True)
    return jnp.linalg.cholesky(half.T @ half, upper=True)
