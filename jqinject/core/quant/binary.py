"""Quantization to two values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core._protocols import Clamp, Scaling
from jqinject.core.clamp import TensorClamp
from jqinject.core.construction import check
from jqinject.core.construction.assign import set_given
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import Component
from jqinject.core.delay import DelayWrapper, delay_of
from jqinject.core.facts import scale_dtype
from jqinject.core.quant.grids import TableGrid
from jqinject.core.quant.int_quant import QuantResult
from jqinject.ops.fake_quant import known_zero
from jqinject.ops.minifloats.nearest_code import Codebook
from jqinject.ops.ste import binary_sign_ste


def _require_signed(signed: bool, where: str) -> None:
    if not signed:
        raise ValueError(f"{where} quantizes to -scale and +scale: it needs signed=True, got {signed!r}.")


@checked_arguments
class BinaryQuant(Component):
    """`y = sign(x) * s`, `sign(0) = +1`, gradient straight through: weights.

    Differs from Brevitas: nan stays nan (there: -scale).

    Args:
        scaling_impl: the scale `s`, called with `x` alone.
        signed: must be True.
        quant_delay_steps: calls that return `x` unchanged.

    Raises:
        ValueError: `signed` is False.
        TypeError: (when called) `x` is not a float array.

    Example:
        >>> from jqinject.core import ConstScaling
        >>> BinaryQuant(ConstScaling(0.5))(jnp.array([0.04, -0.6, 3.3])).value
        Array([ 0.5, -0.5,  0.5], dtype=float32)
    """

    has_zero_point = False
    delay: DelayWrapper | None = None

    def __init__(self, scaling_impl: Scaling, signed: bool = True, quant_delay_steps: int | None = 0) -> None:
        _require_signed(signed, "BinaryQuant")
        self.scaling_impl = scaling_impl
        set_given(self, delay=delay_of(quant_delay_steps, "BinaryQuant"))

    @property
    def scale_dtype(self) -> np.dtype | None:
        """The `scale_dtype` of the scaling."""
        return scale_dtype(self.scaling_impl)

    def __call__(self, x: jax.Array) -> QuantResult:
        """`x` quantized; zero point 0, bit width 1."""
        x = check.float_input(x, "BinaryQuant")
        x32 = x.astype(jnp.float32)
        scale = self.scaling_impl(x32)
        return QuantResult(self._rounded(x, scale), scale, known_zero(), 1)

    def by_scale(self, x: jax.Array, scale: jax.Array, zero_point: jax.Array, keep: bool) -> QuantResult:
        """Return the result for `x` with a given scale and zero point; with its payload if `keep`."""
        x = check.float_input(x, "BinaryQuant")
        return QuantResult(self._rounded(x, scale), scale, known_zero(), 1)

    @property
    def grid(self) -> TableGrid:
        """The numbers at scale 1 that it rounds to nearest on; None if it does something else."""
        return TableGrid(Codebook((-1.0, 1.0)))

    def _rounded(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        y = (binary_sign_ste(x.astype(jnp.float32)) * scale).astype(x.dtype)
        return y if self.delay is None else self.delay(x, y)


@checked_arguments
class ClampedBinaryQuant(Component):
    """`y = sign(clamp(x, -s, s)) * s`: no gradient reaches `x` outside -s .. s: activations.

    Differs from Brevitas: nan stays nan (there: -scale).

    Args:
        scaling_impl: the scale `s`, called with `x` alone.
        tensor_clamp_impl: how to clamp; None means `TensorClamp()`.
        signed: must be True.
        quant_delay_steps: calls that return `x` unchanged.

    Raises:
        ValueError: `signed` is False.
        TypeError: (when called) `x` is not a float array.

    Example:
        >>> from jqinject.core import ConstScaling
        >>> quant = ClampedBinaryQuant(ConstScaling(0.5))
        >>> jax.grad(lambda x: quant(x).value.sum())(jnp.array([0.04, -0.6, 3.3]))
        Array([0.5, 0. , 0. ], dtype=float32)
    """

    has_zero_point = False
    delay: DelayWrapper | None = None

    def __init__(
        self,
        scaling_impl: Scaling,
        tensor_clamp_impl: Clamp | None = None,
        signed: bool = True,
        quant_delay_steps: int | None = 0,
    ) -> None:
        _require_signed(signed, "ClampedBinaryQuant")
        self.scaling_impl = scaling_impl
        self.tensor_clamp_impl = tensor_clamp_impl or TensorClamp()
        set_given(self, delay=delay_of(quant_delay_steps, "ClampedBinaryQuant"))

    @property
    def scale_dtype(self) -> np.dtype | None:
        """The `scale_dtype` of the scaling."""
        return scale_dtype(self.scaling_impl)

    def __call__(self, x: jax.Array) -> QuantResult:
        """`x` quantized; zero point 0, bit width 1."""
        x = check.float_input(x, "ClampedBinaryQuant")
        x32 = x.astype(jnp.float32)
        scale = self.scaling_impl(x32)
        y = (binary_sign_ste(self.tensor_clamp_impl(x32, -scale, scale)) * scale).astype(x.dtype)
        if self.delay is not None:
            y = self.delay(x, y)
        return QuantResult(y, scale, known_zero(), 1)
