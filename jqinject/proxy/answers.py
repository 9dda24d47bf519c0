"""What a proxy says of its quantizer: declared facts, the range, and the numbers that it makes."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx

from jqinject.core import AmaxScaling, _protocols
from jqinject.core.component import InnerModule
from jqinject.ops import FloatGrid
from jqinject.proxy import assembly, layer_links, metadata
from jqinject.quant_tensor.array_methods import attribute


def said(name: str, doc: str) -> Any:
    """An answer that is read from the declaration, once per assembly."""
    return attribute(f"quant_metadata.{name}", doc)


def asked(question: Callable[[object], object], doc: str) -> Any:
    """An answer that the quantizer itself gives, each time anew."""
    return property(lambda proxy: question(proxy.tensor_quant), doc=doc)


class Answers(layer_links.Linked, InnerModule):
    """Abstract: holds a quantizer and answers for it.

    Attributes:
        binding: the injector and the overrides.
        tensor_quant: the quantizer; None if the injector says so (no quantization).
        quant_metadata: what the injector declares of the numbers.
        disable_quant: set it to let the tensor through as it is.
        quantizes_activations: whether it is used on what flows, so that its range can be collected (it then answers the
            protocol of `core.StaticRange` for the components that the quantizer holds).
    """

    quant_metadata: metadata.QuantMetadata
    disable_quant: bool = False
    quantizes_activations: ClassVar[bool] = False

    is_signed: bool | None = said("signed", "Whether the integers have a sign.")
    is_narrow_range: bool | None = said("narrow_range", "Whether the range leaves out one integer.")
    rounding_mode: str | None = said("rounding_mode", "In capitals; None if a component rounds.")
    group_size: int | None = said("group_size", "Elements that share a scale; None without groups.")
    group_dim: int | None = said("group_dim", "The axis that is cut into groups; None without groups.")
    requires_quant_input: bool = said("requires_quant_input", "Whether the format of the input counts.")
    has_whole_zero_points: bool = said("whole_zero_points", "Whether zero points are integers.")

    # with its `.newest` and `.amax_history`
    amax_history: AmaxScaling | None = asked(_protocols.amax_history, "What records amaxes; None without.")
    has_zero_point: bool = asked(_protocols.has_zero_point, "Whether a zero point may be other than 0.")
    is_dynamic: bool = asked(_protocols.is_dynamic, "Whether the scale is that of the given tensor.")
    # times one for all, unless they are powers of two
    scale_dtype: np.dtype | None = asked(_protocols.scale_dtype, "The 8-bit dtype that holds every scale.")

    @property
    def is_quant_enabled(self) -> bool:
        """Whether a tensor is quantized on its way through."""
        return self.tensor_quant is not None and not self.disable_quant

    def has_range(self) -> bool | None:
        """Whether data were seen; None if nothing is collected: of weights, constant and dynamic ranges, and while
        quantization is off."""
        used = self.is_quant_enabled and self.quantizes_activations
        ranges = layer_links.ranges_in(self.tensor_quant) if used else []
        return all(component.has_range() for component in ranges) if ranges else None

    def begin_calibration(self) -> None:
        """Switch to training mode and start to collect anew."""
        self.set_attributes(use_running_average=False, raise_if_not_found=False)
        for component in layer_links.ranges_in(self.tensor_quant):
            component.begin_calibration()

    def end_calibration(self) -> None:
        """Take what was collected as the range."""
        for component in layer_links.ranges_in(self.tensor_quant):
            component.end_calibration()

    def _copy(self, force_eval: bool = False) -> Any:
        """The quantizer as a copy, so that a call moves no state; with `force_eval`, in eval mode."""
        quantizer = nnx.clone(self.tensor_quant, graph=True)
        if force_eval:
            assembly.set_mode(quantizer, use_running_average=True, deterministic=True)
        return quantizer

    # The numbers. Each answer is None if quantization is off.

    def sample(self, force_eval: bool = True) -> Any:
        """Return a QuantTensor of the quantizer that shows what its numbers are; None if it makes none by itself.

        Args:
            force_eval: as eval mode would, also in training mode.
        """
        return None

    def scale(self, force_eval: bool = True) -> jax.Array | None:
        """Return the float per integer step, float32.

        Args:
            force_eval: the scale that eval mode would use, also in training mode.

        Raises:
            RuntimeError: it is made from the given tensor.
        """
        return self._asked("scale", force_eval)

    def zero_point(self, force_eval: bool = True) -> jax.Array | None:
        """Return the integer that represents 0, float32.

        Args:
            force_eval: the zero point that eval mode would use, also in training mode.

        Raises:
            RuntimeError: it is made from the given tensor.
        """
        return self._asked("zero_point", force_eval)

    def bit_width(self, force_eval: bool = True) -> int | jax.Array | None:
        """Return the bits of one number.

        Args:
            force_eval: the bit width that eval mode would use, also in training mode.
        """
        return self._asked("bit_width", force_eval)

    def _asked(self, name: str, *how: Any) -> Any:
        if not self.is_quant_enabled:
            return None
        measured = None if name == "bit_width" else self._measured()
        if measured is not None:
            what, which, call = measured
            raise RuntimeError(
                f"the {name.replace('_', ' ')} of {self.binding.base.__name__} depends on the {what}: it is made from "
                f"{which}.\n  cure: {call}.{name}"
            )
        return getattr(self.sample(*how), name, None)

    def _measured(self) -> tuple[str, str, str] | None:
        """What scale and zero point depend on, what they are made from, and the call that returns them, as text for an
        error; None unless they are made from the tensor that is quantized."""
        return None

    # Minifloats; an AttributeError where the numbers are others. A format does not depend on the mode.

    def exponent_bit_width(self, force_eval: bool = True) -> Any:
        """Bits of the exponent of a minifloat: an int, or an array if learned."""
        return self._of_minifloat("exponent_bit_width")

    def mantissa_bit_width(self, force_eval: bool = True) -> Any:
        """Bits of the mantissa of a minifloat, without the implicit 1: an int, or an array if learned."""
        return self._of_minifloat("mantissa_bit_width")

    def exponent_bias(self, force_eval: bool = True) -> Any:
        """What is subtracted from the exponent field of a minifloat."""
        return self._of_minifloat("exponent_bias")

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
        return form is not None and form.is_ocp

    @property
    def is_fnuz(self) -> bool:
        """Whether it is one of the 8-bit formats without inf and negative 0, e4m3 or e5m2."""
        form = self._minifloat()
        return form is not None and form.is_fnuz

    def _minifloat(self) -> FloatGrid | None:
        if not self.is_quant_enabled:
            return None
        said = _protocols.number_format(self.tensor_quant)
        form = getattr(self.sample(), "format", None) if said is None else said
        return form if form is not None and form.is_minifloat else None

    def _of_minifloat(self, name: str) -> Any:
        form = self._minifloat()
        if form is None and self.is_quant_enabled:
            raise AttributeError(
                f"{self.binding.base.__name__} makes no minifloats: it has no exponent, mantissa, or codes for inf and "
                "nan.\n  cure: proxy.bit_width(), proxy.scale() and proxy.zero_point() describe integers"
            )
        return None if form is None else getattr(form, name)
