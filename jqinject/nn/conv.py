"""Quantized convolutions, plain and transposed."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Unpack, final

import jax
from flax import nnx
from jax.sharding import auto_axes

from jqinject.core.flax_internals import ParameterView
from jqinject.dot import FrozenParam
from jqinject.dot.tensors.choice import ChosenKernel
from jqinject.nn import base
from jqinject.nn.base import keywords
from jqinject.ops.sharding import asked, with_sharding
from jqinject.program.jaxpr import Body, Equation
from jqinject.program.operations import contraction_arguments
from jqinject.quant_tensor import AnyQuantTensor, as_array


@cache
def of_window(
    ndim: int, in_features: int, out_features: int, channel: int, is_summed: bool
) -> base.LayerGeometry:
    """Return the geometry of a kernel (*window, channels, channels) and channels last.

    Args:
        ndim: number of axes of the kernel.
        in_features, out_features: of the layer.
        channel: the axis of the output channels.
        is_summed: whether a contraction of integers needs sums of the kernel.
    """
    return base.LayerGeometry(
        ndim,
        channels=(channel,),
        sums=tuple(range(ndim - 1)) if is_summed else (),
        features=(in_features,),
        channels_last=True,
        input_channels=(in_features,),
        output_channels=(out_features,),
    )


@final
class QuantConv(base.QuantWeightLayer[base.Out], nnx.Conv):
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
        more: overrides of quantizers: `weight_...`, `bias_...`, `input_...`, `output_...`, `grad_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: `return_quant_tensor` without anything to take a scale from; a quantizer that does not say `signed`.
        DependencyError: a quantizer that cannot be assembled; the text shows the path.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant import Int8WeightPerChannelFloat
        >>> conv = QuantConv(3, 8, (3, 3), weight_quant=Int8WeightPerChannelFloat, rngs=nnx.Rngs(0))
        >>> conv(jnp.ones((2, 5, 5, 3))).shape, conv.quant_weight().scale.shape
        ((2, 5, 5, 8), (1, 1, 1, 8))
    """

    options = base.WITH_SCHEME
    _flax_contraction = staticmethod(jax.lax.conv_general_dilated)
    contraction_name = "conv_general_dilated"
    contracts_at_once = False  # the forward of Flax does
    contraction_needs = {
        "int": "an input in integers of at most 8 bits with one scale and one zero point, a signed weight without zero "
        "point and with one scale or one for each output channel, and no mask",
        "fp8": "a contraction of 8-bit floats, which convolutions do not have",
    }

    _results: "base.Results[QuantConv[jax.Array], QuantConv[AnyQuantTensor]]"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = 1,
        *,
        rngs: nnx.Rngs,
        **more: Unpack[keywords.QuantConvKeywords],
    ) -> None:
        self._init_layer(locals())

    @property
    def geometry(self) -> base.LayerGeometry:
        """Integers need sums over the window and the input channels."""
        ndim = len(self.kernel_shape)
        return of_window(ndim, self.in_features, self.out_features, ndim - 1, True)

    def _placed(self, shape: tuple[int, ...]) -> base.PlacedFilters:
        # In a depthwise convolution an output channel sums over one input channel, whose scale multiplies its filter.
        filters = self.out_features // self.in_features if self.weight_shape[-2] == 1 else 0
        terms = math.prod(self.weight_shape) // max(self.out_channels, 1)
        return base.PlacedFilters.of(self.geometry, len(shape), terms, self.mask is None, filters)


