"""The quantized dense layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Unpack, final, overload

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as default_promote_dtype
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from jqinject.nn.base.dot_layer import DEFAULT_WEIGHT, QuantDotLayer, SchemeLike, by_scheme
from jqinject.nn.base.override_keywords import QuantLinearOverrides
from jqinject.nn.base.quant_layer import Out
from jqinject.nn.base.weight_layer import ContractionKind
from jqinject.quant import QuantizerLike
from jqinject.quant_tensor import AnyQuantTensor


@final
class QuantLinear(QuantDotLayer[Out], nnx.Linear):
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
        overrides: `weight_...`, `bias_...`, `input_...`, `output_...`, `grad_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: `return_quant_tensor` without anything to take a scale from; a quantizer that does not say `signed`.
        DependencyError: a quantizer that cannot be assembled; the text shows the path.

    Example:
        >>> from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat
        >>> fc = QuantLinear(
        ...     8, 4, weight_quant=Int8WeightPerChannelFloat, weight_bit_width=4,
        ...     input_quant=Int8ActPerTensorFloat, rngs=nnx.Rngs(0))
        >>> fc(jnp.ones((2, 8))).shape, fc.quant_weight().bit_width
        ((2, 4), 4)
    """

    _flax_forward = staticmethod(nnx.Linear.__call__)

    if TYPE_CHECKING:

        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[False] = False, **more: Any
        ) -> QuantLinear[jax.Array]: ...
        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[True], **more: Any
        ) -> QuantLinear[AnyQuantTensor]: ...
        @overload
        def __new__(cls, *args: Any, return_quant_tensor: bool, **more: Any) -> QuantLinear[Any]: ...
        def __new__(cls, *args: Any, **more: Any) -> Any: ...

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        dot_general: Any = jax.lax.dot_general,
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
        **overrides: Unpack[QuantLinearOverrides],
    ) -> None:
        nnx.Linear.__init__(
            self,
            in_features,
            out_features,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            bias_init=bias_init,
            dot_general=dot_general,
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

    def _expected_features(self, ndim: int) -> Mapping[int, int]:
        return {-1: self.weight_shape[0]}
