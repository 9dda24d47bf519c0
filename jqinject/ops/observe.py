"""Report statistics from inside of a backward pass or a mapped function.

JAX has one sound channel out of a backward pass: cotangents. A gradient quantizer therefore takes a *slot* (zeros) as
an argument and returns its statistic as the slot's cotangent. Cotangents of one value add. A slot adds by maximum
instead: its dtype may be an extended one whose sum is a maximum, and two consecutive uses are forked with their own
rule, so that both ways give the maximum.
"""

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jqinject.ops import sharding, ste

#: What the last axis of a slot reports: the largest magnitude, and the scale that was used; 0 if there was none.
SLOT_SIZE = 2


@jax.custom_batching.custom_vmap
def gathered(statistic: jax.Array, holder: jax.Array) -> jax.Array:
    """`statistic`; under `vmap` the maximum over the mapped axis, unless `holder` is mapped too.

    So a batch that is mapped over has one statistic, and a stack of layers one per layer.

    Args:
        statistic: a statistic that adds by maximum.
        holder: the array that will hold it.

    Example:
        >>> jax.vmap(lambda x, h: gathered(x, h), in_axes=(0, None), out_axes=None)(jnp.arange(4.0), 0.0)
        Array(3., dtype=float32)
    """
    return statistic


# The rules below call the functions again on the batched arrays, for outer maps.


@gathered.def_vmap
def _gathered_vmap(axis_size: int, in_batched: list[bool], statistic: jax.Array, holder: jax.Array) -> Any:
    seen_mapped, holder_mapped = in_batched
    if holder_mapped:
        for_all = statistic if seen_mapped else jnp.broadcast_to(statistic, (axis_size, *statistic.shape))
        return gathered(for_all, holder), True
    return gathered(jnp.max(statistic, axis=0) if seen_mapped else statistic, holder), False


@jax.custom_batching.custom_vmap
def mapped_with(x: jax.Array, *holders: jax.Array) -> jax.Array:
    """`x`; under `vmap` mapped if one of `holders` is, so that every mapped index has its own cotangent.

    Args:
        x: an array; not differentiated, see `mapped_beside`.
        holders: others.
    """
    return x


@mapped_with.def_vmap
def _mapped_with_rule(axis_size: int, in_batched: list[bool], x: jax.Array, *holders: jax.Array) -> Any:
    x_mapped, *holders_mapped = in_batched
    if x_mapped or not any(holders_mapped):
        return mapped_with(x, *holders), x_mapped
    return mapped_with(jnp.broadcast_to(x, (axis_size, *x.shape)), *holders), True


@jax.custom_jvp
def mapped_beside(x: jax.Array, holder: jax.Array) -> jax.Array:
    """`mapped_with` for an array with a gradient."""
    return mapped_with(x, holder)


@mapped_beside.defjvp
def _(primals: ste.Primals, tangents: ste.Tangents) -> tuple[jax.Array, Any]:
    return mapped_beside(*primals), tangents[0]


def over_axis(statistic: jax.Array, axis_name: Hashable, holder: jax.Array) -> jax.Array:
    """The maximum over named axes: those given, and those on which `statistic` varies and `holder` does not.

    Args:
        statistic: a statistic.
        axis_name: an axis of `shard_map` or `vmap`, a tuple of axes, or None. Within `shard_map` it is only needed
            under `check_vma=False`, where JAX does not say what varies.
        holder: the array that will hold the statistic.
    """
    statistic = sharding.extreme_over(jax.lax.pmax, statistic, sharding.names_of(axis_name))
    extra = sharding.varying_axes(statistic) - sharding.varying_axes(holder)
    return sharding.extreme_over(jax.lax.pmax, statistic, tuple(sorted(extra, key=str)))


def summed_like(cotangent: jax.Array, primal: jax.Array) -> jax.Array:
    """The cotangent of an array that is replicated over devices where the cotangent varies: the sum over them."""
    extra = tuple(sorted(sharding.varying_axes(cotangent) - sharding.varying_axes(primal), key=str))
    return jax.lax.psum(cotangent, extra) if extra else cotangent


@jax.custom_vjp
def fork(slot: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A slot for this use, and one for later uses: the slot's cotangent is the larger of theirs."""
    return slot, slot


def _fork_fwd(slot: Any) -> tuple[tuple[jax.Array, jax.Array], None]:
    return (slot.value, slot.value), None


def _fork_bwd(_: None, cotangents: tuple[Any, Any]) -> tuple[Any]:
    used = [cotangent for cotangent in cotangents if not isinstance(cotangent, SymbolicZero)]
    if len(used) < 2:  # there are no later uses
        return (used[0] if used else None,)
    mine, rest = (jax.lax.convert_element_type(c, jnp.float32) for c in used)
    return (jax.lax.convert_element_type(jnp.maximum(mine, rest), used[0].dtype),)


fork.defvjp(_fork_fwd, _fork_bwd, symbolic_zeros=True)
