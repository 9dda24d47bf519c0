"""Rows about signs, the noise of rounding, and the numbers of formats."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from jqinject import core, ops, quant
from jqinject.optim import dynamic_table
from tests.literature import _reference as theory
from tests.literature._reference import Array
from tests.literature._rows import (
    Row,
    activations,
    decibels,
    error,
    quantiles,
    sample,
    weight_layer,
    weights,
)
from tests.literature._scalar import DIGITS, MAX, TAIL, searched

# Signs


class Xnor(quant.SignedBinaryWeightPerTensorConst):
    """Signs times the mean magnitude."""

    scaling_impl_type = "stats"
    scaling_stats_op = "ave"


class Ternary(quant.SignedTernaryWeightPerTensorConst):
    """-s, 0 and s, from half of s on."""

    quant_type = "ternary"
    threshold = 0.5
    scaling_const = 1.224


def scale_of(quantizer: type) -> float:
    """The scale of normally distributed weights."""
    return float(weight_layer(quantizer, quantiles()).quant_weight().scale)


def bitnet() -> float:
    """The squared error of BitNet's weights, by the product with an identity matrix that int8 holds exactly."""
    from jqinject.dot import dot_general

    w = jnp.asarray(quantiles(), jnp.float32)
    product = dot_general(127 * jnp.eye(w.shape[0]), w, (((1,), (0,)), ((), ())), config=quant.BitNet158)
    return error(w, np.asarray(product) / 127)


def signs() -> list[Row]:
    """One bit, and three numbers."""
    mean = math.sqrt(2 / math.pi)
    step = mean
    return [
        Row(
            "scale of signs",
            mean,
            lambda: scale_of(Xnor),
            1e-4,
            TAIL,
            "Rastegari et al. 2016 (XNOR-Net): E|w|",
        ),
        Row(
            "squared error of signs times E|w|",
            1 - 2 / math.pi,
            lambda: error(quantiles(), weights(Xnor, quantiles())),
            1e-4,
            TAIL,
            "1 - 2/pi",
        ),
        Row(
            "squared error of three numbers, step 1.224",
            ".1902",
            lambda: error(quantiles(), weights(Ternary, quantiles())),
            2e-4,
            DIGITS,
            f"{MAX}, N = 3",
        ),
        Row(
            "squared error of 2-bit narrow integers by MSE scaling",
            ".1902",
            lambda: searched(2)[1],
            2e-4,
            DIGITS,
            f"{MAX}, N = 3",
        ),
        Row(
            "threshold of three numbers over sigma",
            ".6120",
            lambda: searched(2)[0] / 2,
            6e-3,
            "a flat minimum",
            f"{MAX}, N = 3; about .6 in Li et al. 2016 (TWN)",
        ),
        Row(
            "squared error of BitNet b1.58's weights",
            theory.table_error((-step, 0, step)),
            bitnet,
            5e-4,
            TAIL,
            "Ma et al. 2024: steps of E|w|; integral",
        ),
    ]


# Noise of rounding


def uniform_error(bits: int) -> float:
    """The squared error of numbers at equal distances on -1 .. 1, by a codebook of 2^b numbers."""
    x = (np.arange(2**16) + 0.5) / 2**15 - 1
    grid = ops.half_integers(bits)
    steps = jnp.asarray(x * 2 ** (bits - 1), jnp.float32)
    return error(x, np.asarray(grid.round(steps)) / 2 ** (bits - 1))


def sine_error(bits: int) -> float:
    """Noise over signal of a sine that fills the range."""
    high = 2 ** (bits - 1) - 0.5
    x = high * np.sin(np.linspace(0, 2 * np.pi, 2**17, endpoint=False) + 1e-3)
    grid = ops.IntGrid(bits, narrow_range=True)
    return error(x, np.asarray(grid.round(jnp.asarray(x, jnp.float32)))) / (high**2 / 2)


@cache
def stochastic(fraction: float) -> Array:
    """A number that is rounded stochastically, many times, less what is below it."""
    rounds = core.StochasticRoundSte(rngs=nnx.Rngs(0))
    return np.asarray(rounds(jnp.full((2**18,), 3 + fraction, jnp.float32)), np.float64) - 3


@cache
def to_bfloat16(fraction: float) -> Array:
    """A number between two of bfloat16, rounded many times, less the lower one and in their distance."""
    x = jnp.full((2**18,), 1 + fraction / 128, jnp.float32)
    y = ops.to_bfloat16_stochastically(x, jax.random.key(0)).astype(jnp.float32)
    return (np.asarray(y, np.float64) - 1) * 128


def entropy_coded() -> tuple[float, float]:
    """Squared error and entropy of codes of normally distributed numbers with a step of 1/8."""
    x = sample(1024, seed=3)
    quantizer = quant.Int8DynamicActPerTensorAbsMax.let(
        calibration_impl=core.FixedRange, low=-127.5 / 8, high=127.5 / 8
    )
    y = activations(quantizer, x)
    _, counts = np.unique(np.rint(8 * y), return_counts=True)
    mass = counts / counts.sum()
    return error(x, y), float(-(mass * np.log2(mass)).sum())


def gap() -> float:
    """Bits of entropy-coded rounding above the rate-distortion function."""
    noise, bits = entropy_coded()
    return bits + 0.5 * math.log2(noise)


