"""An elementwise function as one operation of a traced program.

What a derivative multiplies (a mask, an error of rounding) takes a dozen elementwise operations. JAX traces, linearizes
and recomputes them one by one for every quantizer of a model, although nothing but the compiler looks into them. So
they are one operation until the program is lowered. There they are the operations that the function is made of, which
the compiler fuses with their neighbours.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jqinject.ops.processes import Bound

Elementwise = Callable[..., jax.Array]
ONE_OPERATION = Primitive("one_operation")


def one_operation(function: Elementwise, *arrays: jax.Array) -> jax.Array:
    """`function(*arrays)`, one operation of the program that is traced.

    Args:
        function: elementwise; compares and hashes by value, as a function of a module or a `Bound` one does.
        arrays: its arguments.

    Example:
        >>> import jax.numpy as jnp
        >>> def power(x, n):
        ...     return jnp.abs(x) ** n
        >>> program = jax.make_jaxpr(lambda x: one_operation(power, x, jnp.float32(2)))(-3.0)
        >>> len(program.eqns), float(one_operation(power, jnp.float32(-3), jnp.float32(2)))
        (1, 9.0)
    """
    return ONE_OPERATION.bind(*arrays, function=function)


@lru_cache(maxsize=4096)
def _result(function: Elementwise, mesh: object, *types: object) -> Any:
    """The type of its result: traced once for arguments of these types, on this mesh."""
    return jax.make_jaxpr(function)(*types).out_avals[0]


def _vmapped(function: Elementwise, axes: tuple[int | None, ...], *arrays: jax.Array) -> jax.Array:
    return jax.vmap(function, axes)(*arrays)


def _mapped(arrays: tuple[jax.Array, ...], axes: Any, *, function: Elementwise) -> tuple[jax.Array, int]:
    return one_operation(Bound(_vmapped, (function, tuple(axes))), *arrays), 0


def _differentiated(primals: Any, tangents: Any, *, function: Elementwise) -> tuple[jax.Array, jax.Array]:
    return jax.jvp(function, primals, tuple(map(ad.instantiate_zeros, tangents)))


def _lowered(ctx: mlir.LoweringRuleContext, *arrays: Any, function: Elementwise) -> Any:
    return mlir.lower_fun(function, multiple_results=False)(ctx, *arrays)


@partial(jax.jit, static_argnums=0)
def _eagerly(function: Elementwise, *arrays: jax.Array) -> jax.Array:
    return function(*arrays)


@ONE_OPERATION.def_impl
def _(*arrays: jax.Array, function: Elementwise) -> jax.Array:
    return _eagerly(function, *arrays)


@ONE_OPERATION.def_abstract_eval
def _(*types: object, function: Elementwise) -> Any:
    return _result(function, jax.sharding.get_abstract_mesh(), *types)


ad.primitive_jvps[ONE_OPERATION] = _differentiated
batching.primitive_batchers[ONE_OPERATION] = _mapped
mlir.register_lowering(ONE_OPERATION, _lowered)
