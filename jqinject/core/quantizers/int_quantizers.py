"""Quantizers to integers: by the scale of a component or of the call, by two scales, and truncation of accumulators."""

import warnings
from collections.abc import Callable
from dataclasses import InitVar, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core import _protocols, check, clamping, state
from jqinject.core.bit_width import BitWidthConst
from jqinject.core.component import component, set_view
from jqinject.core.quantizers.delay import Delayed
from jqinject.core.quantizers.quantizer import IntQuant, Quantized, Quantizer, RoundedByIntQuant, int_grid
from jqinject.core.scaling.pre_scaling import InputAwarePreScaling
from jqinject.core.scaling.rule import TruncMsbScaling
from jqinject.ops import lean, round_ste
from jqinject.ops.fake_quant import Offset
from jqinject.ops.grid import IntGrid
from jqinject.ops.power import divide
from jqinject.quant_tensor import is_concrete


@component
class RescalingIntQuant(RoundedByIntQuant):
    """Integer quantization whose scale, zero point and bit width come from components.

    `b = bit_width_impl()`, `s = scaling_impl(x, int_scaling_impl(b))`, `z = zero_point_impl(x, s, b)`,
    `y = int_quant(s, z, b, x)`.

    With a `RangeScaling` scale and zero point come from one range, and the gradient goes through its ends.

    A tensor of zeros is quantized to zeros, with a finite scale greater than 0.

    Args:
        int_quant: to integers and back, `IntQuant`.
        scaling_impl: the scale.
        int_scaling_impl: how many integer steps the scaled value spans.
        zero_point_impl: the zero point; `RangeZeroPoint` if it comes with the scale from one range.
        bit_width_impl: the bit width.

    Raises:
        TypeError: (when called) `x` is not a float array.

    Example:
        >>> from jqinject.core import BitWidthConst, ConstScaling, IntScaling, ZeroZeroPoint
        >>> quant = RescalingIntQuant(
        ...     int_quant=IntQuant(narrow_range=True, signed=True),
        ...     scaling_impl=ConstScaling(0.1),
        ...     int_scaling_impl=IntScaling(narrow_range=True, signed=True),
        ...     zero_point_impl=ZeroZeroPoint(),
        ...     bit_width_impl=BitWidthConst(4),
        ... )
        >>> result = quant(jnp.array([0.042, -0.053, 0.31, -0.44]))
        >>> [round(v, 4) for v in result.value.tolist()], result.bit_width
        ([0.0429, -0.0571, 0.1, -0.1], 4)
    """

    int_quant: _protocols.IntQuantizer
    scaling_impl: _protocols.Scaling
    int_scaling_impl: _protocols.IntScalingImpl
    zero_point_impl: _protocols.ZeroPoint
    bit_width_impl: _protocols.BitWidth

    def __post_init__(self) -> None:
        if _protocols.by_range(type(self.scaling_impl)):
            self._numbers()  # refuses bits that no range has

    @property
    def grid(self) -> IntGrid | None:
        """The numbers at scale 1 that it rounds to nearest on; None if it does something else."""
        if not _protocols.is_nearest(getattr(self.int_quant, "float_to_int_impl", None)):
            return None
        grid = self._numbers()[0]
        return replace(grid, bit_width=float(grid.bit_width)) if grid.is_learned else grid


class DecoupledIntQuant(IntQuant):
    """To integers by one scale and back by another: `y = (clamp(round(x / p + v), min_int(b), max_int(b)) - z) * s`.

    `p` and `v` are scale and zero point before rounding, `s` and `z` those after, `b` the bit width, all passed to the
    call. The arithmetic is float32; `y` has the dtype of `x`.

    Args:
        narrow_range: leave out one value: -128 of signed, 255 of unsigned 8 bits.
        signed: whether the integers have a sign.
        input_view_impl: applied to `x` first.
        float_to_int_impl: how to round.
        tensor_clamp_impl: how to clamp.
        quant_delay_steps: calls that return `x` unchanged before quantization starts.

    Example:
        >>> quant = DecoupledIntQuant(narrow_range=True, signed=True)
        >>> x, zero = jnp.array([0.042, -0.053, 0.31, -0.44]), jnp.float32(0)
        >>> quant(jnp.float32(0.02), zero, jnp.float32(0.01), zero, 4, x).round(4)
        Array([ 0.02, -0.03,  0.07, -0.07], dtype=float32)
    """

    def __call__(  # type: ignore[override]
        self,
        pre_scale: Any,
        pre_zero_point: Any,
        scale: jax.Array,
        zero_point: jax.Array | None,
        bit_width: lean.Bits,
        x: jax.Array,
    ) -> jax.Array:
        """`x` quantized and back in float, in the dtype of `x`."""
        x = check.float_input(x, "DecoupledIntQuant")
        return self.from_int(self.to_int(pre_scale, pre_zero_point, bit_width, x), scale, zero_point, x)