@final
class QuantConvTranspose(base.QuantWeightLayer[base.Out], nnx.ConvTranspose):
    """`nnx.ConvTranspose` with quantizers: y = conv_transpose(x_q, W_q) + b_q, channels last.

    A quantizer argument is an injector, a proxy to share (`other.weight_quant`), or None. Further keywords
    override what a quantizer declares: `weight_bit_width=4` declares `bit_width = 4` anew for the weight quantizer.
    With every quantizer None the layer is `nnx.ConvTranspose` to the bit.

    Source: Brevitas's `QuantConvTranspose1d`, `QuantConvTranspose2d`, `QuantConvTranspose3d`; differs from Brevitas:
    the arguments of the float layer are Flax's, an override without effect is an error, the accumulator's bits are
    enough for every sum, and sums without a scale are returned as an array (there an error).

    Args:
        in_features: input channels.
        out_features: output channels.
        kernel_size: the window.
        strides: as for `nnx.ConvTranspose`.
        weight_quant: quantizer of the kernel, shape (*kernel_size, in_features, out_features), or with
            `transpose_kernel=True` (*kernel_size, out_features, in_features); channels are the axis of `out_features`.
            By default `Int8WeightPerTensorFloat`, as in Brevitas; None keeps the kernel float.
        bias_quant: quantizer of the bias.
        input_quant: quantizer of the input; `act_quant` is another name of it.
        output_quant: quantizer of the output.
        return_quant_tensor: return an `IntQuantTensor`, with the scale of the accumulator or of `output_quant`; an
            array where sums have no scale of their own (scales along a summed axis, groups, minifloats).
        grad_quant: quantizer of the gradient that flows into the output, on its way back.
        contraction: as for `QuantConv`.
        rngs: for the parameters, and for quantizers that draw random numbers.
        padding, kernel_dilation, use_bias, mask, dtype, param_dtype, precision, kernel_init, bias_init,
            transpose_kernel, promote_dtype, preferred_element_type, kernel_metadata, bias_metadata: as for
            `nnx.ConvTranspose`.
        more: overrides of quantizers: `weight_...`, `bias_...`, `input_...`, `output_...`, `grad_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: `return_quant_tensor` without anything to take a scale from; a quantizer that does not say `signed`.
        DependencyError: a quantizer that cannot be assembled; the text shows the path.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant import Int8WeightPerChannelFloat
        >>> up = QuantConvTranspose(3, 8, (2, 2), strides=2, weight_quant=Int8WeightPerChannelFloat, rngs=nnx.Rngs(0))
        >>> up(jnp.ones((2, 5, 5, 3))).shape, up.quant_weight().scale.shape
        ((2, 10, 10, 8), (1, 1, 1, 8))
    """

    contraction_name = "conv_general_dilated"
    contracts_at_once = False  # the forward of Flax does
    _flax_contraction = staticmethod(jax.lax.conv_general_dilated)
    contraction_needs = {
        "int": "an input in integers of at most 8 bits with one scale and one zero point, a signed weight without zero "
        "point and with one scale or one for each output channel, no mask and no transpose_kernel",
        "fp8": "a contraction of 8-bit floats, which transposed convolutions do not have",
    }

    _results: "base.Results[QuantConvTranspose[jax.Array], QuantConvTranspose[AnyQuantTensor]]"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = None,
        *,
        rngs: nnx.Rngs,
        **more: Unpack[keywords.QuantConvTransposeKeywords],
    ) -> None:
        self._init_layer(locals())

    @property
    def geometry(self) -> base.LayerGeometry:
        """The output channels are the last axis of the kernel, the last but one where it is transposed."""
        ndim = len(self.kernel_shape)
        channel = ndim - (2 if self.transpose_kernel else 1)
        return of_window(ndim, self.in_features, self.out_features, channel, False)

    def _terms(self) -> int:
        """The products that one element of the output sums, or what Brevitas counts where that is more.

        They are the input channels times the places of the window that meet in one output: those a stride apart.
        Brevitas counts output channels, and adds the places along the axes; where that is enough, widths agree.
        """
        window = self.weight_shape[-self.weight_ndim : -2]
        strides, dilations = (_each(sizes, len(window)) for sizes in (self.strides, self.kernel_dilation))
        places = (
            math.ceil(size / (stride // math.gcd(stride, dilation)))
            for size, stride, dilation in zip(window, strides, dilations, strict=True)
        )
        added = sum(math.ceil(size / stride) for size, stride in zip(window, strides, strict=True))
        return max(self.in_features * math.prod(places), self.out_features * added)

    def _placed(self, shape: tuple[int, ...]) -> base.PlacedFilters:
        is_contracted = self.mask is None and not self.transpose_kernel
        return base.PlacedFilters.of(self.geometry, len(shape), self._terms(), is_contracted)

    def _choice(self, x: object, weight: object, integer_gradient: bool) -> ChosenKernel | None:
        # Flax hands no sharding to its convolution: along explicit axes floats are convolved.
        array = as_array(x)
        explicit = asked(
            True, array, weight.numbers["scale"] if isinstance(weight, FrozenParam) else as_array(weight)
        )
        return super()._choice(array if explicit else x, weight, integer_gradient)

    def _parent_forward(self, parameter_view: Any, inputs: jax.Array, out_sharding: Any) -> jax.Array:
        def forward(inputs: jax.Array, kernel: jax.Array, bias: object) -> jax.Array:
            view: Any = ParameterView(parameter_view, {"kernel": kernel, "bias": bias})
            return self._flax_forward(view, inputs)

        arrays = inputs, parameter_view.kernel[...], parameter_view.bias
        convolve = vars(parameter_view).get(self.contraction_name)
        if convolve is not None:
            y = with_convolution(convolve, forward, *parameter_view.promote_dtype(arrays, dtype=self.dtype))
        elif asked(out_sharding, inputs, parameter_view.kernel) is None:
            y = forward(*arrays)
        else:
            # Flax hands no sharding to its convolution: it is run with automatic axes.
            run: Any = auto_axes(forward, out_sharding=out_sharding)
            return run(*arrays)
        return with_sharding(y, out_sharding)


def _each(sizes: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """One number for each axis of the window."""
    return (sizes or 1,) * rank if isinstance(sizes, int | None) else tuple(sizes)


def with_convolution(
    convolve: Callable[..., jax.Array], forward: Callable[..., jax.Array], *arrays: object
) -> jax.Array:
    """`forward(*arrays)`, convolving by `convolve`.

    Args:
        convolve: called as `lax.conv_general_dilated`.
        forward: a function of arrays that convolves, itself or in functions that it calls.
        arrays: its arguments; None stays None.

    Raises:
        ValueError: it does not convolve, or where no other function can take its place.
    """
    body = Body.of(jax.make_jaxpr(forward)(*arrays))
    if not _convolves(body):
        raise ValueError(
            "a convolution in low bits was to take the place of the layer's own, and none is in the open or in a "
            "jax.jit function.\n  cure: a forward that calls jax.lax.conv_general_dilated or conv_transpose"
        )
    (out,) = _evaluated(body, jax.tree.leaves(arrays), convolve)
    return out


def _evaluated(body: Body, inputs: Sequence[object], convolve: Callable[..., jax.Array]) -> list[Any]:
    def step(eqn: Equation, values: list[object]) -> list[Any]:
        if eqn.name == "conv_general_dilated":
            dtype = eqn.params["preferred_element_type"]
            return [convolve(*values, **contraction_arguments(eqn), preferred_element_type=dtype)]
        if eqn.name == "jit" and _convolves(eqn.bodies[0]):
            return _evaluated(eqn.bodies[0], values, convolve)
        return eqn.bind(values)

    return body.run(inputs, step, lambda value: value)


def _convolves(body: Body) -> bool:
    return any(
        eqn.name == "conv_general_dilated" or (eqn.name == "jit" and _convolves(eqn.bodies[0]))
        for eqn in body.equations
    )
