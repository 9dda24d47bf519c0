"""The base of all quantized tensors, whatever their number format.

A `QuantTensor` is a dequantized array together with the metadata of its low-bit numbers. `value` is always the
dequantized float array, so a QuantTensor can be used wherever an array can; the other fields (scale, zero point,
exponent width, groups) depend on the format.
"""

import abc
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.quant_tensor.array_methods import ArrayMethods
from jqinject.quant_tensor.attribute import attribute


class QuantTensor(ArrayMethods):
    """Abstract base of the quantized tensors: an array that knows the low-bit numbers behind it.

    A subclass is final, immutable, and registered as a pytree. It works where a plain array is expected, in
    `jax.numpy`, `jax.nn`, NumPy and Flax layers, by decaying to `value`. JAX refuses it in functions that pass their
    arguments directly to `jax.lax` (`jax.nn.sigmoid`, `jax.lax.exp`): give these `x.value`.
    """

    __slots__ = ()

    @property
    @abc.abstractmethod
    def is_valid(self) -> bool | jax.Array:
        """Whether `value` lies on the grid that the other fields describe."""

    @abc.abstractmethod
    def set(self, **changes: Any) -> Self:
        """A copy with some fields replaced."""

    # A class whose value is made when it is read keeps something that has its shape, and its dtype, by these names.
    _shaped: Any = attribute("value", "Something of the shape of `value`.")
    _dtype: Any = attribute("value.dtype", "The float dtype of `value`.")

    shape: tuple[int, ...] = attribute("_shaped.shape", "Shape of `value`.")
    ndim: int = attribute("_shaped.ndim", "Number of axes of `value`.")
    size: int = attribute("_shaped.size", "Number of elements of `value`.")
    dtype: np.dtype = attribute("_dtype", "The float dtype of `value`.")

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a QuantTensor without axes; its shape is ()")
        return self.shape[0]

    def astype(self, dtype: Any) -> Self:
        """The same low-bit numbers with `value` in another float dtype; the scale stays float32.

        Raises:
            TypeError: `dtype` is not a float dtype.
        """
        return self.set(value=self.value.astype(self._float_dtype(dtype)))

    def _float_dtype(self, dtype: Any) -> Any:
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"astype({np.dtype(dtype).name}): the value of {type(self).__name__} is float; use .int() for its "
                "integers, or .value.astype(...)"
            )
        return dtype

    # Operations that no format keeps decay to the plain array.

    def __matmul__(self, other: Any) -> Any:
        return self.value @ as_array(other)

    def __rmatmul__(self, other: Any) -> Any:
        return as_array(other) @ self.value

    def __add__(self, other: Any) -> Any:
        return self.value + as_array(other)

    def __sub__(self, other: Any) -> Any:
        return self.value - as_array(other)

    def __rsub__(self, other: Any) -> Any:
        return as_array(other) - self.value

    def __mul__(self, other: Any) -> Any:
        return self.value * as_array(other)

    def __truediv__(self, other: Any) -> Any:
        return self.value / as_array(other)

    def __neg__(self, /) -> Any:
        return -self.value

    def __abs__(self, /) -> Any:
        return abs(self.value)

    __radd__ = __add__
    __rmul__ = __mul__

    def __pos__(self) -> Any:
        return self

    def __pow__(self, other: Any) -> Any:
        return self.value ** as_array(other)

    def __rpow__(self, other: Any) -> Any:
        return as_array(other) ** self.value

    def __floordiv__(self, other: Any) -> Any:
        return self.value // as_array(other)

    def __rfloordiv__(self, other: Any) -> Any:
        return as_array(other) // self.value

    def __mod__(self, other: Any) -> Any:
        return self.value % as_array(other)

    def __rmod__(self, other: Any) -> Any:
        return as_array(other) % self.value

    def __divmod__(self, other: Any) -> Any:
        return divmod(self.value, as_array(other))

    def __rdivmod__(self, other: Any) -> Any:
        return divmod(as_array(other), self.value)

    def __rtruediv__(self, other: Any) -> Any:
        return as_array(other) / self.value

    def __eq__(self, other: Any) -> Any:
        return self.value == as_array(other)

    def __ne__(self, other: Any) -> Any:
        return self.value != as_array(other)

    def __lt__(self, other: Any) -> Any:
        return self.value < as_array(other)

    def __le__(self, other: Any) -> Any:
        return self.value <= as_array(other)

    def __gt__(self, other: Any) -> Any:
        return self.value > as_array(other)

    def __ge__(self, other: Any) -> Any:
        return self.value >= as_array(other)

    __hash__ = None  # type: ignore[assignment]  # comparisons are elementwise, as for arrays


def as_array(x: Any) -> Any:
    """The plain array of `x`: `x.value` if it is a `QuantTensor`, else `x` itself.

    Args:
        x: a `QuantTensor`, an array, or anything else.

    Returns:
        The dequantized array of a `QuantTensor`; any other object unchanged.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant_tensor import IntQuantTensor, as_array
        >>> x = IntQuantTensor(jnp.array([0.5, 1.0]), 0.5, 0.0, 4, signed=True, training=False)
        >>> as_array(x)
        Array([0.5, 1. ], dtype=float32)
        >>> as_array(3)
        3
    """
    return x.value if isinstance(x, QuantTensor) else x
