"""Statistics that leave a function by the back door: seen over a mapped axis, or in a backward pass.

JAX gives one honest channel out of a backward pass: cotangents. A gradient quantizer therefore takes a *slot* (zeros)
as an argument and returns what it saw as the slot's cotangent. Cotangents of one value add. A slot adds by maximum
instead: its dtype may be an extended one whose sum is a maximum, and two uses in a row are forked with a rule of their
own, so that both ways give the maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.ops.float8 import from_float8, to_float8

AMAX, SEEN, SCALE = 0, 1, 2
"""What the rows of a slot report: the largest magnitude, 1 for "there was one", the scale that was used."""
SLOT_ROWS = 3


@jax.custom_batching.custom_vmap
def gathered(seen: jax.Array, holder: jax.Array) -> jax.Array:
    """`seen`; under `vmap` the maximum over the mapped axis, unless `holder` is mapped too.

    So the statistic of a batch that is mapped over is one statistic, and a stack of layers keeps one a layer.

    Args:
        seen: a statistic that adds by maximum.
        holder: where it is to be kept.

    Example:
        >>> jax.vmap(lambda x, h: gathered(x, h), in_axes=(0, None), out_axes=None)(jnp.arange(4.0), 0.0)
        Array(3., dtype=float32)
    """
    return seen


@gathered.def_vmap
def _gathered_vmap(axis_size: int, in_batched: list[bool], seen: jax.Array, holder: jax.Array) -> Any:
    seen_mapped, holder_mapped = in_batched
    if holder_mapped:
        spread = seen if seen_mapped else jnp.broadcast_to(seen, (axis_size, *seen.shape))
        return jax.vmap(gathered)(spread, holder), True
    return gathered(jnp.max(seen, axis=0) if seen_mapped else seen, holder), False


@jax.custom_batching.custom_vmap
def _mapped_with(x: jax.Array, holder: jax.Array) -> jax.Array:
    """`x`, mapped over where `holder` is."""
    return x


@_mapped_with.def_vmap
def _mapped_with_vmap(axis_size: int, in_batched: list[bool], x: jax.Array, holder: jax.Array) -> Any:
    x_mapped, holder_mapped = in_batched
    if holder_mapped:
        spread = x if x_mapped else jnp.broadcast_to(x, (axis_size, *x.shape))
        return jax.vmap(_mapped_with)(spread, holder), True
    if x_mapped:
        return jax.vmap(_mapped_with, in_axes=(0, None))(x, holder), True
    return x, False


def over_axis(seen: jax.Array, axis_name: Any) -> jax.Array:
    """The maximum over a named axis (of `shard_map`, or of `vmap`); `seen` itself where there is none.

    Args:
        seen: a statistic.
        axis_name: the axis, a tuple of axes, or None.
    """
    if axis_name is None:
        return seen
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    varying = getattr(jax.typeof(seen), "manual_axis_type", None)
    if varying is not None and varying.varying:
        names = tuple(name for name in names if name in varying.varying)
    return jax.lax.pmax(seen, names) if names else seen


@jax.custom_vjp
def fork(slot: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A slot for this use, and one for the uses after: the cotangent is the larger of theirs."""
    return slot, slot


def _fork_bwd(_: None, cotangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array]:
    mine, rest = (jax.lax.convert_element_type(c, jnp.float32) for c in cotangents)
    return (jax.lax.convert_element_type(jnp.maximum(mine, rest), cotangents[0].dtype),)


fork.defvjp(lambda slot: ((slot, slot), None), _fork_bwd)


class ScaleRule(Protocol):
    """How a scale follows from magnitudes; static and hashable."""

    def amax(self, x: jax.Array) -> jax.Array: ...
    def scale(self, amax: jax.Array, held: jax.Array, threshold: float) -> jax.Array: ...


@dataclass(frozen=True)
class GradientRule:
    """How a gradient is quantized: static, equal by value.

    Attributes:
        scale_rule: from the gradient to an amax, from an amax to a scale.
        q_dtype: the 8-bit float dtype.
        threshold: its largest number.
        from_history: whether the scale was known before; else it follows from the gradient itself.
        axis_name: a named axis that the gradient is spread over, or None.
    """

    scale_rule: ScaleRule
    q_dtype: np.dtype
    threshold: float
    from_history: bool
    axis_name: Any


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantize_gradient(
    rule: GradientRule, y: jax.Array, token: jax.Array, held: jax.Array, slot: jax.Array
) -> jax.Array:
    return y


def _fwd(rule: GradientRule, y: jax.Array, token: jax.Array, held: jax.Array, slot: jax.Array) -> Any:
    return _mapped_with(y, slot), (held, slot)


def _bwd(rule: GradientRule, kept: tuple[jax.Array, jax.Array], g: jax.Array) -> Any:
    held, slot = kept
    exact = jax.lax.stop_gradient(g).astype(jnp.float32)
    amax = gathered(over_axis(rule.scale_rule.amax(exact), rule.axis_name), slot)
    scale = held if rule.from_history else rule.scale_rule.scale(amax, held, rule.threshold)
    rows = jnp.stack([amax, jnp.ones_like(amax), jnp.broadcast_to(scale, amax.shape)])
    quantized = from_float8(to_float8(exact, scale, rule.q_dtype), scale, g.dtype)
    return quantized, scale, jnp.zeros_like(held), jax.lax.convert_element_type(rows, slot.dtype)


_quantize_gradient.defvjp(_fwd, _bwd)


def quantize_gradient(
    y: jax.Array, token: jax.Array, held: jax.Array, slot: jax.Array, rule: GradientRule
) -> jax.Array:
    """`y` as it is; its gradient is quantized on the way back.

    The cotangent of `y` becomes `q(g) = payload(g / s) * s`. That of `slot` reports `(amax, 1, s)`, and that of `token`
    is `s`, for a contraction that goes on with the payload.

    Args:
        y: float array.
        token: a float32 scalar, or of the scale's shape; only its cotangent matters.
        held: the scale known before; used where `rule.from_history` or the gradient is all zero or not finite.
        slot: zeros, `(3, *scale shape)`, float32 or a dtype that adds by maximum.
        rule: how to quantize.

    Returns:
        `y`.
    """
    return _quantize_gradient(rule, y, token, held, slot)
