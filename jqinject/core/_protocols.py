"""The architecture of a quantizer on one page: what each of its parts is called with, and what it can be asked.

A quantizer (`TensorQuant`) maps a tensor to a `Quantized`: the quantized numbers in float, the scale, the
zero point and the grid. It is composed of components, each answering one question:

    bit_width_impl()                     -> b           how many bits?
    int_scaling_impl(b)                  -> t           how many integer steps span the scale?
    scaling_impl(x, t)                   -> s           how many floats is one step?          s = v / t
        scaling_stats_impl(view(x))      -> v               from a statistic of the tensor
        restrict_scaling_impl(v)         -> v               and what may it be?
    zero_point_impl(x, s, b)             -> z           which integer is zero?
    int_quant(s, z, b, x)                -> y           y = (clamp(round(x / s + z), min(b), max(b)) - z) * s
        float_to_int_impl, tensor_clamp_impl                how to round, how to clamp
        gradient_mask_impl                                  where the gradient goes, unless the clamp decides

Stateless components are values, compared by their parts: frozen dataclasses, or `Component`s without Variables.
Stateful ones are `nnx.Module`s, as is a `Component` with Variables (`component.py`). Anything that fits a
protocol can be used, built by hand or wired by name. Make your own stateless classes frozen dataclasses, so that
identical layers compile once.

Intermediate results are float32; `Quantized.value` has the dtype of `x`. `value = (integer - zero_point) * scale`.

Components state facts about themselves, which the functions below ask for and have defaults of. Ask here instead of
checking the class, so that custom components work like the library's. Facts are static.
"""

from functools import cache
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jqinject.ops.lean import Bits

#: How many steps span a scale; None for 1.
Threshold = float | jax.Array | None


@runtime_checkable
class Packable(Protocol):
    """A result of a `tensor_quant` that knows its kind of QuantTensor."""

    def quant_tensor(self, *, training: bool) -> Any: ...


class Rounding(Protocol):
    """`float_to_int_impl`: floats to whole numbers, same shape."""

    def __call__(self, x: jax.Array, /) -> jax.Array: ...


class Clamp(Protocol):
    """`tensor_clamp_impl`: clamp between two bounds."""

    def __call__(self, x: jax.Array, /, min_val: Any, max_val: Any) -> jax.Array: ...


class GradientMask(Protocol):
    """`gradient_mask_impl`: which numbers get the gradient, from their steps before and after rounding."""

    def __call__(self, steps: jax.Array, rounded: jax.Array, /) -> jax.Array: ...


class View(Protocol):
    """`..._input_view_shape_impl`: how a tensor is laid out for a statistic."""

    def __call__(self, x: jax.Array, /) -> jax.Array: ...


class Stat(Protocol):
    """`scaling_stats_impl`: a differentiable statistic of a viewed float32 tensor."""

    def __call__(self, x: jax.Array, /) -> jax.Array: ...


class Restrict(Protocol):
    """`restrict_..._impl`: value -> stored domain (`restrict_init_...`) -> value (call)."""

    def restrict_init_float(self, x: float, /) -> float: ...
    def restrict_init_tensor(self, x: jax.Array, /) -> jax.Array: ...
    def __call__(self, x: jax.Array, /) -> jax.Array: ...


class BitWidth(Protocol):
    """`bit_width_impl`: the bit width."""

    def __call__(self) -> int | jax.Array: ...


class IntScalingImpl(Protocol):
    """`int_scaling_impl`: how many integer steps the scaled value spans."""

    def __call__(self, bit_width: Bits, /) -> Any: ...


class FloatScalingImpl(Protocol):
    """`float_scaling_impl`: which minifloat the statistic maps to."""

    def __call__(self, exponent_bit_width: Bits, max_mantissa: Any, exponent_bias: Any, /) -> Any: ...


class FloatClampImpl(Protocol):
    """`float_clamp_impl`: clamp to the range of a minifloat.

    Its attributes `saturating`, `inf_values`, `nan_values` and `max_available_float` are those of the format.
    """

    def __call__(
        self, x: jax.Array, exponent_bit_width: Bits, max_mantissa: float | jax.Array, bias: Bits, /
    ) -> jax.Array: ...


