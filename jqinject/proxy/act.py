"""The proxy of activations."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core.construction.assign import assign
from jqinject.core.state.uncalibrated import LOOKED_AT
from jqinject.proxy.assembly import set_mode
from jqinject.proxy.number_format import FormatQueries
from jqinject.proxy.pre_transform import NAME, ContractsInput, declared_transform, transformed
from jqinject.proxy.ranges import check_range
from jqinject.quant_tensor import QuantTensor, as_array


class ActQuantProxyFromInjector(FormatQueries):
    """Quantizes what flows: inputs, outputs, results of activation functions.

    Statistics move in training mode only. Several layers may share one proxy: they then share its statistics.

    An injector may declare a `pre_transform` (`jqinject.core.transforms`), which comes before the quantizer, also while
    that is off or None: the weight that the tensor meets is stored for it.

    Attributes:
        pre_transform: the transform; None without one.
        transform_axes: the axes of the tensor that it transforms, those that the layer contracts.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> from jqinject.quant import Fp8e5m2FNUZActPerTensorFloat, Int8ActPerTensorFloat, MXInt8Act
        >>> identity = QuantIdentity(act_quant=Int8ActPerTensorFloat, return_quant_tensor=True)
        >>> identity(jnp.array([-1.28, 0.64])).int()
        Array([-128,   64], dtype=int8)
        >>> mx = QuantIdentity(act_quant=MXInt8Act, group_size=2, return_quant_tensor=True)
        >>> mx(jnp.array([0.5, 1.0, 100.0, 3.0])).scale
        Array([0.015625, 0.015625, 1.      , 1.      ], dtype=float32)
        >>> proxy = QuantIdentity(Fp8e5m2FNUZActPerTensorFloat).act_quant
        >>> proxy.exponent_bit_width(), proxy.mantissa_bit_width(), proxy.exponent_bias(), proxy.is_fnuz
        (5, 2, 16, True)
    """

    role = "activation"
    quantizes_activations = True
    made_from_parameters = False
    pre_transform: Any = None
    transform_axes: tuple[int, ...] = (-1,)
    reads = FormatQueries.reads | {NAME}

    def _declare(
        self, layer: Any, stack: tuple[int, ...], trace: set[str], handed: Mapping[str, Any]
    ) -> None:
        transform = declared_transform(self.binding, stack, trace, handed)
        if transform is not None:
            assign(self, pre_transform=transform)
            axes = layer.input_axes if isinstance(layer, ContractsInput) else (-1,)
            if axes != (-1,):
                assign(self, transform_axes=axes)

    def __call__(self, x: jax.Array | QuantTensor) -> jax.Array | QuantTensor:
        """Quantize an activation.

        Args:
            x: float array, or a QuantTensor, whose value is then quantized anew.

        Returns:
            A QuantTensor of the shape and dtype of `x`, or `x` itself if quantization is off; of the transformed `x` if
            there is a `pre_transform`.
        """
        if self.pre_transform is not None:
            return self.quantize_transformed(transformed(self, as_array(x)))
        if self.tensor_quant is None or self.disable_quant:
            return x
        array = x.value if isinstance(x, QuantTensor) else x
        if self.use_running_average and self not in LOOKED_AT:
            check_range(self, array)
        return self._quantized(array)

    def quantize_transformed(self, x: jax.Array) -> Any:
        """Quantize an activation that has been through the `pre_transform`.

        Args:
            x: float array.
        """
        if self.tensor_quant is None or self.disable_quant:
            return x
        if self.use_running_average and self not in LOOKED_AT:
            check_range(self, x)
        return self._quantized(x)

    def quantize_gradient(self, g: Any) -> Any:
        """See `QuantProxyFromInjector`."""
        return super().quantize_gradient(g if self.pre_transform is None else transformed(self, g))

    def quantize(self, x: jax.Array) -> Any:
        """Quantize as a call does: a QuantTensor, whose `payload()` or `int()` are the low-bit numbers and whose
        `value` the dequantized ones; `x` itself if quantization is off."""
        return self(x)

    def scale(self, force_eval: bool = True) -> jax.Array | None:
        """Float per integer step, float32; None if quantization is off.

        Args:
            force_eval: the scale that eval mode would use, also in training mode.

        Raises:
            RuntimeError: it is made from the tensor at hand.
        """
        return self._attribute("scale", force_eval)

    def zero_point(self, force_eval: bool = True) -> jax.Array | None:
        """The integer that stands for 0, float32; None if quantization is off.

        Args:
            force_eval: the zero point that eval mode would use, also in training mode.

        Raises:
            RuntimeError: it is made from the tensor at hand.
        """
        return self._attribute("zero_point", force_eval)

    def bit_width(self, force_eval: bool = True) -> int | jax.Array | None:
        """Bits of one number; None if quantization is off.

        Args:
            force_eval: the bit width that eval mode would use, also in training mode.
        """
        return self._attribute("bit_width", force_eval)

    def sample(self, force_eval: bool = True) -> Any:
        """Quantize one 0, or one group of them: they have the scale, zero point and bit width of any.

        None if quantization is off.

        Args:
            force_eval: as eval mode would, also in training mode.
        """
        return self.trial(jnp.zeros(self._sample_shape(), jnp.float32), force_eval)

    def trial(self, x: jax.Array, force_eval: bool = True) -> Any:
        """Quantize an array that is no activation of the model, without a transform; no state changes.

        Args:
            x: float array.
            force_eval: as eval mode would, also in training mode.

        Returns:
            A QuantTensor, with its groups as axes; None if quantization is off.
        """
        if not self.is_quant_enabled:
            return None
        quantizer = nnx.clone(self.tensor_quant, graph=True)
        if force_eval:
            set_mode(quantizer, use_running_average=True, deterministic=True)
        return self._pack(quantizer(x))

    def _sample_shape(self) -> tuple[int, ...]:
        """A statistic of rows needs an axis, and groups need one of them along the axis that is cut."""
        size, dim = self.group_size, self.group_dim
        if size is None or dim is None:
            return (1,) * self.quant_metadata.is_dynamic
        return (*(1,) * dim, size) if dim >= 0 else (size, *(1,) * (-dim - 1))

    def _looked_at(self) -> Any:
        return self.sample()

    def _attribute(self, name: str, force_eval: bool) -> Any:
        if not self.is_quant_enabled:
            return None
        if self.quant_metadata.is_dynamic and name != "bit_width":
            raise RuntimeError(
                f"the {name.replace('_', ' ')} of {self.binding.base.__name__} depends on the input: it is made from "
                f"the tensor at hand.\n  cure: proxy(x).{name}"
            )
        return getattr(self.sample(force_eval), name)
