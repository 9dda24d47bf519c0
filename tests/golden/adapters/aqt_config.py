"""The structure of a configuration, in AQT's words."""

from typing import Any

import jax.numpy as jnp

import jqinject.dot as d
from tests.golden._config import reading

PRESETS = {
    "v4-default": d.config_v4(),
    "v3-default": d.config_v4(),
    "v4-static": d.config_v4(use_dummy_static_bound=True),
    "v3-static": d.config_v4(use_dummy_static_bound=True),
    "v4-drhs8": d.config_v4(drhs_bits=8),
    "v4-4bit": d.config_v4(fwd_bits=4, dlhs_bits=4, drhs_bits=4),
    "v4-custom1": d.config_v4(rng_type="custom-1"),
    "v4-local": d.config_v4(drhs_bits=8, drhs_local_aqt=d.LocalAqt(2)),
    "v4-fp8": d.config_v4(fwd_bits="e4m3", dlhs_bits="e5m2", drhs_bits="e5m2"),
    "v4-none": d.config_v4(fwd_bits=None, dlhs_bits=None, drhs_bits=None),
    "fully-quantized": d.fully_quantized(),
    "fq-nosr": d.fully_quantized(use_stochastic_rounding=False),
    "fwd-fp8": d.config_fwd_fp8(),
    "fwd-fp8-e5m2": d.config_fwd_fp8("e5m2"),
}


def preset_of(config: dict[str, Any]) -> type:
    with reading(config, "a configuration") as given:
        return given.choose("factory", PRESETS)


def config(case: dict[str, Any], inputs: Any) -> dict[str, Any]:
    """The resolved structure of a preset, in AQT's words."""
    general = preset_of(case["config"]).dot_general
    return {name: _contraction(getattr(general, name)) for name in ("fwd", "dlhs", "drhs")}


def _contraction(found: d.Contraction) -> dict[str, Any]:
    left, right = found.lhs_quantizer, found.rhs_quantizer
    return {
        "accumulator": _accumulator(left.numerics, right.numerics),
        "lhs": _operand(left),
        "rhs": _operand(right),
        "lhs_tensor": _tensor(left),
        "rhs_tensor": _tensor(right),
        "local_aqt": _local(found.local_aqt),
    }


def _accumulator(left: Any, right: Any) -> str | None:
    kinds = {type(left), type(right)}
    return {d.IntNumerics: "int32", d.Float8Numerics: "float32"}.get(*kinds) if len(kinds) == 1 else None


def _local(found: d.LocalAqt | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "contraction_axis_shard_count": found.contraction_axis_shard_count,
        "contraction_axis_shard_size": found.contraction_axis_shard_size,
        "tile_largest_shape": found.contraction_axis == "largest",
    }


def _tensor(found: d.OperandQuantizer) -> dict[str, Any]:
    return {
        "calibration_mode": f"{found.calibration_axes}_axis".upper(),
        "dequant_mode": found.dequant_mode.upper(),
        "use_fwd_quant": found.use_fwd_quant,
    }


def _operand(found: d.OperandQuantizer) -> dict[str, Any]:
    numerics = found.numerics
    noise = None if found.noise is None else type(found.noise).__name__
    words = {
        "calib_shared_axes": None,
        "calibration": None if numerics is None else type(found.calibration).__name__,
        "dtype": None if numerics is None else str(jnp.dtype(numerics.dtype)),
        "noise_fn": noise,
        "scale_stop_grad": True,
    }
    if isinstance(found.calibration, d.ConstantCalibration):
        words["calibration"] = "ConstantCalibration"
        words["calibration_args"] = {"bias": "None", "bound": str(found.calibration.bound)}
    if isinstance(numerics, d.IntNumerics):
        names = ("bits", "clip", "clip_gradient", "preserve_max_val", "preserve_zero")
        return words | {n: getattr(numerics, n) for n in names} | {"kind": "IntSymmetric", "round": True}
    if isinstance(numerics, d.Float8Numerics):
        words["noise_fn"] = None  # AQT's has one noise, which it names by the truth value alone
        bits = {jnp.dtype(jnp.float8_e4m3fn): (4, 3), jnp.dtype(jnp.float8_e5m2): (5, 2)}[numerics.dtype]
        more = dict(zip(("exponent_bits", "mantissa_bits"), bits, strict=True))
        return words | more | {"kind": "Fp8Numerics", "stochastic_rounding": found.noise is not None}
    return words | {"kind": "NoNumerics"}
