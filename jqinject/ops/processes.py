"""Arrays of several processes read on the host, and functions that are one operation, or compiled as a whole or for a
single device.

No process holds all of an array that spans processes, and all of them must run the same programs in the same order:
every process must call these functions, and no decision may depend on what only one process knows.

What runs on a single device (`on_one_device`) has a second form, which XLA can partition and export.
"""

import operator
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.core
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.experimental import multihost_utils
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

P = ParamSpec("P")
R = TypeVar("R")


def on_host(x: jax.Array) -> np.ndarray:
    """The numbers of an array, whichever processes hold them.

    Args:
        x: a concrete array. If it spans processes and is not whole in each, all of them must call.

    Example:
        >>> import jax.numpy as jnp
        >>> on_host(jnp.arange(3))
        array([0, 1, 2], dtype=int32)
    """
    return np.asarray(x) if lies_here(x) else multihost_utils.process_allgather(x, tiled=True)


def spans_processes(tree: object) -> bool:
    """Whether some array in a pytree lies on devices of several processes."""
    leaves = jax.tree.leaves(tree)
    return any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in leaves)


def is_traced(tree: object) -> bool:
    """Whether some array in a pytree is traced: it is then part of a program, and has no numbers."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def lies_here(x: jax.Array) -> bool:
    """Whether this process holds all numbers of a concrete array."""
    return not spans_processes(x) or x.is_fully_replicated


def placed_as(x: jax.Array, model: jax.Array) -> jax.Array:
    """An array with the placement of another one; if either spans processes, all of them must call."""
    if not spans_processes((x, model)):
        return jax.device_put(x, model.sharding)
    if spans_processes(x) and spans_processes(model):
        return jax.jit(lambda x: x, out_shardings=model.sharding)(x)
    array = on_host(x)
    return jax.make_array_from_callback(x.shape, model.sharding, lambda index: array[index])


def from_holder(value: object, is_holder: bool) -> Any:
    """The object of the first process that holds it, in all processes.

    Args:
        value: a picklable object; that of the other processes is not read.
        is_holder: whether this process holds it.

    Returns:
        The object; `value` if no process is a holder.
    """
    holders = multihost_utils.process_allgather(np.array(is_holder))
    if not holders.any():
        return value
    source = jax.process_index() == int(np.argmax(holders))
    packed = np.frombuffer(pickle.dumps(value) if source else b"", np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.array(packed.size, np.int32), source))
    room = packed if source else np.zeros(size, np.uint8)
    return pickle.loads(multihost_utils.broadcast_one_to_all(room, source).tobytes())


Compute = Callable[..., jax.Array]
ONE_DEVICE = Primitive("one_device")


def on_one_device(
    alone: Compute, otherwise: Compute, *arrays: jax.Array, warning: tuple[str, type[Warning]] | None = None
) -> jax.Array:
    """`alone(*arrays)` in a program that every device runs on its own arrays, else `otherwise(*arrays)`.

    XLA cannot partition custom calls (kernels, layout constraints), nor some reshapes: it gathers their operands first.
    And `jax.export` refuses custom calls. Whether a program is for one device, for several or for export is not known
    while it is traced, so this is decided when it is lowered. No gradient.

    Args:
        alone: a function that compares and hashes by value.
        otherwise: likewise; computes the same numbers.
        arrays: their arguments.
        warning: text and category of a warning, raised when the program is lowered for several devices, or None.

    Example:
        >>> import jax.numpy as jnp
        >>> float(on_one_device(jnp.abs, jnp.abs, jnp.float32(-1)))
        1.0
    """
    program = _program(otherwise, jax.sharding.get_abstract_mesh(), *map(jax.typeof, arrays))
    return ONE_DEVICE.bind(*arrays, alone=alone, otherwise=otherwise, program=program, warning=warning)


@lru_cache(maxsize=1024)
def _program(otherwise: Compute, mesh: object, *types: object) -> Any:
    """The program of a function for arrays of these types, on this mesh: traced once."""
    return jax.make_jaxpr(otherwise)(*types)


@dataclass(frozen=True)
class Bound:
    """A function with its first arguments, which are static: compared by value, unlike a `functools.partial`.

    Example:
        >>> Bound(pow, (2,)) == Bound(pow, (2,)), Bound(pow, (2,))(3)
        (True, 8)
    """

    function: Callable[..., Any]
    static: tuple[Any, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*self.static, *args, **kwargs)


def _vmapped(function: Compute, axes: tuple[int | None, ...], *arrays: jax.Array) -> jax.Array:
    return jax.vmap(function, axes)(*arrays)


def _mapped(
    arrays: jax.Array, axes: Any, *, alone: Compute, otherwise: Compute, program: Any, warning: Any
) -> Any:
    alone, otherwise = (Bound(_vmapped, (function, tuple(axes))) for function in (alone, otherwise))
    return on_one_device(alone, otherwise, *arrays, warning=warning), 0


#: As `on_one_device`, for arrays that are not traced: compiled once for arrays that are alike.
eagerly = jax.jit(on_one_device, static_argnums=(0, 1))


def _lowered(
    ctx: mlir.LoweringRuleContext,
    *arrays: jax.Array,
    alone: Compute,
    otherwise: Compute,
    program: Any,
    warning: Any,
) -> Any:
    axes = ctx.module_context.axis_context
    if isinstance(axes, mlir.ShardingContext):
        several = axes.num_devices > 1
    else:  # of `shard_map`, all axes of the mesh leave each device to itself
        several = isinstance(axes, mlir.SPMDAxisContext) and axes.manual_axes != frozenset(
            axes.mesh.axis_names
        )
    if several and warning is not None:
        warnings.warn(*warning, stacklevel=1)  # of one place, so that each is shown once
    if several or ctx.module_context.lowering_parameters.for_export:
        return mlir.lower_fun(jaxpr_as_fun(program), multiple_results=True)(ctx, *arrays)
    return mlir.lower_fun(alone, multiple_results=False)(ctx, *arrays)


@ONE_DEVICE.def_impl
def _(*arrays: jax.Array, alone: Compute, otherwise: Compute, **_: object) -> jax.Array:
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        return otherwise(*arrays)
    return eagerly(alone, otherwise, *arrays)


@ONE_DEVICE.def_abstract_eval
def _(*arrays: object, program: Any, **_: object) -> Any:
    return program.out_avals[0]


batching.primitive_batchers[ONE_DEVICE] = _mapped
mlir.register_lowering(ONE_DEVICE, _lowered)


ONE_OPERATION = Primitive("one_operation")


def one_operation(function: Compute, *arrays: jax.Array) -> jax.Array:
    """`function(*arrays)`, one operation of the program that is traced.

    What a derivative multiplies (a mask, an error of rounding) takes a dozen elementwise operations. JAX traces,
    linearizes and recomputes them one by one for every quantizer of a model, although nothing but the compiler looks
    into them. So they are one operation until the program is lowered. There they are the operations that the function
    is made of, which the compiler fuses with their neighbours.

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
def _result(function: Compute, mesh: object, *types: object) -> Any:
    """The type of its result: traced once for arguments of these types, on this mesh."""
    return jax.make_jaxpr(function)(*types).out_avals[0]


