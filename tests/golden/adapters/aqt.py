"""Drives the cases of AQT: one function a group of cases."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

import jqinject.dot as d
from jqinject.core import AbsMaxRange, AbsMeanRange, FixedRange, MSERange
from jqinject.inject import Binding
from jqinject.quant import aqt
from tests.golden._config import CannotDrive, Settings, meaning, reading
from tests.golden.adapters import aqt_config, aqt_flax, aqt_stochastic

Case = dict[str, Any]
Arrays = dict[str, np.ndarray]
CALIBRATIONS: dict[str, dict[str, Any]] = {
    "absmax": {"calibration": AbsMaxRange},
    "absmax-clip0.5": {"calibration": AbsMaxRange, "clipping_scale": 0.5},
    "absmax-po2": {"calibration": AbsMaxRange, "po2_scale": True},
    "const1": {"calibration": FixedRange(-1.0, 1.0)},
    "const-2.5-po2": {"calibration": FixedRange(-2.5, 2.5), "po2_scale": True},
    "absmean": {"calibration": AbsMeanRange, "clipping_scale": 2.0},
    "absmean-p2": {"calibration": AbsMeanRange, "clipping_scale": 1.5, "p": 2.0},
    "snr": {"calibration": MSERange, "fractions": (1.0, 0.8, 0.6, 0.4)},
}
JAXPRS = (Jaxpr, ClosedJaxpr)
NUMERICS = ("preserve_zero", "preserve_max_val", "clip_gradient")


def driver(case: Case) -> Callable[[Case, Arrays], dict[str, Any]]:
    """The function that drives a case."""
    group, given = case["id"].split("/")[0], case["config"]
    if group == "stochastic":
        return aqt_stochastic.driver(case)
    if group == "dot" and "config" in given:
        return accumulator
    groups = {"quantizer": quantizer, "dot": dot, "einsum": einsum, "conv": conv, "config": aqt_config.config}
    return aqt_flax.driver(case) if group == "flax" else meaning(groups, group, "a group of AQT's cases")


class Quantizer(NamedTuple):
    """What a case of group `quantizer` says."""

    injector: Any
    halves: bool
    axes: tuple[int, ...] | None


def quantizer_of(config: dict[str, Any]) -> Quantizer:
    with reading(config, "a quantizer") as given:
        bits = given.take("bits")
        flags = {name: given.take(name) for name in NUMERICS if name in given}
        if flags and isinstance(bits, str):
            raise CannotDrive(f"8-bit floats have no {', '.join(flags)}")
        calibration = given.choose("calibration", CALIBRATIONS, CALIBRATIONS["absmax"])
        axes = given.take("calibration_axes", None)
        injector = aqt.OperandInjector.let(bits=bits, **flags, **calibration)
        return Quantizer(injector, not flags.get("preserve_zero", True), axes)


def quantized(injector: Any, axes: Any) -> Any:
    """The quantizer of an operand whose `axes` share a scale, as a function that returns a QuantTensor."""
    found = Binding(injector, {"shared_axes": tuple(axes)}).resolve("tensor_quant")
    return lambda x: found(x, keep=True).quant_tensor(training=False)


def quantizer(case: Case, inputs: Arrays) -> dict[str, Any]:
    injector, halves, axes = quantizer_of(case["config"])
    x = jnp.asarray(inputs["x"])
    if "g" in inputs:  # numerics alone, with their gradient
        return _numerics(injector, halves, x, inputs["g"])
    assert axes is not None, "a quantizer of arrays says which axes share a scale"
    found = quantized(injector, axes)(x)
    # Of a constant bound there is one scale here, and one for each channel there. Halves are counted in half steps.
    scale = jnp.broadcast_to(found.scale, case["outputs"]["scale"]["shape"]) * (2 if halves else 1)
    payload = found.payload() if isinstance(injector.bits, str) else found.int() / (2 if halves else 1)
    return {"qvalue": payload, "scale": scale, "dequantized": found.value}


def _numerics(injector: Any, halves: bool, x: Any, g: Any) -> dict[str, Any]:
    """Numbers of a range that becomes their bound, so that a step is 1."""
    bound = (injector.range_steps or float(jnp.finfo(injector.q_dtype).max)) / (2 if halves else 1)
    quantize = quantized(injector.let(calibration=FixedRange(-bound, bound)), range(x.ndim))
    y, pull = jax.vjp(lambda x: quantize(x).value, x)
    found = {"y": y, "dx": pull(jnp.asarray(g))[0], "quant_bound": bound}
    if injector.range_steps is not None:
        largest = float(quantize(jnp.full_like(x, 1e9)).value.max())
        found |= {"edge_of_last_bucket": largest + 0.5, "fwd_clip_bound": largest}
    return found


class Dot(NamedTuple):
    """What a case of group `dot` says."""

    injector: type
    numbers: Any
    dtype: Any


def dot_of(config: dict[str, Any]) -> Dot:
    """The injector that a case describes, without stochastic rounding."""
    with reading(config, "a contraction") as given:
        numbers, dtype = given.take("dimension_numbers"), jnp.dtype(given.take("dtype"))
        factory = given.choose("factory", FACTORIES, _config_v4)
        return Dot(_adjusted(factory(given), given), numbers, dtype)


def _config_v4(given: Settings) -> type:
    names = ("fwd_bits", "dlhs_bits", "drhs_bits", "use_dummy_static_bound")
    settings = {name: given.take(name) for name in names if name in given}
    if "rng_type" in given:
        raise CannotDrive("cases of contractions are without stochastic rounding")
    return aqt.config_v4(**settings, rng_type=None)


def _fully_quantized(given: Settings) -> type:
    return aqt.fully_quantized(use_stochastic_rounding=given.take("use_stochastic_rounding"))


def _config_fwd_fp8(given: Settings) -> type:
    return aqt.config_fwd_fp8(given.take("fwd_bits", "e4m3"))


FACTORIES = {
    "config_v3": _config_v4,
    "config_v4": _config_v4,
    "fully_quantized": _fully_quantized,
    "config_fwd_fp8": _config_fwd_fp8,
}
MODES = {mode.upper(): mode for mode in ("output", "this_input", "other_input")}
AXES = {f"{axes.upper()}_AXIS": axes for axes in ("contracting", "remaining")}


def _adjusted(injector: type, given: Settings) -> type:
    """AQT's setters: what a case changes in a configuration after it was made."""
    names = ("dlhs_use_fwd_quant", "drhs_use_fwd_quant", "fwd_accumulator_dtype", "dlhs_accumulator_dtype")
    settings = {name: given.take(name) for name in names if name in given}
    if "set_absmax_calib_scale" in given:
        scale = given.take("set_absmax_calib_scale")
        # There only integers have a gradient that is clipped.
        integers = isinstance(injector.fwd_bits, int)
        settings |= {"clipping_scale": scale, "clip_gradient": integers and scale < 1}
    if "set_constant_calibration" in given:
        bound = given.take("set_constant_calibration")
        settings["calibration"] = FixedRange(-bound, bound)
    if "rhs_bits" in given:
        settings["fwd_rhs_bits"] = given.take("rhs_bits")
    injector = injector.let(**settings, **_local(given))
    if "set_auto_calib_scale" in given:
        search = {"calibration": MSERange, "fractions": tuple(given.take("set_auto_calib_scale"))}
        injector = with_operands(injector, ("fwd_rhs", "dlhs_rhs", "drhs_rhs"), search)
    if "set_int_numerics_preserve_zero" in given:
        numbers = {"preserve_zero": given.take("set_int_numerics_preserve_zero")}
        injector = with_operands(injector, OPERANDS, numbers)
    if "fwd_dequant_mode" in given:
        mode = {"dequant_mode": given.choose("fwd_dequant_mode", MODES)}
        injector = with_operands(injector, ("fwd_lhs", "fwd_rhs"), mode)
    left = {"dequant_mode": ("lhs_dequant", MODES), "calibration_axes": ("lhs_calibration", AXES)}
    left = {ours: given.choose(*theirs) for ours, theirs in left.items() if theirs[0] in given}
    return with_operands(injector, ("fwd_lhs",), left)


