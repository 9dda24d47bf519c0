"""Static facts about the output of a quantized contraction (a linear layer, a convolution).

The output is y = sum over k terms of (q_l - z_l) * s_l * (q_r - z_r) * s_r. If the scales do not vary along summed
axes, it is an integer times s_l * s_r: the accumulator. These functions give the accumulator's scale, zero point and
bit width, without computing it.
"""

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp

from jqinject.dot.geometry.dimensions import Dimensions, scale_in_output
from jqinject.quant_tensor import (
    BitWidth,
    IntQuantTensor,
    as_array,
    larger,
    on_integers,
    product_sum_bit_width,
)


def contraction_output(
    value: jax.Array,
    lhs: object,
    rhs: object,
    *,
    terms: int,
    rhs_channel_axis: int | None = -1,
    out_channel_axis: int = -1,
    lhs_free_axes: Sequence[int] = (),
    axes: Dimensions | None = None,
    bias: object = None,
    bias_on_grid: bool | jax.Array | None = None,
    zero_points: tuple[bool | None, bool | None] = (None, None),
) -> IntQuantTensor | jax.Array:
    """The output of a contraction as an `IntQuantTensor` if possible, else the plain array.

    scale = s_l * s_r, laid out along the output's channel axis; bits = ceil(log2((2^b_l - 1) * (2^b_r - 1) *
    k)); signed if an operand is. The bias (already part of `value`) is one of:

    | bias | zero point | bits |
    |---|---|---|
    | none | 0 | as above |
    | quantized, scale s_l * s_r | 0 | max(bits, bias bits) + 1 |
    | quantized, another scale | -bias / scale | max(bits, bias bits) + 1 |
    | plain array | -bias / scale | as above |

    The result is a plain array if an operand is one, or if a scale varies along a summed axis. With zero points the
    sums are still integers, of operands `q - z`, signed and one bit wider (`without_zero_points`). Types, shapes, signs
    and widths follow from static facts, so they are the same under tracing.

    Args:
        value: the result of the contraction, bias included; any float dtype.
        lhs: activations, `IntQuantTensor` or array.
        rhs: the kernel, `IntQuantTensor` or array; Flax layout: (in, out), or (*window, in / groups, out).
        terms: k, the products summed into one output: in features, or the window's area times in channels /
            groups.
        rhs_channel_axis: the axis of `rhs` that becomes `out_channel_axis`, if any.
        out_channel_axis: the axis of `value` that holds the output channels.
        lhs_free_axes: axes of `lhs` that keep their place in `value` (a batch axis), along which its scale may vary.
        axes: the axes of `lhs`, `rhs` and `value` by label, instead of the three above.
        bias: what was added: None, an `IntQuantTensor`, or an array; a vector is per channel.
        bias_on_grid: whether a quantized bias has the scale s_l * s_r; an array may be traced. By default the
            scales are compared, inside the computation.
        zero_points: whether the zero points of `lhs` and `rhs` may differ from 0, as for `without_zero_points`.

    Returns:
        An `IntQuantTensor` whose scale has the rank of `value`, size 1 where it is constant; or `value`.

    Differs from Brevitas: zero points are subtracted from the operands (there, an error). A bias that becomes a zero
    point is per channel for every rank (there, along axis 1, which is wrong for a linear layer on more than two axes).
    A per-channel input scale gives a plain array (there, it is multiplied with the output channels' scales if the sizes
    happen to agree).

    Example:
        >>> x = IntQuantTensor(jnp.ones((2, 3)), 0.5, 0.0, 8, signed=True, training=False)
        >>> kernel = IntQuantTensor(jnp.ones((3, 4)), 0.25, 0.0, 4, signed=True, training=False)
        >>> y = contraction_output(x.value @ kernel.value, x, kernel, terms=3)
        >>> y.bit_width, y.scale
        (14, Array([[0.125]], dtype=float32))
    """
    if not (on_integers(lhs) and on_integers(rhs)):
        return value
    lhs, rhs = without_zero_points(lhs, rhs, zero_points)
    out: Sequence[Hashable] = range(value.ndim)
    labels: list[Sequence[Hashable]]
    if axes is None:
        free = {axis % lhs.ndim for axis in lhs_free_axes}
        channels: list[int | None] = [None] * rhs.ndim
        if rhs_channel_axis is not None:
            channels[rhs_channel_axis] = out_channel_axis % value.ndim
        labels = [[axis if axis in free else None for axis in range(lhs.ndim)], channels]
    else:
        labels, out = [axes.lhs, axes.rhs], axes.out
    left, right = (scale_in_output(x.scale, names, out) for x, names in zip((lhs, rhs), labels, strict=True))
    if left is None or right is None:
        return value
    scale = left * right
    scale = scale if scale.ndim else scale.reshape((1,) * value.ndim)
    return IntQuantTensor(
        value,
        scale=scale,
        zero_point=_output_zero_point(scale, bias, out_channel_axis, bias_on_grid),
        bit_width=contraction_bit_width(lhs.bit_width, rhs.bit_width, terms, bias),
        signed=lhs.signed or rhs.signed,
        training=lhs.training or rhs.training,
    )


