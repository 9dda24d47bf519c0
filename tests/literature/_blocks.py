"""Rows about blocks that share a scale: MX, NVFP4, NF4 and integers in groups, rotations, and products."""

import math
from functools import cache

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject import core, ops, quant
from jqinject.inject import this
from jqinject.nn import QuantLinear
from jqinject.quant.minifloat.blocks import Fp8e4m3Scales
from tests.literature import _reference as theory
from tests.literature._reference import Array
from tests.literature._rows import (
    NUMBERS,
    ROWS,
    Row,
    activations,
    decibels,
    effective_bits,
    error,
    quantiles,
    sample,
    weights,
)

SAMPLED = f"sampling error of {NUMBERS} numbers"
INTEGRAL = "integral over a block's largest magnitude"
CREST = "arXiv 2510.25602"
FOUR_OVER_SIX = core.FourOverSixScales("mse")


class NVInt4Act(quant.Int8DynamicActPerGroupFloat):
    """4-bit integers in groups of 16 with e4m3 scales, one float32 scale for these: NVFP4's scales."""

    bit_width = 4
    narrow_range = True
    group_size = 16
    scale_quant = Fp8e4m3Scales
    restrict_scale_threshold_impl = this.scale_quant.restrict_scale_impl


@cache
def noise(name: str, rule: str = "", bit_width: int = 0) -> float:
    """The squared error of a quantizer of activations on normally distributed numbers."""
    more = {"scale_rounding": rule} if rule else {}
    more |= {"bit_width": bit_width} if bit_width else {}
    quantizer = getattr(quant, name).let(**more) if more else getattr(quant, name)
    x = sample(64)
    return error(x, activations(quantizer, x))


def four_over_six() -> float:
    """The squared error of NVFP4 whose blocks take the better of two scales."""
    x = sample(64)
    return error(x, activations(quant.NVFP4TrainingAct.let(block_scale_impl=FOUR_OVER_SIX), x))


MX = {
    "MXFloat8e4m3Act": "float8_e4m3fn",
    "MXFloat8e5m2Act": "float8_e5m2",
    "MXFloat6e2m3Act": "float6_e2m3fn",
    "MXFloat6e3m2Act": "float6_e3m2fn",
    "MXFloat4e2m1Act": "float4_e2m1fn",
}


def microscaling() -> list[Row]:
    """MX and NVFP4 on normally distributed numbers."""
    rows = []
    for name, dtype in MX.items():
        levels = theory.minifloats(dtype)
        for rule, other in (("floor", ""), ("rceil", "rceil")):
            best = decibels(theory.block_error(levels, 32, theory.power_of_two(levels[-1], rule)))
            rows.append(
                Row(
                    f"SQNR in dB, `{name}`{', rounded up' if other else ''}",
                    best,
                    lambda name=name, other=other: decibels(noise(name, other)),
                    0.05,
                    SAMPLED,
                    INTEGRAL,
                )
            )
    rows.append(
        Row(
            "SQNR in dB, `MXInt8Act`, rounded up",
            "41.6",
            lambda: decibels(noise("MXInt8Act", "rceil")),
            0.05,
            "printed digits",
            "10 log10 (12 127^2 / E[scale^2]); " + INTEGRAL,
        )
    )
    for bits in (8, 6, 4):
        levels = theory.integers(bits, narrow=False)
        best = decibels(
            theory.block_error(levels, 32, lambda m, b=bits: 2.0 ** (math.floor(math.log2(m)) - b + 2))
        )
        rows.append(
            Row(
                f"SQNR in dB, `MXInt8Act` of {bits} bits",
                best,
                lambda b=bits: decibels(noise("MXInt8Act", "", b)),
                0.05,
                SAMPLED,
                INTEGRAL,
            )
        )
    levels = theory.minifloats("float4_e2m1fn")
    places = np.array(levels) * 2.92247856 / 6
    quartet = float(np.mean([theory.table_error(places * 2.0 ** -((k + 0.5) / 64)) for k in range(64)]))
    best = effective_bits(theory.block_error(levels, 16, lambda m: theory.to_e4m3(m / 6)))
    rows += [
        Row(
            "effective bits, `NVFP4Act`",
            best,
            lambda: effective_bits(noise("NVFP4Act")),
            0.005,
            f"{SAMPLED}; one level of scales",
            f"log2(1 / error) / 2; {INTEGRAL}",
        ),
        Row(
            "effective bits, NVFP4, reported figure",
            "3.38",
            lambda: effective_bits(noise("NVFP4TrainingAct")),
            0.02,
            "the integral has 3.394",
            "log2(1 / error) / 2 of N(0, 1); see above",
        ),
        Row(
            "effective bits, NVFP4 with `FourOverSixScales`, reported figure",
            "3.52",
            lambda: effective_bits(four_over_six()),
            0.01,
            "printed digits",
            "log2(1 / error) / 2 of N(0, 1); see above",
        ),
        Row(
            "clip of e2m1 in sigma",
            theory.best_step(levels)[0] * 6,
            lambda: quartet_clip(),
            1e-3,
            "search of steps",
            "Castro et al. 2025 (Quartet): 2.92247856; minimum by SciPy",
        ),
        Row(
            "squared error of e2m1 at this clip, float scales",
            theory.best_step(levels)[1],
            lambda: quest_float(levels),
            2e-3 * theory.best_step(levels)[1],
            "the tail of the quantiles",
            "minimum by SciPy",
        ),
        Row(
            "squared error of `MXFloat4e2m1QuestAct`, groups of 1024, scales of any place",
            quartet,
            quartet_error,
            0.02 * quartet,
            "deviations of groups vary",
            "Quartet's powers of two are rounded down; integral",
        ),
    ]
    return rows


