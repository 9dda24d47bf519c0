"""The fields of a `FloatQuantTensor`: its format, and the levels of its scale."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.ops.float8_cast import FLOAT8_DTYPES
from jqinject.ops.float_grid import FloatGrid

CONTRACTED = tuple(np.dtype(dtype) for dtype in FLOAT8_DTYPES)


class Levels(NamedTuple):
    """What a tensor was rounded to, by a scale in two levels: `value = minifloats * block * shared`.

    Attributes:
        minifloats: float32, of the shape of the value; zeros keep their signs.
        block: numbers of the scales' format, float32; broadcasts against them.
        shared: float32, likewise.
    """

    minifloats: jax.Array
    block: jax.Array
    shared: jax.Array

    def codes(self, form: FloatGrid) -> jax.Array:
        """The codes of the minifloats; zeros keep their signs.

        Args:
            form: their format.
        """
        codes = form.codes(self.minifloats)
        sign = codes.dtype.type(1 << (form.exponent_bit_width + form.mantissa_bit_width))
        return jnp.where(jnp.signbit(self.minifloats) & form.signed, codes | sign, codes)


def float_format(given: Any, where: str) -> FloatGrid:
    """A format, given as itself or as a JAX dtype.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(given, FloatGrid):
        return given
    try:
        return FloatGrid.of_dtype(given)
    except TypeError as error:
        raise TypeError(
            f"{where}: expected a FloatGrid or a narrow float dtype, got {given!r}; {error}"
        ) from None
