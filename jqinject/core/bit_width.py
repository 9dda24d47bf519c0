"""Bit widths of integers and minifloats: constant, learned, or taken from another.

`bit_width_impl()` returns a Python int (constant) or a float32 array (learned, or state). Minifloats have exponent
and mantissa bits, the largest mantissa, and the exponent bias.
"""

from dataclasses import InitVar, dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.core import _protocols, check, component, state
from jqinject.core.scaling.rule import IntRestrictValue
from jqinject.ops import lean, minifloat, power, ste, tensor_clamp_ste


@dataclass(frozen=True)
class BitWidthConst:
    """A constant bit width: a Python int, static under `jax.jit`.

    Args:
        bit_width: 1 to 32.

    Raises:
        TypeError: when it is not an int.
        ValueError: when it is not in 1 .. 32.

    Example:
        >>> BitWidthConst(4)()
        4
    """

    is_constant = True
    bit_width: int

    def __post_init__(self) -> None:
        vars(self)["bit_width"] = check.bit_width(self.bit_width, "BitWidthConst")

    def __call__(self) -> int:
        """The bit width."""
        return self.bit_width


class BitWidthStatefulConst(component.InnerModule):
    """A bit width that is saved but not trained: a float32 scalar.

    Args:
        bit_width: 1 to 32.

    Example:
        >>> float(BitWidthStatefulConst(4)())
        4.0
    """

    is_scale_free = True

    def __init__(self, bit_width: int) -> None:
        width = check.bit_width(bit_width, "BitWidthStatefulConst")
        self.bit_width = state.QuantStat(state.float_array(width))

    def __call__(self) -> jax.Array:
        """The bit width."""
        return self.bit_width.get_value()


