"""The quantized dense layer with a low-rank update in float."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Unpack, final, overload

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as default_promote_dtype
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.nnx.nn.lora import default_a_initializer, default_b_initializer
from flax.typing import DotGeneralT, Dtype, Initializer, PrecisionLike, PromoteDtypeFn

from jqinject.nn.base.dot_layer import QuantDotLayer
from jqinject.nn.base.override_keywords import QuantLoRALinearOverrides
from jqinject.nn.base.quant_layer import Out
from jqinject.nn.base.slots import flax_arguments
from jqinject.nn.base.weight_layer import ContractionKind
from jqinject.quant import Int8WeightPerTensorFloat, QuantizerLike
from jqinject.quant_tensor import AnyQuantTensor


@final
class QuantLoRALinear(QuantDotLayer[Out], nnx.LoRALinear):
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
        overrides: `weight_...`, `bias_...`, `input_...`, `output_...`, `grad_...`.

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
    reads_input = True  # A does

    returns_accumulator = False
    _flax_forward = staticmethod(nnx.Linear.__call__)  # the parent's adds A and B to the kernel's own product

    if TYPE_CHECKING:

        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[False] = False, **more: Any
        ) -> QuantLoRALinear[jax.Array]: ...
        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[True], **more: Any
        ) -> QuantLoRALinear[AnyQuantTensor]: ...
        @overload
        def __new__(cls, *args: Any, return_quant_tensor: bool, **more: Any) -> QuantLoRALinear[Any]: ...
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
        dot_general: DotGeneralT = jax.lax.dot_general,
        promote_dtype: PromoteDtypeFn = default_promote_dtype,
        preferred_element_type: Dtype | None = None,
        kernel_metadata: Mapping[str, Any] = {},
        bias_metadata: Mapping[str, Any] = {},
        lora_dtype: Dtype | None = None,
        lora_param_dtype: Dtype = jnp.float32,
        a_initializer: Initializer = default_a_initializer,
        b_initializer: Initializer = default_b_initializer,
        lora_param_type: type[nnx.Variable] = nnx.LoRAParam,
        lora_promote_dtype: PromoteDtypeFn = default_promote_dtype,
        a_metadata: Mapping[str, Any] = {},
        b_metadata: Mapping[str, Any] = {},
        rngs: nnx.Rngs,
        lora_rank: int,
        weight_quant: QuantizerLike = Int8WeightPerTensorFloat,
        bias_quant: QuantizerLike = None,
        input_quant: QuantizerLike = None,
        output_quant: QuantizerLike = None,
        return_quant_tensor: bool = False,
        act_quant: QuantizerLike = None,
        grad_quant: QuantizerLike = None,
        contraction: ContractionKind = "auto",
        **overrides: Unpack[QuantLoRALinearOverrides],
    ) -> None:
        nnx.LoRALinear.__init__(self, **flax_arguments(nnx.LoRALinear, locals()))
        self._init_quantizers(locals(), overrides, return_quant_tensor, rngs)

    def channel_shapes(self) -> dict[str, tuple[int, ...]]:
        """Features are the last axis of input and output."""
        return {"input_quant": (self.in_features,), "output_quant": (self.out_features,)}

    def _expected_features(self, ndim: int) -> Mapping[int, int]:
        return {-1: self.weight_shape[0]}

    def _parent_forward(self, parameter_view: Any, inputs: jax.Array, out_sharding: Any) -> jax.Array:
        return super()._parent_forward(parameter_view, inputs, out_sharding) + self.lora(inputs)

    def _contract(self, choice: Any, arrays: Any, grad_dtype: Any, out_sharding: Any) -> Any:
        y, token = super()._contract(choice, arrays, grad_dtype, out_sharding)
        return y + self.lora(arrays[0]), token
