"""What components say of themselves (`_protocols.py`), and what counts where one says nothing.

Ask here, not by class: a quantizer of a user's own answers as one of the library's does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jqinject.core._protocols import (
    SaysFormat,
    SaysLearned,
    SaysNearest,
    SaysScaleDtype,
    SaysSign,
    SaysZeroPoint,
)


def has_zero_point(component: Any) -> bool:
    """Whether the zero point of a quantizer or a `zero_point_impl` may be another than 0; True where it is not said.

    Example:
        >>> from jqinject.core import ZeroZeroPoint
        >>> has_zero_point(ZeroZeroPoint()), has_zero_point(lambda x, scale, bit_width: scale)
        (False, True)
    """
    return component.has_zero_point if isinstance(component, SaysZeroPoint) else True


def scale_dtype(component: Any) -> np.dtype | None:
    """The 8-bit dtype that holds every scale of a quantizer, a scaling or a restriction; None where it is not said."""
    return component.scale_dtype if isinstance(component, SaysScaleDtype) else None


def is_learned(component: Any) -> bool:
    """Whether a component is a bit width that is learned; False where it is not said."""
    return isinstance(component, SaysLearned) and component.is_learned


def keeps_sign(component: Any) -> bool:
    """Whether a restriction leaves values below 0 as they are; False where it is not said."""
    return isinstance(component, SaysSign) and component.keeps_sign


def number_format(component: Any) -> Any:
    """The minifloats of a quantizer, or its table; None where it is not said."""
    return component.format if isinstance(component, SaysFormat) else None


def is_nearest(*components: Any) -> bool:
    """Whether quantizers, roundings and clamps do what QuantizeLinear does; False where one does not say so."""
    return all(isinstance(component, SaysNearest) and component.is_nearest for component in components)
