"""What components say of themselves (`_protocols.py`), and what counts where one says nothing.

Ask here, not by class: a quantizer of a user's own answers as one of the library's does.
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
    """A fact that a class says of its own `__call__`; None if it says nothing.

    A subclass with another `__call__` has to say it anew: what the base says holds for the base's.

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
    """Whether the zero point of a quantizer or a `zero_point_impl` may be another than 0; True where it is not said.

    Example:
        >>> from jqinject.core import ZeroZeroPoint
        >>> has_zero_point(ZeroZeroPoint()), has_zero_point(lambda x, scale, bit_width: scale)
        (False, True)
    """
    return getattr(component, "has_zero_point", True)


def scale_dtype(component: Any) -> np.dtype | None:
    """The 8-bit dtype that holds every scale of a quantizer, a scaling or a restriction; None if it does not say."""
    return getattr(component, "scale_dtype", None)


def is_learned(component: Any) -> bool:
    """Whether a component is a bit width that is learned; False where it is not said."""
    return getattr(component, "is_learned", False)


def searches(component: Any) -> bool:
    """Whether a statistic, a scaling or a zero point is found by trying it; False if it does not say."""
    return getattr(component, "searches", False)


def takes_axes(component: Any) -> bool:
    """Whether a statistic can be taken along other axes, by its method `along`; False if it does not say."""
    return getattr(component, "takes_axes", False)


def never_negative(component: Any) -> bool:
    """Whether a statistic is nowhere below 0; False if it does not say."""
    return getattr(component, "never_negative", False)


def keeps_sign(component: Any) -> bool:
    """Whether a restriction leaves values below 0 as they are; False where it is not said."""
    return getattr(component, "keeps_sign", False)


def groups_of(component: Any) -> tuple[int, int] | None:
    """Elements of a group and the axis that a quantizer or a view cuts into groups; None if it does not say."""
    return getattr(component, "groups", None)


def is_dynamic(component: Any) -> bool:
    """Whether the scale is that of the given tensor.

    A quantizer that does not say is as its `scaling_impl` is, and a scaling that does not say is not dynamic.
    """
    said = getattr(component, "is_dynamic", None)
    return getattr(getattr(component, "scaling_impl", None), "is_dynamic", False) if said is None else said


def needs_input_format(component: Any) -> bool:
    """Whether a quantizer of weights is called with the format of the layer's input; False where it is not said."""
    return getattr(component, "needs_input_format", False)


def amax_history(quantizer: Any) -> Any:
    """The record of amaxes that the scale of a quantizer follows; None if it does not say."""
    return getattr(getattr(quantizer, "scaling_impl", None), "amax_history", None)


def collects_in_steps(component: Any) -> bool:
    """Whether a component is a `StepStatistic`; False if it does not say."""
    return getattr(component, "in_step", None) is not None


def number_format(component: Any) -> Any:
    """The minifloats of a quantizer, or its table; None if it does not say."""
    return getattr(component, "format", None)


def is_nearest(*components: Any) -> bool:
    """Whether quantizers, roundings and clamps do what QuantizeLinear does; False where one does not say so."""
    return all(getattr(component, "is_nearest", False) for component in components)


# The facts as protocols, for the author of a component.


class SaysZeroPoint(Protocol):
    """A quantizer, or a `zero_point_impl`, that knows whether its zero point may be another than 0.

    A contraction of integers leaves out the correction for a zero point that is 0, a frozen weight its storage.
    """

    @property
    def has_zero_point(self) -> bool: ...


class SaysScaleDtype(Protocol):
    """A quantizer, a scaling or a restriction that knows an 8-bit dtype which holds each of its scales exactly.

    Frozen weights store scales so: `float8_e8m0fnu` for powers of two; that of minifloats up to one factor for all.
    None means that there is none.
    """

    @property
    def scale_dtype(self) -> np.dtype | None: ...


class SaysLearned(Protocol):
    """A `bit_width_impl` that knows whether its bit width is learned, so that a loss may penalize it."""

    @property
    def is_learned(self) -> bool: ...


class SaysNeverNegative(Protocol):
    """A statistic that knows whether it is nowhere below 0."""

    @property
    def never_negative(self) -> bool: ...


class TakesAxes(Protocol):
    """A statistic of an axis that can be taken along other axes as well, so that a tensor needs no view for it."""

    stats_reduce_dim: int | tuple[int, ...] | None
    takes_several: bool

    @property
    def takes_axes(self) -> bool: ...
    def along(self, axes: Any, /) -> Any: ...


class SaysSearches(Protocol):
    """A statistic, a scaling or a `zero_point_impl` that knows whether it is found by trying candidates.

    One that is takes a further argument: the task (`jqinject.core.Search` or `jqinject.core.Candidate`).
    """

    @property
    def searches(self) -> bool: ...


class SaysPositive(Protocol):
    """A restriction whose class knows whether it leaves values above 0 as they are, stored and restored."""

    keeps_positive: bool


class SaysElementwise(Protocol):
    """A rounding whose class knows an elementwise function, without state, that has its values.

    A clamp of such a class says `passes_gradient`: whether the gradient passes it where it clamps.
    """

    @staticmethod
    def elementwise(x: Any, /) -> jax.Array: ...


class SaysConstant(Protocol):
    """A component whose class knows that its answer depends on its attributes and arguments alone, all hashable."""

    is_constant: bool


class SaysSign(Protocol):
    """A restriction that knows whether it leaves a value below 0 as it is; others make it positive."""

    @property
    def keeps_sign(self) -> bool: ...


class SaysGroups(Protocol):
    """A quantizer, or a view, that knows into which groups it cuts a tensor: `(group_size, group_dim)`, or None.

    The value of its result then has two axes (groups, elements of a group) in the place of `group_dim`.
    """

    @property
    def groups(self) -> tuple[int, int] | None: ...


class SaysDynamic(Protocol):
    """A quantizer, or a scaling, that knows whether its scale is made from the tensor at hand, and not known before."""

    @property
    def is_dynamic(self) -> bool: ...


class SaysInputFormat(Protocol):
    """A quantizer of weights that knows whether it is called with the bit width and the sign of the layer's input."""

    @property
    def needs_input_format(self) -> bool: ...


class SaysFormat(Protocol):
    """A quantizer that knows its numbers where they are no integers: a minifloat's format, or a table."""

    @property
    def format(self) -> Any: ...


class SaysNearest(Protocol):
    """A quantizer that knows whether it does what QuantizeLinear does, in evaluation: round to nearest (ties to even),
    then clamp to the ends of its format, and nothing else. A rounding says the first, a clamp the second."""

    @property
    def is_nearest(self) -> bool: ...
