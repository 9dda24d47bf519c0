"""The structure of a configuration, in AQT's words."""

from typing import Any

import jqinject.dot as d
from jqinject.core import AbsMaxRange, FixedRange
from jqinject.quant import aqt
from tests.golden._config import CannotDrive, reading

PRESETS = {
    "v4-default": aqt.config_v4(),
    "v3-default": aqt.config_v4(),
    "v4-static": aqt.config_v4(use_dummy_static_bound=True),
    "v3-static": aqt.config_v4(use_dummy_static_bound=True),
    "v4-drhs8": aqt.config_v4(drhs_bits=8),
    "v4-4bit": aqt.config_v4(fwd_bits=4, dlhs_bits=4, drhs_bits=4),
    "v4-custom1": aqt.config_v4(rng_type="custom-1"),
    "v4-local": aqt.config_v4(drhs_bits=8, drhs_local_aqt=d.LocalAqt(2)),
    "v4-fp8": aqt.config_v4(fwd_bits="e4m3", dlhs_bits="e5m2", drhs_bits="e5m2"),
    "v4-none": aqt.config_v4(fwd_bits=None, dlhs_bits=None, drhs_bits=None),
    "fully-quantized": aqt.fully_quantized(),
    "fq-nosr": aqt.fully_quantized(use_stochastic_rounding=False),
    "fwd-fp8": aqt.config_fwd_fp8(),
    "fwd-fp8-e5m2": aqt.config_fwd_fp8("e5m2"),
}


def preset_of(config: dict[str, Any]) -> type:
    with reading(config, "a configuration") as given:
        return given.choose("factory", PRESETS)


def config(case: dict[str, Any], inputs: Any) -> dict[str, Any]:
    """The resolved structure of a preset, in AQT's words."""
    scheme = preset_of(case["config"])
    return {name: _contraction(scheme, name, case["json_outputs"][name]) for name in PRODUCTS}


PRODUCTS = {
    "fwd": ("fwd_lhs", "fwd_rhs", "tile_size", None),
    "dlhs": ("dlhs_lhs", "dlhs_rhs", "dgrad_tile_size", "dgrad_use_fwd_quant"),
    "drhs": ("drhs_lhs", "drhs_rhs", "wgrad_tile_size", "wgrad_use_fwd_quant"),
}


def _contraction(scheme: Any, name: str, asked: dict[str, Any]) -> dict[str, Any]:
    left, right, tiles, use_fwd_quant = PRODUCTS[name]
    operands = getattr(scheme, left), getattr(scheme, right)
    return {
        "accumulator": _accumulator(*operands),
        "lhs": _operand(operands[0]),
        "rhs": _operand(operands[1]),
        "lhs_tensor": _tensor(operands[0], False),
        "rhs_tensor": _tensor(operands[1], use_fwd_quant is not None and getattr(scheme, use_fwd_quant)),
        "local_aqt": _local(getattr(scheme, tiles), asked["local_aqt"] or {}),
    }


def _kind(operand: Any) -> str:
    if operand.bits is None:
        return "NoNumerics"
    return "IntSymmetric" if isinstance(operand.bits, int) else "Fp8Numerics"


def _accumulator(left: Any, right: Any) -> str | None:
    kinds = {_kind(left), _kind(right)}
    return {"IntSymmetric": "int32", "Fp8Numerics": "float32"}.get(*kinds) if len(kinds) == 1 else None


def _local(tiles: d.LocalAqt | None, asked: dict[str, Any]) -> dict[str, Any] | None:
    """The fields of AQT's `LocalAqt` that a case asks for, whose names it may shorten and whose values be text."""
    if tiles is None:
        return None
    fields = {
        "contraction_axis_shard_count": tiles.contraction_axis_shard_count,
        "contraction_axis_shard_size": tiles.contraction_axis_shard_size,
        "tile_largest_shape": tiles.contraction_axis == "largest",
    }
    values = {}
    for name, value in asked.items():
        matches = [field for field in fields if name in field]
        if len(matches) != 1:
            raise CannotDrive(f"local_aqt: {name!r} is no field of LocalAqt; these are {sorted(fields)}")
        field = fields[matches[0]]
        values[name] = str(field) if isinstance(value, str) else field
    return values


def _tensor(operand: Any, use_fwd_quant: bool) -> dict[str, Any]:
    return {
        "calibration_mode": f"{operand.calibration_axes}_axis".upper(),
        "dequant_mode": operand.dequant_mode.upper(),
        "use_fwd_quant": use_fwd_quant,
    }


NOISES = {None: None, "jax.uniform": "JaxUniform", "custom-1": "RandomCenteredUniform"}
CALIBRATIONS = {AbsMaxRange: "AbsMaxCalibration", FixedRange: "ConstantCalibration"}


def _operand(operand: Any) -> dict[str, Any]:
    words = {"calib_shared_axes": None, "scale_stop_grad": True, "kind": _kind(operand)}
    if operand.bits is None and isinstance(operand.calibration, AbsMaxRange):
        return words | {"calibration": None, "dtype": None, "noise_fn": NOISES[operand.rng_type]}
    words["calibration"] = CALIBRATIONS[type(operand.calibration)]
    if isinstance(operand.calibration, FixedRange):
        words["calibration_args"] = {"bias": "None", "bound": str(operand.calibration.high)}
    if operand.bits is None:
        return words | {"dtype": None, "noise_fn": NOISES[operand.rng_type]}
    if words["kind"] == "IntSymmetric":
        dtype = "int8" if operand.bits != 4 else "int4"  # of what is frozen
        names = ("bits", "clip_gradient", "preserve_max_val", "preserve_zero")
        words |= {name: getattr(operand, name) for name in names} | {"clip": True, "round": True}
        return words | {"dtype": dtype, "noise_fn": NOISES[operand.rng_type]}
    bits = {"e4m3": (4, 3), "e5m2": (5, 2)}[operand.bits]
    words |= dict(zip(("exponent_bits", "mantissa_bits"), bits, strict=True))
    noisy = operand.rng_type is not None
    # AQT's has one noise, which it names by the truth value alone.
    return words | {"dtype": str(operand.q_dtype), "noise_fn": None, "stochastic_rounding": noisy}
