"""Scales that are themselves quantized."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core._protocols import TensorQuant
from jqinject.core.construction import check
from jqinject.core.construction.assign import assign
from jqinject.core.construction.component import Component
from jqinject.core.facts import number_format
from jqinject.core.quant.float_quant import FloatQuantResult
from jqinject.ops import FLOAT8_DTYPES
from jqinject.ops.groups import ungrouped
from jqinject.ops.minifloats.float_format import FloatFormat, LearnedFloatFormat
from jqinject.ops.power import exp2


class QuantRestrictValue(Component):
    """Values quantized by another quantizer, such as 8-bit float group scales.

    As `restrict_scaling_impl` it also applies to the integer threshold, a scalar: if the quantizer is per channel, also
    declare `restrict_threshold_impl = FloatRestrictValue`.

    A value that would become 0 becomes the smallest nonzero one of its sign, so that it remains a valid scale.

    If the quantizer is itself grouped (16 scales share one scale, say), its result is reshaped to that of the values.

    Args:
        restrict_value_float_to_int_impl: the quantizer.
        scale_dequantized_shape: shape of the result; None for that of the values.

    Source: Brevitas. Differs from Brevitas: there a small scale may become 0.

    Example:
        >>> from jqinject.core import ExponentWidthConst, FloatClamp, FloatQuant, MantissaWidthConst, StaticExponentBias
        >>> e2m1 = FloatQuant(True, ExponentWidthConst(2), MantissaWidthConst(1), StaticExponentBias(1), FloatClamp())
        >>> QuantRestrictValue(e2m1)(jnp.array([5.1, 0.1]))
        Array([6. , 0.5], dtype=float32)
    """

    quantizer: TensorQuant
    scale_dequantized_shape: tuple[int, ...] | None = None

    def __init__(
        self,
        restrict_value_float_to_int_impl: TensorQuant,
        scale_dequantized_shape: tuple[int, ...] | None = None,
    ) -> None:
        assign(self, quantizer=restrict_value_float_to_int_impl)
        if scale_dequantized_shape is not None:
            name = "scale_dequantized_shape"
            shape = check.shape(scale_dequantized_shape, type(self).__name__, name)
            assign(self, scale_dequantized_shape=shape)

    @property
    def scale_dtype(self) -> np.dtype | None:
        """The dtype of the quantizer's minifloats if they have 8 bits."""
        form = number_format(self.quantizer)
        return form.dtype if isinstance(form, FloatFormat) and form.dtype in FLOAT8_DTYPES else None

    def restrict_init_float(self, x: float) -> float:
        """`x`."""
        return x

    def restrict_init_tensor(self, x: jax.Array) -> jax.Array:
        """`x`."""
        return x

    def __call__(self, x: jax.Array) -> jax.Array:
        """`x` quantized, never 0."""
        result: Any = self.quantizer(x)
        value, scale, *_ = result
        step = _least_step(result.format) if isinstance(result, FloatQuantResult) else 1.0
        if value.ndim != x.ndim:
            scale = ungrouped(jnp.broadcast_to(scale, value.shape), x)
            value = ungrouped(value, x)
        least = jnp.where(x < 0, -scale * step, scale * step)
        restricted = jnp.where(value == 0, least, value)
        shape = self.scale_dequantized_shape
        return restricted if shape is None else restricted.reshape(shape)


def _least_step(form: FloatFormat | LearnedFloatFormat) -> jax.Array:
    """The smallest positive minifloat."""
    return exp2(jnp.asarray(1 - form.bias - form.mantissa_bit_width, jnp.float32))