@component.component
class BitWidthParameter(component.InnerModule):
    """A learned bit width: `b = round(|offset| + min_bit_width)`.

    The variable is `bit_width_offset`; rounding is straight-through and `|.|` has gradient +1 at 0, so that a bit width
    at its minimum can grow.

    Args:
        bit_width: initial bit width, `min_bit_width` to 32.
        min_bit_width: the minimum.
        restrict_bit_width_impl: which values are allowed.
        override_pretrained_bit_width: keep the initial value when a checkpoint is loaded.

    Raises:
        TypeError: when a bit width is not an int.
        ValueError: when `bit_width < min_bit_width`, or out of 1 .. 32.

    Example:
        >>> impl = BitWidthParameter(8)
        >>> float(impl()), float(impl.bit_width_offset.get_value())
        (8.0, 6.0)
    """

    bit_width: InitVar[int]
    min_bit_width: check.Bits = 2
    restrict_bit_width_impl: _protocols.Restrict = IntRestrictValue()
    override_pretrained_bit_width: bool = False
    is_learned = True
    is_scale_free = True

    def __post_init__(self, bit_width: int) -> None:
        where, least = "BitWidthParameter", self.min_bit_width
        width = check.bit_width(bit_width, where)
        if width < least:
            raise ValueError(
                f"{where}: bit_width={width} is less than min_bit_width={least}. Start with at least {least}, or lower "
                "min_bit_width."
            )
        base, start = map(self.restrict_bit_width_impl.restrict_init_float, (float(least), float(width)))
        self.bit_width_offset = state.QuantParam(state.float_array(start - base))

    @property
    def bit_width_base(self) -> float:
        """Added to the offset: the minimum bit width in the restriction's domain."""
        return self.restrict_bit_width_impl.restrict_init_float(float(self.min_bit_width))

    def __call__(self) -> jax.Array:
        """The bit width, a float32 scalar."""
        offset = ste.abs_binary_sign_grad(self.bit_width_offset.get_value())
        return self.restrict_bit_width_impl(offset + self.bit_width_base)

    def complete_state(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Translate a checkpoint's entries for this component: a constant `bit_width` becomes the offset.

        Args:
            entries: variable name -> array, as found in the checkpoint.

        Returns:
            The entries to load.
        """
        if self.override_pretrained_bit_width:
            return {"bit_width_offset": self.bit_width_offset.get_value()} if entries else {}
        completed = dict(entries)
        constant = completed.pop("bit_width", None)
        if constant is not None and "bit_width_offset" not in completed:
            completed["bit_width_offset"] = constant - self.bit_width_base
        return completed


@component.component
class RemoveBitwidthParameter(component.InnerModule):
    """A learned number of bits to remove: `1 / (1e-6 + |coeff|)`.

    The variable is `bit_width_coeff`, which starts at 10 for 0 bits.

    Args:
        bit_width_to_remove: initial number of bits, at least 0.
        override_pretrained_bit_width: keep the initial value when a checkpoint is loaded.

    Raises:
        ValueError: `bit_width_to_remove` is negative.

    Example:
        >>> float(RemoveBitwidthParameter(4)().round(3))
        4.0
    """

    bit_width_to_remove: InitVar[float]
    override_pretrained_bit_width: bool = False
    is_scale_free = True

    def __post_init__(self, bit_width_to_remove: float) -> None:
        where = "RemoveBitwidthParameter"
        if check.number(bit_width_to_remove, where, "bit_width_to_remove") < 0:
            raise ValueError(f"{where}: bits to remove must be at least 0, got {bit_width_to_remove}.")
        self.bit_width_coeff = state.QuantParam(state.float_array(1.0 / (bit_width_to_remove or 0.1)))

    def __call__(self) -> jax.Array:
        """The number of bits, a float32 scalar."""
        return 1.0 / (1e-6 + jnp.abs(self.bit_width_coeff.get_value()))

    def complete_state(self, entries: dict[str, object]) -> dict[str, Any]:
        """Translate a checkpoint's entries for this component.

        Args:
            entries: variable name -> array, as found in the checkpoint.

        Returns:
            The entries to load.
        """
        entry = {"bit_width_coeff": self.bit_width_coeff.get_value()}
        return entry if self.override_pretrained_bit_width and entries else dict(entries)


@component.component
class MsbClampBitWidth(component.Component):
    """A bit width derived from another: `clamp(|b - bits to remove|, min, max)`, with a straight-through clamp.

    Args:
        bit_width_to_remove_impl: how many bits to remove, such as `RemoveBitwidthParameter`.
        min_overall_bit_width: lower bound.
        max_overall_bit_width: upper bound.

    Example:
        >>> float(MsbClampBitWidth(BitWidthConst(4), 2, 8)(10))
        6.0
    """

    bit_width_to_remove_impl: _protocols.BitWidth
    min_overall_bit_width: check.Bits
    max_overall_bit_width: check.Bits

    def __post_init__(self) -> None:
        names = ("min_overall_bit_width", "max_overall_bit_width")
        check.ordered(self.min_overall_bit_width, self.max_overall_bit_width, "MsbClampBitWidth", names)

    def __call__(self, input_bit_width: int | jax.Array) -> jax.Array:
        """The bit width, a float32 scalar."""
        left = abs(jnp.asarray(input_bit_width, jnp.float32) - self.bit_width_to_remove_impl())
        return tensor_clamp_ste(left, float(self.min_overall_bit_width), float(self.max_overall_bit_width))


class ExponentWidthConst(BitWidthConst):
    """A constant number of exponent bits.

    Args:
        bit_width: 1 to 8.

    Raises:
        TypeError: it is not an int.
        ValueError: it is out of range: a minifloat without exponent is an integer.

    Example:
        >>> ExponentWidthConst(4)()
        4
    """

    _range = "exponent_bit_width", 1, minifloat.MOST_EXPONENT_BITS

    def __post_init__(self) -> None:
        name, least, most = self._range
        minifloat.checked_width(name, self.bit_width, least, most)


class MantissaWidthConst(ExponentWidthConst):
    """A constant number of mantissa bits, without the implicit 1.

    Args:
        bit_width: 0 to 22.

    Raises:
        TypeError: it is not an int.
        ValueError: it is out of range.

    Example:
        >>> MantissaWidthConst(0)()
        0
    """

    _range = "mantissa_bit_width", 0, minifloat.MOST_MANTISSA_BITS


class StaticMaxMantissa(MantissaWidthConst):
    """The largest mantissa for a constant number of bits, `2 - 2**-m`.

    Args:
        bit_width: m.

    Example:
        >>> StaticMaxMantissa(3)(3)
        1.875
    """

    def __call__(self, mantissa_bit_width: lean.Bits | None = None) -> float:  # type: ignore[override]
        """The largest mantissa, whatever the argument."""
        return minifloat.max_mantissa(self.bit_width)


@dataclass(frozen=True)
class ComputeMaxMantissa:
    """The largest mantissa for a learned number of bits, differentiable.

    Example:
        >>> import jax.numpy as jnp
        >>> float(ComputeMaxMantissa()(jnp.float32(3)))
        1.875
    """

    def __call__(self, mantissa_bit_width: lean.Bits) -> Any:
        """The largest mantissa of `mantissa_bit_width` bits."""
        return minifloat.max_mantissa(mantissa_bit_width)


@dataclass(frozen=True)
class StaticExponentBias:
    """A constant exponent bias.

    Args:
        exponent_bias: an int.

    Raises:
        TypeError: it is not an int.

    Example:
        >>> StaticExponentBias(7)()
        7
    """

    exponent_bias: int

    def __post_init__(self) -> None:
        minifloat.checked_width("exponent_bias", self.exponent_bias, -(2**10), 2**10)

    def __call__(self) -> int:
        """The bias."""
        return self.exponent_bias


@component.component
class ComputeExponentBias(component.Component):
    """The bias for e exponent bits: `2**(e - 1) - 1`.

    Args:
        exponent_bit_width_impl: e.

    Example:
        >>> ComputeExponentBias(ExponentWidthConst(4))()
        7
    """

    exponent_bit_width_impl: _protocols.BitWidth

    def __call__(self) -> Any:
        """The bias: an int for constant bits, else a float32 array."""
        return power.power(self.exponent_bit_width_impl() - 1) - 1
