"""Rows about tables, uniform quantizers, integers and clipping: one scale for all numbers."""

import math
from functools import cache

import jax.numpy as jnp
import numpy as np
from scipy.stats import norm

from jqinject import core, ops, quant
from tests.literature import _reference as theory
from tests.literature._reference import LAPLACE, NORMAL, Array
from tests.literature._rows import (
    ROWS,
    Row,
    activations,
    decibels,
    error,
    quantiles,
    weight_layer,
)

BITS = range(1, 9)
WIDE = range(2, 9)
MAX = "Max 1960, table I"
MAX_EVEN = "Max 1960, table II"
DIGITS = "printed digits"
TAIL = f"the tail beyond {ROWS} quantiles"


# Lloyd-Max quantizers


@cache
def rounded_by_table(bits: int) -> tuple[Array, Array]:
    """Places on -8 .. 8, and what `normal_table` rounds them to."""
    x = ((np.arange(2**17) + 0.5) / 2**13 - 8).astype(np.float32)
    return x.astype(np.float64), np.asarray(ops.normal_table(bits).round(jnp.asarray(x)), np.float64)


def table_error(bits: int) -> float:
    """The mean squared error of `normal_table`."""
    x, y = rounded_by_table(bits)
    density = norm.pdf(x)
    return float((density * (x - y) ** 2).sum() / density.sum())


def table_entropy(bits: int) -> float:
    """The entropy of the codes of `normal_table`."""
    x, _ = rounded_by_table(bits)
    codes = np.asarray(ops.normal_table(bits).encode(jnp.asarray(x, jnp.float32)))
    mass = np.bincount(codes, norm.pdf(x))
    mass /= mass.sum()
    return float(-(mass * np.log2(mass)).sum())


def off_centre(bits: int) -> float:
    """How far a number is from the mean of what is rounded to it, at most."""
    x, y = rounded_by_table(bits)
    _, cell = np.unique(y, return_inverse=True)
    density = norm.pdf(x)
    means = np.bincount(cell, density * x) / np.bincount(cell, density)
    return float(np.abs(means - np.unique(y)).max())


def scaled_by_rms(quantizer: type) -> Array:
    """What a quantizer of rows makes of normally distributed numbers in one row."""
    return activations(quantizer, quantiles(columns=ROWS))


@cache
def with_table(bits: int) -> float:
    """The mean squared error of `normal_table` in root mean squares of a row."""
    table = ops.normal_table(bits)
    quantizer = quant.QuestActPerRowFloat.let(codebook=table, normal_clip=table.largest)
    return error(quantiles(columns=ROWS), scaled_by_rms(quantizer))


def lloyd_max() -> list[Row]:
    """Errors, levels and entropies of `normal_table`."""
    printed = {1: ".3634", 2: ".1175", 3: ".03454", 4: ".009497"}
    near = {1: 5e-5, 2: 5e-5, 3: 1e-5, 4: 5e-6}
    rows = [
        Row(f"squared error, b = {b}", printed[b], lambda b=b: table_error(b), near[b], "its last digit", MAX)
        for b in printed
    ]
    for b in BITS:
        best = theory.table_error(theory.lloyd_max(2**b))
        rows.append(
            Row(
                f"squared error, b = {b}, all digits",
                best,
                lambda b=b: table_error(b),
                1e-4 * best,
                "integration step",
                "Max's conditions, solved by SciPy",
            )
        )
    for b, level in {2: "1.510", 3: "2.152", 4: "2.733"}.items():
        rows.append(
            Row(f"largest level, b = {b}", level, lambda b=b: ops.normal_table(b).largest, 6e-4, DIGITS, MAX)
        )
    for b, bits in {2: "1.911", 3: "2.825", 4: "3.765"}.items():
        rows.append(Row(f"entropy of codes, b = {b}", bits, lambda b=b: table_entropy(b), 6e-4, DIGITS, MAX))
    for b, db in {1: "4.40", 2: "9.30", 3: "14.62", 4: "20.22"}.items():
        rows.append(
            Row(
                f"SNR in dB, b = {b}, scaled by a row's RMS",
                db,
                lambda b=b: decibels(with_table(b)),
                0.02,
                DIGITS,
                "Jayant and Noll 1984, chapter 4",
            )
        )
    rows.append(
        Row(
            "distance of levels from their means, 8 bits",
            0.0,
            lambda: off_centre(8),
            1.3e-4,
            "integration step of 2^-13",
            "Max 1960: a level is the mean of its cell",
        )
    )
    limit = math.sqrt(3) * math.pi / 2
    rows.append(
        Row(
            "squared error times 4^b, 8 bits",
            limit,
            lambda: 4**8 * table_error(8),
            0.01 * limit,
            "256 levels are not many",
            "Panter and Dite 1951: sqrt(3) pi / 2",
        )
    )
    return rows


