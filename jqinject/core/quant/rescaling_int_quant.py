"""Integer quantization whose scale, zero point and bit width come from components."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core._protocols import BitWidth, IntQuantizer, IntScalingImpl, Scaling, Settles, ZeroPoint
from jqinject.core.construction import check
from jqinject.core.construction.assign import assign, set_given
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import Component
from jqinject.core.facts import class_fact, groups_of, has_zero_point, is_nearest, scale_dtype, searches
from jqinject.core.quant.grids import IntegerGrid
from jqinject.core.quant.int_quant import IntQuant, QuantResult, ResultWithPayload
from jqinject.core.stats.search import Candidate, Search, scale_of, zero_point_of
from jqinject.ops.fake_quant import known_zero


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
    def grid(self) -> IntegerGrid | None:
        """The numbers at scale 1 that it rounds to nearest on; None if it does something else."""
        if not is_nearest(getattr(self.int_quant, "float_to_int_impl", None)):
            return None
        bits = self._bits()[0]
        low, high = self.int_quant.min_int(bits), self.int_quant.max_int(bits)
        return IntegerGrid(float(low), float(high), not self.has_zero_point, None, divides=True)

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
