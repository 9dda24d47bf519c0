"""Arrays that span the processes of a distributed program, read on the host.

No process holds all of such an array, and all processes must run the same programs in the same order: every process
must call these functions, and no decision may depend on what only one process knows.
"""

from __future__ import annotations

import pickle
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def on_host(x: Any) -> np.ndarray:
    """The numbers of an array, whichever processes hold them.

    Args:
        x: a concrete array. If it spans processes and is not whole in each, all of them must call.

    Example:
        >>> import jax.numpy as jnp
        >>> on_host(jnp.arange(3))
        array([0, 1, 2], dtype=int32)
    """
    return np.asarray(x) if lies_here(x) else multihost_utils.process_allgather(x, tiled=True)


def spans_processes(tree: Any) -> bool:
    """Whether some array in a pytree lies on devices of several processes."""
    leaves = jax.tree.leaves(tree)
    return any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in leaves)


def lies_here(x: Any) -> bool:
    """Whether this process holds all numbers of a concrete array."""
    return not spans_processes(x) or x.is_fully_replicated


def placed_as(x: jax.Array, model: jax.Array) -> jax.Array:
    """An array with the placement of another one; if either spans processes, all of them must call."""
    if not spans_processes((x, model)):
        return jax.device_put(x, model.sharding)
    if spans_processes(x) and spans_processes(model):
        return jax.jit(lambda x: x, out_shardings=model.sharding)(x)
    whole = on_host(x)
    return jax.make_array_from_callback(x.shape, model.sharding, lambda index: whole[index])


def from_holder(held: Any, is_holder: bool) -> Any:
    """The object of the first process that holds it, in all processes.

    Args:
        held: a picklable object; that of the other processes is not read.
        is_holder: whether this process holds it.

    Returns:
        The object; `held` if no process is a holder.
    """
    holders = multihost_utils.process_allgather(np.array(is_holder))
    if not holders.any():
        return held
    source = jax.process_index() == int(np.argmax(holders))
    packed = np.frombuffer(pickle.dumps(held) if source else b"", np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.array(packed.size, np.int32), source))
    room = packed if source else np.zeros(size, np.uint8)
    return pickle.loads(multihost_utils.broadcast_one_to_all(room, source).tobytes())
