"""One operand of one contraction: how it becomes low-bit numbers and a scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.dot.kernels.kernel_table import settled
from jqinject.dot.schemes.noise import Noise
from jqinject.dot.schemes.numerics import Float8Numerics, Numerics
from jqinject.dot.schemes.operand_ranges import AbsMaxCalibration, Calibration
from jqinject.ops.minifloats.float_grid import float_steps
from jqinject.ops.power import by_reciprocal

CalibrationAxes = Literal["contracting", "remaining", "tensor"] | tuple[int, ...]
DequantMode = Literal["output", "this_input", "other_input"]


class QuantizedOperand(NamedTuple):
    """Low-bit numbers and their scale: the operand is `payload * scale`.

    Attributes:
        payload: integers, 8-bit floats, or the operand itself where it is not quantized.
        scale: float32, of the operand's rank, size 1 along axes that share a scale; None where it is not quantized.
    """

    payload: jax.Array
    scale: jax.Array | None

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """`payload * scale`, computed in float32.

        Example:
            >>> QuantizedOperand(jnp.array([3, -1], jnp.int8), jnp.array([0.5])).dequantize()
            Array([ 1.5, -0.5], dtype=float32)
        """
        if self.scale is None:
            return self.payload.astype(dtype)
        return (self.payload.astype(jnp.float32) * self.scale).astype(dtype)


class ScaledOperand(NamedTuple):
    """A float operand whose scale is known beforehand: nothing is reduced to find it. The scale has no gradient.

    Attributes:
        value: the operand.
        scale: float32, of the operand's rank.
    """

    value: jax.Array
    scale: jax.Array


@checked_arguments
@dataclass(frozen=True)
class OperandQuantizer:
    """Quantizes one operand: calibrate, divide by the scale, round into the format.

    Args:
        numerics: the format; None leaves the operand as it is.
        calibration: where the scale comes from.
        noise: for stochastic rounding; None rounds to nearest.
        calibration_axes: the axes that share a scale: those that are summed over, the others ("remaining", which
            goes with `dequant_mode="other_input"`), all ("tensor"), or a tuple of axes.
        dequant_mode: where the scale is multiplied in: at the output (the operands are contracted as they are in low
            bits), at this input (fake quantization) or at the other input.
        use_fwd_quant: in a backward contraction, take the numbers that the forward pass had, and their scale into the
            gradient.

    Source: AQT's `Quantizer` and `Tensor`.
    """

    numerics: Numerics | None = None
    calibration: Calibration = AbsMaxCalibration()
    noise: Noise | None = None
    calibration_axes: CalibrationAxes = "contracting"
    dequant_mode: DequantMode = "output"
    use_fwd_quant: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.calibration_axes, str):
            _check_choice("calibration_axes", self.calibration_axes, ("contracting", "remaining", "tensor"))
        _check_choice("dequant_mode", self.dequant_mode, ("output", "this_input", "other_input"))

    @property
    def needs_key(self) -> bool:
        """Whether quantizing draws random numbers."""
        return self.numerics is not None and self.noise is not None

    def quantize(self, x: jax.Array, axes: Sequence[int], key: jax.Array | None = None) -> QuantizedOperand:
        """The operand in its format. No gradient.

        Args:
            x: float array.
            axes: the axes that share a scale.
            key: for the noise.

        Raises:
            ValueError: there is noise and no key.
        """
        if self.numerics is None:
            return QuantizedOperand(x, None)
        scale = self.calibration.scale(x, axes, self.numerics)
        return QuantizedOperand(self.encode(x, scale, key), scale)

    def encode(self, x: jax.Array, scale: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """The payload of an operand whose scale is known."""
        assert self.numerics is not None, "asked for by a quantizer that has a format"
        noise = None
        if self.noise is not None:
            if key is None:
                raise missing_key()
            noise = self.noise(x.shape, key)
        return settled(self.numerics.encode(self._steps(x, scale), noise))

    def passes_gradient(self, x: jax.Array, scale: jax.Array | None) -> jax.Array | None:
        """Where the gradient of the operand passes through the rounding; None for everywhere."""
        if self.numerics is None or scale is None:
            return None
        return self.numerics.passes_gradient(self._steps(x, scale))

    def _steps(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        return float_steps(x, scale) if isinstance(self.numerics, Float8Numerics) else by_reciprocal(x, scale)


def _check_choice(name: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise ValueError(
            f"OperandQuantizer: {name} must be one of {', '.join(map(repr, known))}; got {given!r}"
        )


def missing_key() -> ValueError:
    """The error for stochastic rounding without a key."""
    return ValueError(
        "stochastic rounding needs a key, and none was given.\n  cure: key=jax.random.key(...) here, "
        "rngs=nnx.Rngs(...) for QDotGeneral and its kin, or rng_type=None to round to nearest"
    )
