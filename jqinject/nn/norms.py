"""Quantized normalizations of one example: Flax's, computed in float, with a quantized output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Unpack, final, overload

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as default_promote_dtype
from flax.typing import Axes, Dtype, Initializer, PromoteDtypeFn

from jqinject.nn.base.norm_layer import QuantNormLayer
from jqinject.nn.base.override_keywords import (
    QuantGroupNormOverrides,
    QuantLayerNormOverrides,
    QuantRMSNormOverrides,
)
from jqinject.nn.base.quant_layer import Out
from jqinject.nn.base.slots import flax_arguments
from jqinject.quant import Int8ActPerTensorFloat, QuantizerLike
from jqinject.quant_tensor import AnyQuantTensor


@final
class QuantLayerNorm(QuantNormLayer[Out], nnx.LayerNorm):
    """`nnx.LayerNorm` with a quantized output: y = output_quant(norm(input_quant(x))), norm computed in float.

    A quantizer argument is an injector, a proxy to share (`other.output_quant`), or None. Further keywords
    override what a quantizer declares: `output_bit_width=4` declares `bit_width = 4` anew for the output quantizer.
    With every quantizer None the layer is `nnx.LayerNorm` to the bit.

    Args:
        num_features: size of the features' axis.
        output_quant: quantizer of the output. By default `Int8ActPerTensorFloat`, which is what the layer is for; None
            leaves the output float.
        input_quant: quantizer of the input; `act_quant` is another name of it.
        return_quant_tensor: return a QuantTensor with the scale of `output_quant`.
        grad_quant: quantizer of the gradient that flows into the output, on its way back.
        rngs: for the parameters, and for quantizers that draw random numbers.
        epsilon, dtype, param_dtype, use_bias, use_scale, bias_init, scale_init, reduction_axes, feature_axes,
            axis_name, axis_index_groups, use_fast_variance, promote_dtype, bias_metadata, scale_metadata: as
            for `nnx.LayerNorm`.
        overrides: `output_...`, `input_...`, `grad_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: `return_quant_tensor` without `output_quant`; a quantizer that does not say `signed`.

    Example:
        >>> import jax.numpy as jnp
        >>> norm = QuantLayerNorm(4, return_quant_tensor=True, rngs=nnx.Rngs(0))
        >>> norm(jnp.eye(4)).int().dtype
        dtype('int8')
    """

    _flax_forward = staticmethod(nnx.LayerNorm.__call__)

    if TYPE_CHECKING:

        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[False] = False, **more: Any
        ) -> QuantLayerNorm[jax.Array]: ...
        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[True], **more: Any
        ) -> QuantLayerNorm[AnyQuantTensor]: ...
        @overload
        def __new__(cls, *args: Any, return_quant_tensor: bool, **more: Any) -> QuantLayerNorm[Any]: ...
        def __new__(cls, *args: Any, **more: Any) -> Any: ...

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-06,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = nnx.initializers.zeros,
        scale_init: Initializer = nnx.initializers.ones,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
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
        **overrides: Unpack[QuantLayerNormOverrides],
    ) -> None:
        nnx.LayerNorm.__init__(self, **flax_arguments(nnx.LayerNorm, locals()))
        self._init_quantizers(locals(), overrides, return_quant_tensor, rngs)

    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> Out:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The parent's forward on the quantized input, then the output quantizer.

        Args:
            x: float array or QuantTensor.
            mask: as for the parent.

        Returns:
            An array, or a QuantTensor with `return_quant_tensor`.
        """
        return self._quantized(x, lambda x: self._flax_forward(self, x, mask=mask))


@final
class QuantRMSNorm(QuantNormLayer[Out], nnx.RMSNorm):
    """`nnx.RMSNorm` with a quantized output: y = output_quant(norm(input_quant(x))), norm computed in float.

    A quantizer argument is an injector, a proxy to share (`other.output_quant`), or None. Further keywords
    override what a quantizer declares: `output_bit_width=4` declares `bit_width = 4` anew for the output quantizer.
    With every quantizer None the layer is `nnx.RMSNorm` to the bit.

    Args:
        num_features: size of the features' axis.
        output_quant: quantizer of the output. By default `Int8ActPerTensorFloat`, which is what the layer is for; None
            leaves the output float.
        input_quant: quantizer of the input; `act_quant` is another name of it.
        return_quant_tensor: return a QuantTensor with the scale of `output_quant`.
        grad_quant: quantizer of the gradient that flows into the output, on its way back.
        rngs: for the parameters, and for quantizers that draw random numbers.
        epsilon, dtype, param_dtype, use_scale, scale_init, reduction_axes, feature_axes, axis_name,
            axis_index_groups, use_fast_variance, promote_dtype, scale_metadata: as for `nnx.RMSNorm`.
        overrides: `output_...`, `input_...`, `grad_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: `return_quant_tensor` without `output_quant`; a quantizer that does not say `signed`.

    Example:
        >>> import jax.numpy as jnp
        >>> norm = QuantRMSNorm(4, return_quant_tensor=True, rngs=nnx.Rngs(0))
        >>> norm(jnp.eye(4)).int().dtype
        dtype('int8')
    """

    _flax_forward = staticmethod(nnx.RMSNorm.__call__)

    if TYPE_CHECKING:

        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[False] = False, **more: Any
        ) -> QuantRMSNorm[jax.Array]: ...
        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[True], **more: Any
        ) -> QuantRMSNorm[AnyQuantTensor]: ...
        @overload
        def __new__(cls, *args: Any, return_quant_tensor: bool, **more: Any) -> QuantRMSNorm[Any]: ...
        def __new__(cls, *args: Any, **more: Any) -> Any: ...

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-06,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_scale: bool = True,
        scale_init: Initializer = nnx.initializers.ones,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = default_promote_dtype,
        scale_metadata: Mapping[str, Any] = {},
        rngs: nnx.Rngs,
        output_quant: QuantizerLike = Int8ActPerTensorFloat,
        input_quant: QuantizerLike = None,
        return_quant_tensor: bool = False,
        act_quant: QuantizerLike = None,
        grad_quant: QuantizerLike = None,
        **overrides: Unpack[QuantRMSNormOverrides],
    ) -> None:
        nnx.RMSNorm.__init__(self, **flax_arguments(nnx.RMSNorm, locals()))
        self._init_quantizers(locals(), overrides, return_quant_tensor, rngs)

    def __call__(self, x: Any, mask: jax.Array | None = None) -> Out:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The parent's forward on the quantized input, then the output quantizer.

        Args:
            x: float array or QuantTensor.
            mask: as for the parent.

        Returns:
            An array, or a QuantTensor with `return_quant_tensor`.
        """
        return self._quantized(x, lambda x: self._flax_forward(self, x, mask=mask))


