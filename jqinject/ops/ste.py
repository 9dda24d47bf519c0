"""Functions whose backward pass differs from their forward pass.

A *straight-through* function changes values (it rounds, clamps or takes a sign) and passes the gradient on as
if it had not. All of them are `jax.custom_jvp` functions, so they work in forward and reverse mode and under
`jax.jit`, `jax.vmap` and `jax.checkpoint`, and they leave only elementwise operations for the compiler to fuse.
Other functions here have no second derivative, or a derivative in reverse mode alone, and say so in an error.
"""

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jqinject.ops.sharding import is_split

Elementwise = Callable[[ArrayLike], jax.Array]
R = TypeVar("R")
Primals = tuple[Any, ...]
#: Arguments of a derivative rule: arrays, or pytrees of them; tangents may be `SymbolicZero`s.
Tangents = tuple[Any, ...]


def custom_jvp(*static: int) -> Callable[[Callable[..., R]], jax.custom_jvp[R]]:
    """`jax.custom_jvp` as a decorator, with the places of the arguments that are not differentiated.

    Example:
        >>> @custom_jvp(1)
        ... def plus(x, step):
        ...     return x + step
        >>> _ = plus.defjvp(lambda step, primals, tangents: (plus(*primals, step), 2 * tangents[0]))
        >>> float(jax.grad(plus)(1.0, 0.5))
        2.0
    """
    return partial(jax.custom_jvp, nondiff_argnums=static)


def straight_through(function: Callable[[jax.Array], jax.Array]) -> Elementwise:
    """Give an elementwise function the gradient of the identity.

    `y = function(x)`, `dy/dx = 1`.

    Args:
        function: an elementwise function of one array that keeps shape and dtype.

    Returns:
        A function with the values of `function` and the gradient of the identity; `inspect.unwrap` gives `function`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> to_even = straight_through(lambda x: 2 * jnp.round(x / 2))
        >>> float(to_even(jnp.float32(2.7))), float(jax.grad(to_even)(jnp.float32(2.7)))
        (2.0, 1.0)
    """

    forward = jax.custom_jvp(function)

    @forward.defjvp
    def _(primals: Primals, tangents: Tangents) -> tuple[jax.Array, Any]:
        return forward(*primals), tangents[0]

    @wraps(function)
    def rounded(x: ArrayLike) -> jax.Array:  # a function, so that it pickles by its name
        return forward(jnp.asarray(x))

    return rounded


#: The nearest integer, ties to the even one; without the gradient of `round_ste`.
nearest = partial(jax.lax.round, rounding_method=jax.lax.RoundingMethod.TO_NEAREST_EVEN)


@straight_through
def round_ste(x: ArrayLike) -> jax.Array:
    """Round to the nearest integer, ties to the even one; gradient 1.

    Args:
        x: a float array of any shape.

    Returns:
        The rounded array, same shape and dtype.

    Example:
        >>> round_ste(jnp.array([0.5, 1.5, -2.5, 2.6]))
        Array([ 0.,  2., -2.,  3.], dtype=float32)
    """
    return nearest(x)


@straight_through
def ceil_ste(x: ArrayLike) -> jax.Array:
    """Round up; gradient 1.

    Example:
        >>> ceil_ste(jnp.array([0.2, -0.2, 3.0]))
        Array([ 1., -0.,  3.], dtype=float32)
    """
    return jax.lax.ceil(x)


@straight_through
def floor_ste(x: ArrayLike) -> jax.Array:
    """Round down; gradient 1.

    Example:
        >>> floor_ste(jnp.array([0.2, -0.2, 3.0]))
        Array([ 0., -1.,  3.], dtype=float32)
    """
    return jax.lax.floor(x)


@straight_through
def round_to_zero_ste(x: jax.Array) -> jax.Array:
    """Drop the fraction; gradient 1.

    Example:
        >>> round_to_zero_ste(jnp.array([1.7, -1.7]))
        Array([ 1., -1.], dtype=float32)
    """
    return jax.lax.select(x < 0, jax.lax.ceil(x), jax.lax.floor(x))


