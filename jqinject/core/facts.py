"""Facts that components state about themselves, and their defaults.

Ask here instead of checking the class, so that custom components work like the library's. Facts are static.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import jax
import numpy as np

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


def has_zero_point(component: Any) -> bool:
    """Whether the zero point of a quantizer or a `zero_point_impl` may be nonzero; True if unstated.

    Example:
        >>> from jqinject.core import ZeroZeroPoint
        >>> has_zero_point(ZeroZeroPoint()), has_zero_point(lambda x, scale, bit_width: scale)
        (False, True)
    """
    return getattr(component, "has_zero_point", True)


def scale_dtype(component: Any) -> np.dtype | None:
    """The 8-bit dtype that holds every scale of a quantizer, a scaling or a restriction; None if unstated."""
    return getattr(component, "scale_dtype", None)


def is_learned(component: Any) -> bool:
    """Whether a bit width is learned; False if unstated."""
    return getattr(component, "is_learned", False)


def divisor_of(scaling: Any, scale: jax.Array) -> jax.Array:
    """What numbers are divided by to be quantized: the scale, unless the scaling has a method `divisor` that says."""
    says = getattr(scaling, "divisor", None)
    return scale if says is None else says(scale)


def searches(component: Any) -> bool:
    """Whether a statistic, a scaling or a zero point is searched by trying candidates; False if unstated."""
    return getattr(component, "searches", False)


def takes_axes(component: Any) -> bool:
    """Whether a statistic can be taken along other axes, by its method `along`; False if unstated."""
    return getattr(component, "takes_axes", False)


def takes_cut(component: Any) -> bool:
    """Whether a range method or a statistic takes a `Cut` for its axes; False if unstated.

    Example:
        >>> from jqinject.core import AbsMaxRange
        >>> takes_cut(AbsMaxRange()), takes_cut(lambda x, axes: x)
        (True, False)
    """
    return class_fact(type(component), "takes_cut") is not None and component.takes_cut


def never_negative(component: Any) -> bool:
    """Whether a statistic is never negative; False if unstated."""
    return getattr(component, "never_negative", False)


def keeps_sign(component: Any) -> bool:
    """Whether a restriction leaves negative values unchanged; False if unstated."""
    return getattr(component, "keeps_sign", False)


def groups_of(component: Any) -> tuple[int, int] | None:
    """Group size and grouped axis of a quantizer or a view; None if unstated."""
    return getattr(component, "groups", None)


def block_width(component: Any) -> int:
    """How many groups of a quantizer or a view share a scale, beside each other; 1 if unstated."""
    for name in ("input_view_impl", "int_quant", "quantizer"):
        inner = getattr(component, name, None)
        if inner is not None:
            return block_width(inner)
    return getattr(component, "block_width", 1)


def is_dynamic(component: Any) -> bool:
    """Whether the scale is computed from the given tensor.

    A quantizer defaults to its `scaling_impl`, a scaling to False.
    """
    said = getattr(component, "is_dynamic", None)
    return getattr(getattr(component, "scaling_impl", None), "is_dynamic", False) if said is None else said


def needs_input_format(component: Any) -> bool:
    """Whether a quantizer of weights is called with the format of the layer's input; False if unstated."""
    return getattr(component, "needs_input_format", False)


def amax_history(quantizer: Any) -> Any:
    """The record of amaxes that the scale of a quantizer follows; None if unstated."""
    return getattr(getattr(quantizer, "scaling_impl", None), "amax_history", None)


def collects_in_steps(component: Any) -> bool:
    """Whether a component is a `StepStatistic`; False if unstated."""
    return getattr(component, "in_step", None) is not None


def number_format(component: Any) -> Any:
    """A quantizer's minifloat format or table; None if unstated."""
    return getattr(component, "format", None)


def is_nearest(*components: Any) -> bool:
    """Whether quantizers, roundings and clamps do what QuantizeLinear does; False if any does not state it."""
    return all(getattr(component, "is_nearest", False) for component in components)


def grid_of(quantizer: Any) -> Any:
    """The grid that a quantizer rounds to nearest on; None if it does something else, or does not state it."""
    return getattr(quantizer, "grid", None)


class Factors(Protocol):
    """What the channels of a quantized tensor are multiplied by."""

    def times(self, x: jax.Array, /) -> jax.Array:
        """Multiply numbers of a quantizer, one per channel, by the factors' magnitudes.

        Raises:
            ValueError: channels that share a number have different factors.
        """
        ...

    def check_signs(self) -> None:
        """Raise a ValueError if a factor is negative."""
        ...


class Rescales(Protocol):
    """A stateful component that knows its own Variables after the tensor's channels are multiplied by constants.

    It is asked where a learned scale has to follow a weight, as in folding a batch normalization. A component whose
    Variables do not depend on the tensor's scale (bit widths, counters) has `is_scale_free = True` instead.
    """

    def rescaled(self, factors: Factors, /) -> dict[str, jax.Array]:
        """Return the Variables that change, by name; others stay."""
        ...
