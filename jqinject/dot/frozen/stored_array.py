"""What an array answers that is stored as low-bit numbers."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.dot.frozen.frozen_numbers import quant_tensor_of


class StoredArray:
    """Abstract: low-bit numbers in the place of a float array, whose facts are known without computing anything."""

    @property
    @abstractmethod
    def numbers(self) -> Mapping[str, Any]:
        """The arrays by name, as `frozen_numbers` lists them, or their shapes."""

    @property
    @abstractmethod
    def form(self) -> FrozenForm:
        """What is static in the numbers."""

    def quant_tensor(self) -> Any:
        """The numbers as a QuantTensor, dequantized when its value is read."""
        return quant_tensor_of(self.numbers, self.form)

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
