"""Rounding by scales in two levels: which of several, and what is rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jqinject.core.scaling.block_scales import BlockScales
from jqinject.core.scaling.two_level_scaling import Candidates, RuntimeDynamicTwoLevelScaling
from jqinject.core.view import Blocks, blocks_of, in_layout
from jqinject.ops.groups import elements_axis, fitting_size, split_groups, spread_groups
from jqinject.ops.minifloats.float_grid import from_float_steps, to_float_grid
from jqinject.ops.ste import with_gradient_of


class InTwoLevels(NamedTuple):
    """A tensor that was rounded by scales in two levels.

    Attributes:
        value: dequantized, in the view of the quantizer, with the gradient of the tensor.
        scale: the product of both levels.
        minifloats: float32, what was rounded to; zeros keep their signs.
        block, shared: the levels.
    """

    value: jax.Array
    scale: jax.Array
    minifloats: jax.Array
    block: jax.Array
    shared: jax.Array


def in_two_levels(quantizer: Any, scaling: RuntimeDynamicTwoLevelScaling, x: jax.Array) -> InTwoLevels:
    """`x` rounded by a `FloatQuant` whose scale comes in two levels; the gradient passes unchanged.

    Args:
        quantizer: the `FloatQuant`.
        scaling: its scaling.
        x: float array.
    """
    found = scaling.candidates(x)
    scales, minifloats = found.scales[0], _rounded(quantizer, x, found.scales[0])
    for other in found.scales[1:]:
        others = _rounded(quantizer, x, other)
        better = _is_better(quantizer, found, (minifloats, others), (scales, other), x)
        minifloats = jnp.where(better, others, minifloats)
        block, scale = (
            jnp.where(better, other.block, scales.block),
            jnp.where(better, other.scale, scales.scale),
        )
        scales = BlockScales(block, scales.shared, scale, scales.factors)
    scale, block = (jnp.broadcast_to(each, scales.block.shape) for each in (scales.scale, scales.block))
    value = from_float_steps(minifloats, jax.lax.stop_gradient(scale), x.dtype)
    viewed = in_layout(quantizer.input_view_impl, lambda x: x, x)
    return InTwoLevels(with_gradient_of(viewed, value), scale, minifloats, block, scales.shared)


def _rounded(quantizer: Any, x: jax.Array, scales: BlockScales) -> jax.Array:
    form, scaling = quantizer.format, quantizer.scaling_impl
    largest = quantizer.compute_max_mantissa(form.mantissa_bit_width)

    def rounded(x: jax.Array, *factors: jax.Array) -> jax.Array:
        x = jax.lax.stop_gradient(x).astype(jnp.float32)
        steps = scales._replace(factors=factors).steps(x)
        if not scaling.block_scale_impl.keeps_negative_zero:
            # By its bits: subnormal numbers, which compare as 0, keep their signs.
            nothing = jax.lax.bitcast_convert_type(x, jnp.uint32) << 1 == 0
            steps = jnp.where(nothing, 0.0, steps)
        steps = jnp.clip(steps, -2.0 * form.max_value, 2.0 * form.max_value)  # the clamp takes no less
        near = _to_grid(steps, form.mantissa_bit_width, form.bias, quantizer.float_to_int_impl)
        return quantizer.float_clamp_impl(near, form.exponent_bit_width, largest, form.exponent_bias)

    return jax.lax.stop_gradient(in_layout(quantizer.input_view_impl, rounded, x, *scales.factors))


def _to_grid(x: jax.Array, mantissa: Any, bias: Any, rounding: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`to_float_grid` of numbers of ordinary size, without its derivative: by exponent bits, which takes less time."""
    if not isinstance(mantissa, int) or not isinstance(bias, int):
        return to_float_grid(x, mantissa, bias, rounding)
    field = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32) >> 23
    exponent = jnp.clip(field - 127, 1 - bias, 64) - mantissa
    step, inverse = (
        jax.lax.bitcast_convert_type((127 + power) << 23, jnp.float32) for power in (exponent, -exponent)
    )
    return rounding(x * inverse) * step


def _is_better(
    quantizer: Any,
    found: Candidates,
    minifloats: tuple[jax.Array, jax.Array],
    scales: tuple[BlockScales, BlockScales],
    x: jax.Array,
) -> jax.Array:
    """Where the second scales have less error in their blocks than the first."""
    impl, axis = quantizer.scaling_impl.block_scale_impl, elements_axis(quantizer.scaling_impl.group_dim)
    x = jax.lax.stop_gradient(x).astype(jnp.float32)
    viewed, blocks = quantizer.input_view_impl(x), blocks_of(quantizer.input_view_impl, x)
    old, new = (
        _of_blocks(_sum_in_order(impl.errors(viewed, rounded, by, found.shared), axis), blocks)
        for rounded, by in zip(minifloats, scales, strict=True)
    )
    return new < old


def _sum_in_order(x: jax.Array, axis: int) -> jax.Array:
    """The sums along an axis, one number after the other, so that their rounding is the same everywhere."""
    parts = [jax.lax.index_in_dim(x, place, axis) for place in range(x.shape[axis])]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


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
