"""The fields that the rules for integer tensors read, whatever the tensor's class."""

from __future__ import annotations

from typing import Any, Protocol, Self, TypeVar

import jax
import numpy as np

from jqinject.quant_tensor.bit_widths import BitWidth


class OnIntegers(Protocol):
    """A float array on a grid of integers: `value = (integer - zero_point) * scale`."""

    @property
    def value(self) -> jax.Array:
        """The dequantized floats."""
        ...

    @property
    def scale(self) -> jax.Array:
        """Float per integer step."""
        ...

    @property
    def zero_point(self) -> jax.Array:
        """The integer that stands for 0.0."""
        ...

    @property
    def bit_width(self) -> BitWidth:
        """Bits of one integer."""
        ...

    @property
    def signed(self) -> bool:
        """Whether the integers are signed."""
        ...

    @property
    def training(self) -> bool:
        """Whether it was made in training mode."""
        ...

    @property
    def payload(self) -> jax.Array | None:
        """The integers, if they are kept."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        ...

    @property
    def ndim(self) -> int:
        """The number of axes of the value."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the value."""
        ...

    def set(self, **changes: Any) -> Self:
        """A copy with some fields replaced."""
        ...

    def keeping(self, payload: jax.Array) -> Self:
        """The same tensor, which keeps its integers."""
        ...


Tensor = TypeVar("Tensor", bound=OnIntegers)
