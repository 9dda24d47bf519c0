"""Drives the components of `jqinject.ops` and `jqinject.core` for the golden area `core`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject import core, ops
from jqinject.core.variables import QuantParam

Arrays = dict[str, Any]
Case = dict[str, Any]

ROUNDING_OF_SUFFIX = {"ceil": core.CeilSte, "floor": core.FloorSte}


def run(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every output that the case names, computed by jqinject."""
    arrays = {name: jnp.asarray(array) for name, array in inputs.items()}
    outputs = _driver(case)(case["config"], arrays)
    return {name: _like(np.asarray(outputs[name]), spec["shape"]) for name, spec in case["outputs"].items()}


def _like(array: np.ndarray, shape: list[int]) -> np.ndarray:
    """A scalar in the shape (1,) that Brevitas gives a scale which was called without threshold."""
    return array.reshape(shape) if array.size == 1 and shape == [1] else array


def _driver(case: Case) -> Callable[[Arrays, Arrays], Arrays]:
    name = case["id"].split("/")[1]
    for prefix, driver in DRIVERS.items():
        if name.startswith(prefix):
            return driver
    raise KeyError(f"no driver for {case['id']}")


def _gradients(function: Callable[..., jax.Array], arrays: Arrays, names: list[str]) -> Arrays:
    """`y`, and the gradient of `sum(y * cotangent)` with respect to each named input."""
    values = [arrays[name] for name in names]
    y, pull = jax.vjp(function, *values)
    cotangent = jnp.broadcast_to(arrays["cotangent"], y.shape)
    return {"y": y, **{f"grad.{n}": g for n, g in zip(names, pull(cotangent), strict=True)}}


def _function(config: Arrays, arrays: Arrays) -> Arrays:
    function = getattr(ops, config["fn"].rsplit(".", 1)[1])
    extra = config.get("args", [])
    names = [name for name in ("x", "min_val", "max_val") if name in arrays]
    return _gradients(lambda *values: function(*values, *extra), arrays, names)


def _int_range(config: Arrays, arrays: Arrays) -> Arrays:
    signed, narrow, bits = config["signed"], config["narrow_range"], config["bit_width"]
    return {
        "max_int": ops.max_int(signed, narrow, bits),
        "min_int": ops.min_int(signed, narrow, bits),
        "int_scaling": core.IntScaling(narrow, signed)(bits),
        "pot_int_scaling": core.PowerOfTwoIntScaling(signed)(bits),
    }


def _restriction(name: str) -> Any:
    base, _, suffix = name.partition("_")
    rounding = ROUNDING_OF_SUFFIX.get(suffix)
    return getattr(core, base)(rounding()) if rounding else getattr(core, base)()


def _restrict(config: Arrays, arrays: Arrays) -> Arrays:
    restriction = _restriction(config["component"])
    init = restriction.restrict_init_tensor(arrays["x"])
    return {"init": init, **_gradients(restriction, {**arrays, "init": init}, ["init"])}


def _stat(config: Arrays, arrays: Arrays) -> Arrays:
    stat = getattr(core, config["component"])(**config["kwargs"], stats_reduce_dim=config["stats_reduce_dim"])
    return _gradients(stat, arrays, ["x"])


def _view(config: Arrays, arrays: Arrays) -> Arrays:
    return {"y": getattr(core, config["component"])(**config["kwargs"])(arrays["x"])}


def _scaling(text: str) -> core.ParameterScaling:
    found = re.fullmatch(r"ParameterScaling\((.+)\)", text)
    if found is None:
        raise KeyError(f"no scaling for {text}")
    return core.ParameterScaling(float(found[1]))


def _bit_width(args: Arrays) -> Any:
    if "bit_width_impl" not in args:
        return core.BitWidthConst(args["bit_width"])
    found = re.fullmatch(r"BitWidthParameter\((\d+)\)", args["bit_width_impl"])
    if found is None:
        raise KeyError(f"no bit width for {args['bit_width_impl']}")
    return core.BitWidthParameter(int(found[1]))


def _quantizer(config: Arrays) -> nnx.Module:
    args, kind = config["args"], config["component"].split("_")[0]
    scaling = _scaling(args["scaling"])
    if kind == "TernaryQuant":
        return core.TernaryQuant(scaling, args["threshold"])
    if kind != "RescalingIntQuant":
        return getattr(core, kind)(scaling)
    narrow, signed = args.get("narrow_range", True), args.get("signed", True)
    clamp = getattr(core, args.get("tensor_clamp_impl", "TensorClamp"))()
    return core.RescalingIntQuant(
        core.IntQuant(narrow, signed, tensor_clamp_impl=clamp),
        scaling,
        core.IntScaling(narrow, signed),
        core.ZeroZeroPoint(),
        _bit_width(args),
    )


def _tensor_quant(config: Arrays, arrays: Arrays) -> Arrays:
    graphdef, params = nnx.split(_quantizer(config))

    def loss(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        result = nnx.merge(graphdef, params)(x)
        return jnp.sum(result.value * arrays["cotangent"]), result

    (_, result), (grads, grad_x) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, arrays["x"])
    outputs = {**result._asdict(), "grad.x": grad_x}
    for path, grad in nnx.to_flat_state(grads):
        name = ".".join(str(part) for part in path).replace("bit_width_impl", "msb_clamp_bit_width_impl")
        outputs[f"grad.{name}"] = grad.get_value()
    return outputs


def _bit_width_parameter(config: Arrays, arrays: Arrays) -> Arrays:
    impl = core.BitWidthParameter(config["bit_width"], config["min_bit_width"])
    graphdef, _ = nnx.split(impl)

    def forward(offset: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, nnx.State({"bit_width_offset": QuantParam(offset)}))()

    y, grad = jax.value_and_grad(forward)(arrays["bit_width_offset"])
    return {"y": y, "grad.bit_width_offset": grad}


def _parameter_scaling(config: Arrays, arrays: Arrays) -> Arrays:
    scaling = core.ParameterScaling(
        config["scaling_init"],
        restrict_scaling_impl=_restriction(config["restrict"]),
        scaling_min_val=config["scaling_min_val"],
    )
    graphdef, params = nnx.split(scaling)
    y, grads = jax.value_and_grad(lambda params: nnx.merge(graphdef, params)(None))(params)
    return {"y": y, "param.value": scaling.value.get_value(), "grad.value": grads["value"].get_value()}


def _learned_round(config: Arrays, arrays: Arrays) -> Arrays:
    given = [] if config["temperature"] is None else [config["temperature"]]
    rounding = core.LearnedRoundSte(getattr(core, config["component"])(*given), arrays["value"])
    rounding.deterministic = config["mode"] == "eval"
    graphdef, _ = nnx.split(rounding)

    def forward(x: jax.Array, value: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, nnx.State({"value": QuantParam(value)}))(x)

    return _gradients(forward, arrays, ["x", "value"])


DRIVERS: dict[str, Callable[[Arrays, Arrays], Arrays]] = {
    "ste_": _function,
    "clamp_": _function,
    "intrange_": _int_range,
    "restrict_": _restrict,
    "stats_": _stat,
    "view_": _view,
    "tq_": _tensor_quant,
    "bitwidth_param_": _bit_width_parameter,
    "ParameterScaling_": _parameter_scaling,
    "learned_round_": _learned_round,
}
