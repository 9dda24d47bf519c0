"""The quantizer of one operand with AQT's names (`bits`, `calibration`, `rng_type`): an ordinary injector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from jqinject.core import (
    AbsMaxRange,
    BitWidthConst,
    CeilSte,
    DynamicOverSubChannelBlockView,
    FloatQuant,
    Identity,
    IntQuant,
    NonzeroRange,
    PowerOfTwoRestrictValue,
    RangeScaling,
    RangeSteps,
    RangeZeroPoint,
    RescalingIntQuant,
    RoundSte,
    RoundToOddSte,
    StochasticRoundSte,
)
from jqinject.core._protocols import has_zero_point
from jqinject.core.component import InnerModule
from jqinject.inject import Binding, ExtendedInjector, check_overrides, choices, value
from jqinject.ops.float8_cast import float8_dtype
from jqinject.ops.groups import checked_group_size

FLOAT8_NAMES = {"e4m3": np.dtype("float8_e4m3fn"), "e5m2": np.dtype("float8_e5m2")}
RANDOM_BITS = {"jax.uniform": 32, "custom-1": 16}
DEQUANT_MODES = ("output", "this_input", "other_input")
MAX_INT_BITS = 22


def checked_bits(bits: Any) -> Any:
    """The number of bits of integers, the dtype of 8-bit floats, or None.

    Raises:
        TypeError: `bits` is anything else.
        ValueError: integers of fewer than 2 bits, or of more than 22.
    """
    if isinstance(bits, int) and not isinstance(bits, bool):
        if not 2 <= bits <= MAX_INT_BITS:
            raise ValueError(
                f"bits must be from 2 to {MAX_INT_BITS}, got {bits}. One bit is a sign: BinaryQuant in a layer's "
                "weight_quant does that"
            )
        return bits
    if bits is None:
        return None
    if isinstance(bits, str | np.dtype) or isinstance(getattr(bits, "dtype", None), np.dtype):
        named = FLOAT8_NAMES.get(bits, bits) if isinstance(bits, str) else bits
        return float8_dtype(named, "bits")
    names = ", ".join(map(repr, FLOAT8_NAMES))
    raise TypeError(f"bits must be an int, one of {names}, an 8-bit float dtype, or None; got {bits!r:.80}")


def checked_rng_type(rng_type: Any) -> int | None:
    """How many random bits are used to round a number; None for nearest.

    Raises:
        ValueError: the noise is unknown.
    """
    if rng_type is None:
        return None
    if rng_type not in RANDOM_BITS:
        names = ", ".join(map(repr, RANDOM_BITS))
        raise ValueError(f"rng_type must be one of {names} or None, got {rng_type!r}")
    return RANDOM_BITS[rng_type]


class OperandProxy(InnerModule):
    """Quantizes an operand of a contraction, whose axes are `module.axes` in its injector.

    Attributes:
        binding: the injector.
        tensor_quant: what it assembles.
        contracts_payload: whether to contract the payload, if possible, instead of the dequantized value.
    """

    role = "operand"
    requires_quant_input = False
    scale_dtype = None
    has_whole_zero_points = True
    tensor_quant: Any

    def __init__(
        self,
        binding: Binding,
        layer: Any,
        *,
        offered: Mapping[str, Any],
        rngs: nnx.Rngs | None,
        where: tuple[str, str],
    ) -> None:
        handed = {"module": layer, **offered} if rngs is None else {"module": layer, "rngs": rngs, **offered}
        read = {"proxy_class", "dequant_mode", "signed", "narrow_range", "calibration_axes"}
        self.binding = binding
        self.tensor_quant = binding.resolve("tensor_quant", trace=read, **handed)
        mode = binding.resolve("dequant_mode", **handed)
        if mode not in DEQUANT_MODES:
            raise ValueError(
                f"{where[0]}: dequant_mode must be one of {', '.join(map(repr, DEQUANT_MODES))}; got {mode!r}"
            )
        self.contracts_payload = mode == "output"
        check_overrides(binding.injector, binding.overridden, read=read, given=handed, where=where[0])

    @property
    def has_zero_point(self) -> bool:
        """Whether its zero point may be nonzero."""
        return has_zero_point(self.tensor_quant)

    def has_range(self) -> bool | None:
        """None: the range is constant or computed from the operand."""
        return None

    def __call__(self, x: jax.Array) -> Any:
        """The operand as a QuantTensor, or as an array if its value is contracted."""
        quantizer = self.tensor_quant
        if quantizer is None:
            return x
        if not self.contracts_payload:
            return quantizer(x).value
        return quantizer.keeping_payload(x).quant_tensor(training=False)


class InRange(ExtendedInjector):
    """Signed integers, or the minifloats of `q_dtype`, in a range that `calibration_impl` finds."""

    scaling_impl = RangeScaling
    calibration_impl = AbsMaxRange
    averaging_impl = None
    int_quant = IntQuant
    int_scaling_impl = RangeSteps
    zero_point_impl = RangeZeroPoint
    bit_width_impl = BitWidthConst
    bit_width = 8
    signed = True
    narrow_range = False
    q_dtype = None
    group_size = None
    group_padding = False

    @choices(RescalingIntQuant, FloatQuant)
    def tensor_quant(q_dtype: Any) -> Any:
        """Integers without a `q_dtype`."""
        return RescalingIntQuant if q_dtype is None else FloatQuant

    @choices(Identity, DynamicOverSubChannelBlockView)
    def input_view_impl(group_size: Any) -> Any:
        """The view in groups, if there are any."""
        if group_size is None:
            return Identity
        checked_group_size(group_size, "a range for each group")
        return DynamicOverSubChannelBlockView


class OperandInjector(InRange):
    """One operand of one contraction, symmetric: `scale = calibration(x) / (2^(bits-1) - 0.5)`, never -2^(bits-1).

    | name | |
    |---|---|
    | `bits` | 2 to 22, `"e4m3"`, `"e5m2"`, an 8-bit float dtype, or None for no quantization |
    | `calibration` | the range: `AbsMaxRange` (`clipping_scale`), `FixedRange(-1.0, 1.0)`, `AbsMeanRange`, ... |
    | `po2_scale` | whether scales are rounded up to powers of two |
    | `preserve_zero` | whether 0 is representable; else the numbers are half-integers |
    | `preserve_max_val` | whether the range ends at the centre of the last bucket instead of its far edge |
    | `clip_gradient` | whether clipped numbers have gradient 0; scales have none |
    | `rng_type` | stochastic rounding: `"jax.uniform"`, `"custom-1"` (16 random bits), or None for nearest |
    | `noise_sharing_axes` | axes along which random numbers are shared |
    | `calibration_axes` | the axes that share a scale: those summed over ("contracting"), those only this operand has \
