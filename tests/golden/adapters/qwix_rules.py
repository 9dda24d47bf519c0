"""Drives Qwix's cases of whole models quantized by a rule: training, and weights quantized after it.

The largest magnitude of an operand lies on a tie, which goes either way by the last bit of the scale: a case is run
with the ties as they fall, and with those of each operand down or up, and has to agree with one of these in everything.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject import Rule, calibrate, freeze, quantize
from jqinject.core import SimpleMovingAverage
from jqinject.model import NothingFrozenWarning
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.quant import NF4WeightPerChannelFloat, NF4WeightPerGroupFloat, NF4WeightPerTensorFloat
from jqinject.quant.integer.calibrated_int import CalibratedAct, CalibratedGroupWeight, CalibratedWeight
from tests.golden._config import meaning, reading
from tests.golden.adapters.qwix import ABOVE, BELOW, FLOATS, Nudged, injector_of
from tests.golden.adapters.qwix_arrays import path_of, range_of
from tests.golden.adapters.qwix_models import NNX_MODELS, model_of

Case = dict[str, Any]
Arrays = dict[str, np.ndarray]
OPS = {"QuantConv": "conv_general_dilated0", "QuantEinsum": "einsum0", "QuantLinear": "dot_general0"}
OPS |= {"Linear": "dot_general0", "Einsum": "einsum0"}
TIES = [(1.0, 1.0), *itertools.product((BELOW, ABOVE), repeat=2)]
GRADIENT_TIES = [(1.0, 1.0), *itertools.product((BELOW, ABOVE), repeat=2)]


class QwixRule(NamedTuple):
    """What a rule of Qwix's says."""

    path: str
    act_qtype: str | None
    weight_qtype: str | None
    bwd_qtype: str | None
    act_method: str
    weight_method: str
    static: bool
    whole: bool
    tile: float | None
    bwd_tile: float | None


def rule_of(rule: Mapping[str, Any]) -> QwixRule:
    with reading(rule, "a rule") as given:
        found = QwixRule(
            path=path_of(given.take("module_path", ".*")),
            act_qtype=given.take("act_qtype", None),
            weight_qtype=given.take("weight_qtype", None),
            bwd_qtype=given.take("bwd_qtype", None),
            act_method=given.take("act_calibration_method", "absmax"),
            weight_method=given.take("weight_calibration_method", "absmax"),
            static=given.take("act_static_scale", False),
            whole=given.take("disable_channelwise_axes", False),
            tile=given.take("tile_size", None),
            bwd_tile=given.take("bwd_weight_grad_tile_size", None),
        )
    range_of(found.act_method)
    range_of(found.weight_method)
    for qtype in (found.act_qtype, found.weight_qtype, found.bwd_qtype):
        if qtype not in (None, "nf4"):
            format_of(qtype)
    return found


def contraction_of(rule: QwixRule, nudges: tuple[float, float], of_gradients: tuple[float, float]) -> type:
    """Qwix's rule as a configuration: the backward pass takes the float operands unless gradients are quantized."""
    given = {
        "lhs_qtype": rule.act_qtype,
        "rhs_qtype": rule.weight_qtype,
        "lhs_calibration_method": rule.act_method,
        "rhs_calibration_method": rule.weight_method,
        "dlhs_grad_qtype": rule.bwd_qtype,
        "drhs_grad_qtype": rule.bwd_qtype,
        "use_original_residuals": not rule.bwd_qtype,
        "tile_size": rule.tile,
        "drhs_tile_size": rule.bwd_tile if rule.bwd_qtype else None,
    }
    given |= {
        f"{side}_disable_channelwise_axes": rule.whole for side in ("lhs", "rhs", "dlhs_grad", "drhs_grad")
    }
    injector = injector_of(given)
    for name, factor in zip(
        ("fprop_lhs", "fprop_rhs", "dgrad_grad", "wgrad_grad"), (*nudges, *of_gradients), strict=True
    ):
        operand = getattr(injector, name)
        if factor != 1.0 and operand is not None:
            injector = injector.let(**{name: operand.let(calibration=Nudged(operand.calibration, factor))})
    operand = injector.fprop_lhs
    if not rule.static or operand is None:
        return injector
    averaged = {"averaging_impl": SimpleMovingAverage, "batch_axes": () if rule.whole else (0,)}
    return injector.let(fprop_lhs=operand.let(**averaged))


