"""The proxies of gradients."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core.construction import check
from jqinject.core.construction.assign import assign
from jqinject.core.facts import amax_history, number_format
from jqinject.dot.tensors.backward_quantizer import quantize_gradient_by, reporting, why_not_backward
from jqinject.ops import FloatFormat
from jqinject.proxy.assembly import set_mode
from jqinject.proxy.metadata import QuantMetadata
from jqinject.proxy.number_format import FormatQueries
from jqinject.proxy.pre_transform import NAME, declared_transform, transformed
from jqinject.quant_tensor import QuantTensor
from jqinject.quant_tensor._float_fields import CONTRACTED


class GradQuantProxyFromInjector(FormatQueries):
    """Quantizes the gradient that flows back into what it is given; forward it changes nothing.

    Any format will do whose scale is made from the gradient at hand, is constant, or follows recorded amaxes. These
    are moved by `jqinject.value_and_grad` and `jqinject.grad`, once per step, and by nothing else: under plain
    `nnx.grad` the gradient is quantized with the scale there is, the statistics stay, and in training mode a
    `jqinject.LostStateWarning` tells so.

    Example:
        >>> import jax.numpy as jnp
        >>> import jqinject
        >>> from jqinject.nn import QuantIdentity
        >>> from jqinject.quant import Fp8e5m2GradPerTensorCurrent
        >>> identity = QuantIdentity(None, grad_quant=Fp8e5m2GradPerTensorCurrent)
        >>> weights = jnp.array([1.0, 0.3])
        >>> jqinject.grad(lambda x, m: (m(x) * weights).sum())(jnp.ones(2), identity).round(3)
        Array([1.   , 0.286], dtype=float32)
        >>> float(identity.grad_quant.amax_history.newest)
        1.0
        >>> import jax
        >>> from jqinject.quant import MXFloat4e2m1Grad
        >>> mx = QuantIdentity(None, grad_quant=MXFloat4e2m1Grad)
        >>> jax.grad(lambda x: (mx(x) * weights).sum())(jnp.ones(2))
        Array([1.  , 0.25], dtype=float32)
    """

    role = "gradient"
    made_from_parameters = False
    pre_transform: Any = None
    transform_axes: tuple[int, ...] = (-1,)
    reads = FormatQueries.reads | {NAME}

    def _declare(
        self, layer: Any, stack: tuple[int, ...], trace: set[str], handed: Mapping[str, Any]
    ) -> None:
        transform = declared_transform(self.binding, stack, trace, handed)
        if transform is None:
            return
        if not getattr(layer, "rotates_both_operands", False):
            raise TypeError(
                f"{self.binding.base.__name__} declares {NAME} = {transform!r}, and only a product whose operands both "
                "go through it undoes it.\n  cure: wgrad_grad and wgrad_lhs of a jqinject.dot.Scheme, not grad_quant"
            )
        assign(self, pre_transform=transform)

    def quantize_gradient(self, g: Any) -> Any:
        """See `QuantProxyFromInjector`; the gradient goes through the `pre_transform` first."""
        return super().quantize_gradient(g if self.pre_transform is None else transformed(self, g))

    def __call__(self, y: jax.Array, token: jax.Array | None = None) -> jax.Array:
        """`y` as it is, with a quantized gradient.

        Args:
            y: float array.
            token: its cotangent becomes the scale of an 8-bit float's gradient, for a contraction that goes on with the
                payload.

        Raises:
            TypeError: `y` is not a float array, so it has no gradient.
        """
        if not self.is_quant_enabled:
            return y
        y = check.float_input(y, "a gradient quantizer")
        return quantize_gradient_by(y, self, GradQuantProxyFromInjector.quantize_gradient, token)

    def on(self, y: jax.Array | QuantTensor) -> Any:
        """As a call, for a QuantTensor too, which stays one."""
        return y.set(value=self(y.value)) if isinstance(y, QuantTensor) else self(y)

    def quantize(self, g: jax.Array) -> Any:
        """A gradient at hand as this step would quantize it; nothing is recorded, and rounding is to nearest.

        Args:
            g: float array.

        Returns:
            A QuantTensor, or `g` itself if quantization is off.
        """
        if not self.is_quant_enabled:
            return g
        quantizer = nnx.clone(self.tensor_quant, graph=True)
        set_mode(quantizer, use_running_average=True, deterministic=True)
        return self._seen(self._pack(quantizer(g)), g)

    def scale(self) -> jax.Array | None:
        """The scale of the next gradient as far as it is known, float32; None if quantization is off.

        Raises:
            RuntimeError: nothing is known of it before the gradient is there.
        """
        if self.is_quant_enabled and reporting(self) is None:
            raise RuntimeError(
                f"the scale of {self.binding.base.__name__} depends on the gradient: it is made from the one at hand."
                "\n  cure: proxy.quantize(g).scale"
            )
        return self._looked_at().scale if self.is_quant_enabled else None

    def _looked_at(self) -> Any:
        return self.quantize(jnp.zeros((), jnp.float32))

    @property
    def q_dtype(self) -> np.dtype | None:
        """Dtype of an 8-bit float's payload that is scaled by amaxes; None for others, and if quantization is off."""
        if not self.is_quant_enabled or reporting(self) is None:
            return None
        form = number_format(self.tensor_quant)
        return form.dtype if isinstance(form, FloatFormat) and form.dtype in CONTRACTED else None

    def _read_metadata(self, said: QuantMetadata, layers: tuple[Any, ...], quantizer: Any) -> QuantMetadata:
        why = why_not_backward(quantizer)
        if not why and amax_history(quantizer) is not None and reporting(quantizer) is None:
            why = "its amaxes are recorded by forward passes (amax_of_gradient is False)"
        if why:
            raise TypeError(
                f"{self.binding.base.__name__} cannot quantize a gradient: {why}.\n  cure: one of the ...Grad... "
                "quantizers of jqinject.quant, such as Int8GradPerTensorDynamic or Fp8e5m2GradPerTensorDelayed"
            )
        return super()._read_metadata(said, layers, quantizer)
