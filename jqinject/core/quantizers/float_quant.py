"""Quantization to minifloats of any exponent and mantissa width."""

from dataclasses import InitVar, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jqinject.core import _protocols, check, clamping, component, views
from jqinject.core.bit_width import ComputeMaxMantissa
from jqinject.core.quantizers.quantizer import GridStep, Quantized, Quantizer, Rounded
from jqinject.core.rounding import RoundSte
from jqinject.core.scaling.of_memory import ConstScaling
from jqinject.core.scaling.rule import POWERS_OF_TWO
from jqinject.core.scaling.two_level_scaling import (
    BlockScales,
    RuntimeDynamicTwoLevelScaling,
    sum_in_order,
    sums_of_runs,
)
from jqinject.core.statistics.ranges import through_ends
from jqinject.core.statistics.search import Search, scale_of
from jqinject.ops import float8_cast, power, ste
from jqinject.ops.float_grid import FloatGrid, quantize_on_grid
from jqinject.ops.grid import Grid
from jqinject.ops.groups import elements_axis
from jqinject.ops.minifloat import float_steps, from_float_steps, in_range_of
from jqinject.ops.processes import Bound, elementwise
from jqinject.quant_tensor import Levels

_WIDTHS = ("exponent_bit_width_impl", "mantissa_bit_width_impl", "exponent_bias_impl", "float_clamp_impl")