def _mapped_as_one(arrays: tuple[jax.Array, ...], axes: Any, *, function: Compute) -> tuple[jax.Array, int]:
    return one_operation(Bound(_vmapped, (function, tuple(axes))), *arrays), 0


def _differentiated(primals: Any, tangents: Any, *, function: Compute) -> tuple[jax.Array, jax.Array]:
    return jax.jvp(function, primals, tuple(map(ad.instantiate_zeros, tangents)))


def _lowered_inline(ctx: mlir.LoweringRuleContext, *arrays: Any, function: Compute) -> Any:
    return mlir.lower_fun(function, multiple_results=False)(ctx, *arrays)


@partial(jax.jit, static_argnums=0)
def _eagerly(function: Compute, *arrays: jax.Array) -> jax.Array:
    return function(*arrays)


@ONE_OPERATION.def_impl
def _(*arrays: jax.Array, function: Compute) -> jax.Array:
    return _eagerly(function, *arrays)


@ONE_OPERATION.def_abstract_eval
def _(*types: object, function: Compute) -> Any:
    return _result(function, jax.sharding.get_abstract_mesh(), *types)


ad.primitive_jvps[ONE_OPERATION] = _differentiated
batching.primitive_batchers[ONE_OPERATION] = _mapped_as_one
mlir.register_lowering(ONE_OPERATION, _lowered_inline)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def elementwise(function: Compute, *arrays: jax.Array) -> jax.Array:
    """`function(*arrays)`, whose derivative by each array is one operation of the program; see `one_operation`.

    Args:
        function: elementwise; compares and hashes by value.
        arrays: its arguments, which broadcast.

    Example:
        >>> import jax.numpy as jnp
        >>> jax.grad(lambda x: elementwise(jnp.multiply, x, jnp.float32(3)))(jnp.float32(2))
        Array(3., dtype=float32)
    """
    return function(*arrays)


def _slope(function: Compute, place: int, *arrays: jax.Array) -> jax.Array:
    def of_one(x: jax.Array) -> jax.Array:
        return function(*arrays[:place], x, *arrays[place + 1 :])

    return jax.jvp(of_one, (arrays[place],), (jax.numpy.ones_like(arrays[place]),))[1]


def _elementwise_jvp(function: Compute, primals: Any, tangents: Any) -> tuple[jax.Array, Any]:
    changes = (
        one_operation(Bound(_slope, (function, place)), *primals) * tangent
        for place, tangent in enumerate(tangents)
        if not isinstance(tangent, SymbolicZero)
    )
    return elementwise(function, *primals), reduce(operator.add, changes)


elementwise.defjvp(_elementwise_jvp, symbolic_zeros=True)


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
    return cast(Any, partial(jax.jit, inline=True, static_argnames=static))
