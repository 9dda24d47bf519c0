"""Round by scales in two levels: which of several, and what is rounded."""

from __future__ import annotations

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.core.quantizers.quantizer import Quantized
from jqinject.core.scaling.two_level_scaling import BlockScales, RuntimeDynamicTwoLevelScaling
from jqinject.core.views import Blocks, blocks_of, in_layout
from jqinject.ops.groups import elements_axis, fitting_size, split_groups, spread_groups
from jqinject.ops.minifloat import from_float_steps
from jqinject.ops.ste import with_gradient_of
from jqinject.quant_tensor import Levels


def in_two_levels(quantizer: Any, scaling: RuntimeDynamicTwoLevelScaling, x: jax.Array) -> Quantized:
    """Round `x` by a `FloatQuant` whose scale comes in two levels; the gradient passes unchanged.

    Of several scales of a block, the first with the least error counts.

    Args:
        quantizer: the `FloatQuant`.
        scaling: its scaling.
        x: float array.
    """
    grid, ((scales, *alternatives), shared) = quantizer.format, scaling.candidates(x)
    minifloats = _rounded(quantizer, grid, x, scales)
    for other in alternatives:
        others = _rounded(quantizer, grid, x, other)
        least = _errors(quantizer, shared, minifloats, scales, x)
        better = _errors(quantizer, shared, others, other, x) < least
        minifloats = jnp.where(better, others, minifloats)
        scales = scales._replace(
            block=jnp.where(better, other.block, scales.block),
            scale=jnp.where(better, other.scale, scales.scale),
        )
    scale, block = (jnp.broadcast_to(level, scales.block.shape) for level in (scales.scale, scales.block))
    value = from_float_steps(minifloats, jax.lax.stop_gradient(scale), x.dtype)
    viewed = in_layout(quantizer.input_view_impl, lambda x: x, x)
    levels = Levels(minifloats, block, scales.shared)
    return Quantized(with_gradient_of(viewed, value), scale, None, grid, levels=levels)


def _rounded(quantizer: Any, grid: Any, x: jax.Array, scales: BlockScales) -> jax.Array:
    """The numbers of the grid, float32; zeros keep their signs if the scales say so."""
    scaling = quantizer.scaling_impl

    def rounded(x: jax.Array, *factors: jax.Array) -> jax.Array:
        x = jax.lax.stop_gradient(x).astype(jnp.float32)
        steps = scales._replace(factors=factors).steps(x)
        if not scaling.block_scale_impl.keeps_negative_zero:
            # By its bits: subnormal numbers, which compare as 0, keep their signs.
            nothing = jax.lax.bitcast_convert_type(x, jnp.uint32) << 1 == 0
            steps = jnp.where(nothing, 0.0, steps)
        steps = jnp.clip(steps, -2.0 * grid.largest, 2.0 * grid.largest)  # the clamp takes no less
        return quantizer.clamped(grid.unbounded(steps, quantizer.float_to_int_impl), grid)

    return jax.lax.stop_gradient(in_layout(quantizer.input_view_impl, rounded, x, *scales.factors))


def _errors(
    quantizer: Any, shared: jax.Array, minifloats: jax.Array, scales: BlockScales, x: jax.Array
) -> jax.Array:
    """The error of each block, rounded by these scales."""
    scaling, view = quantizer.scaling_impl, quantizer.input_view_impl
    x = jax.lax.stop_gradient(x).astype(jnp.float32)
    errors = scaling.block_scale_impl.errors(view(x), minifloats, scales, shared)
    return _of_blocks(_sum_in_order(errors, elements_axis(scaling.group_dim)), blocks_of(view, x))


def _sum_in_order(x: jax.Array, axis: int) -> jax.Array:
    """The sums along an axis, one number after the other, so that their rounding is the same everywhere."""
    return reduce(jnp.add, (jax.lax.index_in_dim(x, place, axis) for place in range(x.shape[axis])))


def _of_blocks(x: jax.Array, blocks: Blocks | None) -> jax.Array:
    """The sums of the groups of each block, once for each: halves are added as long as there are two."""
    if blocks is None:
        return x
    length = x.shape[blocks.axis]
    width = fitting_size(blocks.width, length)
    cut = split_groups(x, width, blocks.axis)
    inner = elements_axis(blocks.axis)
    while cut.shape[inner] % 2 == 0:
        first, second = jnp.split(cut, 2, inner)
        cut = first + second
    return spread_groups(_sum_in_order(cut, inner), width, blocks.axis, length)
