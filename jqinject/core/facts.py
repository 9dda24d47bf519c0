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


# The facts as protocols, for the author of a component.


class SaysZeroPoint(Protocol):
    """A quantizer or `zero_point_impl` that knows whether its zero point may be nonzero.

    If it is 0, integer contractions skip its correction and frozen weights do not store it.
    """

    @property
    def has_zero_point(self) -> bool: ...


class SaysScaleDtype(Protocol):
    """A quantizer, scaling or restriction that knows an 8-bit dtype that holds its scales exactly.

    Frozen weights use it: `float8_e8m0fnu` for powers of two; a minifloat's up to one common factor. None if there is
    none.
    """

    @property
    def scale_dtype(self) -> np.dtype | None: ...


class SaysLearned(Protocol):
    """A `bit_width_impl` that knows whether its bit width is learned, so that a loss may penalize it."""

    @property
    def is_learned(self) -> bool: ...


class SaysNeverNegative(Protocol):
    """A statistic that knows whether it is never negative."""

    @property
    def never_negative(self) -> bool: ...


class TakesAxes(Protocol):
    """A statistic that can reduce other axes, so that the tensor needs no view."""

    stats_reduce_dim: int | tuple[int, ...] | None
    takes_several: bool

    @property
    def takes_axes(self) -> bool: ...
    def along(self, axes: Any, /) -> Any: ...


class SaysSearches(Protocol):
    """A statistic, a scaling or a `zero_point_impl` that knows whether it is found by trying candidates.

    If so, it takes one more argument, the task (`jqinject.core.Search` or `jqinject.core.Candidate`).
    """

    @property
    def searches(self) -> bool: ...


class SaysPositive(Protocol):
    """A restriction whose class knows whether it leaves positive values unchanged, stored and restored."""

    keeps_positive: bool


class SaysElementwise(Protocol):
    """A rounding whose class knows a stateless elementwise function with the same values.

    Such a clamp also states `passes_gradient`: whether the gradient passes where it clamps; and may state
    `clamps_first`: whether it clamps in the gradient from the bound on, before rounding.
    """

    @staticmethod
    def elementwise(x: Any, /) -> jax.Array: ...


class SaysConstant(Protocol):
    """A component whose class knows that its result depends only on attributes and arguments, all hashable."""

    is_constant: bool


class SaysSign(Protocol):
    """A restriction that knows whether it leaves negative values unchanged; others make them positive."""

    @property
    def keeps_sign(self) -> bool: ...


class SaysGroups(Protocol):
    """A quantizer or view that knows how it groups a tensor: `(group_size, group_dim)`, or None.

    Its result's value then has two axes (groups, elements of a group) instead of `group_dim`.
    """

    @property
    def groups(self) -> tuple[int, int] | None: ...


class SaysDynamic(Protocol):
    """A quantizer or scaling that knows whether its scale is computed from the given tensor."""

    @property
    def is_dynamic(self) -> bool: ...


class SaysInputFormat(Protocol):
    """A quantizer of weights that knows whether it is called with the bit width and the sign of the layer's input."""

    @property
    def needs_input_format(self) -> bool: ...


class SaysFormat(Protocol):
    """A quantizer that knows its numbers if they are not integers: a minifloat format or a table."""

    @property
    def format(self) -> Any: ...


class SaysNearest(Protocol):
    """A quantizer that knows whether, in evaluation, it does exactly what QuantizeLinear does: round to nearest (ties
    to even), then clamp to its format. A rounding states the first, a clamp the second."""

    @property
    def is_nearest(self) -> bool: ...


class SaysGrid(Protocol):
    """A quantizer that knows its grid at scale 1, a `jqinject.core.Grid`, and quantizes by a scale that it is given.

    Solvers choose numbers of that grid, and `CommittedQuant` keeps what they chose. None if it does not round to
    nearest.
    """

    @property
    def grid(self) -> Any: ...

    def by_scale(self, x: jax.Array, scale: jax.Array, zero_point: jax.Array, keep: bool) -> Any:
        """The result for `x` with the scale and the zero point of an earlier result; with its payload if `keep`."""
        ...


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


class SaysScaleFree(Protocol):
    """A stateful component whose own Variables do not depend on the tensor's scale: bit widths, counters."""

    is_scale_free: bool


class Rescales(Protocol):
    """A stateful component that knows its own Variables after the tensor's channels are multiplied by constants.

    It is asked where a learned scale has to follow a weight, as in folding a batch normalization.
    """

    def rescaled(self, factors: Factors, /) -> dict[str, jax.Array]:
        """Return the Variables that change, by name; others stay."""
        ...
