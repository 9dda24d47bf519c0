"""What components say of themselves (`_protocols.py`), and what counts where one says nothing.

Ask here, not by class: a quantizer of a user's own answers as one of the library's does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

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


def takes_cut(component: Any) -> bool:
    """Whether a range method takes a `Cut` for its axes; False if it does not say.

    Example:
        >>> from jqinject.core import AbsMaxRange
        >>> takes_cut(AbsMaxRange()), takes_cut(lambda x, axes: x)
        (True, False)
    """
    return class_fact(type(component), "takes_cut") is not None and component.takes_cut


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
