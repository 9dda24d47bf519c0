"""What convolutions and transposed convolutions share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jqinject.dot import Affine, IntegerOperand, affine_of, has_integers, integer_conv
from jqinject.dot.kernels.convolution import Convolution
from jqinject.nn.base.quant_layer import Out
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.ops.sharding import asked, with_sharding
from jqinject.quant_tensor import IntQuantTensor


@dataclass
class IntegerConvolution:
    """In the place of `lax.conv_general_dilated`: convolves integers.

    Attributes:
        x: the input, with one scale and one zero point.
        weight: the integers of the kernel.
        stored: the dtype of the values of a frozen kernel, which gets no gradient; None for any other kernel.
    """

    token: ClassVar[None] = None
    x: IntQuantTensor
    weight: Affine
    stored: Any = None

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
        value, stored = (rhs, rhs.dtype) if self.stored is None else (None, self.stored)
        left = IntegerOperand(self._integers(lhs), lhs, lhs.dtype)
        right = IntegerOperand(self.weight, value, stored)
        return with_sharding(integer_conv(convolution, left, right), out_sharding)

    def _integers(self, lhs: jax.Array) -> Affine:
        """The input's integers, in the shape that the layer gave it: other batch axes, or a border added."""
        scale, zero = self.x.scale.reshape(()), self.x.zero_point.reshape(())
        if lhs.size == self.x.size:
            left = affine_of(self.x)
            no_zero = left.zero_point is None
            return Affine(left.payload.reshape(lhs.shape), scale, None if no_zero else zero)
        return affine_of(self.x.set(value=lhs, scale=scale, zero_point=zero))


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

    def _integer_contraction(self, x: Any, weight: Any) -> Any:
        if not (has_integers(x) and has_integers(weight)):
            return None
        frozen = self.frozen
        integers = self._made_integers(weight) if frozen is None else frozen.integers(weight)
        if integers is None:
            return None
        one_input_scale = x.scale.size == x.zero_point.size == 1
        whole_filters = integers.scale.size in (1, self.out_channels) and self.mask is None
        plain_weight = integers.zero_point is None and integers.payload.dtype != jnp.uint8
        if not (one_input_scale and whole_filters and plain_weight):
            return None
        return IntegerConvolution(x, integers, None if frozen is None else frozen.form.value_dtype)

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