("remaining"), all ("tensor"), or a tuple |
    | `dequant_mode` | "output": payloads are contracted; "this_input", "other_input": their values are |

    Source: AQT's `Quantizer` and `Tensor`.

    Example:
        >>> from jqinject.dot import QDotGeneral, Scheme
        >>> op = QDotGeneral(Scheme.let(fprop_lhs=OperandInjector, fprop_rhs=OperandInjector.let(bits=4)))
        >>> op(jax.numpy.array([[3.0, 1.0]]), jax.numpy.array([[2.0], [1.0]]), (((1,), (0,)), ((), ())))
        Array([[6.632...]], dtype=float32)
    """

    proxy_class = OperandProxy
    bits = 8
    calibration = AbsMaxRange
    clipping_scale = None
    po2_scale = False
    preserve_zero = True
    preserve_max_val = False
    clip_gradient = False
    rng_type = None
    noise_sharing_axes = ()
    calibration_axes = "contracting"
    dequant_mode = "output"
    narrow_range = True
    scale_stop_grad = True
    restrict_value_float_to_int_impl = CeilSte
    calibration_impl = NonzeroRange
    factor = value(lambda clipping_scale: 1.0 if clipping_scale is None else clipping_scale)
    random_bits = value(checked_rng_type)

    @choices(RescalingIntQuant, FloatQuant)
    def tensor_quant(bits: Any) -> Any:
        """None for no quantization."""
        if checked_bits(bits) is None:
            return None
        return RescalingIntQuant if isinstance(bits, int) else FloatQuant

    @value
    def bit_width(bits: Any, preserve_zero: Any) -> int:
        """Bits of the integers; half-integers are counted in half steps."""
        return bits + (not preserve_zero) if isinstance(bits, int) else 8

    @value
    def q_dtype(bits: Any) -> Any:
        """The dtype of 8-bit floats."""
        return None if isinstance(bits, int) else checked_bits(bits)

    @value
    def range_steps(bits: Any, preserve_zero: Any, preserve_max_val: Any) -> float | None:
        """See `RangeSteps`."""
        if not isinstance(bits, int):
            return None
        steps = 2.0 ** (bits - 1) - 0.5 * bool(preserve_zero) - 0.5 * bool(preserve_max_val)
        return steps if preserve_zero else 2.0 * steps

    @choices(RoundSte, RoundToOddSte, StochasticRoundSte)
    def float_to_int_impl(bits: Any, preserve_zero: Any, rng_type: Any) -> Any:
        """To nearest, to half-integers, or at random."""
        if isinstance(bits, int) and not preserve_zero:
            return RoundToOddSte
        return RoundSte if checked_rng_type(rng_type) is None else StochasticRoundSte

    @choices(StochasticRoundSte)
    def halves_to_int_impl(rng_type: Any) -> Any:
        """Stochastic rounding to half-integers."""
        return None if checked_rng_type(rng_type) is None else StochasticRoundSte

    @choices(PowerOfTwoRestrictValue)
    def restrict_scaling_impl(po2_scale: Any) -> Any:
        """None for any scale."""
        return PowerOfTwoRestrictValue if po2_scale else None

    @value
    def shared_axes(module: Any, calibration_axes: Any) -> tuple[int, ...]:
        """Of the operand."""
        axes = module.axes
        named = {"contracting": axes.summed, "remaining": axes.free, "tensor": tuple(range(len(axes.shape)))}
        if isinstance(calibration_axes, str) and calibration_axes not in named:
            raise ValueError(
                f"calibration_axes must be one of {', '.join(map(repr, named))}, or a tuple of axes; got "
                f"{calibration_axes!r}"
            )
        return named[calibration_axes] if isinstance(calibration_axes, str) else tuple(calibration_axes)
