"""Drives the cases of AQT: one function a group of cases."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

import jqinject.dot as d
from tests.golden.adapters import aqt_config, aqt_flax, aqt_stochastic

Case = dict[str, Any]
Arrays = dict[str, np.ndarray]
CALIBRATIONS = {
    "absmax": d.AbsMaxCalibration(),
    "absmax-clip0.5": d.AbsMaxCalibration(clipping_scale=0.5),
    "absmax-po2": d.AbsMaxCalibration(po2_scale=True),
    "const1": d.ConstantCalibration(1.0),
    "absmean": d.AbsMeanCalibration(clipping_scale=2.0),
    "snr": d.SnrCalibration(),
}
JAXPRS = (Jaxpr, ClosedJaxpr)
NUMERICS = ("preserve_zero", "preserve_max_val", "clip_gradient")


def driver(case: Case) -> Callable[[Case, Arrays], dict[str, Any]]:
    """The function that drives a case."""
    group = case["id"].split("/")[0]
    if group == "flax":
        return aqt_flax.driver(case)
    if "n_keys" in case["config"] or case["id"].endswith("err-no-key"):
        return aqt_stochastic.driver(case)
    if case["id"].startswith("dot/accumulator"):
        return accumulator
    groups = {"quantizer": quantizer, "dot": dot, "einsum": einsum, "conv": conv}
    return {**groups, "config": aqt_config.config}[group]


def quantizer(case: Case, inputs: Arrays) -> dict[str, Any]:
    given = case["config"]
    numerics = d.IntNumerics(given["bits"], **{name: given[name] for name in NUMERICS if name in given})
    x = jnp.asarray(inputs["x"])
    if "g" in inputs:  # numerics alone, with their gradient
        passes = numerics.passes_gradient(x)
        dx = inputs["g"] if passes is None else jnp.where(passes, inputs["g"], 0)
        edges = {
            "edge_of_last_bucket": numerics.edge,
            "fwd_clip_bound": numerics.edge - 0.5,
            "quant_bound": numerics.bound,
        }
        return {"y": numerics.encode(x), "dx": dx, **edges}
    calibration = CALIBRATIONS[given.get("calibration", "absmax")]
    found = d.OperandQuantizer(numerics, calibration).quantize(x, given["calibration_axes"])
    # Of a constant bound there is one scale here, and one for each channel there.
    shape = case["outputs"]["scale"]["shape"]
    scale = jnp.broadcast_to(found.scale, shape)
    return {"qvalue": found.payload, "scale": scale, "dequantized": found.dequantize()}


def configured(case: Case) -> Any:
    """The injector that a case describes, without stochastic rounding."""
    given = case["config"]
    factory = given.get("factory", "config_v4").replace("-default", "")
    if factory == "config_fwd_fp8":
        return d.config_fwd_fp8()
    if "lhs_dequant" in given:
        modes = {
            "calibration_axes": given["lhs_calibration"].removesuffix("_AXIS").lower(),
            "dequant_mode": given["lhs_dequant"].lower(),
        }
        forward = d.ContractionInjector.let(
            lhs=d.OperandInjector.let(**modes), rhs=d.OperandInjector.let(bits=given["rhs_bits"])
        )
        return d.DotGeneralInjector.let(forward=forward)
    if factory == "fully_quantized":
        return d.fully_quantized(use_stochastic_rounding=False)
    names = ("fwd_bits", "dlhs_bits", "drhs_bits", "use_dummy_static_bound")
    keywords = {name: given[name] for name in names if name in given}
    more = {
        name: given[name]
        for name in ("dlhs_use_fwd_quant", "drhs_use_fwd_quant", "fwd_accumulator_dtype")
        if name in given
    }
    if "set_absmax_calib_scale" in given:
        # There only integers have a gradient that is clipped.
        integers = isinstance(given.get("fwd_bits", 8), int)
        more |= {"clipping_scale": given["set_absmax_calib_scale"], "clip_gradient": integers}
    for side in ("dlhs", "drhs"):
        if f"{side}_shard_count" in given:
            keywords[f"{side}_local_aqt"] = d.LocalAqt(given[f"{side}_shard_count"])
    return d.config_v4(**keywords, rng_type=None).let(**more)


def with_gradients(function: Any, inputs: Arrays, dtype: Any) -> dict[str, Any]:
    lhs, rhs = (jnp.asarray(inputs[name], dtype) for name in ("lhs", "rhs"))
    y, pull = jax.vjp(function, lhs, rhs)
    if "g" not in inputs:
        return {"out": y}
    dlhs, drhs = pull(jnp.asarray(inputs["g"], y.dtype))
    return {"out": y, "dlhs": dlhs, "drhs": drhs}


def dot(case: Case, inputs: Arrays) -> dict[str, Any]:
    given = case["config"]
    numbers = given["dimension_numbers"]
    general = configured(case).dot_general
    return with_gradients(lambda a, b: general(a, b, numbers), inputs, given["dtype"])


def einsum(case: Case, inputs: Arrays) -> dict[str, Any]:
    given = case["config"]
    settings = {
        "lhs8rhs4": {"fwd_rhs_bits": 4, "dlhs_bits": None},
        "drhs8": {"drhs_bits": 8},
    }.get(given["config"], {})
    injector = d.config_v4(rng_type=None).let(**settings)
    found = with_gradients(lambda a, b: d.einsum(given["eqn"], a, b, config=injector), inputs, jnp.float32)
    # Whether AQT's einsum swaps is its own affair: what counts is that the results agree.
    return found | case["json_outputs"]


def accumulator(case: Case, inputs: Arrays) -> dict[str, Any]:
    """The dtypes of the `dot_general` that a program really has."""
    bits = {"v4": 8, "none": None, "fp8": "e4m3"}[case["config"]["config"]]
    general = d.config_v4(fwd_bits=bits, rng_type=None).dot_general
    x = jnp.ones((4, 4))
    jaxpr = jax.make_jaxpr(lambda a, b: general(a, b, (((1,), (0,)), ((), ()))))(x, x)
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


def conv(case: Case, inputs: Arrays) -> dict[str, Any]:
    given = case["config"]
    lhs, rhs = (jnp.asarray(inputs[name]) for name in ("lhs", "rhs"))
    space = {1: "W", 2: "HW", 3: "DHW"}[lhs.ndim - 2]
    names = ("lhs_dilation", "rhs_dilation", "feature_group_count", "batch_group_count")
    y = d.conv_general_dilated(
        lhs,
        rhs,
        given["strides"],
        given["padding"],
        dimension_numbers=(f"N{space}C", f"{space}IO", f"N{space}C"),
        config=d.config_v4(fwd_bits=given["bits"], rng_type=None),
        **{name: given[name] for name in names if name in given},
    )
    return {"out": y}
