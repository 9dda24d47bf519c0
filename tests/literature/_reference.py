"""What theory predicts, computed with NumPy and SciPy alone: errors of tables, best tables and steps, errors of blocks.

Everything is an integral over the cells of a table. With `F` the distribution of the numbers, a cell from `a` to `b`
that is rounded to `y` adds `M2 - 2 y M1 + y^2 M0` to the mean squared error, where `Mk` is the integral of `x^k` from
`a` to `b`; a `Source` is these integrals from minus infinity to some place.
"""

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize_scalar
from scipy.special import ndtr
from scipy.stats import laplace, norm

Array = NDArray[np.float64]


class Source(NamedTuple):
    """A symmetric distribution.

    Attributes:
        moments: at places, the integrals of 1, `x` and `x^2` up to these.
        quantile: the inverse of the first one.
    """

    moments: Callable[[Array], tuple[Array, Array, Array]]
    quantile: Callable[[Array], Array]


def _normal(t: Array) -> tuple[Array, Array, Array]:
    below, density = ndtr(t), np.exp(-t * t / 2) / math.sqrt(2 * math.pi)
    return below, -density, below - t * density


def _laplace(t: Array) -> tuple[Array, Array, Array]:
    size, tail = np.abs(t), np.exp(-np.abs(t)) / 2
    second = tail * (size**2 + 2 * size + 2)
    return laplace.cdf(t), -tail * (size + 1), np.where(t < 0, second, 2 - second)


NORMAL, LAPLACE = Source(_normal, norm.ppf), Source(_laplace, laplace.ppf)
FAR = 60.0  # as good as infinity


def table_error(levels: ArrayLike, source: Source = NORMAL, most: float = FAR) -> float:
    """The mean squared error of rounding to the nearest of some numbers, of `x` where `|x| <= most`."""
    y = np.sort(np.asarray(levels, np.float64))
    ends = np.clip(np.concatenate([[-most], (y[1:] + y[:-1]) / 2, [most]]), -most, most)
    mass, first, second = (np.diff(part) for part in source.moments(ends))
    return float((second - 2 * y * first + y * y * mass).sum() / mass.sum())


@cache
def lloyd_max(count: int) -> Array:
    """The numbers of the Lloyd-Max quantizer of a normal distribution: Lloyd's iterations with Aitken's extrapolation.

    Not Newton's method, which the library uses.
    """
    levels = np.sqrt(3) * norm.ppf((np.arange(count) + 0.5) / count)

    def once(y: Array) -> Array:
        ends = np.concatenate([[-FAR], (y[1:] + y[:-1]) / 2, [FAR]])
        mass, first, _ = (np.diff(part) for part in _normal(ends))
        return first / mass

    for _ in range(600):
        one = once(levels)
        two = once(one)
        # Squared extrapolation (Varadhan and Roland, 2008) of the two steps.
        change, bend = one - levels, two - 2 * one + levels
        if np.abs(change).max() < 1e-9:
            break
        length = max(1.0, math.sqrt((change**2).sum() / max((bend**2).sum(), 1e-300)))
        candidate = levels + 2 * length * change + length**2 * bend
        levels = candidate if np.all(np.diff(candidate) > 0) else two
    return levels


