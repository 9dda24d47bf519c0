"""Quantizers to minifloats, with one scale or two levels of scales.

Rounding by scales in two levels: which of several, and what is rounded.

Quantization to minifloats of any exponent and mantissa width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import check
from jqinject.core._protocols import (
    BitWidth,
    FloatClampImpl,
    FloatScalingImpl,
    GradientMask,
    Rounding,
    Scaling,
    View,
    divisor_of,
    groups_of,
    is_nearest,
    scale_dtype,
)
from jqinject.core.bit_width import ComputeMaxMantissa
from jqinject.core.checked_arguments import checked_arguments
from jqinject.core.clamp import Identity
from jqinject.core.component import Component, assign, set_given
from jqinject.core.rounding import RoundSte
from jqinject.core.scaling.constant import ConstScaling
from jqinject.core.scaling.two_levels import BlockScales, Candidates, RuntimeDynamicTwoLevelScaling
from jqinject.core.statistics.search import Candidate, Search, scale_of
from jqinject.core.views import Blocks, beside, blocks_of, in_layout
from jqinject.ops.fake_quant import known_zero
from jqinject.ops.float8_cast import from_steps_of_power, steps_of_power
from jqinject.ops.float_grid import FloatGrid
from jqinject.ops.groups import elements_axis, fitting_size, split_groups, spread_groups
from jqinject.ops.minifloat import float_steps, from_float_steps, to_float_grid
from jqinject.ops.ste import with_gradient_of, with_gradient_where
from jqinject.quant_tensor import FloatQuantTensor, Levels


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
        steps = jnp.clip(steps, -2.0 * form.largest, 2.0 * form.largest)  # the clamp takes no less
        near = _to_grid(steps, form.mantissa_bit_width, form.exponent_bias, quantizer.float_to_int_impl)
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


_POWERS_OF_TWO = np.dtype(jnp.float8_e8m0fnu)
_EXACT = (steps_of_power, from_steps_of_power)  # of subnormal numbers too


@dataclass(frozen=True)
class FloatQuantResult:
    """What `FloatQuant` returns; it unpacks as the nine values of Brevitas's.

    Attributes:
        value: the quantized tensor in float, shape and dtype of the input.
        scale: float per step of the minifloat, float32.
        format: the minifloat's.
        payload: the numbers behind `value` in the format's `storage`; None if they were not kept.
        scale_dtype: a dtype of 8 bits that holds the scale; None if unknown.
        minifloats, block, shared: of a scale in two levels (`RuntimeDynamicTwoLevelScaling`), the numbers that were
            rounded to, the scale of each block and the scale that these share; else None.
    """

    value: jax.Array
    scale: jax.Array
    format: FloatGrid
    payload: jax.Array | None = None
    scale_dtype: np.dtype | None = None
    minifloats: jax.Array | None = None
    block: jax.Array | None = None
    shared: jax.Array | None = None

    @property
    def zero_point(self) -> jax.Array:
        """The zero point of floats is 0."""
        return known_zero()

    @property
    def bit_width(self) -> Any:
        """Bits of one number."""
        return self.format.bit_width

    def __iter__(self) -> Iterator[Any]:
        form = self.format
        widths = (form.exponent_bit_width, form.mantissa_bit_width, form.exponent_bias)
        codes = (form.saturating, form.inf_values, form.nan_values)
        return iter((self.value, self.scale, self.zero_point, *widths, *codes))

    def quant_tensor(self, *, training: bool) -> FloatQuantTensor:
        """The tensor that flows between layers.

        Args:
            training: whether it was quantized in training mode.
        """
        made = FloatQuantTensor(self.value, self.scale, self.format, training, self.payload)
        if self.scale_dtype is not None:
            made = made.with_scale_dtype(self.scale_dtype)
        if self.minifloats is None or self.block is None or self.shared is None:
            return made
        return made.with_levels(Levels(self.minifloats, self.block, self.shared))


@checked_arguments
class FloatQuant(Component):
    """To a minifloat and back: `y = clamp(u * round(x / s / u)) * s`.

    `u = 2**(max(floor(log2 |x / s|), 1 - bias) - m)` is the spacing of the numbers at `x / s`. The arithmetic is
    float32 for any dtype of `x`, with exact powers of two; `y` has the dtype of `x`. nan stays nan, and infinities
    become inf if the format has it, else nan.

    The gradient of `x` is `y / x` where `x / s` is a normal number, as the step grows with `x`; 1 where it is
    subnormal; where clamped, `float_clamp_impl` decides. With a `gradient_mask_impl` it is 1 where the mask is True and
    0 elsewhere, and the scale gets none.

    Args:
        signed: whether there are negative numbers.
        exponent_bit_width_impl: bits of the exponent, e.
        mantissa_bit_width_impl: bits of the mantissa, m.
        exponent_bias_impl: the bias.
        float_clamp_impl: the range, and what happens beyond it: `FloatClamp`.
        input_view_impl: applied to `x` first; None for no view.
        compute_max_mantissa: the largest mantissa; None means `ComputeMaxMantissa()`.
        scaling_impl: the scale; None means 1.
        float_scaling_impl: which number the statistic is scaled to, `FloatScaling`; None means 1.
        float_to_int_impl: how to round; None means `RoundSte()`.
        gradient_mask_impl: where the gradient goes; None for the rule above.
        bit_width: bits of one number, checked against the widths; None for no check.
        straight_through: the gradient of `x` is that of `y` everywhere, clamped numbers included, the scale gets none,
            and the result keeps its payload: for training in low bits.

    Raises:
        TypeError: a constant width is not an int; (when called) `x` is not a float array.
        ValueError: widths that are invalid, exceed float32, or do not add up to `bit_width`.

    Source: Brevitas, `core.quant.float.FloatQuant`.

    Differs from Brevitas: an infinity stays inf in formats that have inf (there: nan).

    Example:
        >>> from jqinject.core import ExponentWidthConst, FloatClamp, MantissaWidthConst, StaticExponentBias
        >>> quant = FloatQuant(True, ExponentWidthConst(2), MantissaWidthConst(1), StaticExponentBias(1), FloatClamp())
        >>> result = quant(jnp.array([0.3, -1.4, 2.6, 9.0]))
        >>> result.value, result.bit_width, str(result.format)
        (Array([ 0.5, -1.5,  3. ,  6. ], dtype=float32), 4, 'float4_e2m1fn')
    """

    has_zero_point = False
    signed: bool
    exponent_bit_width_impl: BitWidth
    mantissa_bit_width_impl: BitWidth
    exponent_bias_impl: BitWidth
    float_clamp_impl: FloatClampImpl
    input_view_impl: View = Identity()
    compute_max_mantissa: Any = ComputeMaxMantissa()
    scaling_impl: Scaling
    float_scaling_impl: FloatScalingImpl | None = None
    float_to_int_impl: Rounding = RoundSte()
    straight_through: bool = False
    gradient_mask_impl: GradientMask | None = None

    def __init__(
        self,
        signed: bool,
        exponent_bit_width_impl: BitWidth,
        mantissa_bit_width_impl: BitWidth,
        exponent_bias_impl: BitWidth,
        float_clamp_impl: FloatClampImpl,
        input_view_impl: View | None = None,
        compute_max_mantissa: Any = None,
        scaling_impl: Scaling | None = None,
        float_scaling_impl: FloatScalingImpl | None = None,
        float_to_int_impl: Rounding | None = None,
        gradient_mask_impl: GradientMask | None = None,
        bit_width: int | None = None,
        straight_through: bool = False,
    ) -> None:
        assign(
            self,
            signed=bool(signed),
            exponent_bit_width_impl=exponent_bit_width_impl,
            mantissa_bit_width_impl=mantissa_bit_width_impl,
            exponent_bias_impl=exponent_bias_impl,
            float_clamp_impl=float_clamp_impl,
            scaling_impl=ConstScaling(1.0) if scaling_impl is None else scaling_impl,
        )
        set_given(
            self,
            input_view_impl=input_view_impl,
            compute_max_mantissa=compute_max_mantissa,
            float_scaling_impl=float_scaling_impl,
            float_to_int_impl=float_to_int_impl,
            straight_through=straight_through or None,
            gradient_mask_impl=gradient_mask_impl,
        )
        _check_sum(self.format, bit_width)

    @property
    def format(self) -> FloatGrid:
        """The minifloat's format: static if its widths are."""
        clamp = self.float_clamp_impl
        exponent, mantissa = self.exponent_bit_width_impl(), self.mantissa_bit_width_impl()
        bias = self.exponent_bias_impl()
        codes = (
            self.signed,
            clamp.saturating,
            clamp.inf_values,
            clamp.nan_values,
            clamp.max_available_float,
        )
        return FloatGrid(exponent, mantissa, bias, *codes)

    @property
    def groups(self) -> tuple[int, int] | None:
        """The groups of `input_view_impl`."""
        return groups_of(self.input_view_impl)

    @property
    def scale_dtype(self) -> np.dtype | None:
        """The `scale_dtype` of the scaling."""
        return scale_dtype(self.scaling_impl)

    @property
    def is_nearest(self) -> bool:
        """Whether rounding and clamping are QuantizeLinear's, and the layout is that of the input."""
        as_it_is = isinstance(self.input_view_impl, Identity)
        return as_it_is and is_nearest(self.float_to_int_impl, self.float_clamp_impl)

    def __call__(self, x: jax.Array) -> FloatQuantResult:
        """`x` quantized; scale float32."""
        x = check.float_input(x, "FloatQuant")
        form = self.format
        if isinstance(self.scaling_impl, RuntimeDynamicTwoLevelScaling):
            value, scale, *levels = in_two_levels(self, self.scaling_impl, x)
            return FloatQuantResult(value, scale, form, None, None, *levels)
        threshold = self.scaling_threshold(form)
        scale = scale_of(self.scaling_impl, x.astype(jnp.float32), threshold, Search(self))
        (scale,) = beside(self.input_view_impl, x, scale)
        return self._quantized(x, scale, form)

    def try_candidate(self, x: jax.Array, candidate: Candidate) -> FloatQuantResult:
        """`x` quantized with a candidate in place of the searched statistic."""
        form = self.format
        scale = scale_of(self.scaling_impl, x, self.scaling_threshold(form), candidate)
        return FloatQuantResult(self.quantize(x, scale, form), scale, form)

    def by_scale(
        self, x: jax.Array, scale: jax.Array, zero_point: jax.Array | None, keep: bool
    ) -> FloatQuantResult:
        """Return the result for `x` with a given scale and zero point; with its payload if `keep`."""
        return self._quantized(check.float_input(x, "FloatQuant"), scale, self.format)

    @property
    def grid(self) -> FloatGrid | None:
        """The numbers at scale 1 that it rounds to nearest on; None if it does something else."""
        form = self.format
        if form.is_learned or not is_nearest(self.float_to_int_impl):
            return None
        return form

    def scaling_threshold(self, form: FloatGrid) -> Any:
        """The number that the statistic is scaled to; None without `float_scaling_impl`."""
        if self.float_scaling_impl is None:
            return None
        largest = self.compute_max_mantissa(form.mantissa_bit_width)
        return self.float_scaling_impl(form.exponent_bit_width, largest, form.exponent_bias)

    def _quantized(self, x: jax.Array, scale: jax.Array, form: FloatGrid) -> FloatQuantResult:
        if not self.straight_through:
            return FloatQuantResult(self.quantize(x, scale, form), scale, form)
        if form.is_learned:
            raise TypeError(
                "straight_through keeps a payload, and learned widths have none.\n  cure: straight_through = False"
            )
        scale = jax.lax.stop_gradient(scale)
        powers = self.scale_dtype if self.scale_dtype == _POWERS_OF_TWO else None
        steps_of, value_of = (float_steps, from_float_steps) if powers is None else _EXACT

        def made(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
            numbers = jax.lax.stop_gradient(x)
            steps, minifloats = self._minifloats(numbers, scale, form, steps_of)
            value = value_of(minifloats, scale, x.dtype)
            value = jnp.where(jnp.isinf(numbers), numbers, value)
            mask, payload = self.gradient_mask_impl, form.encode(minifloats)
            if mask is None:
                return with_gradient_of(x, value), payload
            return with_gradient_where(x, value, mask(steps, minifloats)), payload

        value, payload = in_layout(self.input_view_impl, made, x, scale)
        return FloatQuantResult(value, scale, form, payload, powers)

    def quantize(self, x: jax.Array, scale: jax.Array, form: FloatGrid) -> jax.Array:
        """`x` quantized by a scale and back, in its dtype."""

        def made(x: jax.Array, scale: jax.Array) -> jax.Array:
            steps, clamped = self._minifloats(x, scale, form)
            value = from_float_steps(clamped, scale, x.dtype)
            mask = self.gradient_mask_impl
            return value if mask is None else with_gradient_where(x, value, mask(steps, clamped))

        return in_layout(self.input_view_impl, made, x, scale)

    def _minifloats(
        self, x: jax.Array, scale: jax.Array, form: FloatGrid, steps_of: Any = float_steps
    ) -> tuple[jax.Array, jax.Array]:
        """Numbers in steps of their scale, and the format's numbers that they are rounded to; float32."""
        steps = steps_of(x.astype(jnp.float32), divisor_of(self.scaling_impl, scale))
        rounded = to_float_grid(steps, form.mantissa_bit_width, form.exponent_bias, self.float_to_int_impl)
        largest = self.compute_max_mantissa(form.mantissa_bit_width)
        return steps, self.float_clamp_impl(rounded, form.exponent_bit_width, largest, form.exponent_bias)


def _check_sum(form: FloatGrid, bit_width: int | None) -> None:
    """Refuse a bit width that exponent, mantissa and sign do not add up to; the sign bit may be unused."""
    if bit_width is None or form.is_learned:
        return
    exponent, mantissa = form.exponent_bit_width, form.mantissa_bit_width
    if bit_width not in (form.bit_width, 1 + exponent + mantissa):
        sign = "a sign" if form.signed else "no sign"
        raise ValueError(
            f"a minifloat with {sign}, {exponent} bits of exponent and {mantissa} of mantissa has {form.bit_width} "
            f"bits, and bit_width = {bit_width} is declared.\n  cure: bit_width, exponent_bit_width and "
            "mantissa_bit_width go together: declare all three, as Fp6e3m2Mixin does"
        )
