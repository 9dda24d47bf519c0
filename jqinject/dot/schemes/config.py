"""Ready-made configurations of quantized contractions, with the keywords that AQT's users know."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jqinject.dot.geometry.tiles import LocalAqt
from jqinject.dot.schemes.injectors import ContractionInjector, DotGeneralInjector, OperandInjector
from jqinject.dot.schemes.operand_ranges import AbsMaxCalibration, ConstantCalibration
from jqinject.inject import choices, this

Bits = int | str | None


class _Operand(OperandInjector):
    """What the six operands take from the configuration around them."""

    calibration = (this << 2).calibration
    clipping_scale = (this << 2).clipping_scale
    po2_scale = (this << 2).po2_scale
    clip_gradient = (this << 2).clip_gradient


class _Forward(ContractionInjector):
    """`y` of `lhs` and `rhs`."""

    accumulator_dtype = (this << 1).fwd_accumulator_dtype
    lhs = _Operand.let(bits=(this << 2).fwd_lhs_bits)
    rhs = _Operand.let(bits=(this << 2).fwd_rhs_bits)


class _BackwardLhs(ContractionInjector):
    """The gradient of `lhs`: of the cotangent and `rhs`."""

    accumulator_dtype = (this << 1).dlhs_accumulator_dtype
    local_aqt = (this << 1).dlhs_local_aqt
    lhs = _Operand.let(bits=(this << 2).dlhs_lhs_bits, rng_type=(this << 2).vjp_lhs_rng_type)
    rhs = _Operand.let(
        bits=(this << 2).dlhs_rhs_bits,
        rng_type=(this << 2).vjp_rhs_rng_type,
        use_fwd_quant=(this << 2).dlhs_use_fwd_quant,
    )


class _BackwardRhs(ContractionInjector):
    """The gradient of `rhs`: of the cotangent and `lhs`."""

    accumulator_dtype = (this << 1).drhs_accumulator_dtype
    local_aqt = (this << 1).drhs_local_aqt
    lhs = _Operand.let(bits=(this << 2).drhs_lhs_bits, rng_type=(this << 2).vjp_lhs_rng_type)
    rhs = _Operand.let(
        bits=(this << 2).drhs_rhs_bits,
        rng_type=(this << 2).vjp_rhs_rng_type,
        use_fwd_quant=(this << 2).drhs_use_fwd_quant,
    )


class ConfigV4(DotGeneralInjector):
    """What `config_v4` returns, with its defaults. Inherit from it, or use `let`, to override a name.

    `fwd_bits` sets both forward operands, `fwd_lhs_bits` and `fwd_rhs_bits` one of them; likewise `dlhs_...` and
    `drhs_...`, whose left operand is the gradient. `vjp_lhs_rng_type` is the noise of the gradients, `vjp_rhs_rng_type`
    that of the other operands in the backward pass. What is finer is in `forward`, `backward_lhs`, `backward_rhs`.

    Example:
        >>> class MyConfig(ConfigV4):
        ...     fwd_rhs_bits = 4
        >>> fwd = MyConfig.dot_general.fwd
        >>> fwd.lhs_quantizer.numerics.bits, fwd.rhs_quantizer.numerics.bits
        (8, 4)
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

    @choices(ConstantCalibration, AbsMaxCalibration)
    def calibration(use_dummy_static_bound: Any) -> Any:
        """Of every operand: its largest magnitude, or a bound of 1."""
        if not isinstance(use_dummy_static_bound, bool):
            raise TypeError(
                f"use_dummy_static_bound must be True or False, got {use_dummy_static_bound!r:.80}"
            )
        return ConstantCalibration if use_dummy_static_bound else AbsMaxCalibration

    forward = _Forward
    backward_lhs = _BackwardLhs
    backward_rhs = _BackwardRhs


def config_v4(
    *,
    fwd_bits: Bits = 8,
    dlhs_bits: Bits = 8,
    drhs_bits: Bits = None,
    use_dummy_static_bound: bool = False,
    rng_type: str | None = "jax.uniform",
    dlhs_local_aqt: LocalAqt | None = None,
    drhs_local_aqt: LocalAqt | None = None,
    fwd_accumulator_dtype: Any = jnp.int32,
    dlhs_accumulator_dtype: Any = jnp.int32,
    drhs_accumulator_dtype: Any = None,
) -> type[ConfigV4]:
    """A quantized contraction: symmetric, calibrated by the largest magnitude, the gradient rounded stochastically.

    Every operand of every contraction is scaled by `max|x| / (2^(bits-1) - 0.5)` over the axes that are summed over,
    clipped and rounded to nearest, 0 to 0; the scale has no gradient.

    Args:
        fwd_bits: of both operands of the forward contraction: at least 2, "e4m3", "e5m2", or None for float.
        dlhs_bits: of both operands of the contraction that gives the left gradient.
        drhs_bits: of both operands of the contraction that gives the right gradient (usually the weight's).
        use_dummy_static_bound: scale by a bound of 1 instead of the largest magnitude.
        rng_type: the noise of the gradients: "jax.uniform", "custom-1", or None to round them to nearest.
        dlhs_local_aqt, drhs_local_aqt: cut the summed axis of a gradient (the batch) into pieces with scales of their
            own.
        fwd_accumulator_dtype, dlhs_accumulator_dtype, drhs_accumulator_dtype: in which integers are summed; None means
            int32; not used where an operand is float.

    Returns:
        An injector: `config_v4().dot_general` is the `QuantizedDotGeneral`, `config_v4().let(name=...)` or a class that
        inherits from it overrides any of its names (see `ConfigV4`).

    Raises:
        ValueError: fewer than 2 bits, when it is assembled.
        TypeError: a name declared by `let` that nothing reads, when it is assembled.

    Differs from AQT and FJFormer: an accumulator of None for two integer operands means int32 (there, sums wrap around
    in int8), and int32 does not have to be taken back where `fwd_bits=None`.

    Example:
        >>> import jax
        >>> config = config_v4(fwd_bits=4, rng_type=None)
        >>> x = jnp.array([[1.0, -0.5]])
        >>> config.dot_general(x, x, (((1,), (1,)), ((), ())))
        Array([[1.155...]], dtype=float32)
    """
    return ConfigV4.let(
        fwd_bits=fwd_bits,
        dlhs_bits=dlhs_bits,
        drhs_bits=drhs_bits,
        use_dummy_static_bound=use_dummy_static_bound,
        rng_type=rng_type,
        dlhs_local_aqt=dlhs_local_aqt,
        drhs_local_aqt=drhs_local_aqt,
        fwd_accumulator_dtype=fwd_accumulator_dtype,
        dlhs_accumulator_dtype=dlhs_accumulator_dtype,
        drhs_accumulator_dtype=drhs_accumulator_dtype,
    )


def fully_quantized(
    *,
    fwd_bits: Bits = 8,
    bwd_bits: Bits = 8,
    use_fwd_quant: bool = True,
    use_stochastic_rounding: bool = True,
    use_dummy_static_bound: bool = False,
    dlhs_local_aqt: LocalAqt | None = None,
    drhs_local_aqt: LocalAqt | None = None,
) -> type[ConfigV4]:
    """All three contractions quantized, the backward ones on the numbers of the forward pass.

    Source: AQT's `fully_quantized`.

    Example:
        >>> fully_quantized().dot_general.drhs.rhs_quantizer.use_fwd_quant
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
        >>> config_fwd_fp8().dot_general.fwd.lhs_quantizer.numerics.bound
        448.0
    """
    return ConfigV4.let(fwd_bits=fwd_bits, dlhs_bits=None, drhs_bits=None, rng_type=None)