def noise() -> list[Row]:
    """Uniform noise, 6.02 dB a bit, stochastic rounding."""
    rows = [
        Row(
            f"squared error of uniform numbers in steps, b = {b}",
            1 / 12,
            lambda b=b: uniform_error(b) * 4 ** (b - 1),
            1e-5,
            "numbers at equal distances",
            "Bennett 1948: step^2 / 12",
        )
        for b in (4, 8)
    ]
    rows += [
        Row(
            "dB for one more bit, uniform numbers",
            "6.02",
            lambda: decibels(uniform_error(8)) - decibels(uniform_error(7)),
            5e-3,
            DIGITS,
            "Bennett 1948: 20 log10 2",
        ),
        Row(
            "SNR in dB of a sine that fills 12 bits",
            "74.00",
            lambda: decibels(sine_error(12)),
            0.05,
            "steps are not infinitely small",
            "6.02 b + 1.76",
        ),
        Row(
            "bits of entropy-coded rounding above the rate-distortion function",
            ".254",
            gap,
            3e-3,
            "a step of sigma / 8; sampling error",
            "Gish and Pierce 1968: log2(pi e / 6) / 2",
        ),
    ]
    for f in (0.1, 0.25, 0.5):
        deviation = math.sqrt(f * (1 - f) / 2**18)
        rows.append(
            Row(
                f"mean of stochastic rounding, fraction {f}",
                f,
                lambda f=f: float(stochastic(f).mean()),
                4 * deviation,
                "4 deviations of 2^18 draws",
                "f",
            )
        )
        rows.append(
            Row(
                f"variance of stochastic rounding, fraction {f}",
                f * (1 - f),
                lambda f=f: float(stochastic(f).var()),
                4 * deviation,
                "4 deviations of 2^18 draws",
                "f (1 - f)",
            )
        )
    deviation = math.sqrt(0.375 * 0.625 / 2**18)
    rows.append(
        Row(
            "mean of stochastic rounding to bfloat16, fraction 3/8",
            0.375,
            lambda: float(to_bfloat16(0.375).mean()),
            4 * deviation,
            "4 deviations of 2^18 draws",
            "f",
        )
    )
    return rows


# Formats


def grid_of(dtype: str) -> ops.FloatGrid:
    """A format's grid."""
    return ops.FloatGrid.of_dtype(np.dtype(getattr(ml_dtypes, dtype)))


def relative_error(dtype: str) -> float:
    """The largest relative error of numbers from 1 to 2."""
    x = np.linspace(1, 2, 2**12 + 1)
    y = np.asarray(grid_of(dtype).round(jnp.asarray(x, jnp.float32)), np.float64)
    return float(np.abs(y / x - 1).max())


def formats() -> list[Row]:
    """Largest and smallest numbers, relative errors, and the numbers of tables."""
    micikevicius, ocp = "Micikevicius et al. 2022, table 1", "OCP MX 1.0, element formats"
    table = {
        "float8_e4m3fn": ("448", 2.0**-9, micikevicius),
        "float8_e5m2": ("57344", 2.0**-16, micikevicius),
        "float8_e4m3fnuz": ("240", 2.0**-10, "Noune et al. 2022: bias 8"),
        "float6_e3m2fn": ("28", 2.0**-4, ocp),
        "float6_e2m3fn": ("7.5", 2.0**-3, ocp),
        "float4_e2m1fn": ("6", 0.5, ocp),
    }
    rows = []
    for dtype, (largest, least, source) in table.items():
        rows.append(
            Row(f"largest {dtype}", largest, lambda d=dtype: float(grid_of(d).largest), 0.0, "exact", source)
        )
        rows.append(
            Row(
                f"smallest {dtype}",
                least,
                lambda d=dtype: float(grid_of(d).smallest_subnormal),
                0.0,
                "exact",
                source,
            )
        )
    for dtype, mantissa in {"float8_e4m3fn": 3, "float8_e5m2": 2, "float4_e2m1fn": 1}.items():
        unit = 2.0 ** -(mantissa + 1)
        rows.append(
            Row(
                f"largest relative error of {dtype}",
                unit / (1 + unit),
                lambda d=dtype: relative_error(d),
                3e-4,
                "numbers 2^-12 apart",
                "u / (1 + u), u = 2^-(M + 1)",
            )
        )
    dynamic = "Dettmers et al. 2022, dynamic data type: the middle of "
    for name, value, place, source in (
        ("below 1", "0.99297", 254, "the last of 64 parts of .1 to 1"),
        ("above 0", "5.5e-7", 128, ".1 to 1, times 10^-6"),
    ):
        rows.append(
            Row(
                f"`dynamic_table(8, signed=True)`, nearest {name}",
                value,
                lambda place=place: dynamic_table(8, signed=True).values[place],
                5e-6 if place == 254 else 1e-12,
                DIGITS,
                dynamic + source,
            )
        )
    nf4 = {
        0: "-1.0",
        1: "-0.6961928009986877",
        7: "0.0",
        8: "0.07958029955625534",
        14: "0.7229568362236023",
        15: "1.0",
    }
    for place, value in nf4.items():
        rows.append(
            Row(
                f"NF4, number {place}",
                value,
                lambda place=place: ops.NF4.values[place],
                1e-7,
                "float32",
                "Dettmers et al. 2023 (QLoRA), appendix E",
            )
        )
    rows.append(
        Row(
            "NF4's distance from its quantiles",
            0.0,
            lambda: float(np.abs(theory.nf4_by_quantiles() - np.array(ops.NF4.values)).max()),
            1e-6,
            "float32 quantiles",
            "Dettmers et al. 2023: quantiles of both halves, by SciPy",
        )
    )
    return rows


SECTIONS = {
    "Numbers of formats": formats,
    "Signs, and three numbers": signs,
    "Noise of rounding": noise,
}
