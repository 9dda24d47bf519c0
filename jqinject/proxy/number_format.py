"""What a proxy says of the numbers that its quantizer makes: asked of the quantizer, else of its result."""

from typing import Any

from jqinject.core.facts import number_format
from jqinject.ops import FloatFormat, LearnedFloatFormat
from jqinject.proxy.base import QuantProxyFromInjector


class FormatQueries(QuantProxyFromInjector):
    """Abstract: a proxy that can be asked for the format of its numbers, whichever it is.

    Questions about minifloats are answered None if quantization is off, and raise an AttributeError where the
    numbers are not minifloats. `force_eval` is accepted for every role; a format does not depend on the mode.
    """

    def exponent_bit_width(self, force_eval: bool = True) -> Any:
        """Bits of the exponent of a minifloat: an int, or an array if learned."""
        return self._of_minifloat("exponent_bit_width")

    def mantissa_bit_width(self, force_eval: bool = True) -> Any:
        """Bits of the mantissa of a minifloat, without the implicit 1: an int, or an array if learned."""
        return self._of_minifloat("mantissa_bit_width")

    def exponent_bias(self, force_eval: bool = True) -> Any:
        """What is subtracted from the exponent field of a minifloat."""
        return self._of_minifloat("bias")

    def is_saturating(self, force_eval: bool = True) -> Any:
        """Whether what is too large becomes the largest minifloat."""
        return self._of_minifloat("saturating")

    def inf_values(self, force_eval: bool = True) -> Any:
        """Mantissas that mean inf together with the largest exponent; None if there are none."""
        return self._of_minifloat("inf_values")

    def nan_values(self, force_eval: bool = True) -> Any:
        """Mantissas that mean nan together with the largest exponent; None if there are none."""
        return self._of_minifloat("nan_values")

    @property
    def is_ocp(self) -> bool:
        """Whether it is one of OCP's 8-bit formats, e4m3 or e5m2."""
        form = self._minifloat()
        return isinstance(form, FloatFormat) and form.is_ocp

    @property
    def is_fnuz(self) -> bool:
        """Whether it is one of the 8-bit formats without inf and negative 0, e4m3 or e5m2."""
        form = self._minifloat()
        return isinstance(form, FloatFormat) and form.is_fnuz

    @property
    def group_size(self) -> int | None:
        """Elements that share a scale, as declared (along a shorter axis all of them do); None without groups."""
        return self.quant_metadata.group_size

    @property
    def group_dim(self) -> int | None:
        """The axis that is cut into groups; None without groups."""
        return self.quant_metadata.group_dim

    def _looked_at(self) -> Any:
        """A QuantTensor of the quantizer's, which is on; None if it makes none without a tensor."""
        return None

    def _minifloat(self) -> Any:
        if not self.is_quant_enabled:
            return None
        said = number_format(self.tensor_quant)
        form = getattr(self._looked_at(), "format", None) if said is None else said
        return form if isinstance(form, FloatFormat | LearnedFloatFormat) else None

    def _of_minifloat(self, name: str) -> Any:
        form = self._minifloat()
        if form is None and self.is_quant_enabled:
            raise AttributeError(
                f"{self.binding.base.__name__} makes no minifloats: it has no exponent, mantissa, or codes for inf and "
                "nan.\n  cure: proxy.bit_width(), proxy.scale() and proxy.zero_point() describe integers"
            )
        return None if form is None else getattr(form, name)
