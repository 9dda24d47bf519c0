"""Two ways to compute the same: one for a program on a single device, one that XLA can partition and export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

Compute = Callable[..., jax.Array]
ONE_DEVICE = Primitive("one_device")


def on_one_device(alone: Compute, otherwise: Compute, *arrays: jax.Array) -> jax.Array:
    """`alone(*arrays)` in a program that every device runs on its own arrays, else `otherwise(*arrays)`.

    XLA cannot partition custom calls (kernels, layout constraints), nor some reshapes: it gathers their operands first.
    And `jax.export` refuses custom calls. Whether a program is for one device, for several or for export is not known
    while it is traced, so this is decided when it is lowered. No gradient.

    Args:
        alone: a function that compares and hashes by value.
        otherwise: likewise; computes the same numbers.
        arrays: their arguments.

    Example:
        >>> import jax.numpy as jnp
        >>> float(on_one_device(jnp.abs, jnp.abs, jnp.float32(-1)))
        1.0
    """
    program = _program(otherwise, jax.sharding.get_abstract_mesh(), *map(jax.typeof, arrays))
    return ONE_DEVICE.bind(*arrays, alone=alone, otherwise=otherwise, program=program)


@lru_cache(maxsize=1024)
def _program(otherwise: Compute, mesh: Any, *types: Any) -> Any:
    """The program of a function for arrays of these types, on this mesh: traced once."""
    return jax.make_jaxpr(otherwise)(*types)


@dataclass(frozen=True)
class _Mapped:
    """A function under `vmap`, compared by value."""

    function: Compute
    axes: tuple[int | None, ...]

    def __call__(self, *arrays: jax.Array) -> jax.Array:
        return jax.vmap(self.function, self.axes)(*arrays)


def _mapped(arrays: Any, axes: Any, *, alone: Compute, otherwise: Compute, program: Any) -> Any:
    return on_one_device(_Mapped(alone, tuple(axes)), _Mapped(otherwise, tuple(axes)), *arrays), 0


eagerly = jax.jit(on_one_device, static_argnums=(0, 1))
"""As `on_one_device`, for arrays that are not traced: compiled once for arrays that are alike."""


def _runs_alone(module: mlir.ModuleContext) -> bool:
    if module.lowering_parameters.for_export:
        return False
    axes = module.axis_context
    if isinstance(axes, mlir.ShardingContext):
        return axes.num_devices == 1
    return not isinstance(axes, mlir.SPMDAxisContext) or axes.manual_axes == frozenset(axes.mesh.axis_names)


def _lowered(
    ctx: mlir.LoweringRuleContext, *arrays: Any, alone: Compute, otherwise: Compute, program: Any
) -> Any:
    if _runs_alone(ctx.module_context):
        return mlir.lower_fun(alone, multiple_results=False)(ctx, *arrays)
    return mlir.lower_fun(jaxpr_as_fun(program), multiple_results=True)(ctx, *arrays)


ONE_DEVICE.def_impl(lambda *arrays, alone, otherwise, program: eagerly(alone, otherwise, *arrays))
ONE_DEVICE.def_abstract_eval(lambda *arrays, alone, otherwise, program: program.out_avals[0])
batching.primitive_batchers[ONE_DEVICE] = _mapped
mlir.register_lowering(ONE_DEVICE, _lowered)
