"""Round to minifloats, and their codes.

Low-bit floats as unsigned integers, to keep them from the forward pass to the backward pass.

Under a rematerialisation policy that saves intermediate results, JAX rounds floats to the exponent and mantissa widths
of their dtype, by IEEE 754's rules. Formats that use codes which IEEE 754 reserves lose their largest numbers: 256 and
448 of `float8_e4m3fn` become nan, and so do 4 and 6 of `float4_e2m1fn`. Integers are left alone.

Rounds numbers to the grid of a minifloat, and converts them to its codes and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.ops.float_format import FloatFormat
from jqinject.ops.power import divide, exp2
from jqinject.ops.ste import with_gradient_of


def is_low_bit(dtype: Any) -> bool:
    """Whether it is a float dtype of fewer than 16 bits.

    Example:
        >>> is_low_bit(jnp.float8_e4m3fn), is_low_bit(jnp.float4_e2m1fn), is_low_bit(jnp.bfloat16), is_low_bit(jnp.int8)
        (True, True, False, False)
    """
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowBits:
    """A pytree whose low-bit floats are bit-cast to unsigned integers of the same width; made by `as_bits`.

    Attributes:
        tree: the pytree, with integers in place of low-bit floats.
        dtypes: the original dtypes of its leaves, None for unchanged ones.
    """

    tree: Any
    dtypes: tuple[np.dtype | None, ...] = field(metadata={"static": True})

    def floats(self) -> Any:
        """The original pytree."""
        leaves, structure = jax.tree.flatten(self.tree)
        back = [
            leaf if dtype is None else jax.lax.bitcast_convert_type(leaf, dtype)
            for leaf, dtype in zip(leaves, self.dtypes, strict=True)
        ]
        return jax.tree.unflatten(structure, back)


def as_bits(tree: Any) -> LowBits:
    """A pytree in a form that can be kept for a backward pass. No gradient.

    Args:
        tree: arrays; those that are not low-bit floats stay as they are.

    Returns:
        The pytree as `LowBits`; its `floats()` restores it.

    Example:
        >>> kept = as_bits((jnp.array([448.0], jnp.float8_e4m3fn), jnp.ones(2)))
        >>> kept.tree
        (Array([126], dtype=uint8), Array([1., 1.], dtype=float32))
        >>> kept.floats()[0]
        Array([448], dtype=float8_e4m3fn)
    """
    leaves, structure = jax.tree.flatten(tree)
    dtypes = tuple(np.dtype(leaf.dtype) if is_low_bit(leaf.dtype) else None for leaf in leaves)
    bits = [leaf if dtype is None else _bits(leaf, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
    return LowBits(jax.tree.unflatten(structure, bits), dtypes)


def _bits(x: jax.Array, dtype: np.dtype) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{jnp.finfo(dtype).bits}"))


_TINY = float(jnp.finfo(jnp.float32).tiny)
_INF_BITS = 0x7F800000
_LARGEST = float(jnp.finfo(jnp.float32).max)


@jax.custom_jvp
def _exponent(magnitude: jax.Array) -> jax.Array:
    return ((jax.lax.bitcast_convert_type(magnitude, jnp.int32) >> 23) - 127).astype(jnp.float32)


@_exponent.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return _exponent(*primals), tangents[0] / (primals[0] * math.log(2.0))


def exponent_of(x: jax.Array) -> jax.Array:
    """`floor(log2 |x|)`, exact, at least -126; the gradient is that of `log2 |x|`.

    Example:
        >>> exponent_of(jnp.array([8.0, 7.999999, -0.3, 0.0]))
        Array([   3.,    2.,   -2., -126.], dtype=float32)
    """
    magnitude = jnp.abs(x)
    return _exponent(jnp.where(magnitude > _TINY, magnitude, _TINY))


def float_step(x: jax.Array, mantissa_bit_width: Any, exponent_bias: Any) -> jax.Array:
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
    exponent = exponent_of(x) - mantissa_bit_width
    least = jnp.asarray(1.0 - exponent_bias - mantissa_bit_width, jnp.float32)
    return exp2(jnp.where(exponent < least, least, exponent))


def to_float_grid(
    x: jax.Array, mantissa_bit_width: Any, exponent_bias: Any, rounding: Callable[[jax.Array], jax.Array]
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
    known = jnp.where(finite, x, 0.0)
    step = float_step(known, mantissa_bit_width, exponent_bias)
    rounded = rounding(divide(known, step)) * step
    return jnp.where(finite, with_gradient_of(rounded, jnp.clip(rounded, -_LARGEST, _LARGEST)), x)


@jax.custom_jvp
def _float_steps(x: jax.Array, scale: jax.Array) -> jax.Array:
    steps = divide(x, scale)
    return jnp.where(jnp.isfinite(x), jnp.clip(steps, -_LARGEST, _LARGEST), steps)


@_float_steps.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (_, scale), (dx, dscale) = primals, tangents
    steps = _float_steps(*primals)
    return steps, (dx - steps * dscale) / scale


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
    return _float_steps(x, scale)


def from_float_steps(steps: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
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
    value = steps * scale
    largest = float(jnp.finfo(dtype).max)
    inside = jnp.where(jnp.isfinite(steps) & jnp.isfinite(scale), jnp.clip(value, -largest, largest), value)
    return with_gradient_of(value, inside).astype(dtype)


def to_float_codes(x: jax.Array, form: FloatFormat) -> jax.Array:
    """The codes of numbers of a minifloat: sign, exponent field and mantissa as one unsigned integer.

    nan takes its own code if the format has one, else that of negative 0, as in the FNUZ formats; inf takes its own
    code, else that of nan. A number that is not on the grid is rounded, and saturates.

    Args:
        x: float array; no gradient.
        form: the format.

    Returns:
        Unsigned integers of the narrowest dtype.

    Example:
        >>> to_float_codes(jnp.array([0.0, 1.0, -6.0, 0.5]), FloatFormat(2, 1))
        Array([ 0,  2, 15,  1], dtype=uint8)
    """
    x = jax.lax.stop_gradient(x).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    magnitude, sign = bits & jnp.uint32(2**31 - 1), bits >> 31
    codes = jnp.minimum(_nearest_code(magnitude, form), jnp.uint32(largest_code(form)))
    sign_bit = _sign_bit(form)
    codes = jnp.where(codes > 0, codes | sign * sign_bit, 0) if form.signed else jnp.where(sign > 0, 0, codes)
    special = special_codes(form)
    inf = jnp.uint32(special.nan if special.inf is None else special.inf)
    if form.signed and special.inf is not None:
        inf = inf | sign * sign_bit
    codes = jnp.where(magnitude == _INF_BITS, inf, codes)
    return jnp.where(magnitude > _INF_BITS, jnp.uint32(special.nan), codes).astype(form.code_dtype)


def _nearest_code(magnitude: jax.Array, form: FloatFormat) -> jax.Array:
    """The codes of the nearest magnitudes, ties to even, in a format without a largest number.

    Args:
        magnitude: the bits of float32 numbers without their signs.
        form: the format.
    """
    mantissa, bias = form.mantissa_bit_width, form.bias
    dropped = 23 - mantissa
    # The implicit bit of a format without a mantissa is odd.
    odd = (magnitude >> dropped) & 1 if mantissa else jnp.uint32(1)
    normal = (magnitude + jnp.uint32(2 ** (dropped - 1) - 1) + odd) >> dropped
    steps = jax.lax.bitcast_convert_type(magnitude, jnp.float32) * np.float32(1 / form.smallest_subnormal)
    least_normal = np.float32(2.0 ** (1 - bias)).view(np.uint32)
    subnormal = jnp.round(jnp.where(magnitude < least_normal, steps, 0.0)).astype(jnp.uint32)
    return jnp.where(magnitude < least_normal, subnormal, normal - jnp.uint32(127 - bias << mantissa))


def payload_of(x: jax.Array, form: FloatFormat) -> jax.Array:
    """Numbers of a minifloat in its `payload_dtype`: a float dtype that backends convert to, else codes.

    Args:
        x: numbers of the format, float32; no gradient.
        form: the format.

    Example:
        >>> payload_of(jnp.array([3.0]), FloatFormat.of_dtype(jnp.float8_e4m3fn))
        Array([3], dtype=float8_e4m3fn)
    """
    dtype = form.payload_dtype
    x = jax.lax.stop_gradient(x)
    return to_float_codes(x, form) if jnp.issubdtype(dtype, jnp.integer) else x.astype(dtype)


def from_float_codes(codes: jax.Array, form: FloatFormat) -> jax.Array:
    """The numbers that codes stand for, float32; the inverse of `to_float_codes`.

    Args:
        codes: unsigned integers.
        form: the format.

    Example:
        >>> from_float_codes(jnp.array([0, 2, 15, 1], jnp.uint8), FloatFormat(2, 1))
        Array([ 0. ,  1. , -6. ,  0.5], dtype=float32)
    """
    wide = codes.astype(jnp.uint32)
    mantissa, bias = form.mantissa_bit_width, form.bias
    magnitude = wide & jnp.uint32(_sign_bit(form) - 1)
    normal = (magnitude << (23 - mantissa)) + jnp.uint32(127 - bias << 23)
    if 2**form.exponent_bit_width - 1 - bias > 127:
        normal = jnp.where(magnitude >> mantissa > 127 + bias, jnp.uint32(_INF_BITS), normal)
    subnormal = magnitude.astype(jnp.float32) * np.float32(form.smallest_subnormal)
    is_normal = magnitude >= 2**mantissa
    value = jnp.where(is_normal, jax.lax.bitcast_convert_type(normal, jnp.float32), subnormal)
    special = special_codes(form)
    if special.inf is not None:
        value = jnp.where(magnitude == special.inf, jnp.inf, value)
    if form.signed:
        value = jnp.where(wide & jnp.uint32(_sign_bit(form)) > 0, -value, value)
    return jnp.where(_means_nan(wide, magnitude, special, form), jnp.nan, value)


class SpecialCodes(NamedTuple):
    """The codes, without a sign, that are not numbers.

    Attributes:
        nan: the code of nan; that of negative 0 if the format has no other.
        inf: the code of inf; None if it is stored as nan.
        least: the least magnitude above the numbers.
    """

    nan: int
    inf: int | None
    least: int


def largest_code(form: FloatFormat) -> int:
    """The code of the largest number of a format.

    Example:
        >>> largest_code(FloatFormat(2, 1))
        7
    """
    mantissa, exponent = math.frexp(form.max_value)
    fraction = int((2 * mantissa - 1) * 2**form.mantissa_bit_width)
    return (exponent - 1 + form.bias << form.mantissa_bit_width) + fraction


def special_codes(form: FloatFormat) -> SpecialCodes:
    """The codes of a format that are not numbers."""
    top = (2**form.exponent_bit_width - 1) << form.mantissa_bit_width
    largest = largest_code(form)
    # If a number has the same code, the code means the number.
    infs = [top + int(code, 2) for code in form.inf_values or () if top + int(code, 2) > largest]
    nans = [top + int(code, 2) for code in form.nan_values or () if top + int(code, 2) > largest]
    return SpecialCodes(nans[0] if nans else _sign_bit(form), infs[0] if infs else None, largest + 1)


def _means_nan(wide: jax.Array, magnitude: jax.Array, special: SpecialCodes, form: FloatFormat) -> jax.Array:
    if special.nan == _sign_bit(form):
        return (wide == special.nan) if form.signed else jnp.zeros(wide.shape, bool)
    above = magnitude >= special.least
    return above if special.inf is None else above & (magnitude != special.inf)


def _sign_bit(form: FloatFormat) -> int:
    return 1 << (form.exponent_bit_width + form.mantissa_bit_width)