def quartet_clip() -> float:
    """What the largest number of Quartet's e2m1 stands for, in deviations."""
    return float(quant.MXFloat4e2m1QuestAct.normal_scale) * float(ops.FloatGrid(2, 1, 1).largest)


def quest_float(levels: tuple[float, ...]) -> float:
    """The squared error of e2m1 at Quartet's clip in root mean squares of a row."""
    quantizer = quant.QuestActPerRowFloat.let(codebook=ops.TableGrid(levels), normal_clip=quartet_clip())
    x = quantiles(columns=ROWS)
    return error(x, activations(quantizer, x))


def quartet_error() -> float:
    """The squared error of Quartet's e2m1, of numbers at 16 places between two powers of two."""
    x = sample(1024)[:256]
    quantizer = quant.MXFloat4e2m1QuestAct.let(group_size=1024)
    places = 2.0 ** ((np.arange(16) + 0.5) / 16)
    return float(np.mean([error(x, activations(quantizer, x * place) / place) for place in places]))


# Integers against minifloats


def by_crest(quantizer: type, x: Array) -> Array:
    """Noise over signal of each row, which is a block."""
    return np.mean((activations(quantizer, x) - x) ** 2, 1) / np.mean(x**2, 1)


def measured_crossing(integer: type, minifloat: type, size: int, low: float, high: float) -> float:
    """The crest factor at which both formats have the same noise, of normally distributed blocks."""
    x = sample(size, seed=1)
    crest = np.abs(x).max(1) / np.sqrt(np.mean(x**2, 1))
    bins = np.linspace(low, high, 15)
    place = np.digitize(crest, bins)
    noises = [by_crest(quantizer, x) for quantizer in (integer, minifloat)]
    centres, gaps = [], []
    for number in range(1, len(bins)):
        own = place == number
        if own.sum() > 100:
            centres.append(crest[own].mean())
            gaps.append(math.log(noises[1][own].mean() / noises[0][own].mean()))
    roots = np.roots(np.polyfit(centres, gaps, 3))
    real = [root.real for root in roots if abs(root.imag) < 1e-9 and low < root.real < high]
    return float(real[0])


def outlier_blocks(crests: Array, size: int = 2**12) -> Array:
    """Blocks of normally distributed numbers, each with a single number so large that it has a crest factor."""
    x = np.clip(np.random.default_rng(2).standard_normal((crests.size, size)), -3.9, 3.9)
    energy = np.sum(x[:, 1:] ** 2, 1)
    # m^2 = k^2 (energy + m^2) / n
    x[:, 0] = np.sqrt(crests**2 * energy / (size - crests**2))
    return x


def with_rho(x: Array) -> Array:
    """Blocks whose largest number is 4/3, so that the scale of integers, made for 2, is 3/2 times too large."""
    return x * (4 / 3) / np.abs(x).max(1, keepdims=True)


def eight_bit_crossing() -> float:
    """The crest factor at which MXINT8, with rho = 3/2, and MXFP8 have the same noise."""
    crests = np.repeat(np.linspace(6.5, 9.5, 13), 16)
    x = outlier_blocks(crests)
    integers, minifloats = (
        getattr(quant, name).let(group_size=x.shape[1], scale_rounding="rceil")
        for name in ("MXInt8Act", "MXFloat8e4m3Act")
    )
    at_any_place = x * np.tile(2.0 ** (np.arange(16) / 16), 13)[:, None]
    pairs = ((integers, with_rho(x)), (minifloats, at_any_place))
    noises = [by_crest(quantizer, blocks).reshape(13, 16).mean(1) for quantizer, blocks in pairs]
    fit = np.polyfit(np.log(crests[::16]), np.log(noises[1] / noises[0]), 1)
    return float(np.exp(-fit[1] / fit[0]))


