"""A restriction of scales to what another quantizer has."""

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
    """Values that another quantizer makes of them: the scales of groups in 8-bit floats, for instance.

    As `restrict_scaling_impl` it is applied to the integer threshold too, which is one number: where the quantizer has
    a scale for each channel, declare `restrict_threshold_impl = FloatRestrictValue` beside it.

    A value that would become 0 becomes the least of the same sign that is not, so that a scale stays one.

    A quantizer in groups of its own (16 scales of a channel share one scale, say) is cut loose of them: the result has
    the shape of the values.

    Args:
        restrict_value_float_to_int_impl: the quantizer; of its result the value is taken.
        scale_dequantized_shape: shape of the result; None means that of the values.

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
        """That of the quantizer's minifloats, where they have 8 bits."""
        form = number_format(self.quantizer)
        return form.dtype if isinstance(form, FloatFormat) and form.dtype in FLOAT8_DTYPES else None

    def restrict_init_float(self, x: float) -> float:
        """`x`."""
        return x

    def restrict_init_tensor(self, x: jax.Array) -> jax.Array:
        """`x`."""
        return x

    def __call__(self, x: jax.Array) -> jax.Array:
        """`x` quantized, nowhere 0."""
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
    """The least minifloat above 0."""
    return exp2(jnp.asarray(1 - form.bias - form.mantissa_bit_width, jnp.float32))
