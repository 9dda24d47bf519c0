"""Numbers of minifloats: their spacing, their range and rounding to them, for any bit widths."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jqinject.ops.lean import Bits
from jqinject.ops.power import divide, exp2, integer_power, log2, power
from jqinject.ops.ste import Primals, Tangents, custom_jvp, with_gradient_of

_TINY = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)


def exponent_of(x: jax.Array) -> jax.Array:
    """`floor(log2 |x|)`, exact, at least -126; the gradient is that of `log2 |x|`.

    Example:
        >>> exponent_of(jnp.array([8.0, 7.999999, -0.3, 0.0]))
        Array([   3.,    2.,   -2., -126.], dtype=float32)
    """
    magnitude = jnp.abs(x)
    normal = jnp.where(magnitude > _TINY, magnitude, _TINY)
    exponent = (jax.lax.bitcast_convert_type(normal, jnp.int32) >> 23) - 127
    return with_gradient_of(log2(normal), exponent.astype(jnp.float32))


def float_step(x: jax.Array, mantissa_bit_width: Bits, exponent_bias: Any) -> jax.Array:
    """The distance between adjacent numbers of a minifloat at `x`: `2**(max(floor(log2 |x|), 1 - bias) - m)`.

    Args:
        x: float32 array, finite.
        mantissa_bit_width: m, a number or a float32 array.
        exponent_bias: likewise.

    Returns:
        A float32 array, exact powers of two if the widths are whole numbers.

    Example:
        >>> float_step(jnp.array([17.0, 15.0, 1.0, 0.0]), 3, 7).tolist()
        [2.0, 1.0, 0.125, 0.001953125]
    """
    if isinstance(mantissa_bit_width, int) and isinstance(exponent_bias, int):
        return _constant_step(mantissa_bit_width, exponent_bias, x)
    exponent = exponent_of(x) - mantissa_bit_width
    least = jnp.asarray(1.0 - exponent_bias - mantissa_bit_width, jnp.float32)
    return exp2(jnp.where(exponent < least, least, exponent))


@custom_jvp(0, 1)
def _constant_step(mantissa: int, bias: int, x: jax.Array) -> jax.Array:
    """`float_step` of constant widths, by exponent bits."""
    exponent = (jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32) >> 23) - 127
    return integer_power(jnp.maximum(exponent, 1 - bias) - mantissa)


@_constant_step.defjvp
def _(mantissa: int, bias: int, primals: Primals, tangents: Tangents) -> tuple[jax.Array, jax.Array]:
    (x,), step = primals, _constant_step(mantissa, bias, *primals)
    growing = jnp.where(jnp.abs(x) < 2.0 ** (1 - bias), jnp.inf, x)
    return step, step * math.log(2.0) * (tangents[0] / (growing * math.log(2.0)))


def to_float_grid(
    x: jax.Array, mantissa_bit_width: Bits, exponent_bias: object, rounding: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """The nearest numbers of a minifloat with unbounded range: `u * rounding(x / u)`, `u = float_step(x)`.

    With straight-through rounding the derivative is `y / x` where `x` is normal (the step grows with `x`) and 1 where
    it is subnormal, as in Brevitas. Non-finite numbers are unchanged, and finite numbers stay finite: if the nearest
    number is 2**128, it becomes the largest float32, which a later clamp cuts off.

    Args:
        x: float32 array.
        mantissa_bit_width: a number or a float32 array.
        exponent_bias: likewise.
        rounding: to whole numbers.

    Returns:
        A float32 array of the shape of `x`.

    Source: Brevitas, `core.quant.float`.

    Example:
        >>> to_float_grid(jnp.array([17.1, 0.3, -1e3]), 3, 7, jnp.round).tolist()
        [18.0, 0.3125, -1024.0]
    """
    finite = jnp.isfinite(x)
    finite_x = jnp.where(finite, x, 0.0)
    step = float_step(finite_x, mantissa_bit_width, exponent_bias)
    rounded = rounding(divide(finite_x, step)) * step
    return jnp.where(finite, with_gradient_of(rounded, jnp.clip(rounded, -_LARGEST, _LARGEST)), x)


@jax.custom_jvp
def float_steps(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`x / scale` for a minifloat; finite numbers stay finite: one that is too large saturates, an infinity does not.

    Args:
        x: a float32 array.
        scale: float32, broadcasts with `x`, not 0.

    Returns:
        The quotient, float32.

    Example:
        >>> float_steps(jnp.array([3e38, jnp.inf]), jnp.float32(1e-3)).tolist()
        [3.4028234663852886e+38, inf]
    """
    steps = divide(x, scale)
    return jnp.where(jnp.isfinite(x), jnp.clip(steps, -_LARGEST, _LARGEST), steps)


@float_steps.defjvp
def _(primals: Primals, tangents: Tangents) -> tuple[jax.Array, jax.Array]:
    (_, scale), (dx, dscale) = primals, tangents
    steps = float_steps(*primals)
    return steps, (dx - steps * dscale) / scale