class Scaling(Protocol):
    """`scaling_impl`: float32 scale of a tensor, divided by the number of integer steps (`threshold`).

    One whose scale changes at the end of a collection, before the zero point is searched, has a method
    `settle(scale, threshold)`; one by which numbers are not divided has a method `divisor(scale)`.
    """

    def __call__(self, x: jax.Array, threshold: Threshold = None, /) -> jax.Array: ...


class ZeroPoint(Protocol):
    """`zero_point_impl`: the integer that represents zero, as float32."""

    def __call__(self, x: jax.Array, scale: jax.Array, bit_width: Bits, /) -> jax.Array: ...


class IntQuantizer(Protocol):
    """`int_quant`: to integers and back, given scale, zero point and bit width."""

    def to_int(self, scale: jax.Array, zero_point: jax.Array, bit_width: Bits, x: jax.Array) -> jax.Array: ...
    def min_int(self, bit_width: Bits) -> Bits: ...
    def max_int(self, bit_width: Bits) -> Bits: ...
    def __call__(
        self, scale: jax.Array, zero_point: jax.Array | None, bit_width: Bits, x: jax.Array
    ) -> jax.Array: ...


@runtime_checkable
class StaticRange(Protocol):
    """A component whose range is collected from data and kept: scale, zero point or clipping range of activations.

    Containers of such components (a proxy, a quantized op) answer for them.
    """

    def has_range(self) -> bool | None:
        """Whether data was seen (by every layer of a stack).

        None if nothing is collected: the range is constant, or computed from the given tensor. True for traced or
        abstract state.
        """

    def begin_calibration(self) -> None:
        """Forget what was collected, then collect every tensor, equally weighted unless the user chose an averaging."""

    def end_calibration(self) -> None:
        """Use what was collected as the range."""


class StepStatistic(Protocol):
    """A scale that tracks training steps, which `jqinject.value_and_grad` opens and closes.

    Attributes:
        in_step: whether a step is under way.
        slot: where a backward pass reports; None unless the scale is for a gradient.
    """

    in_step: bool
    slot: Any

    def begin_step(self) -> None:
        """Start collecting; discard an unfinished step."""

    def collect(self, amax: jax.Array) -> None:
        """Record a call's or a backward pass's amax, keeping the maximum."""

    def end_step(self) -> None:
        """Commit the step."""

    def abandon_step(self) -> None:
        """Discard a failed step."""


class TensorQuant(Protocol):
    """`tensor_quant`: the assembled quantizer. It may state every fact below."""

    def __call__(self, x: jax.Array, /) -> Packable: ...


class ServedLayer(Protocol):
    """A layer with a weight, as the proxies that it holds ask for it; see `jqinject.proxy.base`."""

    @property
    def weight(self) -> Any: ...
    @property
    def bias(self) -> Any: ...
    @property
    def weight_shape(self) -> tuple[int, ...]: ...
    @property
    def weight_ndim(self) -> int: ...


# A fact is an optional member of a protocol, looked up with what counts if it is missing: an `isinstance` of a protocol
# takes 20 microseconds on Python 3.11, and every quantizer is asked while its layer is built.


@cache
def class_fact(kind: type, name: str) -> Any:
    """A fact that a class states about its own `__call__`; None if unstated.

    A subclass that overrides `__call__` has to state it again.

    Args:
        kind: the class.
        name: the fact.

    Example:
        >>> from jqinject.core import FloatRestrictValue
        >>> class Own(FloatRestrictValue):
        ...     def __call__(self, x):
        ...         return 2 * x
        >>> class_fact(FloatRestrictValue, "keeps_positive"), class_fact(Own, "keeps_positive")
        (True, None)
    """
    for cls in kind.__mro__:
        if name in vars(cls):
            return getattr(cls, name)
        if "__call__" in vars(cls):
            return None
    return None


def stated(component: object, name: str, unstated: object) -> Any:
    """A fact that a component states about itself, else what counts if it does not."""
    return getattr(component, name, unstated)


def has_zero_point(component: object) -> bool:
    """Whether the zero point of a quantizer or a `zero_point_impl` may be nonzero; True if unstated.

    Example:
        >>> from jqinject.core import ZeroZeroPoint
        >>> has_zero_point(ZeroZeroPoint()), has_zero_point(lambda x, scale, bit_width: scale)
        (False, True)
    """
    return stated(component, "has_zero_point", True)


def scale_dtype(component: object) -> np.dtype | None:
    """The 8-bit dtype that holds every scale of a quantizer, a scaling or a restriction; None if unstated."""
    return stated(component, "scale_dtype", None)