def quantizers_of(rule: QwixRule, nudges: tuple[float, float], rank: int, window: bool) -> dict[str, Any]:
    """Qwix's rule as quantizers of a layer.

    Args:
        rule: Qwix's.
        nudges: factors of the ranges of input and weight.
        rank: axes of the input.
        window: whether the layer is a convolution, whose input has a scale for each image.
    """
    found: dict[str, Any] = {}
    tile = None if window else rule.tile  # Qwix does not cut convolutions
    if rule.act_qtype:
        rows = (0,) if window else tuple(range(rank - 1))
        found["input_quant"] = CalibratedAct.let(
            calibration_impl=range_of(rule.act_method, nudges[0]),
            averaging_impl=SimpleMovingAverage if rule.static else None,
            channelwise_axes=() if rule.static or rule.whole else rows,
            scale_stop_grad=True,
            batch_axes=() if rule.whole else (0,),
            **format_of(rule.act_qtype),
        )
        if tile is not None:
            found["input_quant"] = found["input_quant"].let(
                channelwise_axes=(), shared_axes=(-1,), group_size=tile
            )
    if rule.weight_qtype == "nf4":
        found["weight_quant"] = NF4WeightPerTensorFloat if rule.whole else NF4WeightPerChannelFloat
        if tile is not None:
            found["weight_quant"] = NF4WeightPerGroupFloat.let(group_size=tile)
    elif rule.weight_qtype:
        settings = {
            "calibration_impl": range_of(rule.weight_method, nudges[1]),
            "scale_stop_grad": True,
            **format_of(rule.weight_qtype),
        }
        weight = CalibratedWeight.let(**settings)
        if rule.whole:
            weight = weight.let(channelwise_axes=())
        if tile is not None:
            weight = CalibratedGroupWeight.let(group_size=tile, **settings)
        found["weight_quant"] = weight
    return found


def format_of(qtype: str) -> dict[str, Any]:
    """The numbers of a type of Qwix's."""
    if qtype.startswith("int"):
        return {"bit_width": int(qtype.removeprefix("int"))}
    return {"q_dtype": meaning(FLOATS, qtype, "a type")}


class Training(NamedTuple):
    """What a case of training says."""

    model: str
    rule: QwixRule


def training_of(config: Mapping[str, Any]) -> Training:
    with reading(config, "training by a rule") as given:
        model = given.take("model")
        meaning(NNX_MODELS, model, "a model")
        return Training(model, rule_of(given.nested("rule")))


def training(case: Case, inputs: Arrays) -> Iterator[dict[str, Any]]:
    """Forward and gradients of every step, once for each way in which ties may fall.

    Qwix's contractions keep their float operands for the backward pass, as configurations of contractions do; its
    convolutions keep the quantized ones, as the quantizers of a layer do.
    """
    name, rule = training_of(case["config"])
    x = jnp.asarray(inputs["step0/x"])
    gradients = GRADIENT_TIES if rule.bwd_qtype else GRADIENT_TIES[:1]
    for of_gradients, nudges in itertools.product(gradients, TIES):
        plain = model_of(name, {}, parameters(inputs), x)
        rules = []
        for path, layer in nnx.iter_children(plain):
            if not re.fullmatch(rule.path, str(path)):
                continue
            if isinstance(layer, nnx.Conv):
                rules.append(Rule(str(path), **quantizers_of(rule, nudges, x.ndim, window=True)))
            else:
                rules.append(Rule(str(path), scheme=contraction_of(rule, nudges, of_gradients)))
        yield _steps(inputs, quantize(plain, rules) if rules else plain)


def parameters(inputs: Arrays) -> Arrays:
    return {k.removeprefix("params/"): v for k, v in inputs.items() if k.startswith("params/")}


class PostTraining(NamedTuple):
    """What a case of quantization after training says."""

    model: str
    rule: QwixRule


# A rule that is written as a name.
RULES = {"w8a8 static": {"act_qtype": "int8", "weight_qtype": "int8", "act_static_scale": True}}


def post_training_of(config: Mapping[str, Any]) -> PostTraining:
    with reading(config, "quantization after training") as given:
        rule = given.take("rule")
        rule = meaning(RULES, rule, "a rule") if isinstance(rule, str) else rule
        # Of the models in Linen what counts are the layers, which the NNX model has too.
        model = given.choose("model", {name: name for name in NNX_MODELS} | {"LMlp": "mlp"})
        return PostTraining(model, rule_of(rule))


def post_training(case: Case, inputs: Arrays) -> Iterator[dict[str, Any]]:
    """Frozen weights, static scales and outputs, once for each way in which ties may fall."""
    name, rule = post_training_of(case["config"])
    x = jnp.asarray(inputs["x"] if "x" in inputs else inputs["x0"])
    for nudges in TIES:
        plain = model_of(name, {}, parameters(inputs), x)
        quantizers = quantizers_of(rule, nudges, x.ndim, window=name == "conv")
        model = quantize(plain, Rule(rule.path, **quantizers), allow_idle=True)
        found = {"y_float": plain(x)}
        if rule.static:
            found |= _collected(inputs, model)
        yield found | _served(inputs, model, x)


