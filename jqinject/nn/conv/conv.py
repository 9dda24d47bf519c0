"""The quantized convolution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, final, overload

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as default_promote_dtype
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer, PaddingLike, PrecisionLike

from jqinject.nn.base.dot_layer import DEFAULT_WEIGHT, SchemeLike, by_scheme
from jqinject.nn.base.override_keywords import QuantConvOverrides
from jqinject.nn.base.quant_layer import Out
from jqinject.nn.base.weight_layer import ContractionKind
from jqinject.nn.conv.conv_layer import QuantConvLayer
from jqinject.quant import QuantizerLike
from jqinject.quant_tensor import AnyQuantTensor, on_integers


@final
class QuantConv(QuantConvLayer[Out], nnx.Conv):
    """`nnx.Conv` with quantizers: y = conv(x_q, W_q) + b_q, channels last, any number of spatial axes.

    A quantizer argument is an injector, a proxy to share (`other.weight_quant`), or None. Further keywords
    override what a quantizer declares: `weight_bit_width=4` declares `bit_width = 4` anew for the weight quantizer.
    With every quantizer None the layer is `nnx.Conv` to the bit.

    Source: Brevitas's `QuantConv1d`, `QuantConv2d`; differs from Brevitas: the arguments of the float layer are Flax's,
    an override without effect is an error, and sums without a scale are returned as an array (there an error).

    Args:
        in_features: input channels.
        out_features: output channels.
        kernel_size: the window.
        strides: as for `nnx.Conv`.
        padding, input_dilation, kernel_dilation, feature_group_count, use_bias, mask, dtype, param_dtype, precision,
            kernel_init, bias_init, conv_general_dilated, promote_dtype, preferred_element_type, rngs,
            kernel_metadata, bias_metadata: as for `nnx.Conv`.
        weight_quant: quantizer of the kernel, shape (*kernel_size, in_features / feature_group_count, out_features);
            channels are its last axis. By default `Int8WeightPerTensorFloat`, as in Brevitas; None keeps the kernel
            float.
        bias_quant: quantizer of the bias.
        input_quant: quantizer of the input; `act_quant` is another name of it.
        output_quant: quantizer of the output.
        return_quant_tensor: return an `IntQuantTensor`, with the scale of the accumulator or of `output_quant`; an
            array where sums have no scale of their own (scales along a summed axis, groups, minifloats).
        grad_quant: quantizer of the gradient that flows into the output, on its way back.
        scheme: as for `QuantLinear`: a `jqinject.dot.Scheme`, which quantizes what is convolved, forward and backward;
            one without transforms (`hadamard=None`).
        contraction: "auto" convolves integers in evaluation and once frozen, floats in training; "int" insists on
            integers; "float" convolves the dequantized floats in any case.
        overrides: `weight_...`, `bias_...`, `input_...`, `output_...`, `grad_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: `return_quant_tensor` without anything to take a scale from; a quantizer that does not say `signed`.
        DependencyError: a quantizer that cannot be assembled; the text shows the path.

    Example:
        >>> from jqinject.quant import Int8WeightPerChannelFloat
        >>> conv = QuantConv(3, 8, (3, 3), weight_quant=Int8WeightPerChannelFloat, rngs=nnx.Rngs(0))
        >>> conv(jnp.ones((2, 5, 5, 3))).shape, conv.quant_weight().scale.shape
        ((2, 5, 5, 8), (1, 1, 1, 8))
    """

    _flax_forward = staticmethod(nnx.Conv.__call__)
    _flax_contraction = staticmethod(jax.lax.conv_general_dilated)
    contraction_name = "conv_general_dilated"
    contraction_needs = {
        "int": "an input in integers of at most 8 bits with one scale and one zero point, a signed weight without zero "
        "point and with one scale or one for each output channel, and no mask",
        "fp8": "a contraction of 8-bit floats, which convolutions do not have",
    }

    if TYPE_CHECKING:

        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[False] = False, **more: Any
        ) -> QuantConv[jax.Array]: ...
        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[True], **more: Any
        ) -> QuantConv[AnyQuantTensor]: ...
        @overload
        def __new__(cls, *args: Any, return_quant_tensor: bool, **more: Any) -> QuantConv[Any]: ...
        def __new__(cls, *args: Any, **more: Any) -> Any: ...

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = 1,
        *,
        padding: PaddingLike = "SAME",
        input_dilation: int | Sequence[int] | None = 1,
        kernel_dilation: int | Sequence[int] | None = 1,
        feature_group_count: int = 1,
        use_bias: bool = True,
        mask: jax.Array | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        conv_general_dilated: Any = jax.lax.conv_general_dilated,
        promote_dtype: Any = default_promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = {},
        bias_metadata: Mapping[str, Any] = {},
        weight_quant: QuantizerLike = DEFAULT_WEIGHT,
        bias_quant: QuantizerLike = None,
        input_quant: QuantizerLike = None,
        output_quant: QuantizerLike = None,
        return_quant_tensor: bool = False,
        act_quant: QuantizerLike = None,
        grad_quant: QuantizerLike = None,
        contraction: ContractionKind = "auto",
        scheme: SchemeLike = None,
        **overrides: Unpack[QuantConvOverrides],
    ) -> None:
        nnx.Conv.__init__(
            self,
            in_features,
            out_features,
            kernel_size,
            strides,
            padding=padding,
            input_dilation=input_dilation,
            kernel_dilation=kernel_dilation,
            feature_group_count=feature_group_count,
            use_bias=use_bias,
            mask=mask,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            bias_init=bias_init,
            conv_general_dilated=conv_general_dilated,
            promote_dtype=promote_dtype,
            preferred_element_type=preferred_element_type,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )
        arguments = by_scheme(self, scheme, locals(), rngs)
        self._init_quantizers(arguments, overrides, return_quant_tensor, rngs)

    def channel_shapes(self) -> dict[str, tuple[int, ...]]:
        """Features are the last axis of input and output."""
        return {"input_quant": (self.in_features,), "output_quant": (self.out_features,)}

    def axes_of_sums(self) -> tuple[int, ...]:
        """The window and the input channels."""
        return tuple(range(self.weight_ndim - 1))

    def _free_input_axes(self, ndim: int) -> tuple[int, ...]:
        channels = (ndim - 1,) if self.weight_shape[-2] == 1 else ()
        return (*super()._free_input_axes(ndim), *channels)

    def _scales_on_weight(self, quant_input: Any, quant_weight: Any) -> tuple[Any, Any]:
        # In a depthwise convolution an output channel sums over one input channel, whose scale multiplies its filter.
        x, weight = quant_input, quant_weight
        if not (on_integers(x) and on_integers(weight)):
            return x, weight
        along_channels = x.scale.ndim > 0 and x.scale.size == x.scale.shape[-1] == self.in_features
        if x.scale.size == 1 or self.weight_shape[-2] != 1 or not along_channels:
            return x, weight
        each = jnp.repeat(x.scale.reshape(-1), self.out_features // self.in_features)
        return x.set(scale=jnp.ones(())), weight.set(scale=weight.scale * each)