@straight_through
def dpu_round_ste(x: jax.Array) -> jax.Array:
    """Round like AMD's DPU: ties of negative numbers go up, other ties to the even integer; gradient 1.

    Example:
        >>> dpu_round_ste(jnp.array([-1.5, -0.5, 0.5, 1.5]))
        Array([-1., -0.,  0.,  2.], dtype=float32)
    """
    tie_below_zero = (x < 0) & (x - jax.lax.floor(x) == 0.5)
    return jax.lax.select(tie_below_zero, jax.lax.ceil(x), nearest(x))


@straight_through
def round_half_to_zero_ste(x: jax.Array) -> jax.Array:
    """Round to the nearest integer, ties to the one nearer to zero; gradient 1.

    Example:
        >>> round_half_to_zero_ste(jnp.array([-1.5, -0.6, 0.5, 2.5, 2.6]))
        Array([-1., -1.,  0.,  2.,  3.], dtype=float32)
    """
    return jnp.sign(x) * jax.lax.ceil(jnp.abs(x) - 0.5)


@straight_through
def binary_sign_ste(x: jax.Array) -> jax.Array:
    """Sign with two values, `sign(0) = +1`; gradient 1.

    Differs from Brevitas: the sign of nan is nan (there: -1).

    Example:
        >>> binary_sign_ste(jnp.array([2.1, -0.3, 0.0]))
        Array([ 1., -1.,  1.], dtype=float32)
    """
    return jnp.where(x >= 0, jnp.ones_like(x), jnp.where(x < 0, -jnp.ones_like(x), x))


@straight_through
def ternary_sign_ste(x: ArrayLike) -> jax.Array:
    """Sign with three values, `sign(0) = 0`; gradient 1.

    Example:
        >>> ternary_sign_ste(jnp.array([2.1, -0.3, 0.0]))
        Array([ 1., -1.,  0.], dtype=float32)
    """
    return jnp.sign(x)


@jax.custom_jvp
def abs_binary_sign_grad(x: ArrayLike) -> jax.Array:
    """Absolute value whose gradient at 0 is +1 (that of `jnp.abs` is 0, which would freeze a scale that
    reaches 0).

    Example:
        >>> jax.grad(abs_binary_sign_grad)(0.0)
        Array(1., dtype=float32, weak_type=True)
    """
    return jnp.abs(x)


@abs_binary_sign_grad.defjvp
def _(primals: Primals, tangents: Tangents) -> tuple[jax.Array, jax.Array]:
    (x,), (t,) = primals, tangents
    return abs_binary_sign_grad(x), jax.lax.select(x >= 0, t, -t)


@jax.custom_jvp
def with_gradient_of(source: jax.Array, value: jax.Array) -> jax.Array:
    """The number `value`, bit for bit, with the gradient of `source`.

    Used where a parameter is filled during the forward pass: the result is the number just written, and the
    gradient goes to the parameter.

    Args:
        source: the array that receives the gradient.
        value: the array whose numbers are returned; same shape and dtype as `source`; gets no gradient.

    Returns:
        `value`.

    Example:
        >>> jax.value_and_grad(lambda p: 3 * with_gradient_of(p, jnp.float32(7)))(jnp.float32(1))
        (Array(21., dtype=float32), Array(3., dtype=float32))
    """
    return value


@with_gradient_of.defjvp
def _(primals: Primals, tangents: Tangents) -> tuple[jax.Array, Any]:
    return with_gradient_of(*primals), tangents[0]


