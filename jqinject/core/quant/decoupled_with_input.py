"""Integer quantization of a weight that depends on the layer's input format."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from flax import nnx

from jqinject.core._protocols import BitWidth, IntScalingImpl, Scaling, ZeroPoint
from jqinject.core.bit_width import BitWidthConst
from jqinject.core.construction import check
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import set_view
from jqinject.core.quant.decoupled import DecoupledIntQuant, DecoupledQuantizer, DecoupledQuantResult
from jqinject.core.scaling import InputAwarePreScaling
from jqinject.core.state.variables import QuantStat, float_array
from jqinject.quant_tensor import is_concrete

WIDEST = 32  # bits of an accumulator


class ZeroWeightsWarning(UserWarning):
    """An accumulator is so narrow that every weight is quantized to 0."""


@checked_arguments
class DecoupledRescalingIntQuantWithInput(DecoupledQuantizer):
    """Like `DecoupledRescalingIntQuant`, with a scale before rounding that depends on the layer's input format.

    `p = pre_scaling_impl(x, N, signed) / t`, `y = s * (within(q, N, signed) - z)`: `within` of the pre-scaling has the
    last word on the integers `q`. In training mode N and signed are kept, in `input_format`, for a call without them.

    Args:
        decoupled_int_quant: to integers and back, `DecoupledIntQuant`.
        pre_scaling_impl: the scale before rounding, such as `AccumulatorAwareParameterPreScaling`.
        scaling_impl: the scale after rounding.
        int_scaling_impl: how many integer steps the scaled value spans.
        pre_zero_point_impl: what is added before rounding.
        zero_point_impl: the zero point.
        bit_width_impl: the bit width.

    Raises:
        TypeError: `pre_scaling_impl` does not look at the input; (when called) `x` is not a float array.
        ValueError: (when called) the input's format is not known, or its accumulator too narrow.

    Example:
        >>> from jqinject.core import AccumulatorAwareParameterPreScaling, BitWidthConst, ConstScaling, L1Norm
        >>> from jqinject.core import OverOutputChannelView, RoundToZeroSte, SingleArgStatelessBuffer, ZeroZeroPoint
        >>> w, s = jnp.array([[60.0, -40.0]]), ConstScaling(1.0)
        >>> a2q = AccumulatorAwareParameterPreScaling(
        ...     s, L1Norm(stats_reduce_dim=1), BitWidthConst(13), OverOutputChannelView(), [w], (1, 1))
        >>> quant = DecoupledRescalingIntQuantWithInput(
        ...     DecoupledIntQuant(True, True, float_to_int_impl=RoundToZeroSte()), a2q, s,
        ...     SingleArgStatelessBuffer(1.0), ZeroZeroPoint(), ZeroZeroPoint(), BitWidthConst(8))
        >>> quant(w, 8, True).value, quant(w, 4, True).value
        (Array([[ 19., -12.]], dtype=float32), Array([[ 60., -40.]], dtype=float32))
    """

    needs_input_format = True

    def __init__(
        self,
        decoupled_int_quant: DecoupledIntQuant,
        pre_scaling_impl: InputAwarePreScaling,
        scaling_impl: Scaling,
        int_scaling_impl: IntScalingImpl,
        pre_zero_point_impl: ZeroPoint,
        zero_point_impl: ZeroPoint,
        bit_width_impl: BitWidth,
    ) -> None:
        if not isinstance(pre_scaling_impl, InputAwarePreScaling):
            raise TypeError(
                f"DecoupledRescalingIntQuantWithInput: {type(pre_scaling_impl).__name__} does not look at the layer's "
                "input.\n  cure: pre_scaling_impl = AccumulatorAwareParameterPreScaling, or tensor_quant = "
                "DecoupledRescalingIntQuant"
            )
        super().__init__(
            decoupled_int_quant,
            pre_scaling_impl,
            scaling_impl,
            int_scaling_impl,
            pre_zero_point_impl,
            zero_point_impl,
            bit_width_impl,
        )
        self.input_format = QuantStat(float_array(0.0, (2,)))
        self.use_running_average = False

    def __call__(
        self, x: jax.Array, input_bit_width: Any = None, input_is_signed: bool | None = None
    ) -> DecoupledQuantResult:
        """`x` quantized for an input of `input_bit_width` bits; by default that of the last training step."""
        x = check.float_input(x, "DecoupledRescalingIntQuantWithInput")
        x32 = x.astype(jnp.float32)
        if input_bit_width is not None and input_is_signed is not None:
            self._keep(input_bit_width, input_is_signed)
            return self._for_input(x, x32, input_bit_width, input_is_signed)
        kept = self.kept_input()
        if kept is not None:
            return self._for_input(x, x32, *kept)
        # Known only when the program runs: if nothing was kept (0 bits), the numbers are nan.
        bits, sign = jax.lax.stop_gradient(self.input_format.get_value()).astype(jnp.int32)
        result = self._for_input(x, x32, jnp.maximum(bits, 1), sign)
        return result._replace(value=jnp.where(bits > 0, result.value, jnp.nan).astype(x.dtype))

    def kept_input(self) -> tuple[int, bool] | None:
        """Bits and sign of the input of the last training step; None in a stack or under tracing.

        Raises:
            ValueError: there was none.
        """
        kept = self.input_format.get_value()
        if isinstance(kept, jax.core.Tracer | jax.ShapeDtypeStruct):
            return None
        if not bool(jnp.all(kept[..., 0] > 0)):
            raise ValueError(
                "how many bits the layer's input has is not known, and the weight is quantized for them.\n  cure: give "
                "the layer input_quant=..., or call it once in training mode with a QuantTensor"
            )
        return (int(kept[0]), bool(kept[1])) if kept.ndim == 1 else None

    def _keep(self, bits: Any, signed: Any) -> None:
        if not self.use_running_average:
            kept = jnp.stack([jnp.asarray(f).astype(jnp.float32) for f in (bits, signed)])
            self.input_format.set_value(jax.lax.stop_gradient(jnp.round(kept)))

    def check_input(self, x: jax.Array, input_bit_width: Any, input_is_signed: bool) -> None:
        """Refuse in advance an input that cannot be guaranteed for.

        Args:
            x: the weight; one that is traced or abstract is not looked at.
            input_bit_width, input_is_signed: see a call.

        Raises:
            ValueError: the accumulator is too narrow.

        Warns:
            ZeroWeightsWarning: it is so narrow that all of the weight's integers are 0, from which no training starts.
        """
        self.pre_scaling_impl.check_input(input_bit_width, input_is_signed)
        width = self.pre_scaling_impl.accumulator_bit_width()
        if not (isinstance(width, int) and is_concrete(x, input_bit_width)) or not bool(jnp.any(x)):
            return
        widths = range(width, WIDEST + 1)
        least = next((n for n in widths if self._has_integers(n, x, input_bit_width, input_is_signed)), None)
        if least != width:
            warnings.warn(
                f"an accumulator of {width} bits bounds the integers of an output channel so much that all weights of "
                f"shape {x.shape} are 0: the layer passes nothing on, and does not train.\n  cure: "
                + (
                    f"accumulator_bit_width = {least}, the narrowest"
                    if least
                    else "fewer inputs for each output"
                )
                + " that leaves weights other than 0, or more; or an input of fewer bits",
                ZeroWeightsWarning,
                stacklevel=2,
            )

    def _has_integers(self, width: int, x: jax.Array, bits: int | jax.Array, signed: bool) -> bool:
        """Whether an integer of a weight is not 0 with an accumulator of so many bits."""
        copy = nnx.clone(self, graph=True)
        copy.pre_scaling_impl.accumulator_bit_width = BitWidthConst(width)
        return bool(jnp.any(copy._for_input(x, x.astype(jnp.float32), bits, signed).value))

    set_view = set_view

    def _for_input(self, x: jax.Array, x32: jax.Array, bits: Any, signed: Any) -> DecoupledQuantResult:
        pre_threshold = self.pre_scaling_impl(x32, bits, signed)
        return self.quantized(x, x32, pre_threshold, lambda q: self.pre_scaling_impl.within(q, bits, signed))
