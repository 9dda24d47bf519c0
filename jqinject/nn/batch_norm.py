"""Quantized batch normalization: Flax's, computed in float, with a quantized output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Unpack, final, overload

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as default_promote_dtype
from flax.typing import Dtype, Initializer, PromoteDtypeFn

from jqinject.nn.base.norm_layer import QuantNormLayer
from jqinject.nn.base.override_keywords import (
    QuantBatchNormOverrides,
)
from jqinject.nn.base.quant_layer import Out
from jqinject.nn.base.slots import flax_arguments
from jqinject.quant import Int8ActPerTensorFloat, QuantizerLike
from jqinject.quant_tensor import AnyQuantTensor


@final
class QuantBatchNorm(QuantNormLayer[Out], nnx.BatchNorm):
    """`nnx.BatchNorm` with a quantized output: y = output_quant(norm(input_quant(x))), norm computed in float.

    A quantizer argument is an injector, a proxy to share (`other.output_quant`), or None. Further keywords
    override what a quantizer declares: `output_bit_width=4` declares `bit_width = 4` anew for the output quantizer.
    With every quantizer None the layer is `nnx.BatchNorm` to the bit. `model.eval()` puts the norm and its
    quantizers into evaluation mode together; `use_running_average` of a call is for the norm alone.

    Args:
        num_features: size of the features' axis.
        output_quant: quantizer of the output. By default `Int8ActPerTensorFloat`, which is what the layer is for; None
            leaves the output float.
        input_quant: quantizer of the input; `act_quant` is another name of it.
        return_quant_tensor: return a QuantTensor with the scale of `output_quant`.
        grad_quant: quantizer of the gradient that flows into the output, on its way back.
        rngs: for the parameters, and for quantizers that draw random numbers.
        use_running_average, axis, momentum, epsilon, dtype, param_dtype, use_bias, use_scale, bias_init,
            scale_init, axis_name, axis_index_groups, use_fast_variance, promote_dtype, bias_metadata,
            scale_metadata: as for `nnx.BatchNorm`.
        overrides: `output_...`, `input_...`, `grad_...`. With `axis_name` the statistics that the quantizers
            keep are taken over the mapped axis too, unless `output_axis_name=...` and its like say otherwise.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: `return_quant_tensor` without `output_quant`; a quantizer that does not say `signed`.

    Example:
        >>> import jax.numpy as jnp
        >>> norm = QuantBatchNorm(4, return_quant_tensor=True, rngs=nnx.Rngs(0))
        >>> norm(jnp.eye(4)).int().dtype
        dtype('int8')
    """

    _flax_forward = staticmethod(nnx.BatchNorm.__call__)

    if TYPE_CHECKING:

        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[False] = False, **more: Any
        ) -> QuantBatchNorm[jax.Array]: ...
        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[True], **more: Any
        ) -> QuantBatchNorm[AnyQuantTensor]: ...
        @overload
        def __new__(cls, *args: Any, return_quant_tensor: bool, **more: Any) -> QuantBatchNorm[Any]: ...
        def __new__(cls, *args: Any, **more: Any) -> Any: ...

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool | None = False,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-05,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = nnx.initializers.zeros,
        scale_init: Initializer = nnx.initializers.ones,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = default_promote_dtype,
        bias_metadata: Mapping[str, Any] = {},
        scale_metadata: Mapping[str, Any] = {},
        rngs: nnx.Rngs,
        output_quant: QuantizerLike = Int8ActPerTensorFloat,
        input_quant: QuantizerLike = None,
        return_quant_tensor: bool = False,
        act_quant: QuantizerLike = None,
        grad_quant: QuantizerLike = None,
        **overrides: Unpack[QuantBatchNormOverrides],
    ) -> None:
        nnx.BatchNorm.__init__(self, **flax_arguments(nnx.BatchNorm, locals()))
        self._init_quantizers(locals(), overrides, return_quant_tensor, rngs)

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Any, use_running_average: bool | None = None, *, mask: jax.Array | None = None
    ) -> Out:
        """The parent's forward on the quantized input, then the output quantizer.

        Args:
            x: float array or QuantTensor.
            use_running_average, mask: as for the parent.

        Returns:
            An array, or a QuantTensor with `return_quant_tensor`.
        """
        return self._quantized(x, lambda x: self._flax_forward(self, x, use_running_average, mask=mask))
