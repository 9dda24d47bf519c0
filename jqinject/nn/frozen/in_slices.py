"""Freezing a large weight slice by slice, so that what is computed on the way takes little memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core import CommittedQuant, FloatQuant, RescalingIntQuant
from jqinject.core.facts import grid_of
from jqinject.quant_tensor import is_concrete

LARGE = 2**22  # bytes
MOST = 16
# Their `by_scale`, given the scale of a call, makes the bits of this call.
ELEMENTWISE = (RescalingIntQuant, FloatQuant)

Make = Callable[[Any, jax.Array], tuple[Any, Any]]


def slices_of(weight: Any) -> int:
    """How many slices a weight is frozen in: 1 if it is small, not there, or on several devices."""
    if not (isinstance(weight, jax.Array) and is_concrete(weight)):
        return 1
    return MOST if weight.nbytes >= LARGE and len(weight.sharding.device_set) == 1 else 1


def in_slices(make: Make, proxy: Any, weight: jax.Array, number: int, kept: tuple[int, ...]) -> Any:
    """What `make(proxy, weight)` returns, to the bit, made slice by slice; None if that is not possible.

    The scale is measured first, of the whole weight; then the slices are quantized by it.

    Args:
        make: returns a graphdef and a state, and whether they are valid; it works under `jax.jit`.
        proxy: the weight's quantizer, a private copy, which is changed.
        weight: the weight.
        number: of slices, at most.
        kept: axes that are not cut: sums are taken over them.
    """
    quantizer = proxy.tensor_quant
    if type(quantizer) not in ELEMENTWISE or grid_of(quantizer) is None:
        return None
    graphdefs = []

    def whole() -> Any:
        found, valid = make(proxy, weight)
        graphdefs.append(found[0] if isinstance(found, tuple) else None)
        return (found[1] if isinstance(found, tuple) else None), valid

    state, _ = jax.eval_shape(whole)
    measured = CommittedQuant(quantizer, weight)
    axis = _axis_to_cut(weight.shape, measured.committed_scale.shape, kept)
    number = 1 if axis is None else math.gcd(number, weight.shape[axis])
    if graphdefs[0] is None or axis is None or number == 1:
        return None
    proxy.tensor_quant = nnx.data(measured)
    graphdef, held = nnx.split(proxy, graph=True)

    def part(i: Any) -> Any:
        copy = nnx.merge(graphdef, jax.tree.map(lambda x: x, held))
        quant, cut = copy.tensor_quant, partial(_slice, i=i, axis=axis, number=number, shape=weight.shape)
        for variable in (quant.committed_scale, quant.committed_zero_point):
            if variable is not None:
                variable.set_value(cut(variable.get_value()))
        found, valid = make(copy, cut(weight))
        return found[1], valid

    def step(i: Any, made: Any) -> Any:
        found, valid = part(i)
        return jax.tree.map(partial(_put, i), made[0], found), made[1] & valid

    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
    state, valid = jax.lax.fori_loop(0, number, step, (empty, jnp.bool_(True)))
    return (graphdefs[0], state), valid


def _axis_to_cut(shape: tuple[int, ...], scale: tuple[int, ...], kept: tuple[int, ...]) -> int | None:
    """An axis with separate scales, or any if there is one scale; None for scales of another form, as of groups."""
    full = (
        (1,) * (len(shape) - len(scale)) + tuple(scale)
        if len(scale) <= 1 and math.prod(scale) == 1
        else scale
    )
    if len(full) != len(shape) or any(one not in (1, size) for one, size in zip(full, shape, strict=True)):
        return None
    free = [axis for axis in range(len(shape)) if axis not in {one % len(shape) for one in kept}]
    separate = [axis for axis in free if full[axis] > 1]
    return next(iter(separate or free), None)


def _slice(x: jax.Array, i: Any, axis: int, number: int, shape: tuple[int, ...]) -> jax.Array:
    if x.ndim != len(shape) or x.shape[axis] == 1:
        return x
    size = shape[axis] // number
    return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)


def _put(i: Any, whole: jax.Array, part: jax.Array) -> jax.Array:
    """Write the i-th part; what the whole weight has one of, such as a single scale, is the same in all parts."""
    cut = [
        axis for axis, sizes in enumerate(zip(whole.shape, part.shape, strict=True)) if sizes[0] != sizes[1]
    ]
    return jax.lax.dynamic_update_slice_in_dim(whole, part, i * part.shape[cut[0]], cut[0]) if cut else part
