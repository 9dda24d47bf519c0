"""Updates of 16-bit parameters that are smaller than the distance between neighbours."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jqinject.ops.packing import to_bfloat16_stochastically


class RoundingState(NamedTuple):
    """The state of `round_stochastically`.

    Attributes:
        updates: how many so far, int32; together with the seed it makes the random numbers.
    """

    updates: jax.Array


def round_stochastically(seed: int = 0) -> optax.GradientTransformation:
    """Rounds updated bfloat16 parameters by chance, right on average; others are left to `optax.apply_updates`.

    The last of a chain. Rounded to nearest, an update below half the distance between two bfloat16 numbers is lost, and
    a model with a small learning rate does not train. The random numbers depend on the seed and the number of updates.

    Args:
        seed: of the random numbers.

    Raises:
        ValueError: (from `update`) without params.

    Example:
        >>> tx = optax.chain(optax.sgd(1e-4), round_stochastically())
        >>> params = {"w": jnp.ones(10_000, jnp.bfloat16)}
        >>> updates, _ = tx.update({"w": jnp.ones(10_000)}, tx.init(params), params)
        >>> sorted(set(updates["w"].tolist())), abs(float(updates["w"].mean()) + 1e-4) < 1e-4
        ([-0.00390625, 0.0], True)
    """

    def init(params: object) -> RoundingState:
        return RoundingState(jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(
                "round_stochastically needs the parameters.\n  cure: tx.update(grads, state, params)"
            )
        key = jax.random.fold_in(jax.random.key(seed), state.updates)
        leaves, treedef = jax.tree.flatten(updates)
        keys = [jax.random.fold_in(key, place) for place in range(len(leaves))]
        rounded = jax.tree.map(_rounded, updates, params, jax.tree.unflatten(treedef, keys))
        return rounded, RoundingState(jnp.asarray(optax.safe_increment(state.updates)))

    return optax.GradientTransformation(init, update)


def _rounded(update: jax.Array, param: jax.Array, key: jax.Array) -> jax.Array:
    if param.dtype != jnp.bfloat16:
        return update
    wide = param.astype(jnp.float32)
    # Their sum is the rounded number again: both are bfloat16, so the sum that is nearest in float32 rounds to it.
    return to_bfloat16_stochastically(wide + update.astype(jnp.float32), key).astype(jnp.float32) - wide
