"""The weight of a layer, whatever NNX calls it, and what its axes are for."""

import math
from abc import abstractmethod
from typing import Any, ClassVar

from flax import nnx

from jqinject.nn.base.assignment import ReassembledOnAssignment
from jqinject.nn.frozen.frozen_weight import FrozenWeight


class WeightAxes(ReassembledOnAssignment):
    """Abstract: a layer with a weight, frozen or not, that says which of its axes are channels and which are summed.

    Attributes:
        frozen: the low-bit numbers that take the place of the weight, once it is frozen.
        weight_name: what NNX calls the weight.
        takes_batch_norm: whether a batch normalization that follows can be folded into weight and bias.
    """

    frozen: FrozenWeight | None = None
    weight_name: ClassVar[str] = "kernel"
    takes_batch_norm: ClassVar[bool] = True

    @property
    def weight(self) -> nnx.Variable[Any]:
        """The weight Variable."""
        return getattr(self, self.weight_name)

    @property
    def output_channel_dim(self) -> int | tuple[int, ...]:
        """The axis of the weight that holds the output channels: the last. A tuple where it is several."""
        return self.weight_ndim - 1

    @property
    def out_channels(self) -> int:
        """How many output channels there are."""
        dims = self.output_channel_dim
        axes = dims if isinstance(dims, tuple) else (dims,)
        return math.prod(self.weight_shape[axis - self.weight_ndim] for axis in axes)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Of the weight, frozen or not."""
        return tuple(self.weight.shape) if self.frozen is None else self.frozen.shape

    @property
    @abstractmethod
    def weight_ndim(self) -> int:
        """The axes of one weight; more than that is a stack of layers."""

    def channel_shapes(self) -> dict[str, tuple[int, ...]]:
        """Slot of activations -> the shape of a scale for each channel there; only what is known beforehand."""
        return {}

    def _free_input_axes(self, ndim: int) -> tuple[int, ...]:
        """The axes of an input of `ndim` axes along which it may have several scales: those not summed over."""
        return ()

    def summed_axes(self) -> tuple[int, ...]:
        """The axes of the weight that a contraction sums over, to be stored last; none for a convolution."""
        return ()

    def axes_of_sums(self) -> tuple[int, ...] | None:
        """The axes along which a contraction of integers needs their sums; None where it needs none."""
        return self.summed_axes() or None

    def _terms(self) -> int:
        """How many products one element of the output sums."""
        return math.prod(self.weight_shape) // max(self.out_channels, 1)
