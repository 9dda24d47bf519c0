"""Drives the components of `jqinject.ops` and `jqinject.core` for the golden area `core`."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject import core, ops
from jqinject.core.state import QuantParam
from tests.golden._config import CannotDrive, Settings, meaning, reading

Arrays = dict[str, Any]
Case = dict[str, Any]
Drive = Callable[[Arrays], Arrays]

ROUNDING_OF_SUFFIX = {"ceil": core.CeilSte, "floor": core.FloorSte}
FUNCTIONS = {
    f"brevitas.function.{function.__name__}": function
    for function in (
        ops.abs_binary_sign_grad,
        ops.binary_sign_ste,
        ops.ceil_ste,
        ops.dpu_round_ste,
        ops.floor_ste,
        ops.round_ste,
        ops.round_to_zero_ste,
        ops.scalar_clamp_min_ste,
        ops.scalar_clamp_ste,
        ops.tensor_clamp,
        ops.tensor_clamp_ste,
        ops.ternary_sign_ste,
    )
}
STATS = {
    stat.__name__: stat
    for stat in (
        core.AbsAve,
        core.AbsMax,
        core.AbsMaxAve,
        core.AbsMaxL2,
        core.AbsMinMax,
        core.AbsPercentile,
        core.L1Norm,
        core.L2Norm,
        core.MeanSigmaStd,
        core.NegativeMinOrZero,
        core.NegativePercentileOrZero,
        core.PercentileInterval,
        core.SignedAbsMax,
    )
}
VIEWS = {
    view.__name__: view
    for view in (
        core.OverBatchOverOutputChannelView,
        core.OverBatchOverTensorView,
        core.OverOutputChannelView,
        core.OverOutputFeaturesView,
        core.OverTensorView,
    )
}
RESTRICTIONS = {
    restriction.__name__: restriction
    for restriction in (
        core.FloatRestrictValue,
        core.IntRestrictValue,
        core.LogFloatRestrictValue,
        core.PowerOfTwoRestrictValue,
        core.SignedFloatRestrictValue,
    )
}
LEARNED_ROUNDS = {
    impl.__name__: impl
    for impl in (core.LearnedRoundHardSigmoid, core.LearnedRoundIdentity, core.LearnedRoundSigmoid)
}
CLAMPS = {clamp.__name__: clamp for clamp in (core.TensorClamp, core.TensorClampSte)}


def run(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every output that the case names, computed by jqinject."""
    arrays = {name: jnp.asarray(array) for name, array in inputs.items()}
    outputs = build(case, arrays)(arrays)
    return {name: _like(np.asarray(outputs[name]), spec["shape"]) for name, spec in case["outputs"].items()}


def build(case: Case, inputs: Arrays) -> Drive:
    """What computes the outputs of a case from its arrays."""
    with reading(case["config"], "a component") as config:
        return _build(config)


def _build(config: Settings) -> Drive:
    if "fn" in config:
        function, extra = config.choose("fn", FUNCTIONS), config.take("args", ())
        return lambda arrays: _function(function, extra, arrays)
    if "component" not in config:
        return _int_range(*(config.take(name) for name in ("signed", "narrow_range", "bit_width")))
    name = config.take("component")
    family = next((make for known, make in FAMILIES if name.partition("_")[0] in known), None)
    if family is None:
        raise CannotDrive(f"no component {name!r}")
    return family(name, config)


def _like(array: np.ndarray, shape: list[int]) -> np.ndarray:
    """A scalar in the shape (1,) that Brevitas gives a scale which was called without threshold."""
    return array.reshape(shape) if array.size == 1 and shape == [1] else array


def _gradients(function: Callable[..., jax.Array], arrays: Arrays, names: list[str]) -> Arrays:
    """`y`, and the gradient of `sum(y * cotangent)` with respect to each named input."""
    values = [arrays[name] for name in names]
    y, pull = jax.vjp(function, *values)
    cotangent = jnp.broadcast_to(arrays["cotangent"], y.shape)
    return {"y": y, **{f"grad.{n}": g for n, g in zip(names, pull(cotangent), strict=True)}}


def _function(function: Callable[..., Any], extra: Any, arrays: Arrays) -> Arrays:
    names = [name for name in ("x", "min_val", "max_val") if name in arrays]
    return _gradients(lambda *values: function(*values, *extra), arrays, names)


def _int_range(signed: bool, narrow: bool, bits: int) -> Drive:
    return lambda arrays: {
        "max_int": ops.max_int(signed, narrow, bits),
        "min_int": ops.min_int(signed, narrow, bits),
        "int_scaling": core.IntScaling(narrow, signed)(bits),
        "pot_int_scaling": core.PowerOfTwoIntScaling(signed)(bits),
    }


def _restriction(name: str) -> Any:
    base, _, suffix = name.partition("_")
    make = meaning(RESTRICTIONS, base, "a restriction")
    return make(meaning(ROUNDING_OF_SUFFIX, suffix, "a rounding")()) if suffix else make()


def _restrict(name: str, config: Settings) -> Drive:
    restriction = _restriction(name)

    def drive(arrays: Arrays) -> Arrays:
        init = restriction.restrict_init_tensor(arrays["x"])
        return {"init": init, **_gradients(restriction, {**arrays, "init": init}, ["init"])}

    return drive


