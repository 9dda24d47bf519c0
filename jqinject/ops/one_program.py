"""Functions that run as one program when called eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import jax

P = ParamSpec("P")
R = TypeVar("R")


def one_program(*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: compile a function as a whole when it is called eagerly; in a trace it is inlined.

    Eager JAX compiles a program for each operation and shape, about 20 ms each: building and first calling a
    quantizer of a hundred operations takes seconds without this.

    Args:
        static: names of the arguments that are not arrays; they must be hashable. The function returns a pytree of
            arrays.

    Example:
        >>> import jax.numpy as jnp
        >>> @one_program()
        ... def above(x):
        ...     return jnp.abs(x) + 1
        >>> above(jnp.float32(-2)), str(jax.make_jaxpr(above)(1.0).eqns[0].primitive)
        (Array(3., dtype=float32), 'abs')
    """

    def compiled(function: Callable[P, R]) -> Callable[P, R]:
        return cast(Callable[P, R], jax.jit(function, inline=True, static_argnames=static))

    return compiled