def scale_factor(component: object) -> jax.Array | None:
    """The constant factor of all scales of a quantizer, a scaling or a restriction; None if unstated."""
    return stated(component, "scale_factor", None)


def is_learned(component: object) -> bool:
    """Whether a bit width is learned; False if unstated."""
    return stated(component, "is_learned", False)


def searches(component: object) -> bool:
    """Whether a statistic, a scaling or a zero point is searched by trying candidates; False if unstated."""
    return stated(component, "searches", False)


def takes_axes(component: object) -> bool:
    """Whether a statistic can be taken along other axes, by its method `along`; False if unstated."""
    return stated(component, "takes_axes", False)


def takes_cut(component: Any) -> bool:
    """Whether a range method or a statistic takes a `Cut` for its axes; False if unstated.

    Example:
        >>> from jqinject.core import AbsMaxRange
        >>> takes_cut(AbsMaxRange()), takes_cut(lambda x, axes: x)
        (True, False)
    """
    return class_fact(type(component), "takes_cut") is not None and component.takes_cut


def never_negative(component: object) -> bool:
    """Whether a statistic is never negative; False if unstated."""
    return stated(component, "never_negative", False)


def keeps_sign(component: object) -> bool:
    """Whether a restriction leaves negative values unchanged; False if unstated."""
    return stated(component, "keeps_sign", False)


def groups_of(component: object) -> tuple[int, int] | None:
    """Group size and grouped axis of a quantizer or a view; None if unstated."""
    return stated(component, "groups", None)


def block_width(component: object) -> int:
    """How many groups of a quantizer or a view share a scale, beside each other; 1 if unstated."""
    for name in ("input_view_impl", "int_quant"):
        inner = stated(component, name, None)
        if inner is not None:
            return block_width(inner)
    return stated(component, "block_width", 1)


def is_dynamic(component: object) -> bool:
    """Whether the scale is computed from the given tensor.

    A quantizer defaults to its `scaling_impl`, a scaling to False.
    """
    said = stated(component, "is_dynamic", None)
    return stated(stated(component, "scaling_impl", None), "is_dynamic", False) if said is None else said


def is_constant(component: object) -> bool:
    """Whether the scale of a quantizer is a constant; False if unstated."""
    return stated(stated(component, "scaling_impl", None), "kind", "") == "constant"


@cache
def by_range(scaling: type) -> bool:
    """Whether a class of scalings finds scale and zero point together, from a range; False if unstated."""
    return stated(scaling, "by_range", False)


def needs_input_format(component: object) -> bool:
    """Whether a quantizer of weights is called with the format of the layer's input; False if unstated."""
    return stated(component, "needs_input_format", False)


def amax_history(quantizer: object) -> Any:
    """The scaling of a quantizer whose `amax_history` records amaxes; None if unstated."""
    scaling = stated(quantizer, "scaling_impl", None)
    return scaling if stated(scaling, "amax_history", None) is not None else None


def collects_in_steps(component: object) -> bool:
    """Whether a component is a `StepStatistic`; False if unstated."""
    return stated(component, "in_step", None) is not None


def number_format(component: object) -> Any:
    """A quantizer's minifloat format or table; None if unstated."""
    return stated(component, "format", None)


def is_nearest(*components: object) -> bool:
    """Whether quantizers, roundings and clamps do what QuantizeLinear does; False if any does not state it."""
    return all(stated(component, "is_nearest", False) for component in components)


def grid_of(quantizer: object) -> Any:
    """The grid that a quantizer rounds to nearest on; None if it does something else, or does not state it."""
    return stated(quantizer, "grid", None)


class Factors(Protocol):
    """What the channels of a quantized tensor are multiplied by.

    A stateful component whose Variables depend on the tensor's scale has a method `rescaled(factors)`, which returns
    the Variables that change, by name. It is asked where a learned scale has to follow a weight, as in folding a batch
    normalization. One whose Variables do not (bit widths, counters) has `is_scale_free = True`.
    """

    def times(self, x: jax.Array, /) -> jax.Array:
        """Multiply numbers of a quantizer, one per channel, by the factors' magnitudes.

        Raises:
            ValueError: channels that share a number have different factors.
        """
        ...

    def check_signs(self) -> None:
        """Raise a ValueError if a factor is negative."""