def _stat(name: str, config: Settings) -> Drive:
    stat = meaning(STATS, name, "a statistic")(
        **config.nested("kwargs"), stats_reduce_dim=config.take("stats_reduce_dim")
    )
    return lambda arrays: _gradients(stat, arrays, ["x"])


def _view(name: str, config: Settings) -> Drive:
    view = meaning(VIEWS, name, "a view")(**config.nested("kwargs"))
    return lambda arrays: {"y": view(arrays["x"])}


def _number_in(text: str, name: str) -> float:
    """The number in `name(number)`."""
    found = re.fullmatch(rf"{name}\((.+)\)", text)
    if found is None:
        raise CannotDrive(f"{text!r} has no meaning; known is {name}(...)")
    return float(found[1])


def _quantizer(name: str, args: Settings) -> nnx.Module:
    kind = name.partition("_")[0]
    scaling = core.ParameterScaling(_number_in(args.take("scaling"), "ParameterScaling"))
    if kind == "TernaryQuant":
        return core.TernaryQuant(scaling, args.take("threshold"))
    if kind != "RescalingIntQuant":
        return {"BinaryQuant": core.BinaryQuant, "ClampedBinaryQuant": core.ClampedBinaryQuant}[kind](scaling)
    narrow, signed = args.take("narrow_range", True), args.take("signed", True)
    learned = args.take("bit_width_impl", None)
    return core.RescalingIntQuant(
        core.IntQuant(
            narrow, signed, tensor_clamp_impl=args.choose("tensor_clamp_impl", CLAMPS, core.TensorClamp)()
        ),
        scaling,
        core.IntScaling(narrow, signed),
        core.ZeroZeroPoint(),
        core.BitWidthParameter(int(_number_in(learned, "BitWidthParameter")))
        if learned
        else core.BitWidthConst(args.take("bit_width")),
    )


def _tensor_quant(name: str, config: Settings) -> Drive:
    with reading(config.nested("args"), f"the arguments of {name}") as args:
        graphdef, params = nnx.split(_quantizer(name, args))

    def drive(arrays: Arrays) -> Arrays:
        def loss(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
            result = nnx.merge(graphdef, params)(x)
            return jnp.sum(result.value * arrays["cotangent"]), result

        differentiate = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, result), (grads, grad_x) = differentiate(params, arrays["x"])
        outputs = {
            **dict(zip(("value", "scale", "zero_point", "bit_width"), result, strict=True)),
            "grad.x": grad_x,
        }
        for path, grad in nnx.to_flat_state(grads):
            inner = ".".join(str(part) for part in path)
            outputs[f"grad.{inner.replace('bit_width_impl', 'msb_clamp_bit_width_impl')}"] = grad.get_value()
        return outputs

    return drive


def _bit_width_parameter(name: str, config: Settings) -> Drive:
    impl = core.BitWidthParameter(config.take("bit_width"), config.take("min_bit_width"))
    graphdef, _ = nnx.split(impl)

    def forward(offset: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, nnx.State({"bit_width_offset": QuantParam(offset)}))()

    def drive(arrays: Arrays) -> Arrays:
        y, grad = jax.value_and_grad(forward)(arrays["bit_width_offset"])
        return {"y": y, "grad.bit_width_offset": grad}

    return drive


def _parameter_scaling(name: str, config: Settings) -> Drive:
    scaling = core.ParameterScaling(
        config.take("scaling_init"),
        restrict_scaling_impl=_restriction(config.take("restrict")),
        scaling_min_val=config.take("scaling_min_val"),
    )
    graphdef, params = nnx.split(scaling)

    def drive(arrays: Arrays) -> Arrays:
        y, grads = jax.value_and_grad(lambda params: nnx.merge(graphdef, params)(None))(params)
        return {"y": y, "param.value": scaling.value.get_value(), "grad.value": grads["value"].get_value()}

    return drive


def _learned_round(name: str, config: Settings) -> Drive:
    temperature = config.take("temperature")
    impl = LEARNED_ROUNDS[name](*([] if temperature is None else [temperature]))
    evaluating = config.choose("mode", {"train": False, "eval": True})

    def drive(arrays: Arrays) -> Arrays:
        rounding = core.LearnedRoundSte(impl, arrays["value"])
        rounding.deterministic = evaluating
        graphdef, _ = nnx.split(rounding)

        def forward(x: jax.Array, value: jax.Array) -> jax.Array:
            return nnx.merge(graphdef, nnx.State({"value": QuantParam(value)}))(x)

        return _gradients(forward, arrays, ["x", "value"])

    return drive


FAMILIES: tuple[tuple[Container[str], Callable[[str, Settings], Drive]], ...] = (
    (RESTRICTIONS, _restrict),
    (STATS, _stat),
    (VIEWS, _view),
    (("BinaryQuant", "ClampedBinaryQuant", "TernaryQuant", "RescalingIntQuant"), _tensor_quant),
    (("BitWidthParameter",), _bit_width_parameter),
    (("ParameterScaling",), _parameter_scaling),
    (LEARNED_ROUNDS, _learned_round),
)
