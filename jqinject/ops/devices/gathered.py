"""Warnings of sharded tensors that are gathered."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import jax
import jax.core
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jqinject.ops.devices.explicit_axes import is_split, shards_along

TOLD = Primitive("told_of_gather")


class GatheredWarning(UserWarning):
    """A program over several devices gathers a tensor if it is sharded, for a component of your own."""


def told_if_gathered(x: jax.Array, axes: Sequence[int], message: str) -> jax.Array:
    """`x`; a `GatheredWarning` says that it is gathered if it is sharded along certain axes.

    Shards along explicit axes, and those of concrete arrays, are known. Those along automatic axes are not known while
    a program is traced; then the warning comes when the program is lowered for several devices.

    Args:
        x: the tensor.
        axes: along which it must not be sharded, from the front.
        message: what is gathered, why, and the cure.

    Example:
        >>> import jax.numpy as jnp
        >>> told_if_gathered(jnp.ones(2), (0,), "not said: one device")
        Array([1., 1.], dtype=float32)
    """
    if not axes:
        return x
    if is_split(x):
        split = any(shards_along(x, axis) > 1 for axis in axes)
    elif isinstance(x, jax.core.Tracer):
        return _told(message, x) if jax.device_count() > 1 else x
    else:
        shard = x.sharding.shard_shape(x.shape)
        split = any(shard[axis] < x.shape[axis] for axis in axes)
    if split:
        _warn(message)
    return x


def _warn(message: str) -> None:
    warnings.warn(message, GatheredWarning, stacklevel=1)  # of one place, so that each is shown once


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _told(message: str, x: jax.Array) -> jax.Array:
    return TOLD.bind(x, message=message)


@_told.defjvp
def _(message, primals, tangents):
    return _told(message, *primals), tangents[0]


def _lowered(ctx: mlir.LoweringRuleContext, x: mlir.ir.Value, *, message: str) -> list[mlir.ir.Value]:
    axes = ctx.module_context.axis_context
    if isinstance(axes, mlir.ShardingContext):
        several = axes.num_devices > 1
    else:
        manual = getattr(axes, "manual_axes", None)  # of `shard_map`: all of them leave nothing to gather
        several = manual is not None and manual != frozenset(axes.mesh.axis_names)
    if several:
        _warn(message)
    return [x]


TOLD.def_impl(lambda x, *, message: x)
TOLD.def_abstract_eval(lambda x, *, message: x)
batching.primitive_batchers[TOLD] = lambda xs, axes, *, message: (TOLD.bind(*xs, message=message), axes[0])
mlir.register_lowering(TOLD, _lowered)
