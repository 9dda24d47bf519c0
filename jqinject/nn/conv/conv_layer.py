"""What convolutions and transposed convolutions share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jqinject.dot import Affine, affine_of, integer_conv
from jqinject.dot.kernels.convolution import Convolution, Filters
from jqinject.dot.tensors.choice import ChosenKernel
from jqinject.nn.base.quant_layer import Out
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.ops.sharding import asked, with_sharding


@dataclass
class IntegerConvolution:
    """In the place of `lax.conv_general_dilated`: convolves integers.

    Attributes:
        choice: the row of the table for input and kernel.
        grad_dtype, token: None, as there are no 8-bit floats.
    """

    choice: ChosenKernel
    grad_dtype: None = None
    token: None = None

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        window_strides: Any,
        padding: Any,
        *,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
        **options: Any,
    ) -> jax.Array:
        """The convolution; gradients go to the arrays."""
        dtype = preferred_element_type or lhs.dtype
        options["out_sharding"] = asked(out_sharding, lhs, rhs)
        convolution = Convolution.of(lhs.shape, rhs.shape, window_strides, padding, dtype=dtype, **options)
        left, right = self.choice.operands((lhs, rhs))
        left = replace(left, integers=self._integers(left.integers, lhs))
        return with_sharding(integer_conv(convolution, left, right), out_sharding)

    def _integers(self, integers: Any, lhs: jax.Array) -> Affine:
        """The input's integers, in the shape that the layer gave it: other batch axes, or a border added."""
        x = self.choice.lhs
        scale, zero = x.scale.reshape(()), x.zero_point.reshape(())
        if lhs.size == x.size:
            no_zero = integers.zero_point is None
            return Affine(integers.payload.reshape(lhs.shape), scale, None if no_zero else zero)
        return affine_of(x.set(value=lhs, scale=scale, zero_point=zero))


class PlacedFilters(NamedTuple):
    """As `Placed` of a `dot_general`.

    Attributes:
        dims: where scales may vary.
    """

    dims: Filters


class QuantConvLayer(QuantWeightLayer[Out]):
    """Abstract: a layer that moves a window over spatial axes, channels last."""

    kernel_shape: Sequence[int]
    in_features: int
    mask: Any
    _channels_last: ClassVar[bool] = True

    def _expected_features(self, ndim: int) -> Mapping[int, int]:
        return {-1: self.in_features}

    @property
    def weight_ndim(self) -> int:
        """A kernel has the axes of the window, and one each for input and output channels."""
        return len(self.kernel_shape)

    contraction_class = IntegerConvolution

    def _placed(self, shape: tuple[int, ...]) -> Any:
        channel = self.output_channel_dim
        assert isinstance(channel, int), "a kernel has its output channels along one axis"
        return PlacedFilters(Filters(None, channel, shifted=False)) if self.mask is None else None

    def _free_input_axes(self, ndim: int) -> tuple[int, ...]:
        # The window runs over the spatial axes, and channels are summed: only batch axes are unchanged.
        return tuple(range(ndim - (self.weight_ndim - 1)))

    def _bias_on_grid(self, bias: Any, weight: Any) -> bool | jax.Array | None:
        # Where channels differ in scale the quantized bias becomes the output's zero point, so that the integers
        # are those of the accumulator before the bias: Brevitas's convention for convolutions. The value is the
        # same either way.
        on_grid = super()._bias_on_grid(bias, weight)
        if not on_grid or weight.scale.size == 1:
            return on_grid
        return jnp.allclose(bias.scale, bias.scale.reshape(-1)[0])