@component
class DecoupledRescalingIntQuant(Quantizer):
    """Integer quantization that rounds by one scale and rescales by another.

    `b = bit_width_impl()`, `t = int_scaling_impl(b)`, `p = pre_scaling_impl(x) / t`,
    `v = pre_zero_point_impl(x, p, b)`, `s = scaling_impl(x, t)`, `z = zero_point_impl(x, s, b)`,
    `y = decoupled_int_quant(p, v, s, z, b, x)`.

    Args:
        decoupled_int_quant: to integers and back, `DecoupledIntQuant`.
        pre_scaling_impl: the scale before rounding.
        scaling_impl: the scale after rounding.
        int_scaling_impl: how many integer steps the scaled value spans.
        pre_zero_point_impl: what is added before rounding.
        zero_point_impl: the zero point.
        bit_width_impl: the bit width.

    Raises:
        TypeError: (when called) `x` is not a float array.

    Example:
        >>> from jqinject.core import BitWidthConst, ConstScaling, IntScaling, ZeroZeroPoint
        >>> quant = DecoupledRescalingIntQuant(
        ...     DecoupledIntQuant(narrow_range=True, signed=True), ConstScaling(0.7), ConstScaling(1.4),
        ...     IntScaling(narrow_range=True, signed=True), ZeroZeroPoint(), ZeroZeroPoint(), BitWidthConst(4))
        >>> result = quant(jnp.array([0.3, -0.7]))
        >>> [round(v, 4) for v in result.value.tolist()], round(float(result.pre_scale), 4)
        ([0.6, -1.4], 0.1)
    """

    decoupled_int_quant: DecoupledIntQuant
    pre_scaling_impl: Any
    scaling_impl: _protocols.Scaling
    int_scaling_impl: _protocols.IntScalingImpl
    pre_zero_point_impl: _protocols.ZeroPoint
    zero_point_impl: _protocols.ZeroPoint
    bit_width_impl: _protocols.BitWidth

    def _numbers(self) -> tuple[IntGrid, Any]:
        grid = int_grid(self.decoupled_int_quant, self.bit_width_impl())
        return grid, self.int_scaling_impl(grid.bit_width)

    def __call__(self, x: jax.Array, *input_format: Any, keep: bool = False) -> Quantized:
        """`x` quantized; scales and zero points float32. The pre-scaling of an input format limits the integers.

        Numbers that have two scales have no payload to `keep`.
        """
        x = check.float_input(x, type(self).__name__)
        x32, rounds, pre_scaling = x.astype(jnp.float32), self.decoupled_int_quant, self.pre_scaling_impl
        grid, steps = self._numbers()
        pre_scale = divide(pre_scaling(x32, *input_format), steps)
        pre_zero_point = self.pre_zero_point_impl(x32, pre_scale, grid.bit_width)
        scale = self.scaling_impl(x32, steps)
        zero_point = self._zero_point(x32, scale, grid, None)
        q = rounds.to_int(pre_scale, pre_zero_point, grid.bit_width, x32)
        q = pre_scaling.within(q, *input_format) if input_format else q
        value = rounds.from_int(q, scale, zero_point, x)
        return Quantized(value, scale, zero_point, grid, None, pre_scale, pre_zero_point)


WIDEST = 32  # bits of an accumulator


class ZeroWeightsWarning(UserWarning):
    """An accumulator is so narrow that every weight is quantized to 0."""


