"""Sharding of what a backward contraction makes, on meshes whose axes are explicit."""

from typing import Any

import jax


def sharding_before(permutation: tuple[int, ...], like: jax.Array) -> Any:
    """The sharding of what becomes an array like `like` when it is transposed; None on meshes that leave it to XLA."""
    sharding = jax.typeof(like).sharding
    if sharding.mesh.empty or not sharding.mesh.explicit_axes:
        return None
    axes: list[Any] = [None] * like.ndim
    for axis, place in enumerate(permutation):
        axes[place] = sharding.spec[axis]
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*axes))