# Uniform quantizers


@cache
def quest(bits: int) -> Array:
    """What QuEST's quantizer makes of normally distributed numbers."""
    return scaled_by_rms(quant.QuestActPerRowFloat.let(bit_width=bits))


def uniform() -> list[Row]:
    """QuEST's quantizer, whose clipping values are those of the best uniform quantizers."""
    steps = {1: "1.596", 2: ".9957", 3: ".5860", 4: ".3352", 5: ".1881"}
    errors = {1: ".3634", 2: ".1188", 3: ".03744", 4: ".01154", 5: ".003495"}
    clips = {
        1: "0.797885",
        2: "1.493535",
        3: "2.051068",
        4: "2.513931",
        5: "2.916094",
        6: "3.276597",
        7: "3.601050",
        8: "3.884939",
    }
    rows = []
    for b, step in steps.items():
        rows.append(
            Row(
                f"step of `Quest...`, b = {b}",
                step,
                lambda b=b: float(np.diff(np.unique(quest(b))).min()),
                5e-4 if b == 1 else 5e-5,
                DIGITS,
                MAX_EVEN,
            )
        )
    for b, printed in errors.items():
        rows.append(
            Row(
                f"squared error of `Quest...`, b = {b}",
                printed,
                lambda b=b: error(quantiles(columns=ROWS), quest(b)),
                5e-3 * float(printed),
                TAIL,
                MAX_EVEN,
            )
        )
    for b in (6, 7, 8):
        _, best = theory.best_step(theory.half_steps(b))
        rows.append(
            Row(
                f"squared error of `Quest...`, b = {b}",
                best,
                lambda b=b: error(quantiles(columns=ROWS), quest(b)),
                2e-2 * best,
                f"{TAIL}; QuEST's clips",
                "minimum by SciPy over all steps",
            )
        )
    for b, clip in clips.items():
        rows.append(
            Row(
                f"clip of `Quest...` in RMS, b = {b}",
                clip,
                lambda b=b: float(quest(b).max()),
                1e-4,
                TAIL,
                "Panferov et al. 2025 (QuEST), its code's table",
            )
        )
    return rows


@cache
def searched(
    bits: int, narrow: bool = True, source: theory.Source = NORMAL, fine: bool = True
) -> tuple[float, float]:
    """The step that MSE scaling takes, and its error."""
    more = {"mse_search_method": "exact"} if fine else {}
    quantizer = quant.Int8WeightPerTensorFloatMSE.let(bit_width=bits, narrow_range=narrow, **more)
    w = quantiles(source)
    tensor = weight_layer(quantizer, w).quant_weight()
    return float(tensor.scale), error(w, tensor.value)


def integers() -> list[Row]:
    """MSE scaling of integers that have a 0."""
    rows, search = [], "minimum by SciPy over all steps"
    for b in WIDE:
        step, best = theory.best_step(theory.integers(b))
        near = 0.01 if b < 7 else 0.03
        rows.append(
            Row(
                f"squared error of MSE scaling, {b}-bit narrow integers",
                best,
                lambda b=b: searched(b)[1],
                near * best,
                TAIL,
                search,
            )
        )
        clip = step * (2 ** (b - 1) - 1)
        rows.append(
            Row(
                f"its range in sigma, {b}-bit narrow integers",
                clip,
                lambda b=b: searched(b)[0] * (2 ** (b - 1) - 1),
                0.02 * clip,
                "a flat minimum",
                search,
            )
        )
    for b in (2, 3, 4):
        _, best = theory.best_step(theory.integers(b, narrow=False))
        rows.append(
            Row(
                f"squared error of MSE scaling, {b}-bit integers",
                best,
                lambda b=b: searched(b, False)[1],
                0.01 * best,
                TAIL,
                search,
            )
        )
        _, best = theory.best_step(theory.integers(b), LAPLACE)
        rows.append(
            Row(
                f"squared error of MSE scaling, {b}-bit narrow integers, Laplace",
                best,
                lambda b=b: searched(b, True, LAPLACE)[1],
                0.01 * best,
                TAIL,
                search,
            )
        )
    _, best = theory.best_step(theory.integers(4))
    rows.append(
        Row(
            "squared error of MSE scaling, 4 bits, its default 20 candidates",
            best,
            lambda: searched(4, fine=False)[1],
            0.02 * best,
            "candidates are 5% of the largest number apart",
            search,
        )
    )
    return rows


