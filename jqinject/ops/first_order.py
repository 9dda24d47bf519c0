"""Functions whose derivative has no derivative."""

from functools import partial
from typing import Any

import jax


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def first_order(x: jax.Array, what: str) -> jax.Array:
    """`x`, which must not be differentiated: for what only a second derivative would differentiate.

    Args:
        x: any array.
        what: the text of the error, and its cure.

    Raises:
        TypeError: when it is differentiated.

    Example:
        >>> try:
        ...     jax.grad(lambda x: first_order(x, "no second derivative"))(1.0)
        ... except TypeError as error:
        ...     print(error)
        no second derivative
    """
    return x


@first_order.defjvp
def _refuse(what: str, primals: Any, tangents: Any) -> Any:
    raise TypeError(what)
