"""Quantized dense layers: over one axis, over any axes, by an equation, and with a low-rank update in float."""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any, Unpack, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.dot import kernel_axes_of
from jqinject.dot.geometry.equation import EinsumLabels
from jqinject.nn.base import (
    WITH_SCHEME,
    LayerGeometry,
    Out,
    PlacedContraction,
    QuantWeightLayer,
    Results,
    WrongFeaturesError,
    check_features,
    of_matrix,
)
from jqinject.nn.base.keywords import (
    QuantEinsumKeywords,
    QuantLinearGeneralKeywords,
    QuantLinearKeywords,
    QuantLoRALinearKeywords,
)
from jqinject.quant_tensor import AnyQuantTensor, Operand, as_array


@final
class QuantLinear(QuantWeightLayer[Out], nnx.Linear):
    """`nnx.Linear` with quantizers: y = x_q @ W_q + b_q.

    A quantizer argument is an injector, a proxy to share (`other.weight_quant`), or None. Further keywords
    override what a quantizer declares: `weight_bit_width=4` declares `bit_width = 4` anew for the weight quantizer.
    With every quantizer None the layer is `nnx.Linear` to the bit.

    Source: Brevitas's `QuantLinear`; differs from Brevitas: the arguments of the float layer are Flax's, an override
    without effect is an error, and sums without a scale are returned as an array (there an error).

    Args:
        in_features: size of the last axis of the input.
        out_features: size of the last axis of the output.
        use_bias, dtype, param_dtype, precision, kernel_init, bias_init, dot_general, promote_dtype,
            preferred_element_type, rngs, kernel_metadata, bias_metadata: as for `nnx.Linear`.
        weight_quant: quantizer of the kernel, shape (in_features, out_features); channels are its last axis.
            By default `Int8WeightPerTensorFloat`, as in Brevitas; None keeps the kernel float.
        bias_quant: quantizer of the bias.
        input_quant: quantizer of the input; `act_quant` is another name of it.
        output_quant: quantizer of the output.
        return_quant_tensor: return an `IntQuantTensor`, with the scale of the accumulator or of `output_quant`; an
            array where sums have no scale of their own (scales along a summed axis, groups, minifloats).
        grad_quant: quantizer of the gradient that flows into the output, on its way back.
        scheme: quantizes the operands of the contraction and of its gradients instead: a `jqinject.dot.Scheme`, such as
            `jqinject.quant.Int8Training`. Refused here if its transforms or unpadded blocks do not fill features, or
            it takes a payload that does not fit; rows of a batch are checked by a call in training.
        contraction: "auto" contracts the payloads of an 8-bit float input and weight, integers in evaluation and once
            frozen, and floats otherwise; "int" and "fp8" insist on the payloads; "float" contracts the dequantized
            floats in any case. 8-bit floats are faster where the machine has units for them, a CPU gains nothing.
        more: overrides of quantizers: `weight_...`, `bias_...`, `input_...`, `output_...`, `grad_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: `return_quant_tensor` without anything to take a scale from; a quantizer that does not say `signed`.
        DependencyError: a quantizer that cannot be assembled; the text shows the path.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat
        >>> fc = QuantLinear(
        ...     8, 4, weight_quant=Int8WeightPerChannelFloat, weight_bit_width=4,
        ...     input_quant=Int8ActPerTensorFloat, rngs=nnx.Rngs(0))
        >>> fc(jnp.ones((2, 8))).shape, fc.quant_weight().bit_width
        ((2, 4), 4)
    """

    options = WITH_SCHEME

    _results: "Results[QuantLinear[jax.Array], QuantLinear[AnyQuantTensor]]"

    def __init__(
        self, in_features: int, out_features: int, *, rngs: nnx.Rngs, **more: Unpack[QuantLinearKeywords]
    ) -> None:
        self._init_layer(locals())

    @property
    def geometry(self) -> LayerGeometry:
        """A matrix (in, out) is contracted with the last axis of the input."""
        return of_matrix(self.in_features, self.out_features)


