"""What a proxy asks of the layer it serves."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class WeightLayer(Protocol):
    """A layer with a weight, and perhaps a bias.

    Attributes:
        weight: the weight Variable, whatever the layer calls it.
        bias: the bias Variable, or None.
        output_channel_dim: the axis of the weight that holds the output channels, counted without stacking; a tuple
            where channels are counted along several.
        weight_shape: its shape, frozen or not.
        weight_ndim: the axes of one weight; a weight with more of them is a stack of layers.
    """

    @property
    def weight(self) -> Any: ...
    @property
    def bias(self) -> Any: ...
    @property
    def output_channel_dim(self) -> int | tuple[int, ...]: ...
    @property
    def weight_shape(self) -> tuple[int, ...]: ...
    @property
    def weight_ndim(self) -> int: ...