@component.component
class Float8Cast(component.Component):
    """To an 8-bit float by a cast, and back: the numbers, and the rule by which a tensor is brought into their steps.

    `y = q_dtype(clip(x / s, -max, max)) * s`, `max` the largest number of `q_dtype`, as Flax does: the quotient is
    bfloat16 if `x` is, else float32, by the reciprocal of a scale that several numbers share. A finite number
    saturates; nan stays nan, an infinity becomes what `q_dtype` has for it (inf, or nan).

    Args:
        q_dtype: dtype of the payload, one of the four 8-bit floats.
        dq_dtype: dtype of `y`; None means that of `x`.
        by_factor: multiply by `f = max / amax` instead, in float32, as TransformerEngine and torchao do; the scale is
            `1 / f`, and the scaling finds `amax`. One with a first scale takes it in units of `x`: `scaling_init = max`
            for 1. Infinities stay what they are.
        power_of_two_factor: round `f` down to a power of two.

    Raises:
        TypeError: `q_dtype` is not an 8-bit float, or `dq_dtype` not a float.
        ValueError: `power_of_two_factor` without `by_factor`.

    Source: Flax's `fp8_ops`; TransformerEngine; torchao.

    Example:
        >>> Float8Cast(jnp.float8_e4m3fn)(jnp.array([448.0, 17.0]), jnp.float32(1.0))
        (Array([448.,  16.], dtype=float32), Array([448, 16], dtype=float8_e4m3fn))
    """

    q_dtype: Any = jnp.float8_e4m3fn
    dq_dtype: Any = None
    by_factor: bool = False
    power_of_two_factor: bool = False

    def __post_init__(self) -> None:
        dtype = self.dq_dtype
        if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"Float8Cast: dq_dtype must be a float dtype or None, got {dtype!r}")
        vars(self)["q_dtype"] = float8_cast.float8_dtype(self.q_dtype, "Float8Cast")
        if self.power_of_two_factor and not self.by_factor:
            raise ValueError(
                "Float8Cast: power_of_two_factor rounds a factor, and numbers are divided by the scale.\n"
                "  cure: by_factor = True"
            )

    def __call__(
        self, x: jax.Array, scale: jax.Array, factor: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """The value and the payload of `x`, by its factor if given; the gradient passes unchanged."""
        carrier = x.astype(self.dq_dtype or x.dtype)
        if factor is not None:
            return float8_cast.quantize_by_factor(x, factor, self.q_dtype, carrier.dtype)
        scale = jax.lax.stop_gradient(scale)
        payload = float8_cast.to_float8(x, scale, self.q_dtype)
        return ste.with_gradient_of(carrier, float8_cast.from_float8(payload, scale, carrier.dtype)), payload


@component.component
class FloatQuant(Quantizer):
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
        input_view_impl: applied to `x` first.
        compute_max_mantissa: the largest mantissa.
        scaling_impl: the scale; None means 1.
        float_scaling_impl: which number the statistic is scaled to, `FloatScaling`; None means 1.
        float_to_int_impl: how to round.
        gradient_mask_impl: where the gradient goes; None for the rule above.
        bit_width: bits of one number, checked against the widths; None for no check.
        straight_through: the gradient of `x` is that of `y` everywhere, clamped numbers included, the scale gets none,
            and the result keeps its payload: for training in low bits.
        cast_impl: a cast to an 8-bit float in the place of widths, bias, clamp and rounding, straight through.
        q_dtype: a dtype of at most 8 bits in the place of widths, bias and clamp, as in Qwix and AQT: the scale comes
            from a symmetric range (`RangeScaling`), and the gradient is that of clipping to it.

    Raises:
        TypeError: a constant width is not an int, a component is missing, or `q_dtype` is no minifloat; (when called)
            `x` is not a float array.
        ValueError: widths that are invalid, exceed float32, or do not add up to `bit_width`; (when called) the range is
            not symmetric.

    Source: Brevitas, `core.quant.float.FloatQuant`; Qwix; AQT.

    Differs from Brevitas: an infinity stays inf in formats that have inf (there: nan).

    Example:
        >>> from jqinject.core import ExponentWidthConst, FloatClamp, MantissaWidthConst, StaticExponentBias
        >>> quant = FloatQuant(True, ExponentWidthConst(2), MantissaWidthConst(1), StaticExponentBias(1), FloatClamp())
        >>> result = quant(jnp.array([0.3, -1.4, 2.6, 9.0]))
        >>> result.value, result.bit_width, str(result.grid)
        (Array([ 0.5, -1.5,  3. ,  6. ], dtype=float32), 4, 'float4_e2m1fn')
        >>> from jqinject.core import AmaxScaling
        >>> flax = FloatQuant(cast_impl=Float8Cast(), scaling_impl=AmaxScaling(delayed=False))
        >>> flax(jnp.array([448.0, 17.0])).payload
        Array([448, 16], dtype=float8_e4m3fn)
        >>> from jqinject.core import AbsMaxRange, RangeScaling
        >>> qwix = FloatQuant(scaling_impl=RangeScaling(AbsMaxRange()), q_dtype=jnp.float4_e2m1fn)
        >>> qwix(jnp.array([5.9, -12.0, 0.0])).value
        Array([  6., -12.,   0.], dtype=float32)
    """

    has_zero_point = False  # type: ignore[assignment]
    signed: bool = True
    exponent_bit_width_impl: _protocols.BitWidth | None = None
    mantissa_bit_width_impl: _protocols.BitWidth | None = None
    exponent_bias_impl: _protocols.BitWidth | None = None
    float_clamp_impl: _protocols.FloatClampImpl | None = None
    input_view_impl: _protocols.View = clamping.Identity()
    compute_max_mantissa: Any = ComputeMaxMantissa()
    scaling_impl: _protocols.Scaling | None = None  # type: ignore[assignment]
    float_scaling_impl: _protocols.FloatScalingImpl | None = None
    float_to_int_impl: _protocols.Rounding = RoundSte()
    gradient_mask_impl: _protocols.GradientMask | None = None
    bit_width: InitVar[int | None] = None
    straight_through: bool = False
    cast_impl: Float8Cast | None = None
    q_dtype: Any = None

    def __post_init__(self, bit_width: int | None) -> None:
        if self.scaling_impl is None:
            vars(self)["scaling_impl"] = ConstScaling(1.0)
        if self.cast_impl is not None:
            vars(self).update(straight_through=True, q_dtype=self.cast_impl.q_dtype)
        if self.q_dtype is not None:
            vars(self)["q_dtype"] = FloatGrid.of_dtype(self.q_dtype).dtype
            return self._check_unused()
        for name in _WIDTHS:
            check.component(getattr(self, name), "FloatQuant", name)
        _check_sum(self.format, bit_width)

    def _check_unused(self) -> None:
        names = (*_WIDTHS, "float_scaling_impl", "gradient_mask_impl")
        unused = [name for name in names if getattr(self, name) is not None]
        what = "q_dtype has numbers of its own"
        if self.cast_impl is not None:
            what = "cast_impl rounds to nearest to the numbers of its q_dtype"
            unused += [] if _protocols.is_nearest(self.float_to_int_impl) else ["float_to_int_impl"]
        if unused:
            raise ValueError(
                f"FloatQuant: {what}, and {', '.join(unused)} would not be used.\n"
                "  cure: leave it out; or a minifloat by its widths, without cast_impl"
            )

    @property
    def format(self) -> FloatGrid:
        """The minifloat's format: static if its widths are."""
        if self.q_dtype is not None:
            return FloatGrid.of_dtype(self.q_dtype)
        clamp: Any = self.float_clamp_impl
        parts: Any = (self.exponent_bit_width_impl, self.mantissa_bit_width_impl, self.exponent_bias_impl)
        exponent, mantissa, bias = (width() for width in parts)
        codes = self.signed, clamp.saturating, clamp.inf_values, clamp.nan_values, clamp.max_available_float
        return FloatGrid(exponent, mantissa, bias, *codes)

    @property
    def is_nearest(self) -> bool:
        """Whether rounding and clamping are QuantizeLinear's, and the layout is that of the input."""
        as_it_is = self.q_dtype is None and isinstance(self.input_view_impl, clamping.Identity)
        return as_it_is and _protocols.is_nearest(self.float_to_int_impl, self.float_clamp_impl)

    @property
    def grid(self) -> FloatGrid | None:
        """The numbers at scale 1 that it rounds to nearest on; None if it does something else."""
        grid = self.format
        return None if grid.is_learned or not _protocols.is_nearest(self.float_to_int_impl) else grid

    def _numbers(self) -> tuple[FloatGrid, Any]:
        grid, scaling = self.format, self.float_scaling_impl
        if self.q_dtype is not None:
            return grid, grid.largest
        if scaling is None:
            return grid, None
        return grid, scaling(grid.exponent_bit_width, self._max_mantissa(grid), grid.exponent_bias)

    def __call__(self, x: jax.Array, *, keep: bool = False) -> Quantized:
        """`x` quantized; see `Quantizer`."""
        x, cast = check.float_input(x, "FloatQuant"), self.cast_impl
        scaling: Any = self.scaling_impl
        if isinstance(scaling, RuntimeDynamicTwoLevelScaling):
            return in_two_levels(self, scaling, x)
        in_place = type(self.input_view_impl) is clamping.Identity
        if cast is not None and not cast.by_factor and in_place and _protocols.collects_in_steps(scaling):
            encode = partial(float8_cast.cast_to_float8, dtype=cast.q_dtype)
            scale, payload = scaling.encoded(x, self.format.largest, encode)
            return Quantized.cast(x.astype(cast.dq_dtype or x.dtype), payload, scale, self.format)
        if cast is None or not cast.by_factor:
            return super().__call__(x, keep=keep)
        amax = scale_of(scaling, x.astype(jnp.float32), 1.0, Search(self))
        amax, grid = jax.lax.stop_gradient(amax), self.format
        factor = float8_cast.float8_factor(amax, grid.largest, x.dtype, cast.power_of_two_factor)
        return self._quantize(x, GridStep(power.divide(1.0, factor), factor=factor), grid, keep)

    def _quantize(self, x: jax.Array, step: GridStep, grid: Grid, keep: bool) -> Quantized:
        if not self.straight_through:
            return super()._quantize(x, step, grid, keep)
        if grid.is_learned:
            raise TypeError(
                "straight_through keeps a payload, and learned widths have none.\n  cure: straight_through = False"
            )
        if not _protocols.collects_in_steps(self.scaling_impl):  # such a scale has no gradient
            step = step._replace(scale=jax.lax.stop_gradient(step.scale))
        result = super()._quantize(x, step, grid, keep)
        return replace(result, scale_dtype=POWERS_OF_TWO) if self._by_powers else result

    @property
    def _by_powers(self) -> bool:
        """Whether scales are powers of two, of which subnormal ones count too."""
        return self.straight_through and self.scale_dtype == POWERS_OF_TWO

    def _round(self, x: jax.Array, step: GridStep, grid: Any, keep: bool) -> Rounded:
        scale = step.scale
        if self.cast_impl is not None:
            return self.cast_impl(x, scale, step.factor)
        if self.q_dtype is not None:
            rounding, scaling = self.float_to_int_impl, cast(Any, self.scaling_impl)
            compute = partial(_rounded, grid, x.dtype, rounding)
            flags = {"to_range": not scaling.scale_stop_grad, "pure": type(rounding) is RoundSte}
            y = through_ends(compute, x.astype(jnp.float32), step.ends, scale, **flags)
            return y.astype(x.dtype), None
        through, mask = self.straight_through, self.gradient_mask_impl
        numbers = jax.lax.stop_gradient(x) if through else x
        steps_of, value_of = float_steps, from_float_steps
        if self._by_powers:
            steps_of, value_of = float8_cast.steps_of_power, float8_cast.from_steps_of_power
        divisor = getattr(self.scaling_impl, "divisor", None)
        to_nearest = type(self.float_to_int_impl) is RoundSte and _protocols.is_nearest(self.float_clamp_impl)
        if to_nearest and divisor is None and mask is None and not (through or grid.is_learned):
            numerics = Bound(_nearest, (grid, self.float_clamp_impl, self._max_mantissa(grid), x.dtype))
            return elementwise(numerics, x.astype(jnp.float32), scale).astype(x.dtype), None
        steps = steps_of(numbers.astype(jnp.float32), scale if divisor is None else divisor(scale))
        minifloats = self.clamped(grid.unbounded(steps, self.float_to_int_impl), grid)
        value = value_of(minifloats, scale, x.dtype)
        value = jnp.where(jnp.isinf(numbers), numbers, value) if through else value
        if mask is not None:
            value = ste.with_gradient_where(x, value, mask(steps, minifloats))
        elif through:
            value = ste.with_gradient_of(x, value)
        return value, grid.encode(minifloats) if through else None

    def clamped(self, steps: jax.Array, grid: Any) -> jax.Array:
        """Numbers of unbounded range, clamped to those of the format."""
        clamp: Any = self.float_clamp_impl
        return clamp(steps, grid.exponent_bit_width, self._max_mantissa(grid), grid.exponent_bias)

    def _max_mantissa(self, grid: Any) -> Any:
        return self.compute_max_mantissa(grid.mantissa_bit_width)


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


def _nearest(
    grid: FloatGrid, clamp: Any, max_mantissa: object, dtype: DTypeLike, x: jax.Array, scale: jax.Array
) -> jax.Array:
    """The nearest number that a grid has at a scale, float32, within the range of `dtype`."""
    minifloats = grid.unbounded(float_steps(x, scale), ste.round_ste)
    minifloats = clamp(minifloats, grid.exponent_bit_width, max_mantissa, grid.exponent_bias)
    return in_range_of(minifloats, scale, dtype)


def _rounded(
    grid: FloatGrid, dtype: DTypeLike, rounding: _protocols.Rounding, x: jax.Array, scale: jax.Array
) -> jax.Array:
    """Numbers of a grid, float32, that `dtype` holds."""
    if type(rounding) is not RoundSte:
        return quantize_on_grid(x, grid, scale, None, rounding, dtype).astype(jnp.float32)
    if grid.dtype not in float8_cast.FLOAT8_DTYPES:
        return quantize_on_grid(x, grid, scale, dtype=dtype).astype(jnp.float32)
    payload = float8_cast.cast_to_float8(x, scale, grid.dtype)
    return float8_cast.from_float8(payload, scale, dtype).astype(jnp.float32)


def in_two_levels(quantizer: Any, scaling: RuntimeDynamicTwoLevelScaling, x: jax.Array) -> Quantized:
    """Round `x` by a `FloatQuant` whose scale comes in two levels; the gradient passes unchanged.

    Of several scales of a block, the first with the least error counts; then they are corrected.

    Args:
        quantizer: the `FloatQuant`.
        scaling: its scaling.
        x: float array.
    """
    grid, ((scales, *alternatives), shared) = quantizer.format, scaling.candidates(x)
    minifloats = _rounded_in_levels(quantizer, grid, x, scales)
    if alternatives:
        best = minifloats, scales.block, scales.scale, _errors(quantizer, shared, minifloats, scales, x)
        number = jax.lax.stop_gradient(x)

        def better_of(
            best: tuple[jax.Array, ...], alternative: BlockScales
        ) -> tuple[tuple[jax.Array, ...], None]:
            others = _rounded_in_levels(quantizer, grid, number, alternative)
            error = _errors(quantizer, shared, others, alternative, number)
            candidate, better = (others, alternative.block, alternative.scale, error), error < best[-1]
            return tuple(jnp.where(better, new, old) for new, old in zip(candidate, best, strict=True)), None

        stacked = jax.tree.map(lambda *levels: jnp.stack(levels), *alternatives)
        (minifloats, block, scale, _), _ = jax.lax.scan(better_of, best, stacked)
        scales = scales._replace(block=block, scale=scale)
    viewed = views.in_layout(quantizer.input_view_impl, lambda x: x, x)
    scales = scaling.block_scale_impl.corrected(viewed, minifloats, scales, scaling.group_dim)
    scale, block = (jnp.broadcast_to(level, scales.block.shape) for level in (scales.scale, scales.block))
    value = from_float_steps(minifloats, jax.lax.stop_gradient(scale), x.dtype)
    levels = Levels(minifloats, block, scales.shared)
    return Quantized(ste.with_gradient_of(viewed, value), scale, None, grid, levels=levels)


def _rounded_in_levels(quantizer: Any, grid: Grid, x: jax.Array, scales: BlockScales) -> jax.Array:
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

    return jax.lax.stop_gradient(views.in_layout(quantizer.input_view_impl, rounded, x, *scales.factors))


def _errors(
    quantizer: Any, shared: jax.Array, minifloats: jax.Array, scales: BlockScales, x: jax.Array
) -> jax.Array:
    """The error of each block, rounded by these scales."""
    scaling, view = quantizer.scaling_impl, quantizer.input_view_impl
    x = jax.lax.stop_gradient(x).astype(jnp.float32)
    errors = scaling.block_scale_impl.errors(view(x), minifloats, scales, shared)
    return _of_blocks(sum_in_order(errors, elements_axis(scaling.group_dim)), views.blocks_of(view, x))


def _of_blocks(x: jax.Array, blocks: views.Blocks | None) -> jax.Array:
    """The sums of the groups of each block, once for each: halves are added as long as there are two."""
    if blocks is None:
        return x
    return sums_of_runs(x, blocks.width, blocks.axis)
