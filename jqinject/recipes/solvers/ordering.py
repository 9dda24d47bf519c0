"""The order in which columns are rounded, and inputs that calibration never saw."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jqinject.recipes.grid import ordered


def check_rounding(name: str, block_size: int, damping: float) -> None:
    """Refuse numbers that no solver can use.

    Args:
        name: the solver's.
        block_size: of columns.
        damping: a share.

    Raises:
        ValueError: a block of no columns; a damping that is negative or not finite.
    """
    if block_size < 1:
        raise ValueError(
            f"{name}: block_size must be at least 1, got {block_size!r}.\n  cure: block_size=128"
        )
    if not 0 <= damping < float("inf"):
        raise ValueError(
            f"{name}: damping must be a number of at least 0, got {damping!r}.\n  cure: damping=0.01"
        )


def positive(name: str, **numbers: float | None) -> None:
    """Refuse numbers that are given and not above 0.

    Args:
        name: the solver's.
        numbers: its choices.

    Raises:
        ValueError: one is not.
    """
    for choice, number in numbers.items():
        if number is not None and not 0 < number < float("inf"):
            raise ValueError(
                f"{name}: {choice} must be a number above 0, got {number!r}.\n  cure: leave it out"
            )


def by_importance(hessian: jax.Array, wanted: bool) -> jax.Array:
    """Places of the columns in the order in which they are rounded, `(stack, columns)`.

    Args:
        hessian: `(stack, columns, columns)`.
        wanted: whether the columns with the largest `hessian[j, j]` come first; as they are otherwise.
    """
    diagonal = diagonal_of(hessian)
    if wanted:
        return jnp.argsort(-diagonal, axis=1, stable=True)
    return jnp.broadcast_to(jnp.arange(diagonal.shape[1]), diagonal.shape)


def diagonal_of(matrices: jax.Array) -> jax.Array:
    """The diagonals of a stack of matrices, `(stack, columns)`."""
    return jnp.diagonal(matrices, axis1=-2, axis2=-1)


def on_diagonal(matrices: jax.Array, more: jax.Array) -> jax.Array:
    """Matrices with something added to each diagonal: a number for each matrix, or one for each place."""
    eye = jnp.eye(matrices.shape[-1], dtype=matrices.dtype)
    return matrices + eye * (more[:, None, None] if more.ndim == 1 else more[:, None])


def both_ordered(matrices: jax.Array, order: jax.Array) -> jax.Array:
    """Matrices with their rows and their columns in another order, `(stack, columns)`."""
    return ordered(jnp.take_along_axis(matrices, order[:, :, None], axis=1), order)


def without_dead_inputs(hessian: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A Hessian with 1 on its diagonal for inputs that were always 0, and weights of 0 for these."""
    dead = diagonal_of(hessian) == 0
    return on_diagonal(hessian, dead.astype(hessian.dtype)), jnp.where(dead[:, None], 0.0, weights)


def inverse_factor(hessian: jax.Array) -> jax.Array:
    """The upper triangular `U` with `U^T U = hessian^-1`; nan if a Hessian is not positive definite."""
    # H = R R^T with R upper triangular is the Cholesky factorization of H with its rows and columns reversed; then
    # H^-1 = (R^-1)^T R^-1. H itself is not inverted.
    reversed_factor = jnp.linalg.cholesky(hessian[..., ::-1, ::-1])
    eye = jnp.broadcast_to(jnp.eye(hessian.shape[-1], dtype=hessian.dtype), hessian.shape)
    return jax.lax.linalg.triangular_solve(reversed_factor[..., ::-1, ::-1], eye, left_side=True, lower=False)


def inverse(matrices: jax.Array) -> jax.Array:
    """The inverses of symmetric matrices; nan for those that are not positive definite."""
    lower = jnp.linalg.cholesky(matrices)
    eye = jnp.broadcast_to(jnp.eye(matrices.shape[-1], dtype=matrices.dtype), matrices.shape)
    half = jax.lax.linalg.triangular_solve(lower, eye, left_side=True, lower=True)
    return jnp.matmul(half.mT, half, precision=jax.lax.Precision.HIGHEST)