@cache
def best_step(steps: tuple[float, ...], source: Source = NORMAL) -> tuple[float, float]:
    """The scale of some numbers with the least mean squared error, and this error."""
    numbers = np.asarray(steps)
    far = 12.0 / np.abs(numbers).max()
    found = minimize_scalar(
        lambda scale: table_error(scale * numbers, source),
        bounds=(far / 100, far),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return float(found.x), float(found.fun)


def half_steps(bits: int) -> tuple[float, ...]:
    """Odd multiples of one half: the steps of a uniform quantizer without 0."""
    return tuple(k + 0.5 for k in range(-(2 ** (bits - 1)), 2 ** (bits - 1)))


def integers(bits: int, narrow: bool = True) -> tuple[float, ...]:
    """The integers of a width."""
    return tuple(float(k) for k in range(-(2 ** (bits - 1)) + narrow, 2 ** (bits - 1)))


def minifloats(dtype: str) -> tuple[float, ...]:
    """The finite numbers of a format, by the conversion of `ml_dtypes`."""
    kind = np.dtype(getattr(ml_dtypes, dtype))
    width = {"float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6}.get(dtype, 8)
    numbers = np.arange(2**width, dtype=np.uint8).view(kind).astype(np.float64)
    return tuple(sorted({float(x) for x in numbers if np.isfinite(x)}))


def entropy(levels: ArrayLike) -> float:
    """Bits of the codes of numbers that are normally distributed."""
    y = np.sort(np.asarray(levels, np.float64))
    mass = np.diff(ndtr(np.concatenate([[-FAR], (y[1:] + y[:-1]) / 2, [FAR]])))
    return float(-(mass * np.log2(mass)).sum())


def block_error(levels: ArrayLike, size: int, scale: Callable[[float], float], points: int = 1500) -> float:
    """The mean squared error of blocks of normally distributed numbers, scaled by their largest magnitude `m`.

    `m` has the density `n (2 Phi(m) - 1)^(n - 1) 2 phi(m)`. Given it, one number of a block is `m` itself, the others
    have a normal distribution that ends at `m`.

    Args:
        levels: the numbers of the format.
        size: numbers of a block, `n`.
        scale: of a block, from `m`.
        points: places of `m` that the density is summed at, at equal distances of its logarithm.
    """
    numbers = np.asarray(levels)
    edges = np.exp(np.linspace(math.log(0.2), math.log(8.0), points + 1))
    total = weight = 0.0
    for low, high in pairwise(edges):
        share = (2 * ndtr(high) - 1) ** size - (2 * ndtr(low) - 1) ** size
        if share < 1e-9:
            continue
        m = (low + high) / 2
        own = scale(m) * numbers
        largest = float(np.abs(own - m).min()) ** 2
        total += share * ((size - 1) * table_error(own, most=m) + largest) / size
        weight += share
    return total / weight


def power_of_two(largest: float, rule: str) -> Callable[[float], float]:
    """A block's scale from its largest magnitude, a power of two: "floor" is the specification's rule of MX."""
    if rule == "floor":
        return lambda m: 2.0 ** (math.floor(math.log2(m)) - math.floor(math.log2(largest)))
    return lambda m: 2.0 ** math.ceil(math.log2(m / largest))


def to_e4m3(m: float) -> float:
    """The nearest e4m3 number."""
    return float(np.float32(m).astype(ml_dtypes.float8_e4m3fn))


def expected_largest(size: int) -> float:
    """The mean of the largest magnitude of normally distributed numbers."""
    m = np.linspace(0, 10, 20001)
    above = 1 - (2 * ndtr(m) - 1) ** size
    return float(np.trapezoid(above, m))


def aciq_error(clip: float, bits: int, source: Source) -> float:
    """ACIQ's model of the mean squared error of a clipping value (Banner et al., 2019)."""
    grain = clip**2 / (3 * 4**bits)
    if source is LAPLACE:
        return 2 * math.exp(-clip) + grain
    outside = math.erfc(clip / math.sqrt(2))
    tail = math.sqrt(2 / math.pi) * clip * math.exp(-(clip**2) / 2)
    return (1 + clip**2) * outside - tail + grain


def aciq_clip(bits: int, source: Source) -> float:
    """The clipping value where this model is least."""
    found = minimize_scalar(lambda clip: aciq_error(clip, bits, source), bounds=(0.2, 30), method="bounded")
    return float(found.x)


def octav_clip(bits: int) -> float:
    """The fixed point of OCTAV's iteration for a normal distribution (Sakr et al., 2022)."""
    clip = 2.0
    for _ in range(200):
        outside = 2 * norm.sf(clip)
        clip = 2 * norm.pdf(clip) / (4.0**-bits / 3 * (1 - outside) + outside)
    return float(clip)


def int_sqnr(bits: int, kappa: float, rho: float) -> float:
    """dB of integers in blocks: the model of arXiv 2510.25602.

    Args:
        bits: of an integer.
        kappa: the crest factor, largest magnitude over root mean square.
        rho: how much too large the scale is, from 1 to 2 for powers of two.
    """
    return 4.78 + 6.02 * bits - 20 * math.log10(rho) - 20 * math.log10(kappa)


def float_sqnr(exponent_bits: int, mantissa_bits: int, largest: float, kappa: float, rho: float) -> float:
    """dB of minifloats in blocks of normally distributed numbers: the model of arXiv 2510.25602.

    The share `w` of the energy above the smallest normal number has a relative error of `1 / (24 4^M)`, the share
    `p` of numbers below it the error of their step.
    """
    bias = 2 ** (exponent_bits - 1) - 1
    least = 2.0 ** (1 - bias) * rho * kappa / largest
    p = 2 * ndtr(least) - 1
    w = 1 - (p - 2 * least * norm.pdf(least))
    step = 2.0 ** (1 - bias - mantissa_bits) * rho * kappa / largest
    return -10 * math.log10(w / (24 * 4**mantissa_bits) + step**2 / 12 * p)


def crossing(first: Callable[[float], float], second: Callable[[float], float]) -> float:
    """Where two functions of the crest factor are equal, the first being larger below it."""
    low, high = 1.01, 30.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if first(middle) > second(middle) else (low, middle)
    return low


def nf4_by_quantiles() -> Array:
    """NF4 by its construction in QLoRA's appendix E: quantiles of both halves, with 0, divided by the largest."""
    offset = (1 - 1 / 30 + 1 - 1 / 32) / 2
    positive = norm.ppf(np.linspace(offset, 0.5, 9)[:-1])
    negative = -norm.ppf(np.linspace(offset, 0.5, 8)[:-1])
    numbers = np.sort(np.concatenate([positive, [0.0], negative]))
    return numbers / numbers.max()


def ldl_diagonal(hessian: Array) -> Array:
    """`D` of `H = U D U^T` with `U` upper triangular and 1 on its diagonal."""
    factor = np.linalg.cholesky(hessian[::-1, ::-1])
    return np.square(np.diag(factor)[::-1])