def integer_noise(bits: int, crest: float) -> float:
    """dB of an MX integer whose scale is 3/2 times too large, at a crest factor."""
    x = with_rho(outlier_blocks(np.full(64, crest)))
    return decibels(by_crest(quant.MXInt8Act.let(bit_width=bits, group_size=x.shape[1]), x).mean())


CROSSINGS = {(8, 4, 3, 448.0): "7.55", (6, 2, 3, 7.5): "1.96", (4, 2, 1, 6.0): "2.04"}


def crest_factors() -> list[Row]:
    """Where integers in blocks become better than minifloats."""
    model = "the paper's model has minifloats of small steps"
    rows = [
        Row(
            f"SQNR in dB of MX integers of {bits} bits, rho = 3/2, crest factor {crest:g}",
            theory.int_sqnr(bits, crest, 1.5),
            lambda b=bits, k=crest: integer_noise(b, k),
            0.15,
            "steps are not small",
            f"{CREST}: 4.78 + 6.02 b - 20 log10 (rho kappa)",
        )
        for bits, crest in ((8, 4.0), (8, 8.0), (6, 4.0))
    ]
    rows += [
        Row(
            "crest factor where MXFP8 (e4m3) passes MXINT8",
            "7.55",
            eight_bit_crossing,
            0.06 * 7.55,
            model,
            CREST,
        ),
        Row(
            "crest factor where MXFP6 (e2m3) passes MXINT6",
            "1.96",
            lambda: measured_crossing(quant.MXInt8Act.let(bit_width=6), quant.MXFloat6e2m3Act, 32, 1.6, 2.6),
            0.06 * 1.96,
            model,
            CREST,
        ),
        Row(
            "crest factor where MXFP4 passes MXINT4",
            "2.04",
            lambda: measured_crossing(quant.MXInt8Act.let(bit_width=4), quant.MXFloat4e2m1Act, 32, 1.6, 2.6),
            0.06 * 2.04,
            model,
            CREST,
        ),
        Row(
            "crest factor where NVFP4 passes NVINT4",
            "2.39",
            lambda: measured_crossing(NVInt4Act, quant.NVFP4Act, 16, 1.5, 3.0),
            0.06 * 2.39,
            model,
            CREST,
        ),
        Row(
            "SQNR in dB of MXFP8 (e4m3), rounded up",
            "31.5",
            lambda: decibels(noise("MXFloat8e4m3Act", "rceil")),
            0.05,
            "printed digits",
            f"{CREST}, of tensors; {INTEGRAL}",
        ),
    ]
    return rows


# Groups of weights


class SignedNF4(quant.NF4WeightPerGroupFloat):
    """NF4 whose scale is the number of the largest magnitude, with its sign."""

    scaling_stats_op = "signed_max"
    restrict_scaling_type = "signed_fp"


@cache
def group_noise(name: str, size: int, bits: int = 0) -> float:
    """The squared error of a quantizer of weights in groups."""
    w = sample(1024)
    more = {"bit_width": bits} if bits else {}
    return error(w, weights(getattr(quant, name).let(group_size=size, **more), w))


def groups() -> list[Row]:
    """NF4 and integers, scaled by a group's largest magnitude."""
    nf4 = theory.nf4_by_quantiles()
    rows = []
    for size in (32, 64, 128):
        best = theory.block_error(nf4, size, lambda m: m)
        rows.append(
            Row(
                f"squared error of NF4, groups of {size}",
                best,
                lambda n=size: group_noise("NF4WeightPerGroupFloat", n),
                5e-3 * best,
                SAMPLED,
                INTEGRAL,
            )
        )
    best = theory.block_error(nf4, 64, lambda m: m)
    rows.append(
        Row(
            "squared error of NF4, groups of 64, scales with a sign",
            best,
            lambda: error(sample(1024), weights(SignedNF4, sample(1024))),
            5e-3 * best,
            SAMPLED,
            f"the normalization of BOF4-S (arXiv 2505.06653); {INTEGRAL}",
        )
    )
    for bits, size in ((4, 32), (4, 128), (8, 128)):
        levels = theory.integers(bits)
        best = theory.block_error(levels, size, lambda m, top=levels[-1]: m / top)
        rows.append(
            Row(
                f"squared error of {bits}-bit integers, groups of {size}",
                best,
                lambda b=bits, n=size: group_noise("IntWeightSymmetricGroupQuant", n, b),
                5e-3 * best,
                SAMPLED,
                INTEGRAL,
            )
        )
    return rows