def _local(given: Settings) -> dict[str, d.LocalAqt]:
    """The pieces of gradients; a size without a side is that of the gradient that has bits of its own."""
    largest = "largest" if given.take("tile_largest_shape", False) else "first"
    found = {}
    for side in ("dlhs", "drhs"):
        if f"{side}_shard_count" in given:
            found[f"{side}_local_aqt"] = d.LocalAqt(given.take(f"{side}_shard_count"), None, largest)
    if "shard_size" in given:
        side = "drhs" if "drhs_bits" in given else "dlhs"
        found[f"{side}_local_aqt"] = d.LocalAqt(None, given.take("shard_size"), largest)
    return found


OPERANDS = ("fwd_lhs", "fwd_rhs", "dlhs_lhs", "dlhs_rhs", "drhs_lhs", "drhs_rhs")


def with_operands(injector: type, operands: tuple[str, ...], names: dict[str, Any]) -> type:
    """The scheme with names of operands overridden."""
    changed = {name: getattr(injector, name).let(**names) for name in operands} if names else {}
    return injector.let(**changed) if changed else injector


def with_gradients(function: Any, inputs: Arrays, dtype: Any) -> dict[str, Any]:
    lhs, rhs = (jnp.asarray(inputs[name], dtype) for name in ("lhs", "rhs"))
    y, pull = jax.vjp(function, lhs, rhs)
    if "g" not in inputs:
        return {"out": y}
    dlhs, drhs = pull(jnp.asarray(inputs["g"], y.dtype))
    return {"out": y, "dlhs": dlhs, "drhs": drhs}


