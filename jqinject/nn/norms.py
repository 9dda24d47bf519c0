"""Quantized normalizations: Flax's, computed in float, between an input and an output quantizer."""

from collections.abc import Callable, Sequence
from typing import Any, Unpack, final

import jax
from flax import nnx

from jqinject.nn import base
from jqinject.nn.base.keywords import (
    QuantBatchNormKeywords,
    QuantGroupNormKeywords,
    QuantLayerNormKeywords,
    QuantRMSNormKeywords,
)
from jqinject.quant import Int8ActPerTensorFloat
from jqinject.quant_tensor import AnyQuantTensor, as_array


class QuantNormLayer(base.QuantLayer[base.Out]):
    """Abstract: y = output_quant(norm(input_quant(x))), the norm computed in float.

    Attributes:
        input_quant, output_quant, grad_quant: proxies, or None.
        return_quant_tensor: whether the output is a QuantTensor.
    """

    input_quant = base.INPUT
    output_quant = base.OUTPUT.by_default(Int8ActPerTensorFloat)
    grad_quant = base.GRAD
    options = (base.RETURN, base.ACT_INPUT)
    num_features: int

    def _check_scale_to_return(self) -> None:
        if not base.is_on(self.output_quant):
            raise self._no_scale_to_return("output_quant")

    def _facts(self) -> base.LayerFacts:
        axis, count = self._features()
        shapes: dict[str, tuple[int, ...]] = {}
        if axis is not None and axis < 0:  # counted from the end
            shapes |= dict.fromkeys(("input_quant", "output_quant"), (count, *(1,) * (-axis - 1)))
        parameters = [v for v in vars(self).values() if isinstance(v, nnx.Variable)]
        # The last axis of a parameter is the features'.
        return base.LayerFacts(parameters[0].shape[:-1] if parameters else (), shapes)

    def _features(self) -> tuple[int | None, int]:
        """The axis of the features, None if there are several, and how many they are."""
        axes = vars(self).get("feature_axes", vars(self).get("axis", -1))
        axis = axes[0] if isinstance(axes, Sequence) and len(axes) == 1 else axes
        count = self.num_groups * self.group_size if isinstance(self, nnx.GroupNorm) else self.num_features
        return axis if isinstance(axis, int) else None, count

    def _quantized(self, x: object, norm: Callable[[jax.Array], jax.Array]) -> Any:
        """The norm of the quantized input, with a quantized output.

        Args:
            x: float array or QuantTensor.
            norm: the forward of the Flax layer.
        """
        axis, count = self._features()
        if axis is not None:
            base.check_features(self, x, {axis: count}, argument="num_features")
        y: Any = norm(as_array(base.through(self.input_quant, x)))
        y = base.through(self.output_quant, base.through(self.grad_quant, y))
        return y if self.return_quant_tensor else as_array(y)

    def __call__(self, x: Any, mask: jax.Array | None = None) -> base.Out:
        """The parent's forward on the quantized input, then the output quantizer.

        Args:
            x: float array or QuantTensor.
            mask: as for the parent.

        Returns:
            An array, or a QuantTensor with `return_quant_tensor`.
        """
        return self._quantized(x, lambda x: self._flax_forward(self, x, mask=mask))


