"""The proxy of accumulators that are truncated."""

from typing import Any, final

import jax
from flax import nnx

from jqinject.proxy.metadata import QuantMetadata
from jqinject.proxy.number_format import FormatQueries
from jqinject.proxy.ranges import check_range
from jqinject.quant_tensor import IntQuantTensor, as_array


@final
class TruncQuantProxyFromInjector(FormatQueries):
    """Requantizes integers to fewer bits; scale, zero point and sign come with them.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import TruncAvgPool2d
        >>> from jqinject.quant import TruncTo8bit
        >>> x = IntQuantTensor(jnp.full((1, 2, 2, 1), 1.0), 0.5, 0.0, 8, signed=False, training=False)
        >>> y = TruncAvgPool2d((2, 2), trunc_quant=TruncTo8bit)(x)
        >>> y.int().tolist(), float(y.scale), y.bit_width  # (2 + 2 + 2 + 2) >> 2
        ([[[[2]]]], 0.5, 8)
    """

    role = "accumulator"

    quantizes_activations = True
    made_from_parameters = False

    @property
    def is_narrow_range(self) -> bool:
        """Whether one integer of the result is left out."""
        return bool(self.quant_metadata.narrow_range)

    def __call__(self, x: IntQuantTensor) -> IntQuantTensor:
        """Requantize.

        Args:
            x: integers of any bit width.

        Returns:
            Integers of the quantizer's bit width, of the shape, dtype and sign of `x`; `x` itself where quantization is
            off.

        Raises:
            TypeError: `x` is not an `IntQuantTensor`.
        """
        if not self.is_quant_enabled:
            return x
        check_range(self, as_array(x))
        return self._seen(self._truncated(self.tensor_quant, x), x)

    def quantize(self, x: IntQuantTensor) -> Any:
        """Quantize as a call does."""
        return self(x)

    def scale(self, x: IntQuantTensor) -> jax.Array | None:
        """Float per integer step of the result for `x`, float32; None if quantization is off."""
        return self._attribute("scale", x)

    def zero_point(self, x: IntQuantTensor) -> jax.Array | None:
        """The integer that stands for 0 in the result for `x`; None if quantization is off."""
        return self._attribute("zero_point", x)

    def bit_width(self) -> int | jax.Array | None:
        """Bits of an integer of the result; None if quantization is off."""
        return self.tensor_quant.bit_width_impl() if self.is_quant_enabled else None

    def _attribute(self, name: str, x: IntQuantTensor) -> Any:
        if not self.is_quant_enabled:
            return None
        return getattr(self._truncated(nnx.clone(self.tensor_quant, graph=True), x), name)

    def _truncated(self, quantizer: Any, x: Any) -> IntQuantTensor:
        if not isinstance(x, IntQuantTensor):
            raise TypeError(
                f"{self.binding.base.__name__} takes bits off integers, expected an IntQuantTensor, got "
                f"{type(x).__name__}.\n  cure: quantize it first, by a layer with return_quant_tensor=True"
            )
        result = quantizer(x.value, x.scale, x.zero_point, x.bit_width, x.signed)
        return result.quant_tensor(signed=x.signed, training=self.training)

    def _read_metadata(self, said: QuantMetadata, layers: tuple[Any, ...], quantizer: Any) -> QuantMetadata:
        return said  # the sign is that of what comes in
