"""Quantizers to integers, to two and to three values.

Integer quantization whose scale, zero point and bit width come from components.

Quantization to two values.

Quantization to three values.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import check
from jqinject.core._protocols import (
    BitWidth,
    Clamp,
    IntQuantizer,
    IntScalingImpl,
    Scaling,
    Settles,
    ZeroPoint,
    class_fact,
    groups_of,
    has_zero_point,
    is_nearest,
    scale_dtype,
    searches,
)
from jqinject.core.checked_arguments import checked_arguments
from jqinject.core.clamp import TensorClamp
from jqinject.core.component import Component, assign, set_given
from jqinject.core.quantizers.int_quant import (
    DelayWrapper,
    IntQuant,
    QuantResult,
    ResultWithPayload,
    delay_of,
)
from jqinject.core.statistics.search import Candidate, Search, scale_of, zero_point_of
from jqinject.ops.fake_quant import known_zero
from jqinject.ops.grid import IntGrid, TableGrid
from jqinject.ops.ste import binary_sign_ste, ternary_sign_ste


@lru_cache(maxsize=1024)
def _constant(bit_width: BitWidth) -> Any:
    """The bit width of a constant component."""
    return bit_width()


@lru_cache(maxsize=1024)
def _constants(bit_width: BitWidth, steps: IntScalingImpl) -> tuple[Any, Any]:
    """Bit width and integer steps of constant components."""
    bits = bit_width()
    return bits, steps(bits)


@checked_arguments
class RescalingIntQuant(Component):
    """Integer quantization whose scale, zero point and bit width come from components.

    `b = bit_width_impl()`, `s = scaling_impl(x, int_scaling_impl(b))`, `z = zero_point_impl(x, s, b)`,
    `y = int_quant(s, z, b, x)`.

    A tensor of zeros is quantized to zeros, with a finite scale greater than 0.

    Args:
        int_quant: to integers and back, `IntQuant`.
        scaling_impl: the scale.
        int_scaling_impl: how many integer steps the scaled value spans.
        zero_point_impl: the zero point.
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

    int_quant: IntQuantizer
    scaling_impl: Scaling
    int_scaling_impl: IntScalingImpl
    zero_point_impl: ZeroPoint
    bit_width_impl: BitWidth
    searches: bool = False

    def __init__(
        self,
        int_quant: IntQuantizer,
        scaling_impl: Scaling,
        int_scaling_impl: IntScalingImpl,
        zero_point_impl: ZeroPoint,
        bit_width_impl: BitWidth,
    ) -> None:
        assign(
            self,
            int_quant=int_quant,
            scaling_impl=scaling_impl,
            int_scaling_impl=int_scaling_impl,
            zero_point_impl=zero_point_impl,
            bit_width_impl=bit_width_impl,
        )
        set_given(self, searches=searches(scaling_impl) or searches(zero_point_impl))

    @property
    def has_zero_point(self) -> bool:
        """See `zero_point_impl`."""
        return has_zero_point(self.zero_point_impl)

    @property
    def scale_dtype(self) -> np.dtype | None:
        """The `scale_dtype` of the scaling."""
        return scale_dtype(self.scaling_impl)

    @property
    def groups(self) -> tuple[int, int] | None:
        """The groups of `int_quant`."""
        return groups_of(self.int_quant)

    @property
    def is_nearest(self) -> bool:
        """See `int_quant`."""
        return is_nearest(self.int_quant)

    def __call__(self, x: jax.Array) -> QuantResult:
        """`x` quantized; scale and zero point float32."""
        return self._quantized(x, keep=False)

    def keeping_payload(self, x: jax.Array) -> QuantResult:
        """Like a call; the result also has the integers."""
        return self._quantized(x, keep=True)

    def _quantized(self, x: jax.Array, keep: bool) -> QuantResult:
        if not isinstance(x, jax.Array) or x.dtype != jnp.float32:
            x = check.float_input(x, "RescalingIntQuant")
        x32 = x.astype(jnp.float32)
        bit_width, threshold = self._bits()
        scale, zero_point = self._measured(x32, bit_width, threshold)
        if isinstance(self.int_quant, IntQuant):
            scale, zero_point = self.int_quant.beside(x32, scale, zero_point)
            if keep:
                value, payload = self.int_quant.with_payload(scale, zero_point, bit_width, x)
                return ResultWithPayload.of(value, scale, zero_point, bit_width, payload)
            return QuantResult(self.int_quant(scale, zero_point, bit_width, x), scale, zero_point, bit_width)
        value = self.int_quant(scale, zero_point, bit_width, x32).astype(x.dtype)
        return QuantResult(value, scale, zero_point, bit_width)

    def by_scale(self, x: jax.Array, scale: jax.Array, zero_point: jax.Array, keep: bool) -> QuantResult:
        """Return the result for `x` with a given scale and zero point; with its payload if `keep`."""
        x, bit_width = check.float_input(x, "RescalingIntQuant"), self._bits()[0]
        payload = None
        if keep and isinstance(self.int_quant, IntQuant):
            value, payload = self.int_quant.with_payload(scale, zero_point, bit_width, x)
        else:
            value = self.int_quant(scale, zero_point, bit_width, x)
        return ResultWithPayload.of(value.astype(x.dtype), scale, zero_point, bit_width, payload)

    @property
    def grid(self) -> IntGrid | None:
        """The numbers at scale 1 that it rounds to nearest on; None if it does something else."""
        if not is_nearest(getattr(self.int_quant, "float_to_int_impl", None)):
            return None
        bits, integers = self._bits()[0], self.int_quant
        bits = bits if isinstance(bits, int) else float(bits)
        return IntGrid(bits, integers.signed, integers.narrow_range)

    def _bits(self) -> tuple[Any, Any]:
        """Bit width, and the number of integer steps."""
        width, steps = self.bit_width_impl, self.int_scaling_impl
        if class_fact(type(width), "is_constant") and class_fact(type(steps), "is_constant"):
            return _constants(width, steps)
        bits = width()
        return bits, steps(bits)

    def try_scale(self, x: jax.Array, statistic: jax.Array) -> QuantResult:
        """`x` quantized with the scale made from `statistic`; the zero point is not searched.

        Args:
            x: float32.
            statistic: replaces the searched one.
        """
        _, threshold = self._bits()
        scale = scale_of(self.scaling_impl, x, threshold, Candidate(statistic))
        return self.try_zero_point(x, scale, None)

    def try_zero_point(self, x: jax.Array, scale: jax.Array, statistic: jax.Array | None) -> QuantResult:
        """`x` quantized with the zero point made from `statistic`.

        Args:
            x: float32.
            scale: the scale.
            statistic: replaces the searched one; None for the start of the search.
        """
        bit_width = self.bit_width_impl()
        zero_point = zero_point_of(self.zero_point_impl, x, scale, bit_width, Candidate(statistic))
        return QuantResult(self.int_quant(scale, zero_point, bit_width, x), scale, zero_point, bit_width)

    def _measured(self, x: jax.Array, bit_width: Any, threshold: Any) -> tuple[jax.Array, jax.Array]:
        """Scale and zero point."""
        scaling, zero_point = self.scaling_impl, self.zero_point_impl
        if not self.searches:
            scale = scaling(x, threshold)
            is_zero = class_fact(type(zero_point), "has_zero_point") is False
            return scale, known_zero() if is_zero else zero_point(x, scale, bit_width)
        scale = scale_of(scaling, x, threshold, Search(self))
        tried = scale
        if x.size and searches(zero_point) and isinstance(scaling, Settles):
            tried = scaling.settle(scale, threshold)
        return scale, zero_point_of(zero_point, x, scale, bit_width, Search(self, tried))


