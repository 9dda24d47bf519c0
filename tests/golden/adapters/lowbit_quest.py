"""Drives QuEST's quantizers and Quartet's MXFP4 with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import ScaledRestrictValue, TensorClamp, TensorClampSte
from jqinject.core.scaling.rule import FloatScaling
from jqinject.core.statistics.extremes import AbsMax
from jqinject.core.transforms import Hadamard
from jqinject.inject import ExtendedInjector
from jqinject.nn import QuantIdentity
from jqinject.ops import TableGrid, normal_table
from jqinject.quant import MXFloat4e2m1QuestAct, QuestActPerRowFloat
from jqinject.quant.codebook import NORMAL_CLIP
from tests.golden._config import Settings, reading

Arrays = dict[str, np.ndarray]
Drive = Callable[[Arrays], dict[str, Any]]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_LEVELS = tuple(sorted({sign * 2.92247856 / 6 * each for each in E2M1 for sign in (-1.0, 1.0)}))

# How the peer's class bounds the gradient.
PASSES: dict[str, dict[str, Any]] = {
    "STE": {"gradient_mask_impl": None, "tensor_clamp_impl": TensorClampSte},
    "Clip": {"gradient_mask_impl": None, "tensor_clamp_impl": TensorClamp},
    "Trust": {},
}
NORMAL = {"GaussianTrustQuantizer": "Trust", "FP4TrustQuantizer": "Trust", "FP4ClipQuantizer": "Clip"}
# What the class does with the row before and after it is quantized.
ROTATED: dict[str, tuple[str, bool, bool]] = {
    "STEQuantizer": ("STE", False, False),
    "ClipQuantizer": ("Clip", False, False),
    "TrustQuantizer": ("Trust", False, False),
    "HadamardClipQuantizer": ("Clip", True, True),
    "HadamardTrustQuantizer": ("Trust", True, True),
    "HalfHadamardTrustQuantizer": ("Trust", True, False),
}


def quest_of(config: dict[str, Any]) -> Drive:
    """What drives a case, from its config."""
    with reading(config, "a quantizer of QuEST") as given:
        if "quest" in given:
            return quartet_of(given)
        if given.take("cls") in NORMAL:
            return normal_of(given)
        return equidistant_of(given)


def rotates_back(config: dict[str, Any]) -> bool:
    """Whether the class rotates the quantized row back."""
    return ROTATED.get(config.get("cls", ""), ("", False, False))[2]


def equidistant_of(given: Settings) -> Drive:
    """Equidistant numbers, perhaps of the rotated row."""
    name = given.take("cls")
    passes, rotates, rotates_back = given.choose("cls", ROTATED)
    bits = given.choose("bits", {bits: bits for bits in range(1, 9)}, 4)
    size = given.take("hadamard_dim", 128)
    declared: dict[str, Any] = {**PASSES[passes], "about_mean": name.startswith("Half")}
    if given.choose("centered", {True: True, False: False}, True):
        declared["bit_width"] = bits
    else:
        declared |= whole_steps(bits, bounded=passes == "STE")
        if passes == "Trust":
            declared["trust"] = NORMAL_CLIP[bits] / (2**bits - 1)
    if passes == "Trust" and given.take("trust", None) is not None:
        declared["trust"] = given.take("trust")
    quantizer = QuestActPerRowFloat.let(**declared)
    turn = Hadamard(size, factor_dtype=jnp.bfloat16) if rotates else None

    def function(x: jax.Array) -> jax.Array:
        if turn is None:
            return quantized(quantizer, x)
        y = quantized(quantizer, turn(x))
        return turn.inverse(y) if rotates_back else y

    return lambda inputs: with_gradient(function, inputs)


def whole_steps(bits: int, bounded: bool) -> dict[str, Any]:
    """`centered=False`: multiples of a step; classes other than STE forget to clip below, at `-(n - 2)` ranges."""
    n = 2**bits
    low = 1 - n // 2 if bounded else max(-(n // 2) * (n - 2), n // 2 - 255)
    table = TableGrid(tuple(float(k) for k in range(low, n // 2 + 1)))
    return {"codebook": table, "normal_clip": NORMAL_CLIP[bits] * table.largest / (n / 2)}


def normal_of(given: Settings) -> Drive:
    """A table for normally distributed numbers, in root mean squares."""
    name = given.take("cls")
    table = normal_table(4, iterations=20) if name.startswith("Gaussian") else TableGrid(FP4_LEVELS)
    declared = {"codebook": table, "normal_clip": table.largest, **PASSES[given.choose("cls", NORMAL)]}
    if NORMAL[name] == "Trust" and given.take("trust", None) is not None:
        declared["trust"] = given.take("trust")
    quantizer = QuestActPerRowFloat.let(**declared)
    # The peer's FP4 lists 0 with both signs.
    levels = table.table if 0.0 not in table.values else np.insert(table.table, 7, 0.0)

    def run(inputs: Arrays) -> dict[str, Any]:
        return {**with_gradient(lambda x: quantized(quantizer, x), inputs), "levels": levels}

    return run


def quartet_of(given: Settings) -> Drive:
    """MXFP4 of rotated blocks, by their deviation or by their largest magnitude."""
    by_deviation = given.choose("quest", {True: True, False: False})
    scale, group, size = given.take("gaussian_scale"), given.take("group"), given.take("hadamard_dim")
    given.take("seed", None)
    declared = {"normal_scale": scale} if by_deviation else largest_to_six
    quantizer = MXFloat4e2m1QuestAct.let(group_size=group, **declared)
    turn = Hadamard(size)

    def run(inputs: Arrays) -> dict[str, Any]:
        made = with_gradient(
            lambda x: quantized(quantizer, x),
            {"x": np.asarray(turn(jnp.asarray(inputs["x"]))), "cotangent": np.ones_like(inputs["x"])},
        )
        return {"y": made["y"], "mask": made["grad_x"] != 0, "hadamard": turn(jnp.eye(size))}

    return run


largest_to_six = {
    "scaling_stats_impl": AbsMax,
    "float_scaling_impl": FloatScaling,
    "restrict_scale_threshold_impl": ScaledRestrictValue,
    "scale_factor": 4 / 3,
}


def quantized(quantizer: type[ExtendedInjector], x: jax.Array) -> jax.Array:
    return QuantIdentity(act_quant=quantizer)(x)


def with_gradient(function: Callable[[jax.Array], jax.Array], inputs: Arrays) -> dict[str, Any]:
    y, pull_back = jax.vjp(function, jnp.asarray(inputs["x"]))
    return {"y": y, "grad_x": pull_back(jnp.asarray(inputs["cotangent"]))[0]}
