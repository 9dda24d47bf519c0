"""Quantization to 8-bit floats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import check
from jqinject.core._protocols import Scaling, View, groups_of, scale_dtype
from jqinject.core.checked_arguments import checked_arguments
from jqinject.core.clamp import Identity
from jqinject.core.component import Component, assign, set_given
from jqinject.ops.fake_quant import known_zero
from jqinject.ops.float8_cast import (
    float8_dtype,
    float8_factor,
    float8_max,
    quantize_by_factor,
    quantize_float8,
)
from jqinject.ops.float_grid import FloatGrid
from jqinject.ops.power import divide
from jqinject.quant_tensor import FloatQuantTensor


@dataclass(frozen=True)
class Float8QuantResult:
    """What `Float8Quant` returns; it unpacks as value, scale, zero point, bit width.

    Attributes:
        value: the quantized tensor in float, shape of the input.
        scale: float per step of the payload, float32.
        q_dtype: dtype of the payload.
        payload: the numbers behind `value`, in `q_dtype`.
    """

    value: jax.Array
    scale: jax.Array
    q_dtype: np.dtype
    payload: jax.Array | None = None

    @property
    def zero_point(self) -> jax.Array:
        """The zero point of floats is 0."""
        return known_zero()

    @property
    def bit_width(self) -> int:
        """Bits of one number of the payload."""
        return self.q_dtype.itemsize * 8

    def __iter__(self) -> Iterator[Any]:
        return iter((self.value, self.scale, self.zero_point, self.bit_width))

    def quant_tensor(self, *, training: bool) -> FloatQuantTensor:
        """The tensor that flows between layers.

        Args:
            training: whether it was quantized in training mode.
        """
        return FloatQuantTensor(self.value, self.scale, self.q_dtype, training, self.payload)


@checked_arguments
class Float8Quant(Component):
    """To an 8-bit float and back: `y = q_dtype(clip(x / s, -max, max)) * s`, `s = scaling_impl(x, max)`.

    `max` is the largest number of `q_dtype`. The quotient is bfloat16 if `x` is, else float32. The
    gradient of `x` is that of `y` everywhere, saturated elements included (as in Flax). A finite number saturates; nan
    stays nan, an infinity becomes what `q_dtype` has for it (inf, or nan).

    Args:
        scaling_impl: the scale: `AmaxScaling`, or any other scaling component.
        q_dtype: dtype of the payload, one of the four 8-bit floats.
        dq_dtype: dtype of `y`; None means that of `x`.
        input_view_impl: applied to `x` first; None for no view.
        by_factor: multiply by `f = max / scaling_impl(x, 1)` instead, in float32, as TransformerEngine and torchao do;
            the scale is `1 / f`. A scaling with a first scale takes it in units of `x`: `scaling_init = max` for 1.
        power_of_two_factor: round `f` down to a power of two.

    Raises:
        TypeError: `q_dtype` is not an 8-bit float, or `dq_dtype` not a float; (when called) `x` is not a float array.

    Source: Flax's `fp8_ops`.

    Example:
        >>> from jqinject.core import AmaxScaling
        >>> quant = Float8Quant(AmaxScaling(delayed=False), jnp.float8_e4m3fn)
        >>> value, scale, zero_point, bit_width = quant(jnp.array([448.0, 17.0]))
        >>> value, float(scale), bit_width
        (Array([448.,  16.], dtype=float32), 1.0, 8)
    """

    has_zero_point = False
    scaling_impl: Scaling
    q_dtype: np.dtype
    input_view_impl: View = Identity()
    dq_dtype: np.dtype | None = None
    by_factor: bool = False
    power_of_two_factor: bool = False

    def __init__(
        self,
        scaling_impl: Scaling,
        q_dtype: Any = jnp.float8_e4m3fn,
        dq_dtype: Any = None,
        input_view_impl: View | None = None,
        by_factor: bool = False,
        power_of_two_factor: bool = False,
    ) -> None:
        if dq_dtype is not None and not jnp.issubdtype(dq_dtype, jnp.floating):
            raise TypeError(f"Float8Quant: dq_dtype must be a float dtype or None, got {dq_dtype!r}")
        assign(self, scaling_impl=scaling_impl, q_dtype=float8_dtype(q_dtype, "Float8Quant"))
        set_given(
            self,
            dq_dtype=None if dq_dtype is None else np.dtype(dq_dtype),
            input_view_impl=input_view_impl,
            by_factor=by_factor or None,
            power_of_two_factor=power_of_two_factor or None,
        )
        if power_of_two_factor and not by_factor:
            raise ValueError(
                "Float8Quant: power_of_two_factor rounds a factor, and numbers are divided by the scale.\n"
                "  cure: by_factor = True"
            )

    @property
    def format(self) -> FloatGrid:
        """The format of `q_dtype`."""
        return FloatGrid.of_dtype(self.q_dtype)

    @property
    def groups(self) -> tuple[int, int] | None:
        """The groups of `input_view_impl`."""
        return groups_of(self.input_view_impl)

    @property
    def scale_dtype(self) -> np.dtype | None:
        """The `scale_dtype` of the scaling."""
        return scale_dtype(self.scaling_impl)

    def __call__(self, x: jax.Array) -> Float8QuantResult:
        """`x` quantized; scale float32."""
        x = self.input_view_impl(check.float_input(x, "Float8Quant"))
        if self.by_factor:
            return self._by_factor(x)
        scale = self.scaling_impl(x.astype(jnp.float32), float8_max(self.q_dtype))
        return self._quantized(x, scale)

    def _by_factor(self, x: jax.Array) -> Float8QuantResult:
        amax = jax.lax.stop_gradient(self.scaling_impl(x.astype(jnp.float32), 1.0))
        factor = float8_factor(amax, float8_max(self.q_dtype), x.dtype, self.power_of_two_factor)
        value, payload = quantize_by_factor(x, factor, self.q_dtype, self.dq_dtype or x.dtype)
        return Float8QuantResult(value, divide(1.0, factor), self.q_dtype, payload)

    def by_scale(
        self, x: jax.Array, scale: jax.Array, zero_point: jax.Array | None, keep: bool
    ) -> Float8QuantResult:
        """Return the result for `x` with a given scale and zero point; with its payload if `keep`."""
        return self._quantized(self.input_view_impl(check.float_input(x, "Float8Quant")), scale)

    @property
    def grid(self) -> FloatGrid:
        """The numbers at scale 1 that it rounds to nearest on; None if it does something else."""
        return self.format

    def _quantized(self, x: jax.Array, scale: jax.Array) -> Float8QuantResult:
        scale = jax.lax.stop_gradient(scale)
        value, payload = quantize_float8(x, scale, self.q_dtype, self.dq_dtype or x.dtype)
        return Float8QuantResult(value, scale, self.q_dtype, payload)