def without_zero_points(
    lhs: IntQuantTensor, rhs: IntQuantTensor, zero_points: tuple[bool | None, bool | None] = (None, None)
) -> tuple[IntQuantTensor, IntQuantTensor]:
    """The factors `q - z` of a product of integers, with zero point 0; signed and a bit wider if z may be nonzero.

    Args:
        lhs, rhs: the operands.
        zero_points: whether each zero point may be nonzero. None if unknown: then only if both operands are unsigned,
            as only a zero point makes their product negative. With a signed operand the product is wide enough.

    Example:
        >>> x = IntQuantTensor(jnp.ones(3), 0.5, 2.0, 8, signed=False, training=False)
        >>> left, right = without_zero_points(x, x, (True, False))
        >>> (left.bit_width, left.signed), (right.bit_width, right.signed)
        ((9, True), (8, False))
    """
    unknown = not (lhs.signed or rhs.signed)
    left, right = (unknown if nonzero is None else nonzero for nonzero in zero_points)
    return _centered(lhs, left), _centered(rhs, right)


def _centered(x: IntQuantTensor, has_zero_point: bool) -> IntQuantTensor:
    x = x.set(zero_point=jnp.zeros_like(x.zero_point))
    return x.set(bit_width=x.bit_width + 1, signed=True) if has_zero_point else x


def contraction_bit_width(lhs: BitWidth, rhs: BitWidth, terms: int, bias: object = None) -> BitWidth:
    """Bits of the accumulator: ceil(log2((2^lhs - 1) * (2^rhs - 1) * terms)), then one more than the bias needs.

    The bound is on unsigned magnitudes. It is too small for signed one-bit operands (-1 and 1), whose accumulator runs
    from -terms to terms. (Brevitas's rule, kept for identical numbers.)

    Args:
        lhs: bits of the activations; Python int or scalar array.
        rhs: bits of the kernel.
        terms: the products summed into one output.
        bias: only an `IntQuantTensor` counts: max(bits, bias bits) + 1.

    Returns:
        A Python int if all widths are, else a float32 array that carries gradients to the widths.

    Example:
        >>> contraction_bit_width(8, 8, 6)
        19
    """
    bits = product_sum_bit_width(terms, lhs, rhs)
    return larger(bits, bias.bit_width) + 1 if on_integers(bias) else bits


def _along_channels(x: jax.Array, ndim: int, channel_axis: int) -> jax.Array:
    """A vector laid along the channel axis of `ndim` axes; anything else broadcasts from the right, as in addition."""
    shape = [1] * ndim
    if x.ndim == 1:
        shape[channel_axis] = x.size
    else:
        shape[ndim - x.ndim :] = x.shape
    return x.reshape(shape)


def _output_zero_point(
    scale: jax.Array, bias: object, channel_axis: int, bias_on_grid: bool | jax.Array | None
) -> jax.Array:
    """0 without a bias or with one on the accumulator's grid, else -bias / scale."""
    if bias is None or (on_integers(bias) and bias_on_grid is True):
        return jnp.zeros((1,), jnp.float32)
    values = _along_channels(as_array(bias).astype(jnp.float32), scale.ndim, channel_axis)
    offset = -values / scale
    if not on_integers(bias):
        return offset
    same = bias_on_grid
    if same is None:
        same = jnp.allclose(_along_channels(bias.scale, scale.ndim, channel_axis), scale)
    return jnp.where(same, 0.0, offset)