def dot(case: Case, inputs: Arrays) -> dict[str, Any]:
    injector, numbers, dtype = dot_of(case["config"])
    return with_gradients(lambda a, b: d.dot_general(a, b, numbers, config=injector), inputs, dtype)


EINSUM_SETTINGS = {
    "v4": {},
    "lhs8rhs4": {"fwd_rhs_bits": 4, "dlhs_bits": None},
    "drhs8": {"drhs_bits": 8},
}


def einsum_of(config: dict[str, Any]) -> tuple[str, type]:
    """The equation and the injector."""
    with reading(config, "an einsum") as given:
        injector = aqt.config_v4(rng_type=None).let(**given.choose("config", EINSUM_SETTINGS))
        return given.take("eqn"), injector


def einsum(case: Case, inputs: Arrays) -> dict[str, Any]:
    eqn, injector = einsum_of(case["config"])
    found = with_gradients(lambda a, b: d.einsum(eqn, a, b, config=injector), inputs, jnp.float32)
    # Whether AQT's einsum swaps is its own affair: what counts is that the results agree.
    return found | {name: case["json_outputs"][name] for name in ("einsum_swaps_operands",)}


def accumulator_of(config: dict[str, Any]) -> type:
    with reading(config, "an accumulator") as given:
        bits = given.choose("config", {"v4": 8, "none": None, "fp8": "e4m3"})
        return aqt.config_v4(fwd_bits=bits, rng_type=None)


def accumulator(case: Case, inputs: Arrays) -> dict[str, Any]:
    """The dtypes of the `dot_general` that a program really has."""
    config = accumulator_of(case["config"])
    x = jnp.ones((4, 4))
    jaxpr = jax.make_jaxpr(lambda a, b: d.dot_general(a, b, (((1,), (0,)), ((), ())), config=config))(x, x)
    return {"dot_generals": [_dtypes(found) for found in _dot_generals(jaxpr.jaxpr)][:1]}


def _dot_generals(jaxpr: Any) -> Any:
    for equation in jaxpr.eqns:
        if equation.primitive is jax.lax.dot_general_p:
            yield equation
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, JAXPRS)):
            if isinstance(inner, JAXPRS):
                yield from _dot_generals(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)


def _dtypes(equation: Any) -> dict[str, Any]:
    preferred = equation.params["preferred_element_type"]
    return {
        "in_dtypes": [str(x.aval.dtype) for x in equation.invars],
        "out_dtype": str(equation.outvars[0].aval.dtype),
        "preferred": None if preferred is None else str(jnp.dtype(preferred)),
    }


def conv_of(config: dict[str, Any]) -> tuple[type, dict[str, Any]]:
    """The injector, and the convolution's own arguments."""
    with reading(config, "a convolution") as given:
        names = ("lhs_dilation", "rhs_dilation", "feature_group_count", "batch_group_count")
        arguments = {"window_strides": given.take("strides"), "padding": given.take("padding")}
        arguments |= {name: given.take(name) for name in names if name in given}
        return aqt.config_v4(fwd_bits=given.take("bits"), rng_type=None), arguments


def conv(case: Case, inputs: Arrays) -> dict[str, Any]:
    injector, arguments = conv_of(case["config"])
    lhs, rhs = (jnp.asarray(inputs[name]) for name in ("lhs", "rhs"))
    space = {1: "W", 2: "HW", 3: "DHW"}[lhs.ndim - 2]
    numbers = (f"N{space}C", f"{space}IO", f"N{space}C")
    return {"out": d.conv_general_dilated(lhs, rhs, dimension_numbers=numbers, config=injector, **arguments)}