@final
class QuantLinearGeneral(QuantWeightLayer[Out], nnx.LinearGeneral):
    """`nnx.LinearGeneral` with quantizers: y = sum over `axis` of x_q W_q, plus b_q.

    A quantizer argument is an injector, a proxy to share (`other.weight_quant`), or None. Further keywords
    override what a quantizer declares: `weight_bit_width=4` declares `bit_width = 4` anew for the weight quantizer.
    With every quantizer None the layer is `nnx.LinearGeneral` to the bit. Frozen, it contracts integers where its
    input is quantized to at most 8 bits.

    Args:
        in_features: sizes of the axes of the input that are summed over.
        out_features: sizes of the output's last axes.
        weight_quant: quantizer of the kernel, shape (*batch, *in_features, *out_features). Channels are counted along
            all its axes but those of the input features: with a scale for each channel, the scale has the kernel's
            shape with 1 along `in_features`. By default `Int8WeightPerTensorFloat`, as in Brevitas; None keeps the
            kernel float.
        bias_quant: quantizer of the bias, shape (*batch, *out_features).
        input_quant: quantizer of the input; `act_quant` is another name of it.
        output_quant: quantizer of the output.
        return_quant_tensor: return an `IntQuantTensor`, with the scale of the accumulator or of `output_quant`; an
            array where sums have no scale of their own (scales along a summed axis, groups, minifloats).
        grad_quant: quantizer of the gradient that flows into the output, on its way back.
        scheme: as for `QuantLinear`: a `jqinject.dot.Scheme`, which quantizes what is contracted, forward and backward.
        contraction: as for `QuantLinear`.
        rngs: for the parameters, and for quantizers that draw random numbers.
        axis, batch_axis, use_bias, dtype, param_dtype, kernel_init, bias_init, precision, promote_dtype,
            dot_general, dot_general_cls, preferred_element_type, kernel_metadata, bias_metadata: as for
            `nnx.LinearGeneral`.
        more: overrides of quantizers: `weight_...`, `bias_...`, `input_...`, `output_...`, `grad_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: `return_quant_tensor` without anything to take a scale from; a quantizer that does not say `signed`.
        DependencyError: a quantizer that cannot be assembled; the text shows the path.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant import Int8WeightPerChannelFloat
        >>> heads = QuantLinearGeneral(8, (2, 4), weight_quant=Int8WeightPerChannelFloat, rngs=nnx.Rngs(0))
        >>> heads(jnp.ones((3, 8))).shape, heads.quant_weight().scale.shape
        ((3, 2, 4), (1, 2, 4))
    """

    options = WITH_SCHEME

    _results: "Results[QuantLinearGeneral[jax.Array], QuantLinearGeneral[AnyQuantTensor]]"

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        rngs: nnx.Rngs,
        **more: Unpack[QuantLinearGeneralKeywords],
    ) -> None:
        self._init_layer(locals())

    @property
    def geometry(self) -> LayerGeometry:
        """A kernel has the batch axes, then those of the input features, which are summed over."""
        batch = tuple(self.batch_axis)
        return _of_general(tuple(self.in_features), tuple(self.out_features), tuple(self.axis), batch)

    def _contracts_as_flax(self) -> bool:
        return self.dot_general is None and self.dot_general_cls is None


@cache
def _of_general(
    in_features: tuple[int, ...], out_features: tuple[int, ...], axis: tuple[int, ...], batch: tuple[int, ...]
) -> LayerGeometry:
    first = len(batch)
    behind = first + len(in_features)
    input_axes = tuple(sorted(axis))
    ends_input = input_axes == tuple(range(-len(in_features), 0))
    return LayerGeometry(
        behind + len(out_features),
        summed=tuple(range(first, behind)),
        input_axes=input_axes,
        batch_axes=batch,
        features=in_features,
        input_channels=in_features if ends_input else None,
        output_channels=None if batch else out_features,
    )