# Clipping


def clipped_by(bits: int, source: theory.Source, clip: float) -> float:
    """The squared error with a clipping value in means of magnitudes (Laplace) or in root mean squares."""
    method = core.AbsMeanRange if source is LAPLACE else core.RMSRange
    quantizer = quant.Int8DynamicActPerTensorAbsMax.let(calibration_impl=method, factor=clip, bit_width=bits)
    x = quantiles(source)
    return error(x, activations(quantizer, x))


def percentile_range(percentile: float) -> float:
    """The end of a range at a percentile of magnitudes."""
    ends = core.AbsPercentileRange(percentile)(jnp.asarray(quantiles(), jnp.float32), (0, 1))
    return float(ends.high.reshape(()))


def clipping() -> list[Row]:
    """ACIQ's and OCTAV's clipping values beside the range that MSE scaling takes."""
    rows = []
    printed = {
        "Laplace": (LAPLACE, {2: "2.83", 3: "3.89", 4: "5.03", 5: "6.20", 6: "7.41", 7: "8.64", 8: "9.89"}),
        "normal": (NORMAL, {2: "1.71", 3: "2.15", 4: "2.55", 5: "2.93", 6: "3.28", 7: "3.61", 8: "3.92"}),
    }
    # The model has clipped numbers and grains of 2 alpha / 2^b; of few bits the best range is another one.
    models = {4: 0.06, 5: 0.04, 6: 0.03, 7: 0.02, 8: 0.02}
    for name, (source, clips) in printed.items():
        unit = "b" if source is LAPLACE else "sigma"
        for b, near in models.items():
            clip = float(clips[b])
            rows.append(
                Row(
                    f"range of MSE scaling in {unit}, {name}, b = {b}",
                    clips[b],
                    lambda b=b, source=source: searched(b, True, source)[0] * (2 ** (b - 1) - 1),
                    near * clip,
                    "ACIQ's model of the error",
                    "Banner et al. 2019 (ACIQ)",
                )
            )
        for b, near in {4: 0.15, 6: 0.04, 8: 0.03}.items():
            clip = float(clips[b])
            model = theory.aciq_error(clip, b, source)
            method = "`AbsMeanRange`" if source is LAPLACE else "`RMSRange`"
            rows.append(
                Row(
                    f"squared error at ACIQ's clip by {method}, {name}, b = {b}",
                    model,
                    lambda b=b, source=source, clip=clip: clipped_by(b, source, clip),
                    near * model,
                    "ACIQ has 2^b steps, integers 2^b - 1",
                    "Banner et al. 2019, model of the error",
                )
            )
    for b, near in {4: 0.05, 6: 0.02, 8: 0.02}.items():
        clip = theory.octav_clip(b)
        rows.append(
            Row(
                f"range of MSE scaling in sigma, b = {b}",
                clip,
                lambda b=b: searched(b)[0] * (2 ** (b - 1) - 1),
                near * clip,
                "OCTAV's model of the error",
                "Sakr et al. 2022 (OCTAV), fixed point of its iteration",
            )
        )
    for percentile, near in {99.9: 2.2e-3, 99.99: 0.02}.items():
        rows.append(
            Row(
                f"{percentile}th percentile of magnitudes, `AbsPercentileRange`",
                float(norm.ppf(0.5 + percentile / 200)),
                lambda percentile=percentile: percentile_range(percentile),
                near,
                f"distance of neighbours among {ROWS}",
                "quantile of a normal distribution",
            )
        )
    return rows


SECTIONS = {
    "Lloyd-Max quantizers of a normal distribution": lloyd_max,
    "Uniform quantizers of a normal distribution": uniform,
    "Integers with a 0": integers,
    "Clipping values": clipping,
}