@final
class QuantLayerNorm(QuantNormLayer[base.Out], nnx.LayerNorm):
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
        more: overrides of quantizers: `output_...`, `input_...`, `grad_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: `return_quant_tensor` without `output_quant`; a quantizer that does not say `signed`.

    Example:
        >>> import jax.numpy as jnp
        >>> norm = QuantLayerNorm(4, return_quant_tensor=True, rngs=nnx.Rngs(0))
        >>> norm(jnp.eye(4)).int().dtype
        dtype('int8')
    """

    _results: "base.Results[QuantLayerNorm[jax.Array], QuantLayerNorm[AnyQuantTensor]]"

    def __init__(self, num_features: int, *, rngs: nnx.Rngs, **more: Unpack[QuantLayerNormKeywords]) -> None:
        self._init_layer(locals())


@final
class QuantRMSNorm(QuantNormLayer[base.Out], nnx.RMSNorm):
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
        more: overrides of quantizers: `output_...`, `input_...`, `grad_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: `return_quant_tensor` without `output_quant`; a quantizer that does not say `signed`.

    Example:
        >>> import jax.numpy as jnp
        >>> norm = QuantRMSNorm(4, return_quant_tensor=True, rngs=nnx.Rngs(0))
        >>> norm(jnp.eye(4)).int().dtype
        dtype('int8')
    """

    _results: "base.Results[QuantRMSNorm[jax.Array], QuantRMSNorm[AnyQuantTensor]]"

    def __init__(self, num_features: int, *, rngs: nnx.Rngs, **more: Unpack[QuantRMSNormKeywords]) -> None:
        self._init_layer(locals())


@final
class QuantGroupNorm(QuantNormLayer[base.Out], nnx.GroupNorm):
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
        more: overrides of quantizers: `output_...`, `input_...`, `grad_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: `return_quant_tensor` without `output_quant`; a quantizer that does not say `signed`.

    Example:
        >>> import jax.numpy as jnp
        >>> norm = QuantGroupNorm(4, 2, return_quant_tensor=True, rngs=nnx.Rngs(0))
        >>> norm(jnp.eye(4)).int().dtype
        dtype('int8')
    """

    _results: "base.Results[QuantGroupNorm[jax.Array], QuantGroupNorm[AnyQuantTensor]]"

    def __init__(
        self,
        num_features: int,
        num_groups: int | None = 32,
        group_size: int | None = None,
        *,
        rngs: nnx.Rngs,
        **more: Unpack[QuantGroupNormKeywords],
    ) -> None:
        self._init_layer(locals())


@final
class QuantBatchNorm(QuantNormLayer[base.Out], nnx.BatchNorm):
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
        more: overrides of quantizers: `output_...`, `input_...`, `grad_...`. With `axis_name` the statistics that the
            quantizers keep are taken over the mapped axis too, unless `output_axis_name=...` says otherwise.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: `return_quant_tensor` without `output_quant`; a quantizer that does not say `signed`.

    Example:
        >>> import jax.numpy as jnp
        >>> norm = QuantBatchNorm(4, return_quant_tensor=True, rngs=nnx.Rngs(0))
        >>> norm(jnp.eye(4)).int().dtype
        dtype('int8')
    """

    def _facts(self) -> base.LayerFacts:
        offered = {} if self.axis_name is None else {"axis_name": self.axis_name}
        return super()._facts()._replace(offered={slot.name: offered for slot in base.slots_of(type(self))})

    _results: "base.Results[QuantBatchNorm[jax.Array], QuantBatchNorm[AnyQuantTensor]]"

    def __init__(self, num_features: int, *, rngs: nnx.Rngs, **more: Unpack[QuantBatchNormKeywords]) -> None:
        self._init_layer(locals())

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Any, use_running_average: bool | None = None, *, mask: jax.Array | None = None
    ) -> base.Out:
        """The parent's forward on the quantized input, then the output quantizer.

        Args:
            x: float array or QuantTensor.
            use_running_average, mask: as for the parent.

        Returns:
            An array, or a QuantTensor with `return_quant_tensor`.
        """
        return self._quantized(x, lambda x: self._flax_forward(self, x, use_running_average, mask=mask))


@final
class MergedBatchNorm(QuantNormLayer[Any]):
    """Replaces a batch normalization that was merged: y = output_quant(x).

    Args:
        norm: the normalization; its quantizers of output and gradient go on here.

    Example:
        >>> import jax.numpy as jnp
        >>> MergedBatchNorm(nnx.BatchNorm(2, rngs=nnx.Rngs(0)))(jnp.ones((1, 2)))
        Array([[1., 1.]], dtype=float32)
    """

    def __init__(self, norm: nnx.BatchNorm) -> None:
        self.return_quant_tensor = getattr(norm, "return_quant_tensor", False)
        for name in ("output_quant", "grad_quant"):
            proxy = getattr(norm, name, None)
            if proxy is not None:
                setattr(self, name, proxy)

    def _features(self) -> tuple[int | None, int]:
        return None, 0  # whatever the layer before it returns

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Any, use_running_average: bool | None = None, *, mask: Any = None
    ) -> Any:
        """The input, quantized as the output of the normalization was.

        Args:
            x: float array or QuantTensor.
            use_running_average, mask: as for `nnx.BatchNorm`; they change nothing.
        """
        if self.output_quant is None and self.grad_quant is None:
            return x
        return self._quantized(x, lambda x: x)
