"""Quantizers to integers, to two and to three values."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import InitVar, replace
from functools import lru_cache, partial
from typing import Any, cast

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
    View,
    ZeroPoint,
    class_fact,
    is_nearest,
)
from jqinject.core.clamp import Identity, TensorClamp
from jqinject.core.component import component
from jqinject.core.memory.clipping_range import RangeScaling
from jqinject.core.quantizers.int_quant import IntQuant
from jqinject.core.quantizers.quantizer import DelayWrapper, Quantized, Quantizer, start_delay, through_ends
from jqinject.core.statistics.ranges import ClippingRange
from jqinject.core.views import cut_of
from jqinject.ops.fake_quant import Offset, Steps
from jqinject.ops.grid import IntGrid, TableGrid
from jqinject.ops.ste import binary_sign_ste, ternary_sign_ste


@lru_cache(maxsize=1024)
def _constant(component: Any, *arguments: Any) -> Any:
    """The number of a constant component."""
    return component(*arguments)


@lru_cache(maxsize=1024)
def _int_grid(int_quant: IntQuantizer, bit_width: int) -> IntGrid:
    """The grid of a stateless `int_quant`; one of a user's own says its range alone."""
    signed = bool(int_quant.min_int(bit_width) < 0)
    return IntGrid(bit_width, signed, bool(getattr(int_quant, "narrow_range", False)))


def int_grid(int_quant: IntQuantizer, bit_width: Any) -> IntGrid:
    """The integers of an `int_quant` of so many bits.

    Args:
        int_quant: rounds and clamps.
        bit_width: an int, or an array if learned.
    """
    if isinstance(bit_width, int):
        return _int_grid(int_quant, bit_width)
    return IntGrid(bit_width, _int_grid(int_quant, 8).signed, getattr(int_quant, "narrow_range", False))


@lru_cache(maxsize=1024)
def _constant_grid(int_quant: IntQuantizer, bit_width: BitWidth) -> IntGrid:
    return int_grid(int_quant, bit_width())