@component
class DecoupledRescalingIntQuantWithInput(DecoupledRescalingIntQuant):
    """Like `DecoupledRescalingIntQuant`, with a scale before rounding that depends on the layer's input format.

    `p = pre_scaling_impl(x, N, signed) / t`, `y = s * (within(q, N, signed) - z)`: `within` of the pre-scaling has the
    last word on the integers `q`. In training mode N and signed are kept, in `input_format`, for a call without them.

    Args:
        decoupled_int_quant: to integers and back, `DecoupledIntQuant`.
        pre_scaling_impl: the scale before rounding, such as `AccumulatorAwareParameterPreScaling`.
        scaling_impl: the scale after rounding.
        int_scaling_impl: how many integer steps the scaled value spans.
        pre_zero_point_impl: what is added before rounding.
        zero_point_impl: the zero point.
        bit_width_impl: the bit width.

    Raises:
        TypeError: `pre_scaling_impl` does not look at the input; (when called) `x` is not a float array.
        ValueError: (when called) the input's format is not known, or its accumulator too narrow.

    Example:
        >>> from jqinject.core import AccumulatorAwareParameterPreScaling, BitWidthConst, ConstScaling, L1Norm
        >>> from jqinject.core import OverOutputChannelView, RoundToZeroSte, SingleArgStatelessBuffer, ZeroZeroPoint
        >>> w, s = jnp.array([[60.0, -40.0]]), ConstScaling(1.0)
        >>> a2q = AccumulatorAwareParameterPreScaling(
        ...     s, L1Norm(stats_reduce_dim=1), OverOutputChannelView(), [w], (1, 1),
        ...     accumulator_bit_width_impl=BitWidthConst(13))
        >>> quant = DecoupledRescalingIntQuantWithInput(
        ...     DecoupledIntQuant(True, True, float_to_int_impl=RoundToZeroSte()), a2q, s,
        ...     SingleArgStatelessBuffer(1.0), ZeroZeroPoint(), ZeroZeroPoint(), BitWidthConst(8))
        >>> quant(w, 8, True).value, quant(w, 4, True).value
        (Array([[ 19., -12.]], dtype=float32), Array([[ 60., -40.]], dtype=float32))
    """

    needs_input_format = True

    def __post_init__(self) -> None:
        """Check the pre-scaling, and keep the input's format."""
        if not isinstance(self.pre_scaling_impl, InputAwarePreScaling):
            raise TypeError(
                f"DecoupledRescalingIntQuantWithInput: {type(self.pre_scaling_impl).__name__} does not look at the "
                "layer's input.\n  cure: pre_scaling_impl = AccumulatorAwareParameterPreScaling, or tensor_quant = "
                "DecoupledRescalingIntQuant"
            )
        self.input_format = state.QuantStat(state.float_array(0.0, (2,)))
        self.use_running_average = False

    def __call__(  # type: ignore[override]
        self,
        x: jax.Array,
        input_bit_width: lean.Bits | None = None,
        input_is_signed: bool | None = None,
        *,
        keep: bool = False,
    ) -> Quantized:
        """`x` quantized for an input of `input_bit_width` bits; by default that of the last training step."""
        if input_bit_width is not None and input_is_signed is not None:
            if not self.use_running_average:
                facts = input_bit_width, input_is_signed
                arrays = [jnp.asarray(fact).astype(jnp.float32) for fact in facts]
                self.input_format.set_value(jax.lax.stop_gradient(jnp.round(jnp.stack(arrays))))
            return super().__call__(x, input_bit_width, input_is_signed)
        input_format = self.kept_input()
        if input_format is not None:
            return super().__call__(x, *input_format)
        # Known only when the program runs: if nothing was kept (0 bits), the numbers are nan.
        bits, sign = jax.lax.stop_gradient(self.input_format.get_value()).astype(jnp.int32)
        result = super().__call__(x, jnp.maximum(bits, 1), sign)
        return replace(result, value=jnp.where(bits > 0, result.value, jnp.nan).astype(result.value.dtype))

    def kept_input(self) -> tuple[int, bool] | None:
        """Bits and sign of the input of the last training step; None in a stack or under tracing.

        Raises:
            ValueError: there was none.
        """
        input_format = self.input_format.get_value()
        if not state.has_numbers(input_format):
            return None
        if not bool(jnp.all(input_format[..., 0] > 0)):
            raise ValueError(
                "how many bits the layer's input has is not known, and the weight is quantized for them.\n  cure: give "
                "the layer input_quant=..., or call it once in training mode with a QuantTensor"
            )
        return (int(input_format[0]), bool(input_format[1])) if input_format.ndim == 1 else None

    def check_input(self, x: jax.Array, input_bit_width: lean.Bits, input_is_signed: bool) -> None:
        """Refuse in advance an input that cannot be guaranteed for.

        Args:
            x: the weight; one that is traced or abstract is not looked at.
            input_bit_width, input_is_signed: see a call.

        Raises:
            ValueError: the accumulator is too narrow.

        Warns:
            ZeroWeightsWarning: it is so narrow that all of the weight's integers are 0, from which no training starts.
        """
        self.pre_scaling_impl.check_input(input_bit_width, input_is_signed)
        width = self.pre_scaling_impl.accumulator_bit_width_impl()
        if not (isinstance(width, int) and is_concrete(x, input_bit_width)) or not bool(jnp.any(x)):
            return
        widths = range(width, WIDEST + 1)
        least = next((n for n in widths if self._has_integers(n, x, input_bit_width, input_is_signed)), None)
        if least != width:
            cure = (
                f"accumulator_bit_width = {least}, the narrowest" if least else "fewer inputs for each output"
            )
            warnings.warn(
                f"an accumulator of {width} bits bounds the integers of an output channel so much that all weights of "
                f"shape {x.shape} are 0: the layer passes nothing on, and does not train.\n  cure: {cure} that leaves "
                "weights other than 0, or more; or an input of fewer bits",
                ZeroWeightsWarning,
                stacklevel=2,
            )

    def _has_integers(self, width: int, x: jax.Array, bits: int | jax.Array, signed: bool) -> bool:
        """Whether an integer of a weight is not 0 with an accumulator of so many bits."""
        copy = nnx.clone(self, graph=True)
        copy.pre_scaling_impl.accumulator_bit_width_impl = BitWidthConst(width)
        return bool(jnp.any(copy(x, bits, signed).value))

    set_view = set_view