def from_float_steps(steps: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`steps * scale`, computed in float32; finite numbers stay finite.

    If a format's largest number times its scale, or a number that was rounded up, exceeds the range of `dtype`, it
    becomes the largest number of `dtype`.

    Args:
        steps: numbers of a minifloat, float32.
        scale: float32, broadcasts with `steps`.
        dtype: of the result.

    Example:
        >>> from_float_steps(jnp.array([65536.0, jnp.inf]), jnp.float32(1), jnp.float16).tolist()
        [65504.0, inf]
    """
    return in_range_of(steps, scale, dtype).astype(dtype)


def in_range_of(steps: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`steps * scale`, float32, with finite numbers within the range of `dtype`: `from_float_steps` before its cast.

    Args:
        steps, scale, dtype: as for `from_float_steps`.

    Example:
        >>> in_range_of(jnp.array([65536.0, 3.0]), jnp.float32(1), jnp.float16).tolist()
        [65504.0, 3.0]
    """
    value, largest = steps * scale, float(jnp.finfo(dtype).max)
    inside = jnp.where(jnp.isfinite(steps) & jnp.isfinite(scale), jnp.clip(value, -largest, largest), value)
    return with_gradient_of(value, inside)


def max_mantissa(mantissa_bit_width: Bits) -> Any:
    """The largest mantissa of a bit width, including the implicit 1: `2 - 2**-m`.

    Example:
        >>> max_mantissa(3), max_mantissa(0)
        (1.875, 1.0)
    """
    return 2.0 - power(-mantissa_bit_width)


def max_float(
    exponent_bit_width: Any, max_mantissa: Any, exponent_bias: Any, max_available_float: float | None = None
) -> Any:
    """The largest number of a minifloat: `max_mantissa * 2**(2**e - 1 - bias)`, at most `max_available_float`.

    Args:
        exponent_bit_width: e.
        max_mantissa: the largest mantissa, including the implicit 1; see `ops.max_mantissa`.
        exponent_bias: subtracted from the exponent field.
        max_available_float: the largest number; None if all codes are numbers.

    Returns:
        A Python float if all are Python numbers, else a float32 array, differentiable.

    Example:
        >>> max_float(4, 1.875, 7), max_float(2, 1.5, 1)
        (480.0, 6.0)
    """
    end = math.inf if max_available_float is None else max_available_float
    if all(isinstance(width, int | float) for width in (exponent_bit_width, max_mantissa, exponent_bias)):
        exponent = 2**exponent_bit_width - 1 - int(exponent_bias)
        return min(math.ldexp(max_mantissa, exponent) if exponent < 1024 else math.inf, end)
    largest = max_mantissa * exp2(power(exponent_bit_width) - 1.0 - exponent_bias)
    return largest if max_available_float is None else jnp.minimum(largest, end)


def max_available_float(
    exponent_bit_width: int,
    mantissa_bit_width: int,
    exponent_bias: int,
    nan_values: tuple[str, ...] | None,
    inf_values: tuple[str, ...] | None,
    saturating: bool = True,
) -> float:
    """The largest number below the codes for inf and nan: the one before the least of them.

    Args:
        exponent_bit_width: of the format.
        mantissa_bit_width: of the format.
        exponent_bias: of the format.
        nan_values: mantissas, in binary, that mean nan together with the largest exponent; None for no nan.
        inf_values: likewise for inf.
        saturating: whether numbers that are too large become the largest.

    Returns:
        The number.

    Raises:
        ValueError: a code is not a mantissa; inf without nan; neither, and not saturating.

    Example:
        >>> max_available_float(4, 3, 7, ("111",), None), max_available_float(5, 2, 15, ("01", "10", "11"), ("00",))
        (448.0, 57344.0)
    """
    check_codes(mantissa_bit_width, inf_values, nan_values, saturating)
    codes = [int(code, 2) for code in (*(nan_values or ()), *(inf_values or ()))]
    steps = 2**mantissa_bit_width
    last = (2**exponent_bit_width - 1) * steps + min(codes, default=steps) - 1
    field, fraction = divmod(last, steps)
    return math.ldexp(steps + fraction, field - exponent_bias - mantissa_bit_width)


def check_codes(
    mantissa_bit_width: object,
    inf_values: tuple[str, ...] | None,
    nan_values: tuple[str, ...] | None,
    saturating: bool,
) -> None:
    """Refuse codes for inf and nan that no format has.

    Raises:
        ValueError: see `max_available_float`.
    """
    for name, codes in (("inf_values", inf_values), ("nan_values", nan_values)):
        for code in codes or ():
            if not (isinstance(code, str) and code and set(code) <= {"0", "1"}):
                raise ValueError(f"{name}: a code is a text of 0s and 1s such as '111', got {code!r}")
            if isinstance(mantissa_bit_width, int) and len(code) != mantissa_bit_width:
                raise ValueError(
                    f"{name}: the code {code!r} has {len(code)} bits, the mantissa has {mantissa_bit_width}.\n"
                    "  cure: write all bits of the mantissa, no more"
                )
    if inf_values is not None and nan_values is None:
        raise ValueError("a format with codes for inf has some for nan too.\n  cure: declare nan_values")
    if not saturating and nan_values is None:
        raise ValueError(
            "saturating = False, and the format has neither inf nor nan that a number which is too large could become."
            "\n  cure: saturating = True, or declare nan_values (and inf_values)"
        )


def flag(value: object, where: str, name: str) -> bool:
    """Return a boolean as a Python bool.

    Raises:
        TypeError: it is something else, 0, 1 and None included.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(
            f"{where}: {name} must be True or False, got {value!r} of type {type(value).__name__}. "
            f"Write {name} = True or {name} = False."
        )
    return bool(value)


def checked_width(name: str, width: object, least: int, most: int) -> None:
    """Refuse a bit width that no minifloat has.

    Raises:
        TypeError: it is not an int.
        ValueError: it is out of range.
    """
    if isinstance(width, bool) or not isinstance(width, int | np.integer):
        raise TypeError(f"{name} must be an int, got {width!r}")
    if not least <= width <= most:
        raise ValueError(f"{name} must be in {least} .. {most}, got {width}")


MOST_EXPONENT_BITS = 8
MOST_MANTISSA_BITS = 22  # float32 must also hold the implicit bit and the rounding bit
