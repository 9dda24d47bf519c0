"""What an array answers that is stored as low-bit numbers."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.dot.frozen.frozen_numbers import integers_of, quant_tensor_of
from jqinject.dot.kernels.integer import Affine


class StoredArray:
    """Abstract: low-bit numbers in the place of a float array, whose facts are known without computing anything."""

    is_stored: ClassVar[bool] = True

    @property
    @abstractmethod
    def numbers(self) -> Mapping[str, Any]:
        """The arrays by name, as `frozen_numbers` lists them, or their shapes."""

    @property
    @abstractmethod
    def form(self) -> FrozenForm:
        """What is static in the numbers."""

    def quant_tensor(self, dtype: Any = None) -> Any:
        """The numbers as a QuantTensor, dequantized when its value is read.

        Args:
            dtype: of its value; None for that of the float array.
        """
        form = self.form if dtype is None else replace(self.form, value_dtype=np.dtype(dtype))
        return quant_tensor_of(self.numbers, form)

    def operand(self, dtype: Any = None) -> Any:
        """The numbers as an operand of a contraction: dequantized if no contraction takes their scales or zero points.

        Args:
            dtype: as for `quant_tensor`.
        """
        found, form = self.quant_tensor(dtype), self.form
        between = "zero_point" in form.names and not form.whole_zero_point
        return found.value if between or form.in_turn is not None else found

    def integers(self, summed: tuple[int, ...] | None = None) -> Affine:
        """The integers of a form that `has_integers`, for a contraction, with two axes for one if there are groups.

        Args:
            summed: the axes that the contraction sums over; None for those of the stored sums.
        """
        return integers_of(self.numbers, self.form, summed)

    @property
    def fitted_form(self) -> FrozenForm:
        """The form, with the axes in front that the numbers are stacked along, and without those that are gone."""
        return self.form.fitted(tuple(self.numbers["value"].shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the float array."""
        return self.fitted_form.shape

    @property
    def dtype(self) -> np.dtype:
        """Of the float array."""
        return self.form.value_dtype

    @property
    def ndim(self) -> int:
        """Number of axes of the float array."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements of the float array."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]