@final
class QuantLoRALinear(QuantWeightLayer[Out], nnx.LoRALinear):
    """`nnx.LoRALinear` on a quantized kernel: y = x_q @ W_q + b_q + x_q @ A @ B, with A and B in float.

    A quantizer argument is an injector, a proxy to share (`other.weight_quant`), or None. Further keywords
    override what a quantizer declares: `weight_bit_width=4` declares `bit_width = 4` anew for the weight quantizer.
    With every quantizer None the layer is `nnx.LoRALinear` to the bit. `jqinject.freeze` stores the kernel in low bits
    and leaves A and B, which can then be trained on.

    Args:
        in_features: size of the last axis of the input.
        out_features: size of the last axis of the output.
        lora_rank: columns of A, rows of B.
        weight_quant: quantizer of the kernel, shape (in_features, out_features); channels are its last axis.
            By default `Int8WeightPerTensorFloat`, as in Brevitas; None keeps the kernel float.
        bias_quant: quantizer of the bias.
        input_quant: quantizer of the input; `act_quant` is another name of it.
        output_quant: quantizer of the output.
        return_quant_tensor: return an `IntQuantTensor` with the scale of `output_quant`, which it needs, as the sum of
            the two products has no scale.
        grad_quant: quantizer of the gradient that flows into the output, on its way back.
        contraction: as for `QuantLinear`, of input and kernel.
        rngs: for the parameters, and for quantizers that draw random numbers.
        use_bias, dtype, param_dtype, precision, kernel_init, bias_init, dot_general, promote_dtype,
            preferred_element_type, kernel_metadata, bias_metadata, lora_dtype, lora_param_dtype, a_initializer,
            b_initializer, lora_param_type, lora_promote_dtype, a_metadata, b_metadata: as for `nnx.LoRALinear`.
        more: overrides of quantizers: `weight_...`, `bias_...`, `input_...`, `output_...`, `grad_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: `return_quant_tensor` without `output_quant`; a quantizer that does not say `signed`.
        DependencyError: a quantizer that cannot be assembled; the text shows the path.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = QuantLoRALinear(8, 4, lora_rank=2, weight_bit_width=4, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((3, 8))).shape, layer.quant_weight().bit_width, layer.lora.lora_a.shape
        ((3, 4), 4, (8, 2))
    """

    takes_batch_norm = False
    contracts_at_once = False  # A reads the input too

    returns_accumulator = False
    _flax_forward = staticmethod(nnx.Linear.__call__)  # the parent's adds A and B to the kernel's own product

    _results: "Results[QuantLoRALinear[jax.Array], QuantLoRALinear[AnyQuantTensor]]"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rngs: nnx.Rngs,
        lora_rank: int,
        **more: Unpack[QuantLoRALinearKeywords],
    ) -> None:
        self._init_layer(locals())

    @property
    def geometry(self) -> LayerGeometry:
        """A matrix (in, out) is contracted with the last axis of the input."""
        return of_matrix(self.in_features, self.out_features)

    def _contracted(
        self, x: Operand, weight: Any, bias: Operand | None, grad_quant: Any, out_sharding: object
    ) -> tuple[jax.Array, jax.Array | None]:
        y, token = super()._contracted(x, weight, bias, grad_quant, out_sharding)
        return y + self.lora(as_array(x)), token


