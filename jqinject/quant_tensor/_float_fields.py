"""Conversion of a `FloatQuantTensor`'s format argument."""

from typing import Any

import numpy as np

from jqinject.ops.minifloats.float8_cast import FLOAT8_DTYPES
from jqinject.ops.minifloats.float_format import FloatFormat, LearnedFloatFormat

CONTRACTED = tuple(np.dtype(dtype) for dtype in FLOAT8_DTYPES)
AnyFloatFormat = FloatFormat | LearnedFloatFormat


def float_format(given: Any, where: str) -> AnyFloatFormat:
    """A format, given as itself or as a JAX dtype.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(given, FloatFormat | LearnedFloatFormat):
        return given
    try:
        return FloatFormat.of_dtype(given)
    except TypeError as error:
        raise TypeError(
            f"{where}: expected a FloatFormat or a narrow float dtype, got {given!r}; {error}"
        ) from None
