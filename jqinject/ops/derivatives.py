"""Functions whose derivative has no derivative, or is known backward only."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def first_order(x: Any, what: str) -> Any:
    """`x`, which must not be differentiated: for what only a second derivative would differentiate.

    Args:
        x: any array, or a pytree of arrays.
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


@contextmanager
def backward_only(what: str) -> Iterator[None]:
    """Say what forward mode (`jax.jvp`, `jax.jacfwd`, `jax.linearize`) finds in here: a derivative known backward only.

    Args:
        what: what is differentiated, in words.

    Raises:
        TypeError: in the place of JAX's own, which names nothing.

    Example:
        >>> @jax.custom_vjp
        ... def f(x):
        ...     return x
        >>> f.defvjp(lambda x: (x, None), lambda _, g: (g,))
        >>> def guarded(x):
        ...     with backward_only("this contraction"):
        ...         return f(x)
        >>> jax.jvp(guarded, (1.0,), (1.0,))
        Traceback (most recent call last):
        TypeError: forward-mode differentiation (jax.jvp, jacfwd, hessian) is not defined for this contraction: ...
    """
    try:
        yield
    except TypeError as error:
        explain_forward_mode(error, what)
        raise


def explain_forward_mode(error: TypeError, what: str) -> None:
    """As `backward_only`, of an error that was caught.

    Args:
        error: what JAX raised; one of forward mode becomes an error that names `what`, another is left alone.
        what: what is differentiated, in words.
    """
    if "forward-mode" in str(error):
        raise TypeError(
            f"forward-mode differentiation (jax.jvp, jacfwd, hessian) is not defined for {what}: its derivative "
            "is defined on the way back only, by reverse mode (jax.grad, jax.vjp, jacrev, nnx.grad, "
            "jqinject.value_and_grad).\n  cure: reverse mode; or contract the dequantized floats, which have both: "
            "contraction='float'"
        ) from error
