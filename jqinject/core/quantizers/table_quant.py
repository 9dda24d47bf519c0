"""Quantizers to tables of numbers: to two and three values, signs times a scale, and to any table."""

import math
from abc import abstractmethod
from dataclasses import InitVar
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from jqinject.core import _protocols, check, clamping, component
from jqinject.core.quantizers import delay, quantizer
from jqinject.ops import power, ste
from jqinject.ops.grid import Codebook, Grid, IntGrid, TableGrid


class _SignQuant(delay.Delayed, quantizer.Quantizer):
    """Abstract: signs times a scale that is called with the tensor alone; see `_values`."""

    bits = 1
    signed: bool = True

    def __post_init__(self, quant_delay_steps: int | None) -> None:
        if not self.signed:
            raise ValueError(
                f"{type(self).__name__} quantizes to -scale and +scale: it needs signed=True, got {self.signed!r}."
            )
        super().__post_init__(quant_delay_steps)

    def _numbers(self) -> tuple[IntGrid, None]:
        return IntGrid(self.bits), None

    @abstractmethod
    def _values(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        """-1, 0 and 1, float32."""

    def _round(self, x: jax.Array, step: quantizer.GridStep, grid: Grid, keep: bool) -> quantizer.Rounded:
        y = (self._values(x.astype(jnp.float32), step.scale) * step.scale).astype(x.dtype)
        return y if self.delay is None else self.delay(x, y), None


@component.component
class BinaryQuant(_SignQuant):
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

    grid = TableGrid((-1.0, 1.0))
    scaling_impl: _protocols.Scaling
    signed: bool = True
    quant_delay_steps: InitVar[int | None] = 0

    def _values(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        return ste.binary_sign_ste(x)


@component.component
class ClampedBinaryQuant(_SignQuant):
    """`y = sign(clamp(x, -s, s)) * s`: no gradient reaches `x` outside -s .. s: activations.

    Differs from Brevitas: nan stays nan (there: -scale).

    Args:
        scaling_impl: the scale `s`, called with `x` alone.
        tensor_clamp_impl: how to clamp.
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

    scaling_impl: _protocols.Scaling
    tensor_clamp_impl: _protocols.Clamp = clamping.TensorClamp()
    signed: bool = True
    quant_delay_steps: InitVar[int | None] = 0

    def _values(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        return ste.binary_sign_ste(self.tensor_clamp_impl(x, -scale, scale))


_FRACTION = check.between(0, math.inf, expected="is a fraction of the scale, expected >= 0")


@component.component
class TernaryQuant(_SignQuant):
    """`y = sign(x) * s` where `|x| > threshold * s`, else 0; the gradient passes where `y` is nonzero.

    Args:
        scaling_impl: the scale `s`, called with `x` alone.
        threshold: numbers up to this fraction of the scale become 0.
        quant_delay_steps: calls that return `x` unchanged; None for no delay.

    Raises:
        ValueError: when `threshold` is negative or not finite.
        TypeError: (when called) `x` is not a float array.

    Example:
        >>> from jqinject.core import ConstScaling
        >>> TernaryQuant(ConstScaling(1.0), 0.5)(jnp.array([0.04, -0.6, 3.3])).value
        Array([ 0., -1.,  1.], dtype=float32)
    """

    bits = 2
    grid = TableGrid((-1.0, 0.0, 1.0))
    scaling_impl: _protocols.Scaling
    threshold: Annotated[float, _FRACTION]
    quant_delay_steps: InitVar[int | None] = None

    def _values(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        mask = (jnp.abs(x) > self.threshold * scale).astype(jnp.float32)
        return mask * ste.ternary_sign_ste(x)


@component.component
class CodebookQuant(quantizer.Quantizer):
    """To the nearest number of a table and back: `y = table[argmin |x / s - table|] * s`.

    `s = scaling_impl(x, largest magnitude of the table)`. The arithmetic is float32; ties go to the lower number; nan
    stays nan; where the scale is 0, so is `y`. The gradient goes straight through to `x` where `x / s` is within the
    table's range, else as `tensor_clamp_impl` decides; with a `gradient_mask_impl` to `x` alone, where the mask is
    True.

    Args:
        scaling_impl: the scale.
        codebook: a `jqinject.ops.Codebook`; or the numbers of a table, in ascending order.
        input_view_impl: applied to `x` first.
        tensor_clamp_impl: how to clamp to the table's ends.
        gradient_mask_impl: where the gradient goes; None leaves it to the clamp.

    Raises:
        ValueError: the numbers are not a table.
        TypeError: (when called) `x` is not a float array.

    Example:
        >>> from jqinject.core import ConstScaling
        >>> quant = CodebookQuant(ConstScaling(2.0), (-1.0, 0.0, 0.25, 1.0))
        >>> quant(jnp.array([0.4, -3.0])).value
        Array([ 0.5, -2. ], dtype=float32)
    """

    scaling_impl: _protocols.Scaling
    codebook: Any
    input_view_impl: _protocols.View = clamping.Identity()
    tensor_clamp_impl: _protocols.Clamp = clamping.TensorClamp()
    gradient_mask_impl: _protocols.GradientMask | None = None

    def __post_init__(self) -> None:
        vars(self)["codebook"] = Codebook.of(self.codebook)

    @property
    def grid(self) -> Codebook:
        """The numbers at scale 1 that it rounds to nearest on: the table, which is also its `format`."""
        return self.codebook

    format = grid

    def _numbers(self) -> tuple[Codebook, float]:
        return self.codebook, self.codebook.largest

    def _round(self, x: jax.Array, step: quantizer.GridStep, grid: Grid, keep: bool) -> quantizer.Rounded:
        scale = step.scale
        steps = power.divide(x.astype(jnp.float32), jnp.where(scale == 0, 1.0, scale))
        inside = self.tensor_clamp_impl(steps, *grid.bounds)
        nearest = grid.round(inside)
        mask = self.gradient_mask_impl
        if mask is not None:
            return ste.with_gradient_where(x, (nearest * scale).astype(x.dtype), mask(steps, nearest)), None
        passed = jax.lax.stop_gradient(nearest) + (inside - jax.lax.stop_gradient(inside))
        return (passed * scale).astype(x.dtype), None