def _collected(inputs: Arrays, model: Any) -> dict[str, Any]:
    """Statistics: given, of the first call, or of three training steps."""
    found = {}
    given = {n.split("/")[1]: n.rpartition("/")[0] for n in inputs if n.startswith("quant_stats/")}
    if not given:
        batches = [inputs[n] for n in ("x_init", "x0", "x1", "x2") if n in inputs]
        calibrate(model, [jnp.asarray(x) for x in batches], quantized=True, progress=False)
        found["y_qat_eval"] = _forward(model, jnp.asarray(batches[0]))
    for name in vars(model):
        layer = getattr(model, name)
        if not isinstance(layer, QuantWeightLayer):
            continue
        average = layer.input_quant.tensor_quant.scaling_impl.averaging_impl
        op = OPS[type(layer).__name__]
        if name in given:
            sums = {what: inputs.get(f"{given[name]}/sum_of_{what}") for what in ("absmax", "max", "min")}
            high, low = (
                (sums["absmax"], -sums["absmax"])
                if sums["absmax"] is not None
                else (sums["max"], sums["min"])
            )
            average.counter.set_value(jnp.asarray(inputs[given[name] + "/count"], jnp.float32))
            average.sum_of_max.set_value(jnp.asarray(high).reshape(()))
            average.sum_of_min.set_value(jnp.asarray(low).reshape(()))
        for kind in ("qparams", "state"):
            one = (1,) * layer.weight_ndim
            found[f"{kind}/{name}/{op}_lhs_scale/array"] = layer.input_quant.scale().reshape(one)
            found[f"{kind}/{name}/{op}_lhs_zero_point"] = layer.input_quant.zero_point().reshape(one)
    return found | _statistics(model)


def _statistics(model: Any) -> dict[str, Any]:
    """What static ranges have collected, named as Qwix does."""
    found = {}
    for name in vars(model):
        layer = getattr(model, name)
        average = _average_of(layer)
        if average is not None:
            prefix = f"quant_stats/{name}/{OPS[type(layer).__name__]}_lhs/"
            shape = (1,) * layer.kernel.ndim
            found[prefix + "count"] = average.counter[...].astype(jnp.int32)
            found |= {
                prefix + f"sum_of_{what}": average.sum_of_max[...].reshape(shape)
                for what in ("absmax", "max")
            }
            found[prefix + "sum_of_min"] = average.sum_of_min[...].reshape(shape)
    return found


def _average_of(layer: Any) -> SimpleMovingAverage | None:
    op = getattr(layer, {"Linear": "dot_general", "Einsum": "einsum_op"}.get(type(layer).__name__, ""), None)
    proxy = getattr(getattr(op, "fprop_lhs", None), "quant", None) or getattr(layer, "input_quant", None)
    return getattr(
        getattr(getattr(proxy, "tensor_quant", None), "scaling_impl", None), "averaging_impl", None
    )


def _served(inputs: Arrays, model: Any, x: jax.Array) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingFrozenWarning)  # a rule may take no layer
        freeze(model)
    for name in vars(model):
        layer = getattr(model, name)
        if isinstance(layer, nnx.Linear | nnx.Conv | nnx.Einsum) and not isinstance(layer, QuantWeightLayer):
            for kind in ("qparams", "state"):  # a layer that the rule leaves as it is
                found[f"{kind}/{name}/kernel"] = layer.kernel[...]
                found[f"{kind}/{name}/bias"] = None if layer.bias is None else layer.bias[...]
        if isinstance(layer, QuantWeightLayer) and layer.frozen is not None:
            frozen, groups = layer.frozen, layer.frozen.form.groups
            for kind in ("qparams", "state"):
                payload, scale = frozen.form.stored.payload(frozen.numbers["value"]), frozen.numbers["scale"]
                if groups is not None:
                    payload, scale = groups.join(payload), jnp.squeeze(scale, groups.dim)
                found[f"{kind}/{name}/kernel/array/qvalue"] = payload.astype(jnp.float32)
                found[f"{kind}/{name}/kernel/array/scale"] = scale
                found[f"{kind}/{name}/bias"] = None if layer.bias is None else layer.bias[...]
    y = _forward(model, x)
    return found | {"y": y, "y_ptq": y}


@nnx.jit
def _both(model: Any, x: jax.Array, g: jax.Array) -> Any:
    def loss(model: Any, x: jax.Array) -> Any:
        y = model(x)
        return jnp.sum(y * g), y

    return nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(model, x)


@nnx.jit
def _forward(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


def _steps(inputs: Arrays, model: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for step in range(sum(name.endswith("/x") for name in inputs)):
        prefix = f"step{step}/"
        x, g = jnp.asarray(inputs[prefix + "x"]), inputs.get(prefix + "g")
        if g is None:
            found[prefix + "y"] = _forward(model, x)
        else:
            (_, found[prefix + "y"]), (dparams, found[prefix + "dx"]) = _both(model, x, jnp.asarray(g))
            for path, leaf in nnx.to_flat_state(dparams):
                found[prefix + "dparams/" + "/".join(map(str, path))] = leaf.get_value()
        found |= {prefix + name: value for name, value in _statistics(model).items()}
    return found
