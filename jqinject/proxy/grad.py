"""The proxy of gradients."""

from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import Float8Quant
from jqinject.proxy.assembly import set_mode
from jqinject.proxy.base import QuantProxyFromInjector
from jqinject.quant_tensor import FloatQuantTensor, QuantTensor


@final
class GradQuantProxyFromInjector(QuantProxyFromInjector):
    """Quantizes the gradient that flows back into what it is given; forward it changes nothing.

    Its statistics are moved by `jqinject.value_and_grad` and `jqinject.grad`, once per step, and by nothing else: under
    plain `nnx.grad` the gradient is quantized with the scale there is, and the statistics stay.

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
    """

    def __call__(self, y: jax.Array, token: jax.Array | None = None) -> jax.Array:
        """`y` as it is, with a quantized gradient.

        Args:
            y: float array.
            token: its cotangent becomes the scale of the gradient, for a contraction that goes on with the payload.

        Raises:
            TypeError: `y` is no float array and so has no gradient, or the quantizer is not one of gradients.
        """
        return self._quantizer().on_gradient(y, token) if self.is_quant_enabled else y

    def on(self, y: jax.Array | QuantTensor) -> Any:
        """As a call, for a QuantTensor too, which stays one."""
        return y.set(value=self(y.value)) if isinstance(y, QuantTensor) else self(y)

    def quantize(self, g: jax.Array) -> FloatQuantTensor | jax.Array:
        """A gradient at hand as this step would quantize it; nothing is recorded.

        Args:
            g: float array.

        Returns:
            A `FloatQuantTensor`, or `g` itself where quantization is off.
        """
        if not self.is_quant_enabled:
            return g
        quantizer = nnx.clone(self._quantizer(), graph=True)
        set_mode(quantizer, use_running_average=True)
        return self._pack(quantizer(g))

    def scale(self) -> jax.Array | None:
        """The scale of the next gradient as far as it is known, float32; None where quantization is off."""
        looked_at = self.quantize(jnp.zeros((), jnp.float32))
        return looked_at.scale if isinstance(looked_at, FloatQuantTensor) else None

    @property
    def q_dtype(self) -> np.dtype | None:
        """Dtype of the gradient's payload; None where quantization is off."""
        return self._quantizer().q_dtype if self.is_quant_enabled else None

    def _quantizer(self) -> Float8Quant:
        if isinstance(self.tensor_quant, Float8Quant):
            return self.tensor_quant
        raise TypeError(
            f"{self.binding.base.__name__} can not quantize a gradient: its tensor_quant is a "
            f"{type(self.tensor_quant).__name__}, expected a Float8Quant.\n  cure: one of the ...Grad... quantizers of "
            "jqinject.quant, such as Fp8e5m2GradPerTensorDelayed"
        )

    def depends_on_layers(self) -> bool:
        """Only where the injector asks for `module`: none of the ready-made ones does."""
        return self._asks_for_layers()

    def _tracked_parameters(self, layers: tuple[Any, ...]) -> list[Any]:
        return []

    def _stack(self, layers: tuple[Any, ...]) -> tuple[int, ...]:
        # Nothing in it depends on how many layers are stacked: values are broadcast into the stack.
        return ()
