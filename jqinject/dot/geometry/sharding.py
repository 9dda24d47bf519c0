"""Sharding of backward contractions on meshes with explicit axes."""

from typing import Any

import jax


def sharding_before(permutation: tuple[int, ...], like: jax.Array) -> Any:
    """The sharding of an array whose transposition is like `like`; None on meshes that leave it to XLA."""
    sharding = jax.typeof(like).sharding
    if sharding.mesh.empty or not sharding.mesh.explicit_axes:
        return None
    axes: list[Any] = [None] * like.ndim
    for axis, place in enumerate(permutation):
        axes[place] = sharding.spec[axis]
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*axes))