@component
class TruncIntQuant(Delayed):
    """Integers of one bit width as integers of another: `q = round(x / s + z)`, `q' = clamp(round'(q / t))`.

    `t = trunc_scaling_impl(q, b_in, b_out, signed)`, the result's scale is `s * t` and its zero point `z / t`. Scale,
    zero point, bit width and sign of `x` are passed to the call; the sign stays.

    Args:
        float_to_int_impl: how `q / t` is rounded.
        bit_width_impl: the bit width of the result.
        trunc_scaling_impl: what integers are divided by, called with them, both bit widths and the sign.
        narrow_range: leave out one value of the result: -128 of signed, 255 of unsigned 8 bits.
        tensor_clamp_impl: how to clamp.
        quant_delay_steps: calls that return `x` unchanged before quantization starts.

    Raises:
        TypeError: (when called) `x` is not a float array.

    Example:
        >>> from jqinject.core import BitWidthConst, RoundSte
        >>> quant = TruncIntQuant(RoundSte(), BitWidthConst(4))
        >>> x = jnp.array([0.04, -0.05, 0.31, -0.44])
        >>> result = quant(x, jnp.float32(0.01), jnp.float32(0), 8, signed=True)
        >>> result.value.round(4), float(result.scale.round(4)), result.bit_width
        (Array([ 0.  , -0.  ,  0.32, -0.48], dtype=float32), 0.1599999964237213, 4)
    """

    float_to_int_impl: _protocols.Rounding
    bit_width_impl: _protocols.BitWidth
    trunc_scaling_impl: Callable[..., jax.Array] = TruncMsbScaling()
    narrow_range: bool = False
    tensor_clamp_impl: _protocols.Clamp = clamping.TensorClamp()
    quant_delay_steps: InitVar[int | None] = 0

    def __call__(
        self, x: jax.Array, scale: jax.Array, zero_point: Offset, input_bit_width: Any, signed: bool
    ) -> Quantized:
        """`x` requantized; scale and zero point float32."""
        x = check.float_input(x, "TruncIntQuant")
        x32 = x.astype(jnp.float32)
        grid = IntGrid(self.bit_width_impl(), signed, self.narrow_range)
        q = divide(x32, scale)
        q = round_ste(q if zero_point is None else q + zero_point)
        divisor = self.trunc_scaling_impl(q, input_bit_width, grid.bit_width, signed)
        low, high = grid.bounds
        q = self.tensor_clamp_impl(self.float_to_int_impl(divide(q, divisor)), min_val=low, max_val=high)
        out_scale = scale * divisor
        out_zero = None if zero_point is None else divide(jnp.asarray(zero_point, jnp.float32), divisor)
        value = ((q if out_zero is None else q - out_zero) * out_scale).astype(x.dtype)
        value = value if self.delay is None else self.delay(x, value)
        return Quantized(value, out_scale, out_zero, grid)


@component
class PrescaledRestrictIntQuant(RoundedByIntQuant):
    """Integer quantization by a scale passed to the call, zero point 0: biases, whose scale is input times
    weight scale.

    Args:
        int_quant: to integers and back, `IntQuant`.
        bit_width_impl: the bit width.

    Raises:
        TypeError: (when called) `x` is not a float array.

    Example:
        >>> from jqinject.core import BitWidthConst
        >>> quant = PrescaledRestrictIntQuant(IntQuant(narrow_range=False, signed=True), BitWidthConst(32))
        >>> quant(jnp.array([0.3, -0.26]), jnp.float32(0.125)).value
        Array([ 0.25, -0.25], dtype=float32)
    """

    int_quant: _protocols.IntQuantizer
    bit_width_impl: _protocols.BitWidth
    scaling_impl = None  # type: ignore[assignment]
    int_scaling_impl = None
    has_zero_point = False  # type: ignore[assignment]
    scale_dtype = None  # type: ignore[assignment]

    def __call__(self, x: jax.Array, scale: jax.Array) -> Quantized:  # type: ignore[override]
        """`x` quantized by `scale`."""
        return self.by_scale(x, jnp.asarray(scale).astype(jnp.float32))
