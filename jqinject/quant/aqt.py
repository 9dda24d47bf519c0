"""AQT's vocabulary: `OperandInjector`, the quantizer of one operand, and ready-made schemes with AQT's keywords."""

import inspect
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jqinject import core, dot, proxy
from jqinject.core import check
from jqinject.inject import choices, this, value
from jqinject.ops.float8_cast import float8_dtype
from jqinject.quant.fragments import InRange

FLOAT8_NAMES = {"e4m3": np.dtype("float8_e4m3fn"), "e5m2": np.dtype("float8_e5m2")}
RANDOM_BITS = {"jax.uniform": 32, "custom-1": 16, "bits-8": 8}
_OF_NOISE = check.among((*RANDOM_BITS, None), "one of 'jax.uniform', 'custom-1', 'bits-8' or None")
MAX_INT_BITS = 22


def checked_bits(bits: object) -> Any:
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


def checked_rng_type(rng_type: str | None) -> int | None:
    """How many random bits are used to round a number; None for nearest.

    Raises:
        ValueError: the noise is unknown.
    """
    return RANDOM_BITS.get(_OF_NOISE(rng_type, "an operand", "rng_type"))


@choices(core.PowerOfTwoRestrictValue)
def scale_restriction(po2_scale: object) -> Any:
    """`restrict_scaling_impl`; None for any scale."""
    return core.PowerOfTwoRestrictValue if po2_scale else None


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
    | `averaging_impl` | `SimpleMovingAverage` for a static range, one for the tensor, averaged in training; None |
    | `rng_type` | stochastic rounding: `"jax.uniform"`, `"custom-1"` (16 bits), `"bits-8"`, or None for nearest |
    | `noise_sharing_axes` | axes along which random numbers are shared |
    | `calibration_axes` | the axes that share a scale: those summed over ("contracting"), those only this operand has \
