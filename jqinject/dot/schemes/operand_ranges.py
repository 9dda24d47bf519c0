"""Calibration of an operand: the magnitude that becomes the largest number of its format."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.dot.schemes.numerics import Numerics
from jqinject.ops.power import by_reciprocal, exp2

Axes = Sequence[int]


class Calibration(Protocol):
    """What finds the scale of an operand in the operand itself."""

    @abstractmethod
    def scale(self, x: jax.Array, axes: Axes, numerics: Numerics) -> jax.Array:
        """Float32 per step of the format, size 1 along `axes`, which share a scale; positive."""


def nonzero(x: jax.Array) -> jax.Array:
    """1 in the place of zeros: the scale of an operand that is all zeros does not matter."""
    return jnp.where(x == 0.0, 1.0, x)


def power_of_two_above(scale: jax.Array) -> jax.Array:
    """The smallest power of two that is not below `scale`.

    Example:
        >>> power_of_two_above(jnp.array([0.3, 0.5]))
        Array([0.5, 0.5], dtype=float32)
    """
    mantissa, exponent = jnp.frexp(scale)
    return exp2(jnp.where(mantissa == 0.5, exponent - 1, exponent))


def _magnitudes(x: jax.Array) -> jax.Array:
    return jnp.abs(x.astype(jnp.float32))


def _largest_magnitude(x: jax.Array, axes: Axes) -> jax.Array:
    """`max|x|`, from both ends: on CPUs two reductions are faster than an array of magnitudes and one."""
    x = x.astype(jnp.float32)
    high = jnp.max(x, axis=tuple(axes), keepdims=True, initial=0.0)
    return jnp.maximum(high, -jnp.min(x, axis=tuple(axes), keepdims=True, initial=0.0))


@checked_arguments
@dataclass(frozen=True)
class AbsMaxCalibration:
    """`scale = clipping_scale * max|x| / bound`.

    Args:
        clipping_scale: below 1, the largest magnitudes are clipped; None for 1.
        po2_scale: round the scale up to a power of two.

    Source: AQT's `AbsMaxCalibration`.

    Example:
        >>> from jqinject.dot.schemes.numerics import IntNumerics
        >>> AbsMaxCalibration().scale(jnp.array([[1.5, -3.0]]), (1,), IntNumerics(2))
        Array([[2.]], dtype=float32)
    """

    clipping_scale: float | None = None
    po2_scale: bool = False

    def scale(self, x: jax.Array, axes: Axes, numerics: Numerics) -> jax.Array:
        """See the class."""
        bound = nonzero(_largest_magnitude(x, axes))
        if self.clipping_scale is not None:
            bound = bound * self.clipping_scale
        return _rounded(by_reciprocal(bound, numerics.bound), self.po2_scale)


@checked_arguments
@dataclass(frozen=True)
class AbsMeanCalibration:
    """`scale = clipping_scale * (mean over x != 0 of |x|^p)^(1/p) / bound`.

    Args:
        clipping_scale: how many means reach to the bound.
        p: exponent of the mean.
        po2_scale: round the scale up to a power of two.
        count_zeros: take the mean over zeros too.

    Source: AQT's `AbsMeanCalibration`; with `p=2` and `count_zeros=True`, Qwix's `rms`.

    Example:
        >>> from jqinject.dot.schemes.numerics import IntNumerics
        >>> x = jnp.array([[1.5, 0.0, -1.5, 3.0]])
        >>> [float(AbsMeanCalibration(count_zeros=c).scale(x, (1,), IntNumerics(2))[0, 0]) for c in (True, False)]
        [1.0, 1.3333333730697632]
    """

    clipping_scale: float = 1.0
    p: float = 1.0
    po2_scale: bool = False
    count_zeros: bool = False

    def scale(self, x: jax.Array, axes: Axes, numerics: Numerics) -> jax.Array:
        """See the class."""
        magnitudes = _magnitudes(x)
        total = jnp.sum(magnitudes**self.p, axis=tuple(axes), keepdims=True)
        counted = jnp.full(magnitudes.shape, True) if self.count_zeros else magnitudes != 0.0
        count = jnp.sum(counted, axis=tuple(axes), keepdims=True, dtype=jnp.float32)
        mean = (total / nonzero(count)) ** (1.0 / self.p)
        return _rounded(by_reciprocal(nonzero(mean * self.clipping_scale), numerics.bound), self.po2_scale)


@checked_arguments
@dataclass(frozen=True)
class ConstantCalibration:
    """`scale = bound / the format's bound`, known beforehand: nothing is reduced.

    Args:
        bound: the magnitude that becomes the largest number; positive.
        po2_scale: round the scale up to a power of two.

    Raises:
        ValueError: `bound` is not positive.

    Source: AQT's `ConstantCalibration`.
    """

    bound: float = 1.0
    po2_scale: bool = False

    def __post_init__(self) -> None:
        if not self.bound > 0:
            raise ValueError(f"ConstantCalibration: bound must be positive, got {self.bound!r}")

    def scale(self, x: jax.Array, axes: Axes, numerics: Numerics) -> jax.Array:
        """See the class."""
        return _rounded(jnp.full((1,) * x.ndim, self.bound / numerics.bound, jnp.float32), self.po2_scale)


@checked_arguments
@dataclass(frozen=True)
class SnrCalibration:
    """The one of several clipping scales whose rounding leaves the highest ratio of signal to noise.

    For each, `scale = clipping_scale * max|x| / bound`; taken is the one with the largest
    `sum(x^2) / sum((x - dequantized)^2)` over the axes that share a scale; the first of equals.

    Args:
        clipping_scales: to be tried.
        po2_scale: round the scales up to powers of two.

    Source: AQT's `SnrBasedAutoCalibration`.
    """

    clipping_scales: tuple[float, ...] = (1.0, 0.8, 0.6, 0.4, 0.2)
    po2_scale: bool = False

    def scale(self, x: jax.Array, axes: Axes, numerics: Numerics) -> jax.Array:
        """See the class."""
        x = x.astype(jnp.float32)
        bound = nonzero(_largest_magnitude(x, axes))
        scales = jnp.stack(
            [_rounded(by_reciprocal(bound * c, numerics.bound), self.po2_scale) for c in self.clipping_scales]
        )
        again = numerics.encode(by_reciprocal(x, scales)).astype(jnp.float32) * scales
        # The signal is the same for all: the least noise has the highest ratio.
        noise = jnp.sum((x - again) ** 2, axis=tuple(axis + 1 for axis in axes), keepdims=True)
        best = jnp.argmin(noise, axis=0, keepdims=True)
        return jnp.take_along_axis(scales, best, axis=0)[0]


def _rounded(scale: jax.Array, po2_scale: bool) -> jax.Array:
    return power_of_two_above(scale) if po2_scale else scale
