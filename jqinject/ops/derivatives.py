"""Functions whose derivative has no derivative, or exists only in reverse mode."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def first_order(x: Any, what: str) -> Any:
    """`x`, which must not be differentiated: for arrays that only a second derivative would differentiate.

    Args:
        x: any array, or a pytree of arrays.
        what: the error's text, with its cure.

    Raises:
        TypeError: it is differentiated.

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
    """Explain the error of forward mode (`jax.jvp`, `jax.jacfwd`, `jax.linearize`) in a function with a reverse rule.

    Args:
        what: the differentiated function, in words.

    Raises:
        TypeError: instead of JAX's own error, which does not name the function.

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
    """As `backward_only`, for an error that was caught.

    Args:
        error: JAX's error; one of forward mode becomes an error that names `what`, others are left alone.
        what: the differentiated function, in words.
    """
    if "forward-mode" in str(error):
        raise TypeError(
            f"forward-mode differentiation (jax.jvp, jacfwd, hessian) is not defined for {what}: its derivative "
            "is defined on the way back only, by reverse mode (jax.grad, jax.vjp, jacrev, nnx.grad, "
            "jqinject.value_and_grad).\n  cure: reverse mode; or contract the dequantized floats, which have both: "
            "contraction='float'"
        ) from error
