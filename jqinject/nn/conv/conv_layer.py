"""What convolutions and transposed convolutions share."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jqinject.nn.base.weight_layer import QuantWeightLayer


class QuantConvLayer(QuantWeightLayer):
    """Abstract: a layer that moves a window over spatial axes, channels last."""

    kernel_shape: Sequence[int]
    in_features: int
    _channels_last: ClassVar[bool] = True

    def _expected_features(self, ndim: int) -> Mapping[int, int]:
        return {-1: self.in_features}

    @property
    def weight_ndim(self) -> int:
        """A kernel has the axes of the window, and one each for input and output channels."""
        return len(self.kernel_shape)

    def _free_input_axes(self, ndim: int) -> tuple[int, ...]:
        # The window runs over the spatial axes, and channels are summed: only batch axes stay as they are.
        return tuple(range(ndim - (self.weight_ndim - 1)))

    def _bias_on_grid(self, bias: Any, weight: Any) -> bool | jax.Array | None:
        # Where channels differ in scale the quantized bias becomes the output's zero point, so that the integers
        # are those of the accumulator before the bias: Brevitas's convention for convolutions. The value is the
        # same either way.
        on_grid = super()._bias_on_grid(bias, weight)
        if not on_grid or weight.scale.size == 1:
            return on_grid
        return jnp.allclose(bias.scale, bias.scale.reshape(-1)[0])