# Rotations and products


@cache
def turbo(bits: int) -> float:
    """The squared error of unit vectors: rotated at random, each number to the nearest of `normal_table`, and back."""
    size = 256
    rng = np.random.default_rng(4)
    turn = core.Orthogonal(size)
    turn.put(jnp.asarray(np.linalg.qr(rng.standard_normal((size, size)))[0], jnp.float32))
    v = rng.standard_normal((1024, size)) ** 3
    v /= np.linalg.norm(v, axis=1, keepdims=True)
    table = ops.normal_table(bits)
    quantizer = quant.QuestActPerRowFloat.let(codebook=table, normal_clip=table.largest)
    rotated = turn(jnp.asarray(v, jnp.float32))
    back = turn.inverse(jnp.asarray(activations(quantizer, rotated), jnp.float32))
    return error(v, np.asarray(back)) * size


def largest_after_hadamard(size: int) -> float:
    """The largest magnitude of a unit vector with a single number, rotated."""
    return float(jnp.abs(core.Hadamard(size)(jnp.eye(size))).max())


def largest_of_rotated() -> float:
    """The mean of the largest of 32 numbers after a rotation of outliers, in root mean squares."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((512, 1024)) ** 3
    signs = tuple(int(sign) for sign in rng.choice((-1, 1), 1024))
    y = np.asarray(core.Hadamard(1024, signs=signs)(jnp.asarray(x, jnp.float32)))
    y = y / np.sqrt(np.mean(y**2, 1, keepdims=True))
    return float(np.abs(y.reshape(-1, 32)).max(1).mean())


def product_noise(bits: int) -> float:
    """Noise over signal of a layer's output, both operands quantized."""
    x, w = sample(1024, seed=6), sample(1024, seed=7).T
    layer = QuantLinear(
        1024,
        w.shape[1],
        weight_quant=quant.Int8WeightPerChannelFloat.let(bit_width=bits),
        use_bias=False,
        input_quant=quant.Int8DynamicActPerRowFloat.let(bit_width=bits, narrow_range=True),
        rngs=nnx.Rngs(0),
    )
    layer.kernel.set_value(jnp.asarray(w, jnp.float32))
    layer.eval()
    y = x.astype(np.float32).astype(np.float64) @ w.astype(np.float32).astype(np.float64)
    return error(y, np.asarray(layer(jnp.asarray(x, jnp.float32)))) / float(np.mean(y**2))


def rotations() -> list[Row]:
    """TurboQuant's parts, incoherence, and the noise of a product."""
    near = {1: 5e-3, 2: 5e-3, 3: 5e-3, 4: 1e-3}
    rows = [
        Row(
            f"distortion of rotated unit vectors, {b} bits",
            printed,
            lambda b=b: turbo(b),
            near[b],
            "printed digits",
            "Zandieh et al. 2025 (TurboQuant), theorem 1",
        )
        for b, printed in {1: ".36", 2: ".117", 3: ".03", 4: ".009"}.items()
    ]
    rows += [
        Row(
            f"largest magnitude of a unit vector after `Hadamard({n})`",
            1 / math.sqrt(n),
            lambda n=n: largest_after_hadamard(n),
            1e-6,
            "float32",
            "1 / sqrt(n)",
        )
        for n in (64, 48)
    ]
    best = theory.expected_largest(32)
    rows.append(
        Row(
            "largest of 32 rotated numbers in RMS",
            best,
            largest_of_rotated,
            0.02 * best,
            "sampling error of 2^19 numbers",
            "integral of 1 - (2 Phi(m) - 1)^32",
        )
    )
    for bits in (8, 4):
        levels = theory.integers(bits)
        one = theory.block_error(levels, 1024, lambda m, top=levels[-1]: m / top)
        both = 2 * one + one**2
        rows.append(
            Row(
                f"noise over signal of a product, {bits}-bit integers",
                both,
                lambda b=bits: product_noise(b),
                0.03 * both,
                "sampling error of 256 rows",
                f"sum of both operands' noise; {INTEGRAL}",
            )
        )
    return rows


SECTIONS = {
    "Microscaling formats": microscaling,
    "Integers against minifloats": crest_factors,
    "Groups of weights": groups,
    "Rotations and products": rotations,
}
