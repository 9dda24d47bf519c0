"""What an array answers that is stored as low-bit numbers."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.dot.frozen.frozen_numbers import parts_of, quant_tensor_of, stores_last
from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.kernels.integer import Affine
from jqinject.ops.groups import split_groups


class LowBitArray:
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
        numbers, form = self.numbers, self.form
        value = numbers["value"]
        form = form.fitted(value.shape)
        cut = form.cut
        payload, scale, zero = parts_of(numbers, form)
        if cut is not None:  # pieces of groups that no shard divides, each with the scale of its group
            length = payload.shape[cut.axis]
            zero = None if zero is None else cut.of_pieces(zero, length)
            return Affine(split_groups(payload, cut.piece, cut.axis), cut.of_pieces(scale, length), zero)
        known = summed is None or {*summed} == {*form.stored.summed}
        grid = form.stored.grid
        packed = grid is not None and grid.packed_bits == 4 and stores_last(form, summed)
        return Affine(payload, scale, zero, numbers.get("sums") if known else None, value if packed else None)

    def integers_as_stored(self, dims: Dimensions) -> tuple[Dimensions, Affine]:
        """The integers for a contraction along axes of the array, and the same contraction along their own axes.

        Whole bytes with one float scale a channel stay in the order in which they are stored, with the summed axes
        last, as kernels take them: nothing of the array's size is computed.

        Args:
            dims: of the contraction, with the array on the right.
        """
        numbers, form = self.numbers, self.form
        stored = form.fitted(numbers["value"].shape).stored
        plain = stored.grid is None and form.in_turn is None and "scale_factor" not in numbers
        if not plain or {*dims.rhs_contract} != {*stored.summed}:
            return dims, self.integers(dims.rhs_contract)
        scale = numbers["scale"].astype(np.float32).transpose(stored.order)
        zero, sums = numbers.get("zero_point"), numbers.get("sums")
        if zero is not None:
            zero = zero.transpose(stored.order).astype(np.float32)
        if sums is not None:
            sums = sums.transpose(stored.order)
        return dims.with_right(stored.back), Affine(numbers["value"], scale, zero, sums)

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