("remaining"), all ("tensor"), or a tuple |
    | `dequant_mode` | "output": payloads are contracted; "this_input", "other_input": their values are |

    Source: AQT's `Quantizer` and `Tensor`.

    Example:
        >>> from jqinject.dot import QDotGeneral, Scheme
        >>> op = QDotGeneral(Scheme.let(fprop_lhs=OperandInjector, fprop_rhs=OperandInjector.let(bits=4)))
        >>> op(jnp.array([[3.0, 1.0]]), jnp.array([[2.0], [1.0]]), (((1,), (0,)), ((), ())))
        Array([[6.632...]], dtype=float32)
    """

    proxy_class = proxy.OperandQuantProxyFromInjector
    bits = 8
    calibration = core.AbsMaxRange
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
    restrict_value_float_to_int_impl = core.CeilSte
    calibration_impl = core.NonzeroRange
    factor = value(lambda clipping_scale: 1.0 if clipping_scale is None else clipping_scale)
    random_bits = value(checked_rng_type)

    @choices(core.RescalingIntQuant, core.FloatQuant)
    def tensor_quant(bits: object) -> Any:
        """None for no quantization."""
        if checked_bits(bits) is None:
            return None
        return core.RescalingIntQuant if isinstance(bits, int) else core.FloatQuant

    @value
    def bit_width(bits: object, preserve_zero: bool) -> int:
        """Bits of the integers; half-integers are counted in half steps."""
        return bits + (not preserve_zero) if isinstance(bits, int) else 8

    @value
    def q_dtype(bits: object) -> Any:
        """The dtype of 8-bit floats."""
        return None if isinstance(bits, int) else checked_bits(bits)

    @value
    def range_steps(bits: object, preserve_zero: bool, preserve_max_val: bool) -> float | None:
        """See `RangeSteps`."""
        if not isinstance(bits, int):
            return None
        steps = 2.0 ** (bits - 1) - 0.5 * bool(preserve_zero) - 0.5 * bool(preserve_max_val)
        return steps if preserve_zero else 2.0 * steps

    @choices(core.RoundSte, core.RoundToOddSte, core.StochasticRoundSte)
    def float_to_int_impl(bits: object, preserve_zero: bool, rng_type: str | None) -> Any:
        """To nearest, to half-integers, or at random."""
        if isinstance(bits, int) and not preserve_zero:
            return core.RoundToOddSte
        return core.RoundSte if checked_rng_type(rng_type) is None else core.StochasticRoundSte

    @choices(core.StochasticRoundSte)
    def halves_to_int_impl(rng_type: Any) -> Any:
        """Stochastic rounding to half-integers."""
        return None if checked_rng_type(rng_type) is None else core.StochasticRoundSte

    restrict_scaling_impl = scale_restriction

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


Bits = int | str | None

_Operand = OperandInjector.let(
    calibration=(this << 1).calibration,
    restrict_scaling_impl=(this << 1).restrict_scaling_impl,
    clip_gradient=(this << 1).clip_gradient,
)


def _checked_operand(name: str, *noise: str) -> Any:
    """Return the `@value` function of an operand of a configuration: None for float; checked when it is read.

    Args:
        name: of the operand; its bits are under `NAME_bits`.
        noise: the name of its random noise, if it may be rounded stochastically.
    """

    def quantized(**names: Any) -> Any:
        for key in noise:
            checked_rng_type(names[key])
        operand, bits = names[name], names[f"{name}_bits"]
        bits = operand.bits if "bits" in operand else bits
        return None if checked_bits(bits) is None else operand

    keys = (f"{name}_bits", name, *noise)
    arguments = [inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY) for key in keys]
    vars(quantized)["__signature__"] = inspect.Signature(arguments)
    return value(quantized)


class ConfigV4(dot.Scheme):
    """What `config_v4` returns, with its defaults. Inherit from it, or use `let`, to override a name.

    `fwd_bits` sets both forward operands, `fwd_lhs_bits` and `fwd_rhs_bits` one of them; likewise `dlhs_...` and
    `drhs_...`, whose left operand is the gradient. `vjp_lhs_rng_type` is the noise of the gradients, `vjp_rhs_rng_type`
    that of the other operands in the backward pass. `fwd_lhs` to `drhs_rhs` are the six operands: override their names,
    `ConfigV4.let(fwd_lhs=ConfigV4.fwd_lhs.let(preserve_zero=False))`, or give the scheme's operand another quantizer,
    `ConfigV4.let(fprop_rhs=Int4WeightPerGroupAbsMax)`. An operand whose `bits` are None is float; what else is
    overridden of it counts once it has bits, as in AQT, whose setters go over all six.

    Example:
        >>> class MyConfig(ConfigV4):
        ...     fwd_rhs_bits = 4
        >>> from jqinject.dot import QDotGeneral
        >>> x, w = jnp.ones((2, 8)), jnp.ones((8, 4))
        >>> print(QDotGeneral(MyConfig.let(rng_type=None)).explain(x, w, (((1,), (0,)), ((), ()))))
        fprop: integers of 8 bits x integers of 4 bits -> int
        dgrad: integers of 8 bits x integers of 8 bits -> int
        wgrad: an array of float32 x an array of float32 -> float
    """

    fwd_bits = 8
    dlhs_bits = 8
    drhs_bits = None
    fwd_lhs_bits = this.fwd_bits
    fwd_rhs_bits = this.fwd_bits
    dlhs_lhs_bits = this.dlhs_bits
    dlhs_rhs_bits = this.dlhs_bits
    drhs_lhs_bits = this.drhs_bits
    drhs_rhs_bits = this.drhs_bits
    use_dummy_static_bound = False
    clipping_scale = None
    po2_scale = False
    clip_gradient = False
    rng_type = "jax.uniform"
    vjp_lhs_rng_type = this.rng_type
    vjp_rhs_rng_type = None
    dlhs_use_fwd_quant = False
    drhs_use_fwd_quant = False
    dlhs_local_aqt = None
    drhs_local_aqt = None
    fwd_accumulator_dtype = jnp.int32
    dlhs_accumulator_dtype = jnp.int32
    drhs_accumulator_dtype = None

    @choices(core.FixedRange, core.AbsMaxRange)
    def calibration(use_dummy_static_bound: object) -> Any:
        """For every operand: its largest magnitude, or a bound of 1."""
        fixed = check.flag(use_dummy_static_bound, "ConfigV4", "use_dummy_static_bound")
        return core.FixedRange if fixed else core.AbsMaxRange

    low, high = -1.0, 1.0
    factor = value(lambda clipping_scale: 1.0 if clipping_scale is None else clipping_scale)

    restrict_scaling_impl = scale_restriction
    restrict_value_float_to_int_impl = core.CeilSte

    fwd_lhs = _Operand.let(bits=(this << 1).fwd_lhs_bits)
    fwd_rhs = _Operand.let(bits=(this << 1).fwd_rhs_bits)
    dlhs_lhs = _Operand.let(bits=(this << 1).dlhs_lhs_bits, rng_type=(this << 1).vjp_lhs_rng_type)
    dlhs_rhs = _Operand.let(bits=(this << 1).dlhs_rhs_bits, rng_type=(this << 1).vjp_rhs_rng_type)
    drhs_lhs = _Operand.let(bits=(this << 1).drhs_lhs_bits, rng_type=(this << 1).vjp_lhs_rng_type)
    drhs_rhs = _Operand.let(bits=(this << 1).drhs_rhs_bits, rng_type=(this << 1).vjp_rhs_rng_type)

    fprop_lhs = _checked_operand("fwd_lhs")
    fprop_rhs = _checked_operand("fwd_rhs")
    dgrad_grad = _checked_operand("dlhs_lhs", "vjp_lhs_rng_type")
    dgrad_rhs = _checked_operand("dlhs_rhs", "vjp_rhs_rng_type")
    wgrad_grad = _checked_operand("drhs_lhs", "vjp_lhs_rng_type")
    wgrad_lhs = _checked_operand("drhs_rhs", "vjp_rhs_rng_type")
    accumulator_dtype = this.fwd_accumulator_dtype
    dgrad_accumulator_dtype = this.dlhs_accumulator_dtype
    wgrad_accumulator_dtype = this.drhs_accumulator_dtype
    dgrad_tile_size = this.dlhs_local_aqt
    wgrad_tile_size = this.drhs_local_aqt
    dgrad_use_fwd_quant = this.dlhs_use_fwd_quant
    wgrad_use_fwd_quant = this.drhs_use_fwd_quant
    conv_gradients = False


def config_v4(
    *,
    fwd_bits: Bits = 8,
    dlhs_bits: Bits = 8,
    drhs_bits: Bits = None,
    use_dummy_static_bound: bool = False,
    rng_type: str | None = "jax.uniform",
    dlhs_local_aqt: dot.LocalAqt | None = None,
    drhs_local_aqt: dot.LocalAqt | None = None,
    fwd_accumulator_dtype: DTypeLike | None = jnp.int32,
    dlhs_accumulator_dtype: DTypeLike | None = jnp.int32,
    drhs_accumulator_dtype: DTypeLike | None = None,
) -> type[ConfigV4]:
    """A quantized contraction: symmetric, calibrated by the largest magnitude, the gradient rounded stochastically.

    Every operand of every contraction is scaled by `max|x| / (2^(bits-1) - 0.5)` over the summed axes, clipped and
    rounded to nearest, 0 to 0; the scale has no gradient.

    Args:
        fwd_bits: of both operands of the forward contraction: at least 2, "e4m3", "e5m2", or None for float.
        dlhs_bits: of both operands of the contraction that gives the left gradient.
        drhs_bits: of both operands of the contraction that gives the right gradient (usually the weight's).
        use_dummy_static_bound: scale by a bound of 1 instead of the largest magnitude.
        rng_type: the noise of the gradients: "jax.uniform", "custom-1" (16 random bits), "bits-8" (which AQT lacks), or
            None to round them to nearest.
        dlhs_local_aqt, drhs_local_aqt: cut the summed axis of a gradient (the batch) into pieces with their own scales.
        fwd_accumulator_dtype, dlhs_accumulator_dtype, drhs_accumulator_dtype: dtype of integer sums; None means int32;
            unused if an operand is float.

    Returns:
        A `Scheme`: `config_v4().let(name=...)` or a class that inherits from it overrides any of its names (see
        `ConfigV4`).

    Raises:
        ValueError: (when used) fewer than 2 bits.
        TypeError: (when used) a name declared by `let` that nothing reads.

    Differs from AQT and FJFormer: an accumulator of None for two integer operands means int32 (there, sums wrap around
    in int8), and `fwd_bits=None` does not require resetting int32.

    Example:
        >>> from jqinject.dot import dot_general
        >>> x = jnp.array([[1.0, -0.5]])
        >>> dot_general(x, x, (((1,), (1,)), ((), ())), config=config_v4(fwd_bits=4, rng_type=None))
        Array([[1.155...]], dtype=float32)
    """
    return ConfigV4.let(**locals())


def fully_quantized(
    *,
    fwd_bits: Bits = 8,
    bwd_bits: Bits = 8,
    use_fwd_quant: bool = True,
    use_stochastic_rounding: bool = True,
    use_dummy_static_bound: bool = False,
    dlhs_local_aqt: dot.LocalAqt | None = None,
    drhs_local_aqt: dot.LocalAqt | None = None,
) -> type[ConfigV4]:
    """All three contractions quantized, the backward ones reusing the forward pass's numbers.

    Source: AQT's `fully_quantized`.

    Example:
        >>> fully_quantized().wgrad_use_fwd_quant
        True
    """
    noise = "jax.uniform" if use_stochastic_rounding else None
    return ConfigV4.let(
        fwd_bits=fwd_bits,
        dlhs_bits=bwd_bits,
        drhs_bits=bwd_bits,
        dlhs_use_fwd_quant=use_fwd_quant,
        drhs_use_fwd_quant=use_fwd_quant,
        rng_type=noise,
        vjp_rhs_rng_type=noise,
        use_dummy_static_bound=use_dummy_static_bound,
        dlhs_local_aqt=dlhs_local_aqt,
        drhs_local_aqt=drhs_local_aqt,
    )


def config_fwd_fp8(fwd_bits: Bits = "e4m3") -> type[ConfigV4]:
    """The forward contraction in 8-bit floats, the backward ones in float.

    Source: AQT's `config_fwd_fp8`.

    Example:
        >>> config_fwd_fp8().fwd_lhs_bits, config_fwd_fp8().dgrad_grad
        ('e4m3', None)
    """
    return ConfigV4.let(fwd_bits=fwd_bits, dlhs_bits=None, drhs_bits=None, rng_type=None)