class _RoundedByIntQuant(Quantizer):
    """Abstract: a quantizer whose `int_quant` rounds, to as many bits as its `bit_width_impl` says."""

    int_quant: IntQuantizer
    bit_width_impl: BitWidth

    @property
    def input_view_impl(self) -> View:  # type: ignore[override]
        """The view of an `IntQuant`; one of a user's own views the tensor itself."""
        return self.int_quant.input_view_impl if isinstance(self.int_quant, IntQuant) else Identity()

    @property
    def is_nearest(self) -> bool:
        """See `int_quant`."""
        return is_nearest(self.int_quant)

    def _grid(self) -> IntGrid:
        bits = self.bit_width_impl
        constant = class_fact(type(bits), "is_constant")
        return _constant_grid(self.int_quant, bits) if constant else int_grid(self.int_quant, bits())

    def _round(
        self,
        x: jax.Array,
        scale: jax.Array,
        zero_point: Offset,
        ends: ClippingRange | None,
        grid: IntGrid,
        keep: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        rounds = self.int_quant
        if isinstance(rounds, IntQuant):
            if getattr(getattr(self, "scaling_impl", None), "by_range", False):
                return self._through_ends(rounds, x, scale, zero_point, ends, grid, keep)
            return rounds.rounded(x, scale, zero_point, grid.bit_width, keep)
        zero = jnp.zeros((), jnp.float32) if zero_point is None else zero_point
        return rounds(scale, zero, grid.bit_width, x.astype(jnp.float32)).astype(x.dtype), None

    def _through_ends(
        self,
        rounds: IntQuant,
        x: jax.Array,
        scale: jax.Array,
        zero_point: Offset,
        ends: ClippingRange | None,
        grid: Any,
        keep: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        """`_round` with the gradient through the ends of a range."""
        rounding, scaling = rounds.float_to_int_impl, cast(RangeScaling, self.scaling_impl)
        low, high = (cast(Any, np.float32(bound)) for bound in grid.bounds)
        if ends is not None and grid.narrow_range and zero_point is None:
            ends = ClippingRange(jax.lax.stop_gradient(scale) * high)
        function = class_fact(type(rounding), "elementwise")
        how = Steps(
            function or rounding,
            by_reciprocal=zero_point is None,
            repeated=cut_of(self.input_view_impl, x) is not None,
            payload=rounds.payload_dtype(grid.bit_width) if keep else None,
        )
        compute = partial(how.quantized, low=low, high=high)
        to_range, pure = not scaling.scale_stop_grad, function is not None
        y = through_ends(
            compute, x.astype(jnp.float32), ends, scale, zero_point, to_range=to_range, pure=pure
        )
        value, payload = (y, None) if how.payload is None else y
        return rounds.finish(value, scale, x), payload


@component
class RescalingIntQuant(_RoundedByIntQuant):
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

    int_quant: IntQuantizer
    scaling_impl: Scaling
    int_scaling_impl: IntScalingImpl
    zero_point_impl: ZeroPoint
    bit_width_impl: BitWidth

    def __post_init__(self) -> None:
        if getattr(self.scaling_impl, "by_range", False):
            self._threshold(self._grid())  # refuses bits that no range has

    def _threshold(self, grid: IntGrid) -> Any:
        steps, bits = self.int_scaling_impl, grid.bit_width
        constant = isinstance(bits, int) and class_fact(type(steps), "is_constant")
        return _constant(steps, bits) if constant else steps(bits)

    @property
    def grid(self) -> IntGrid | None:
        """The numbers at scale 1 that it rounds to nearest on; None if it does something else."""
        if not is_nearest(getattr(self.int_quant, "float_to_int_impl", None)):
            return None
        grid = self._grid()
        return replace(grid, bit_width=float(grid.bit_width)) if grid.is_learned else grid


@component
class PrescaledRestrictIntQuant(_RoundedByIntQuant):
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

    int_quant: IntQuantizer
    bit_width_impl: BitWidth
    has_zero_point = False  # type: ignore[assignment]
    scale_dtype = None  # type: ignore[assignment]

    def __call__(self, x: jax.Array, scale: jax.Array) -> Quantized:  # type: ignore[override]
        """`x` quantized by `scale`."""
        return self.by_scale(x, jnp.asarray(scale).astype(jnp.float32))


class _SignQuant(Quantizer):
    """Abstract: signs times a scale that is called with the tensor alone; see `_values`."""

    bits = 1
    signed: bool = True
    delay: DelayWrapper | None = None

    def __post_init__(self, quant_delay_steps: int | None) -> None:
        check.fields(self, signed=check.flag)
        if not self.signed:
            raise ValueError(
                f"{type(self).__name__} quantizes to -scale and +scale: it needs signed=True, got {self.signed!r}."
            )
        start_delay(self, quant_delay_steps)

    def _grid(self) -> IntGrid:
        return IntGrid(self.bits)

    def _measure(self, x: jax.Array, grid: IntGrid) -> tuple[jax.Array, None, None]:
        return self.scaling_impl(x), None, None

    @abstractmethod
    def _values(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        """-1, 0 and 1, float32."""

    def _round(
        self,
        x: jax.Array,
        scale: jax.Array,
        zero_point: Offset,
        ends: ClippingRange | None,
        grid: IntGrid,
        keep: bool,
    ) -> tuple[jax.Array, None]:
        y = (self._values(x.astype(jnp.float32), scale) * scale).astype(x.dtype)
        return y if self.delay is None else self.delay(x, y), None


@component
class BinaryQuant(_SignQuant):
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

    scaling_impl: Scaling
    signed: bool = True
    quant_delay_steps: InitVar[int | None] = 0

    @property
    def grid(self) -> TableGrid:
        """The numbers at scale 1 that it rounds to nearest on."""
        return TableGrid((-1.0, 1.0))

    def _values(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        return binary_sign_ste(x)


@component
class ClampedBinaryQuant(_SignQuant):
    """`y = sign(clamp(x, -s, s)) * s`: no gradient reaches `x` outside -s .. s: activations.

    Differs from Brevitas: nan stays nan (there: -scale).

    Args:
        scaling_impl: the scale `s`, called with `x` alone.
        tensor_clamp_impl: how to clamp.
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

    scaling_impl: Scaling
    tensor_clamp_impl: Clamp = TensorClamp()
    signed: bool = True
    quant_delay_steps: InitVar[int | None] = 0

    def _values(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        return binary_sign_ste(self.tensor_clamp_impl(x, -scale, scale))


@component
class TernaryQuant(_SignQuant):
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

    bits = 2
    scaling_impl: Scaling
    threshold: float
    quant_delay_steps: InitVar[int | None] = None

    def __post_init__(self, quant_delay_steps: int | None) -> None:
        super().__post_init__(quant_delay_steps)
        check.fields(self, threshold=check.number)
        if self.threshold < 0:
            raise ValueError(
                f"TernaryQuant: threshold is a fraction of the scale, expected >= 0, got {self.threshold!r}."
            )

    @property
    def grid(self) -> TableGrid:
        """The numbers at scale 1 that it rounds to nearest on."""
        return TableGrid((-1.0, 0.0, 1.0))

    def _values(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        mask = (jnp.abs(x) > self.threshold * scale).astype(jnp.float32)
        return mask * ternary_sign_ste(x)
