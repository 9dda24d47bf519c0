"""The proxy of activations."""

from typing import Any, ClassVar, final

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core.state.uncalibrated import LOOKED_AT
from jqinject.proxy.assembly import set_mode
from jqinject.proxy.base import QuantProxyFromInjector
from jqinject.proxy.ranges import check_range
from jqinject.quant_tensor import QuantTensor


class ActQuantProxy(QuantProxyFromInjector):
    """Abstract: the proxy of what flows, perhaps through several layers."""

    role = "activation"

    sample_shape: ClassVar[tuple[int, ...]] = ()
    quantizes_activations = True
    made_from_parameters = False

    def __call__(self, x: jax.Array | QuantTensor) -> jax.Array | QuantTensor:
        """Quantize an activation.

        Args:
            x: float array, or a QuantTensor, whose value is then quantized anew.

        Returns:
            A QuantTensor of the shape and dtype of `x`, or `x` itself where quantization is off.
        """
        if self.tensor_quant is None or self.disable_quant:
            return x
        array = x.value if isinstance(x, QuantTensor) else x
        if self.use_running_average and self not in LOOKED_AT:
            check_range(self, array)
        return self._quantized(array)

    def quantize(self, x: jax.Array) -> Any:
        """Quantize as a call does: a QuantTensor, whose `payload()` or `int()` are the low-bit numbers and whose
        `value` the dequantized ones; `x` itself where quantization is off."""
        return self(x)

    def scale(self, force_eval: bool = True) -> jax.Array | None:
        """Float per integer step, float32; None where quantization is off.

        Args:
            force_eval: the scale that eval mode would use, also in training mode.
        """
        return self._attribute("scale", force_eval)

    def zero_point(self, force_eval: bool = True) -> jax.Array | None:
        """The integer that stands for 0, float32; None where quantization is off.

        Args:
            force_eval: the zero point that eval mode would use, also in training mode.
        """
        return self._attribute("zero_point", force_eval)

    def bit_width(self, force_eval: bool = True) -> int | jax.Array | None:
        """Bits of an integer; None where quantization is off.

        Args:
            force_eval: the bit width that eval mode would use, also in training mode.
        """
        return self._attribute("bit_width", force_eval)

    def sample(self, force_eval: bool = True) -> Any:
        """One 0, quantized: it has the scale, zero point and bit width of any; None where quantization is off.

        Args:
            force_eval: as eval mode would, also in training mode.
        """
        if not self.is_quant_enabled:
            return None
        quantizer = nnx.clone(self.tensor_quant, graph=True)
        if force_eval:
            set_mode(quantizer, use_running_average=True, deterministic=True)
        return self._pack(quantizer(jnp.zeros(self.sample_shape, jnp.float32)))

    def _attribute(self, name: str, force_eval: bool) -> Any:
        return getattr(self.sample(force_eval), name) if self.is_quant_enabled else None


def input_dependent(proxy: ActQuantProxy, name: str) -> Any:
    """What can be said of a quantizer whose scale comes from the tensor at hand: its bit width.

    Args:
        proxy: the proxy.
        name: "bit_width", "scale" or "zero_point".

    Returns:
        The bit width; None where quantization is off.

    Raises:
        RuntimeError: it is asked for what depends on the tensor.
    """
    if not proxy.is_quant_enabled:
        return None
    if name == "bit_width":
        return proxy.tensor_quant.bit_width_impl()
    raise RuntimeError(
        f"the {name.replace('_', ' ')} of {proxy.binding.base.__name__} depends on the input: it is made from the "
        f"tensor at hand.\n  cure: proxy(x).{name}"
    )


@final
class DynamicActQuantProxyFromInjector(ActQuantProxy):
    """Quantizes what flows to integers, with scales made from the tensor at hand: nothing is kept.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> from jqinject.quant import Int8DynamicActPerRowFloat
        >>> identity = QuantIdentity(act_quant=Int8DynamicActPerRowFloat, return_quant_tensor=True)
        >>> identity(jnp.array([[1.28, 0.0], [0.0, -12.8]])).scale.shape
        (2, 1)
    """

    sample_shape = (1,)  # a statistic of rows needs an axis

    def _attribute(self, name: str, force_eval: bool) -> Any:
        return input_dependent(self, name)


@final
class ActQuantProxyFromInjector(ActQuantProxy):
    """Quantizes what flows: inputs, outputs, results of activation functions.

    Statistics move in training mode only. Several layers may share one proxy: they then share its statistics.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> from jqinject.quant import Int8ActPerTensorFloat
        >>> identity = QuantIdentity(act_quant=Int8ActPerTensorFloat, return_quant_tensor=True)
        >>> identity(jnp.array([-1.28, 0.64])).int()
        Array([-128,   64], dtype=int8)
    """