@jax.custom_jvp
def with_gradient_where(x: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """The number `value`, with the gradient 1 of `x` where `mask` is True, else 0.

    Args:
        x: the array that receives the gradient.
        value: the array whose numbers are returned; same shape and dtype as `x`; gets no gradient.
        mask: bool, of that shape.

    Example:
        >>> f = lambda x: with_gradient_where(x, jnp.round(x), jnp.abs(x) < 1).sum()
        >>> jax.value_and_grad(f)(jnp.array([0.6, 1.6]))
        (Array(3., dtype=float32), Array([1., 0.], dtype=float32))
    """
    return value


@with_gradient_where.defjvp
def _(primals: Primals, tangents: Tangents) -> tuple[jax.Array, jax.Array]:
    y, mask, tangent = with_gradient_where(*primals), primals[2], tangents[0]
    if mask.ndim == 0 or is_split(mask):
        return y, jnp.where(mask, tangent, 0)
    # So a backward pass keeps a bit of each number.
    return y, jax.checkpoint(_where_bits)(jnp.packbits(mask, axis=-1), tangent)


def _where_bits(bits: jax.Array, tangent: jax.Array) -> jax.Array:
    mask = jnp.unpackbits(bits, axis=-1, count=tangent.shape[-1])
    return jnp.where(mask.astype(jnp.bool_), tangent, 0)


def stochastic_round_ste(
    x: ArrayLike, key: jax.Array, shared_axes: tuple[int, ...] = (), random_bits: int = 32
) -> jax.Array:
    """Round up with a probability equal to the fraction, else down: the expectation is `x`; gradient 1.

    Args:
        x: a float array.
        key: a JAX random key, used up by this call.
        shared_axes: axes along which all numbers are rounded by the same random number.
        random_bits: of each random number: 32, or 16 or 8, which are drawn in less time. A fraction is one of
            `2^random_bits`, so that the expectation is off by at most `2^-(random_bits + 1)`.

    Returns:
        The rounded array, same shape and dtype. nan stays nan.

    Example:
        >>> y = stochastic_round_ste(jnp.full((10_000,), 0.3), jax.random.key(0))
        >>> sorted(set(y.tolist())), abs(float(y.mean()) - 0.3) < 0.02
        ([0.0, 1.0], True)
    """
    x = jnp.asarray(x)
    shared = {axis % x.ndim for axis in shared_axes}
    shape = tuple(1 if axis in shared else size for axis, size in enumerate(x.shape))
    if random_bits == 32:
        drawn = jax.random.uniform(key, shape, x.dtype)
    else:
        drawn = coarse_uniform(key, shape, random_bits, x.dtype)
    low = jnp.floor(x)
    return with_gradient_of(x, jnp.where(drawn < x - low, low + 1, low))


def coarse_uniform(
    key: jax.Array, shape: tuple[int, ...], random_bits: int, dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """One of `2^random_bits` numbers equally far apart, in (0, 1) and symmetric about one half.

    Args:
        key: a JAX random key, used up by this call.
        shape: of the result.
        random_bits: of each number: 16 or 8.
        dtype: of the result.

    Source: AQT's `'custom-1'` noise, which has 16 bits.

    Example:
        >>> drawn = coarse_uniform(jax.random.key(0), (8, 4), 16)
        >>> drawn.shape, bool((drawn > 0).all() and (drawn < 1).all())
        ((8, 4), True)
    """
    # Several numbers of every 32 bits: drawing fewer at a time costs more than drawing 32. Along the axes that they are
    # for, so that they are drawn where the shards of a tensor lie.
    size, each = math.prod(shape), 32 // random_bits
    fits = bool(shape) and shape[-1] % each == 0
    words = (*shape[:-1], shape[-1] // each) if fits else (-(-size // each),)
    drawn = jax.random.bits(key, words, jnp.uint32)
    drawn = jax.lax.bitcast_convert_type(drawn, jnp.dtype(f"uint{random_bits}"))
    drawn = drawn if fits else drawn.reshape(-1)[:size]
    return ((drawn.reshape(shape).astype(jnp.float32) + 0.5) * 2.0**-random_bits).astype(dtype)


@custom_jvp(1)
def first_order(x: jax.Array, what: str) -> Any:
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
def _refuse(what: str, primals: Primals, tangents: Tangents) -> Any:
    raise TypeError(what)


@contextmanager
def backward_only(what: str) -> Generator[None]:
    """Explain the error of forward mode (`jax.jvp`, `jax.jacfwd`, `jax.linearize`) in a function with a reverse rule.

    Args:
        what: the differentiated function, as text.

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
        what: the differentiated function, as text.
    """
    if "forward-mode" in str(error):
        raise TypeError(
            f"forward-mode differentiation (jax.jvp, jacfwd, hessian) is not defined for {what}: its derivative "
            "is defined on the way back only, by reverse mode (jax.grad, jax.vjp, jacrev, nnx.grad, "
            "jqinject.value_and_grad).\n  cure: reverse mode; or contract the dequantized floats, which have both: "
            "contraction='float'"
        ) from error