@checked_arguments
class PrescaledRestrictIntQuant(Component):
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

    has_zero_point = False
    int_quant: IntQuantizer
    bit_width_impl: BitWidth

    def __init__(self, int_quant: IntQuantizer, bit_width_impl: BitWidth) -> None:
        assign(self, int_quant=int_quant, bit_width_impl=bit_width_impl)

    def __call__(self, x: jax.Array, scale: jax.Array) -> QuantResult:
        """`x` quantized by `scale`; zero point float32."""
        if not isinstance(x, jax.Array) or x.dtype != jnp.float32:
            x = check.float_input(x, "PrescaledRestrictIntQuant")
        scale = jnp.asarray(scale).astype(jnp.float32)
        width = self.bit_width_impl
        bit_width = _constant(width) if class_fact(type(width), "is_constant") else width()
        zero_point = known_zero()
        value = self.int_quant(scale, zero_point, bit_width, x).astype(x.dtype)
        return QuantResult(value, scale, zero_point, bit_width)


def _require_signed(signed: bool, where: str) -> None:
    if not signed:
        raise ValueError(f"{where} quantizes to -scale and +scale: it needs signed=True, got {signed!r}.")


@checked_arguments
class BinaryQuant(Component):
    """`y = sign(x) * s`, `sign(0) = +1`, gradient straight through: weights.

    Differs from Brevitas: nan stays nan (there: -scale).

    Args:
        scaling_impl: the scale `s`, called with `x` alone.
        signed: must be True.
        quant_delay_steps: calls that return `x` unchanged.

    Raises:
        ValueError: `signed` is False.
        TypeError: (when called) `x` is not a float array.

    Example:
        >>> from jqinject.core import ConstScaling
        >>> BinaryQuant(ConstScaling(0.5))(jnp.array([0.04, -0.6, 3.3])).value
        Array([ 0.5, -0.5,  0.5], dtype=float32)
    """

    has_zero_point = False
    delay: DelayWrapper | None = None

    def __init__(self, scaling_impl: Scaling, signed: bool = True, quant_delay_steps: int | None = 0) -> None:
        _require_signed(signed, "BinaryQuant")
        self.scaling_impl = scaling_impl
        set_given(self, delay=delay_of(quant_delay_steps, "BinaryQuant"))

    @property
    def scale_dtype(self) -> np.dtype | None:
        """The `scale_dtype` of the scaling."""
        return scale_dtype(self.scaling_impl)

    def __call__(self, x: jax.Array) -> QuantResult:
        """`x` quantized; zero point 0, bit width 1."""
        x = check.float_input(x, "BinaryQuant")
        x32 = x.astype(jnp.float32)
        scale = self.scaling_impl(x32)
        return QuantResult(self._rounded(x, scale), scale, known_zero(), 1)

    def by_scale(self, x: jax.Array, scale: jax.Array, zero_point: jax.Array, keep: bool) -> QuantResult:
        """Return the result for `x` with a given scale and zero point; with its payload if `keep`."""
        x = check.float_input(x, "BinaryQuant")
        return QuantResult(self._rounded(x, scale), scale, known_zero(), 1)

    @property
    def grid(self) -> TableGrid:
        """The numbers at scale 1 that it rounds to nearest on; None if it does something else."""
        return TableGrid((-1.0, 1.0))

    def _rounded(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        y = (binary_sign_ste(x.astype(jnp.float32)) * scale).astype(x.dtype)
        return y if self.delay is None else self.delay(x, y)


@checked_arguments
class ClampedBinaryQuant(Component):
    """`y = sign(clamp(x, -s, s)) * s`: no gradient reaches `x` outside -s .. s: activations.

    Differs from Brevitas: nan stays nan (there: -scale).

    Args:
        scaling_impl: the scale `s`, called with `x` alone.
        tensor_clamp_impl: how to clamp; None means `TensorClamp()`.
        signed: must be True.
        quant_delay_steps: calls that return `x` unchanged.

    Raises:
        ValueError: `signed` is False.
        TypeError: (when called) `x` is not a float array.

    Example:
        >>> from jqinject.core import ConstScaling
        >>> quant = ClampedBinaryQuant(ConstScaling(0.5))
        >>> jax.grad(lambda x: quant(x).value.sum())(jnp.array([0.04, -0.6, 3.3]))
        Array([0.5, 0. , 0. ], dtype=float32)
    """

    has_zero_point = False
    delay: DelayWrapper | None = None

    def __init__(
        self,
        scaling_impl: Scaling,
        tensor_clamp_impl: Clamp | None = None,
        signed: bool = True,
        quant_delay_steps: int | None = 0,
    ) -> None:
        _require_signed(signed, "ClampedBinaryQuant")
        self.scaling_impl = scaling_impl
        self.tensor_clamp_impl = tensor_clamp_impl or TensorClamp()
        set_given(self, delay=delay_of(quant_delay_steps, "ClampedBinaryQuant"))

    @property
    def scale_dtype(self) -> np.dtype | None:
        """The `scale_dtype` of the scaling."""
        return scale_dtype(self.scaling_impl)

    def __call__(self, x: jax.Array) -> QuantResult:
        """`x` quantized; zero point 0, bit width 1."""
        x = check.float_input(x, "ClampedBinaryQuant")
        x32 = x.astype(jnp.float32)
        scale = self.scaling_impl(x32)
        y = (binary_sign_ste(self.tensor_clamp_impl(x32, -scale, scale)) * scale).astype(x.dtype)
        if self.delay is not None:
            y = self.delay(x, y)
        return QuantResult(y, scale, known_zero(), 1)


@checked_arguments
class TernaryQuant(Component):
    """`y = sign(x) * s` where `|x| > threshold * s`, else 0; the gradient passes where `y` is nonzero.

    Args:
        scaling_impl: the scale `s`, called with `x` alone.
        threshold: numbers up to this fraction of the scale become 0.
        quant_delay_steps: calls that return `x` unchanged; None for no delay.

    Raises:
        ValueError: when `threshold` is negative or not finite.
        TypeError: (when called) `x` is not a float array.

    Example:
        >>> from jqinject.core import ConstScaling
        >>> TernaryQuant(ConstScaling(1.0), 0.5)(jnp.array([0.04, -0.6, 3.3])).value
        Array([ 0., -1.,  1.], dtype=float32)
    """

    has_zero_point = False
    delay: DelayWrapper | None = None

    def __init__(self, scaling_impl: Scaling, threshold: float, quant_delay_steps: int | None = None) -> None:
        if not math.isfinite(threshold) or threshold < 0:
            raise ValueError(
                f"TernaryQuant: threshold is a fraction of the scale, expected >= 0, got {threshold!r}."
            )
        self.scaling_impl = scaling_impl
        self.threshold = float(threshold)
        set_given(self, delay=delay_of(quant_delay_steps, "TernaryQuant"))

    @property
    def scale_dtype(self) -> np.dtype | None:
        """The `scale_dtype` of the scaling."""
        return scale_dtype(self.scaling_impl)

    def __call__(self, x: jax.Array) -> QuantResult:
        """`x` quantized; zero point 0, bit width 2."""
        x = check.float_input(x, "TernaryQuant")
        scale = self.scaling_impl(x.astype(jnp.float32))
        return QuantResult(self._rounded(x, scale), scale, known_zero(), 2)

    def by_scale(self, x: jax.Array, scale: jax.Array, zero_point: jax.Array, keep: bool) -> QuantResult:
        """Return the result for `x` with a given scale and zero point; with its payload if `keep`."""
        x = check.float_input(x, "TernaryQuant")
        return QuantResult(self._rounded(x, scale), scale, known_zero(), 2)

    @property
    def grid(self) -> TableGrid:
        """The numbers at scale 1 that it rounds to nearest on; None if it does something else."""
        return TableGrid((-1.0, 0.0, 1.0))

    def _rounded(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        mask = (jnp.abs(x32) > self.threshold * scale).astype(jnp.float32)
        y = (mask * ternary_sign_ste(x32) * scale).astype(x.dtype)
        return y if self.delay is None else self.delay(x, y)
