"""Quantized normalizations: Flax's, computed in float, with a quantized output."""

from typing import Any, final

import jax
from flax import nnx

from jqinject.nn.base.keywords import split_keywords
from jqinject.nn.base.norm_layer import QuantNormLayer
from jqinject.quant import Int8ActPerTensorFloat, QuantizerLike


@final
class QuantBatchNorm(QuantNormLayer, nnx.BatchNorm):
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
        more: the other keywords of `nnx.BatchNorm` (`axis`, `momentum`, `epsilon`, ...), and overrides:
            `output_...`, `input_...`, `grad_...`. With `axis_name` the statistics that the quantizers keep are
            taken over the mapped axis too, unless `output_axis_name=...` and its like say otherwise.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: `return_quant_tensor` without `output_quant`; a quantizer that does not say `signed`.

    Example:
        >>> import jax.numpy as jnp
        >>> norm = QuantBatchNorm(4, return_quant_tensor=True, rngs=nnx.Rngs(0))
        >>> norm(jnp.eye(4)).int().dtype
        dtype('int8')
    """

    def __init__(
        self,
        num_features: int,
        *,
        output_quant: QuantizerLike = Int8ActPerTensorFloat,
        input_quant: QuantizerLike = None,
        return_quant_tensor: bool = False,
        act_quant: QuantizerLike = None,
        grad_quant: QuantizerLike = None,
        rngs: nnx.Rngs,
        **more: Any,
    ) -> None:
        flax, overrides = split_keywords(nnx.BatchNorm, more)
        nnx.BatchNorm.__init__(self, num_features, rngs=rngs, **flax)
        arguments = {
            "output_quant": output_quant,
            "input_quant": input_quant,
            "act_quant": act_quant,
            "grad_quant": grad_quant,
        }
        self._init_quantizers(arguments, overrides, return_quant_tensor, rngs)

    def __call__(
        self, x: Any, use_running_average: bool | None = None, *, mask: jax.Array | None = None
    ) -> Any:
        """The parent's forward on the quantized input, then the output quantizer.

        Args:
            x: float array or QuantTensor.
            use_running_average, mask: as for the parent.

        Returns:
            An array, or a QuantTensor with `return_quant_tensor`.
        """
        return self._quantized(x, lambda x: nnx.BatchNorm.__call__(self, x, use_running_average, mask=mask))


@final
class QuantLayerNorm(QuantNormLayer, nnx.LayerNorm):
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
        more: the other keywords of `nnx.LayerNorm` (`epsilon`, `use_bias`, ...), and overrides:
            `output_...`, `input_...`, `grad_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: `return_quant_tensor` without `output_quant`; a quantizer that does not say `signed`.

    Example:
        >>> import jax.numpy as jnp
        >>> norm = QuantLayerNorm(4, return_quant_tensor=True, rngs=nnx.Rngs(0))
        >>> norm(jnp.eye(4)).int().dtype
        dtype('int8')
    """

    def __init__(
        self,
        num_features: int,
        *,
        output_quant: QuantizerLike = Int8ActPerTensorFloat,
        input_quant: QuantizerLike = None,
        return_quant_tensor: bool = False,
        act_quant: QuantizerLike = None,
        grad_quant: QuantizerLike = None,
        rngs: nnx.Rngs,
        **more: Any,
    ) -> None:
        flax, overrides = split_keywords(nnx.LayerNorm, more)
        nnx.LayerNorm.__init__(self, num_features, rngs=rngs, **flax)
        arguments = {
            "output_quant": output_quant,
            "input_quant": input_quant,
            "act_quant": act_quant,
            "grad_quant": grad_quant,
        }
        self._init_quantizers(arguments, overrides, return_quant_tensor, rngs)

    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> Any:
        """The parent's forward on the quantized input, then the output quantizer.

        Args:
            x: float array or QuantTensor.
            mask: as for the parent.

        Returns:
            An array, or a QuantTensor with `return_quant_tensor`.
        """
        return self._quantized(x, lambda x: nnx.LayerNorm.__call__(self, x, mask=mask))


@final
class QuantRMSNorm(QuantNormLayer, nnx.RMSNorm):
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
        more: the other keywords of `nnx.RMSNorm` (`epsilon`, `use_scale`, ...), and overrides:
            `output_...`, `input_...`, `grad_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: `return_quant_tensor` without `output_quant`; a quantizer that does not say `signed`.

    Example:
        >>> import jax.numpy as jnp
        >>> norm = QuantRMSNorm(4, return_quant_tensor=True, rngs=nnx.Rngs(0))
        >>> norm(jnp.eye(4)).int().dtype
        dtype('int8')
    """

    def __init__(
        self,
        num_features: int,
        *,
        output_quant: QuantizerLike = Int8ActPerTensorFloat,
        input_quant: QuantizerLike = None,
        return_quant_tensor: bool = False,
        act_quant: QuantizerLike = None,
        grad_quant: QuantizerLike = None,
        rngs: nnx.Rngs,
        **more: Any,
    ) -> None:
        flax, overrides = split_keywords(nnx.RMSNorm, more)
        nnx.RMSNorm.__init__(self, num_features, rngs=rngs, **flax)
        arguments = {
            "output_quant": output_quant,
            "input_quant": input_quant,
            "act_quant": act_quant,
            "grad_quant": grad_quant,
        }
        self._init_quantizers(arguments, overrides, return_quant_tensor, rngs)

    def __call__(self, x: Any, mask: jax.Array | None = None) -> Any:
        """The parent's forward on the quantized input, then the output quantizer.

        Args:
            x: float array or QuantTensor.
            mask: as for the parent.

        Returns:
            An array, or a QuantTensor with `return_quant_tensor`.
        """
        return self._quantized(x, lambda x: nnx.RMSNorm.__call__(self, x, mask=mask))


@final
class QuantGroupNorm(QuantNormLayer, nnx.GroupNorm):
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
        more: the other keywords of `nnx.GroupNorm` (`epsilon`, `use_bias`, ...), and overrides:
            `output_...`, `input_...`, `grad_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: `return_quant_tensor` without `output_quant`; a quantizer that does not say `signed`.

    Example:
        >>> import jax.numpy as jnp
        >>> norm = QuantGroupNorm(4, 2, return_quant_tensor=True, rngs=nnx.Rngs(0))
        >>> norm(jnp.eye(4)).int().dtype
        dtype('int8')
    """

    def __init__(
        self,
        num_features: int,
        num_groups: int | None = 32,
        group_size: int | None = None,
        *,
        output_quant: QuantizerLike = Int8ActPerTensorFloat,
        input_quant: QuantizerLike = None,
        return_quant_tensor: bool = False,
        act_quant: QuantizerLike = None,
        grad_quant: QuantizerLike = None,
        rngs: nnx.Rngs,
        **more: Any,
    ) -> None:
        flax, overrides = split_keywords(nnx.GroupNorm, more)
        nnx.GroupNorm.__init__(self, num_features, num_groups, group_size, rngs=rngs, **flax)
        arguments = {
            "output_quant": output_quant,
            "input_quant": input_quant,
            "act_quant": act_quant,
            "grad_quant": grad_quant,
        }
        self._init_quantizers(arguments, overrides, return_quant_tensor, rngs)

    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> Any:
        """The parent's forward on the quantized input, then the output quantizer.

        Args:
            x: float array or QuantTensor.
            mask: as for the parent.

        Returns:
            An array, or a QuantTensor with `return_quant_tensor`.
        """
        return self._quantized(x, lambda x: nnx.GroupNorm.__call__(self, x, mask=mask))
