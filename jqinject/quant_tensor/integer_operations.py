"""Operations on tensors of integers that keep their grid: arithmetic, and moves of axes."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import jax

from jqinject.quant_tensor import arithmetic, shaping
from jqinject.quant_tensor.base import QuantTensor, as_array
from jqinject.quant_tensor.bit_widths import BitWidth


class IntegerOperations(QuantTensor):
    """Abstract: the operators and array methods of `IntQuantTensor` whose results are again on a grid of integers."""

    __slots__ = ()

    scale: jax.Array
    zero_point: jax.Array
    bit_width: BitWidth
    signed: bool
    training: bool
    payload: jax.Array | None

    @abstractmethod
    def keeping(self, payload: jax.Array) -> Self:
        """The same tensor, which keeps its integers.

        Args:
            payload: its integers.
        """

    def swapaxes(self, axis1: Any, axis2: Any) -> Self:
        """Two axes exchanged."""
        return shaping.swapaxes(self, axis1, axis2)

    def squeeze(self, axis: Any = None) -> Self:
        """Axes of size 1 removed."""
        return shaping.squeeze(self, axis)

    def __getitem__(self, key: Any) -> Self:
        return shaping.index(self, key)

    def reshape(self, *shape: Any, order: str = "C", **options: Any) -> Any:
        """The same elements in another shape; see `shaping.reshape`. Another order gives a plain array."""
        if order != "C" or any(option is not None for option in options.values()):
            return self.value.reshape(*shape, order=order, **options)
        return shaping.reshape(self, _one_sequence(shape))

    def ravel(self, order: str = "C", **options: Any) -> Any:
        """The same elements along one axis."""
        return self.reshape(-1, order=order, **options)

    def transpose(self, *axes: Any) -> Self:
        """Axes permuted; reversed without arguments."""
        return shaping.transpose(self, None if axes == (None,) else _one_sequence(axes) or None)

    def __add__(self, other: Any) -> Any:
        if isinstance(other, IntegerOperations):
            return arithmetic.add(self, other)
        return self.value + other.value if isinstance(other, QuantTensor) else arithmetic.shift(self, other)

    def __sub__(self, other: Any) -> Any:
        return self + (-other)

    def __rsub__(self, other: Any) -> Any:
        return (-self) + other

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, IntegerOperations):
            return arithmetic.multiply(self, other)
        return self.value * as_array(other)

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, IntegerOperations):
            return arithmetic.divide(self, other)
        return self.value / as_array(other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Self:
        return arithmetic.negate(self)

    def __abs__(self) -> Self:
        return arithmetic.absolute(self)


def _one_sequence(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """`f(2, 3)` and `f((2, 3))` alike: the one sequence, or all arguments."""
    alone = len(arguments) == 1 and isinstance(arguments[0], Sequence)
    return tuple(arguments[0]) if alone else arguments