@final
class QuantEinsum(QuantWeightLayer[Out], nnx.Einsum):
    """`nnx.Einsum` with quantizers: y = einsum(x_q, W_q) + b_q.

    A quantizer argument is an injector, a proxy to share (`other.weight_quant`), or None. Further keywords
    override what a quantizer declares: `weight_bit_width=4` declares `bit_width = 4` anew for the weight quantizer.
    With every quantizer None the layer is `nnx.Einsum` to the bit. Frozen, it contracts integers where its input is
    quantized to at most 8 bits and the equation is a plain contraction: one that repeats a label in an operand,
    broadcasts an axis of length 1, or sums an axis of one operand alone contracts the dequantized floats.

    Args:
        einsum_str: the equation: input, kernel -> output.
        kernel_shape: of the kernel.
        bias_shape: of the bias; None for no bias.
        weight_quant: quantizer of the kernel. Channels are counted along all its axes that the output has: with a scale
            for each channel, the scale has the kernel's shape with 1 along the axes that are summed over. By default
            `Int8WeightPerTensorFloat`; None keeps the kernel float.
        bias_quant: quantizer of the bias.
        input_quant: quantizer of the input; `act_quant` is another name of it.
        output_quant: quantizer of the output.
        return_quant_tensor: return an `IntQuantTensor`, with the scale of the accumulator or of `output_quant`; an
            array where sums have no scale of their own (scales along a summed axis, groups, minifloats).
        grad_quant: quantizer of the gradient that flows into the output, on its way back.
        scheme: as for `QuantLinear`: a `jqinject.dot.Scheme`, which quantizes what is contracted, forward and backward.
        contraction: as for `QuantLinear`.
        rngs: for the parameters, and for quantizers that draw random numbers.
        dtype, param_dtype, precision, kernel_init, bias_init, promote_dtype, einsum_op, preferred_element_type,
            kernel_metadata, bias_metadata: as for `nnx.Einsum`.
        more: overrides of quantizers: `weight_...`, `bias_...`, `input_...`, `output_...`, `grad_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: `return_quant_tensor` without anything to take a scale from; a quantizer that does not say `signed`.
        DependencyError: a quantizer that cannot be assembled; the text shows the path.

    Example:
        >>> from jqinject.quant import Int8WeightPerChannelFloat
        >>> heads = QuantEinsum(
        ...     "btd,dnh->btnh", (8, 2, 4), weight_quant=Int8WeightPerChannelFloat, rngs=nnx.Rngs(0))
        >>> heads(jnp.ones((1, 3, 8))).shape, heads.quant_weight().scale.shape
        ((1, 3, 2, 4), (1, 2, 4))
    """

    takes_batch_norm = False

    options = WITH_SCHEME
    contraction_name = "einsum_op"
    _flax_contraction = staticmethod(jnp.einsum)
    contraction_needs = {
        "int": "an input and a weight in integers of at most 8 bits, known before the program runs, and an equation "
        "that is a plain contraction",
        "fp8": "an input and a weight in 8-bit floats, with scales that do not vary along what is summed over, and an "
        "equation that is a plain contraction",
    }

    _results: "Results[QuantEinsum[jax.Array], QuantEinsum[AnyQuantTensor]]"

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: Sequence[int],
        bias_shape: Sequence[int] | None = None,
        *,
        rngs: nnx.Rngs,
        **more: Unpack[QuantEinsumKeywords],
    ) -> None:
        kernel_shape = tuple(kernel_shape)
        self._init_layer(locals())

    def __call__(self, inputs: Any, einsum_str: str | None = None, out_sharding: Any = None) -> Out:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The parent's forward on quantized input, weight and bias, then the output quantizer.

        Args:
            inputs: float array or QuantTensor.
            einsum_str: an equation for this call instead of the layer's. What shares a scale in the kernel is
                decided by the layer's own.
            out_sharding: as for the parent.

        Returns:
            An array, or a QuantTensor with `return_quant_tensor` (an array where sums have no scale, as in an equation
            that is not a plain contraction).

        Raises:
            ValueError: a QuantTensor is to be returned, and input or weight are not quantized; an equation that does
                not fit.
        """
        if einsum_str is None or einsum_str.replace(" ", "") == self.einsum_str:
            return super().__call__(inputs, out_sharding)
        twin = copy.copy(self)  # the same Variables and quantizers, another equation
        twin.einsum_str = einsum_str.replace(" ", "")
        return twin(inputs, out_sharding=out_sharding)

    @property
    def geometry(self) -> LayerGeometry:
        """The axes of the kernel that the output does not have are summed over."""
        return _of_equation(self.einsum_str, tuple(self.kernel_shape))

    def _check_features(self, inputs: object) -> None:
        shape, kernel = tuple(np.shape(as_array(inputs))), tuple(self.kernel_shape)
        of_input, of_kernel, _ = _labels(self.einsum_str)
        lengths = [len(label) for label in of_input.split("...")]
        if len(shape) < sum(lengths) or (len(lengths) == 1 and len(shape) != lengths[0]):
            raise WrongFeaturesError(
                f"QuantEinsum({self.einsum_str!r}) got an input of shape {shape}; expected "
                f"{'at least ' if len(lengths) > 1 else ''}{sum(lengths)} axes, {of_input!r}"
            )
        if "..." in of_kernel:
            return
        sizes = dict(zip(of_kernel, kernel, strict=True))
        front, _, behind = of_input.rpartition("...")
        axes = dict(enumerate(front)) | {axis - len(behind): label for axis, label in enumerate(behind)}
        # Axes of length 1 are broadcast, as `jnp.einsum` does it.
        expected = {
            axis: sizes[label]
            for axis, label in axes.items()
            if label in sizes and 1 not in (sizes[label], shape[axis])
        }
        check_features(self, inputs, expected, argument="kernel_shape")

    def _placed(self, shape: tuple[int, ...]) -> PlacedContraction | None:
        equation = EinsumLabels.parse(self.einsum_str, shape, self.kernel_shape)
        if not equation.is_plain(shape, tuple(self.kernel_shape)):
            return None
        return PlacedContraction(equation.axes)


def _labels(equation: str) -> tuple[str, str, str]:
    """Split an equation into the labels of input, kernel and output."""
    operands, _, output = equation.partition("->")
    of_input, of_kernel = operands.split(",")
    return of_input, of_kernel, output


@cache
def _of_equation(equation: str, kernel_shape: tuple[int, ...]) -> LayerGeometry:
    of_input, of_kernel, output = _labels(equation)
    behind = of_input.rpartition(".")[2]
    summed = [label for label in of_kernel.replace(".", "") if label in behind and label not in output]
    sizes = {} if "." in of_kernel or not output else dict(zip(of_kernel, kernel_shape, strict=True))
    return LayerGeometry(
        len(kernel_shape),
        summed=kernel_axes_of(equation, kernel_shape),
        input_axes=tuple(behind.index(label) - len(behind) for label in summed) or (-1,),
        input_channels=_channels(behind, sizes),
        output_channels=_channels(output.rpartition(".")[2], sizes),
    )


def _channels(labels: str, sizes: dict[str, int]) -> tuple[int, ...] | None:
    """Return the sizes of the last axes, from the first on that the kernel has too; None without one."""
    first = next((at for at, label in enumerate(labels) if label in sizes), None)
    return None if first is None else tuple(sizes.get(label, 1) for label in labels[first:])