@final
class QuantGroupNorm(QuantNormLayer[Out], nnx.GroupNorm):
    """`nnx.GroupNorm` with a quantized output: y = output_quant(norm(input_quant(x))), norm computed in float.

    A quantizer argument is an injector, a proxy to share (`other.output_quant`), or None. Further keywords
    override what a quantizer declares: `output_bit_width=4` declares `bit_width = 4` anew for the output quantizer.
    With every quantizer None the layer is `nnx.GroupNorm` to the bit.

    Args:
        num_features: size of the features' axis.
        num_groups: how many groups of features; None with `group_size`.
        group_size: features of a group.
        output_quant: quantizer of the output. By default `Int8ActPerTensorFloat`, which is what the layer is for; None
            leaves the output float.
        input_quant: quantizer of the input; `act_quant` is another name of it.
        return_quant_tensor: return a QuantTensor with the scale of `output_quant`.
        grad_quant: quantizer of the gradient that flows into the output, on its way back.
        rngs: for the parameters, and for quantizers that draw random numbers.
        epsilon, dtype, param_dtype, use_bias, use_scale, bias_init, scale_init, reduction_axes, axis_name,
            axis_index_groups, use_fast_variance, promote_dtype, bias_metadata, scale_metadata: as for
            `nnx.GroupNorm`.
        overrides: `output_...`, `input_...`, `grad_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: `return_quant_tensor` without `output_quant`; a quantizer that does not say `signed`.

    Example:
        >>> import jax.numpy as jnp
        >>> norm = QuantGroupNorm(4, 2, return_quant_tensor=True, rngs=nnx.Rngs(0))
        >>> norm(jnp.eye(4)).int().dtype
        dtype('int8')
    """

    _flax_forward = staticmethod(nnx.GroupNorm.__call__)

    if TYPE_CHECKING:

        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[False] = False, **more: Any
        ) -> QuantGroupNorm[jax.Array]: ...
        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[True], **more: Any
        ) -> QuantGroupNorm[AnyQuantTensor]: ...
        @overload
        def __new__(cls, *args: Any, return_quant_tensor: bool, **more: Any) -> QuantGroupNorm[Any]: ...
        def __new__(cls, *args: Any, **more: Any) -> Any: ...

    def __init__(
        self,
        num_features: int,
        num_groups: int | None = 32,
        group_size: int | None = None,
        *,
        epsilon: float = 1e-06,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = nnx.initializers.zeros,
        scale_init: Initializer = nnx.initializers.ones,
        reduction_axes: Axes | None = None,
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
        **overrides: Unpack[QuantGroupNormOverrides],
    ) -> None:
        nnx.GroupNorm.__init__(self, **flax_arguments(nnx.GroupNorm, locals()))
        self._init_quantizers(locals(), overrides, return_quant_tensor, rngs)

    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> Out:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The parent's forward on the quantized input, then the output quantizer.

        Args:
            x: float array or QuantTensor.
            mask: as for the parent.

        Returns:
            An array, or a QuantTensor with `return_quant_tensor`.
        """
        return self._quantized(x, lambda x: self._flax_forward(self, x, mask=mask))
