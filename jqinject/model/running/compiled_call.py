"""A compiled call of a model whose arguments are not all arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class _Frame:
    """Arguments without their arrays and modules; compared by value, so that a compiled call is found again."""

    tree: Any
    places: tuple[int, ...]
    others: tuple[Any, ...]

    def filled(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = list(self.others)
        for place, value in zip(self.places, values, strict=True):
            leaves[place] = value
        return jax.tree.unflatten(self.tree, leaves)


def compiled_call(run: Call) -> Call:
    """`run(model, args, kwargs)`, compiled: arrays and modules in the arguments are traced, everything else is static.

    A flag (`train=False`), a size or a name is a constant of the program, as in a direct call of the model: the model
    may branch on it.

    Args:
        run: the function to compile; it may change the model's state.

    Example:
        >>> import jax.numpy as jnp
        >>> double = compiled_call(lambda model, args, kwargs: args[0] * 2 if kwargs["twice"] else args[0])
        >>> double(nnx.List([]), (jnp.ones(2),), {"twice": True})
        Array([2., 2.], dtype=float32)
    """
    compiled = nnx.jit(
        lambda model, values, frame: run(model, *frame.filled(values)),
        static_argnums=2,
    )

    def call(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda x: isinstance(x, nnx.Pytree))
        kinds = (jax.Array, np.ndarray, nnx.Pytree)
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, kinds))
        others = tuple(None if i in places else leaf for i, leaf in enumerate(leaves))
        return compiled(model, [leaves[i] for i in places], _Frame(tree, places, others))

    return call
