"""Drives Qwix's ODML cases: training steps with their statistics, and conversion with its markers.

The largest magnitude of a weight lies on a tie (127.5 steps), which goes either way by the last bit of the scale. The
manifest accepts both; here a case is run with the ties as they fall, with all of them down, and with all of them up,
and has to agree with one of the three in everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject import Rule
from jqinject.odml import Int8Act, Int8DynamicAct, Int8Weight, OdmlConversion, OdmlQat
from tests.golden._config import CannotDrive, reading
from tests.golden.adapters.qwix_arrays import path_of, range_of
from tests.golden.adapters.qwix_models import model_of
from tests.golden.adapters.qwix_rules import format_of

Case = dict[str, Any]
Arrays = dict[str, np.ndarray]


TIES = (1.0, 1 + 1e-6, 1 - 1e-6)


class Odml(NamedTuple):
    """What a case says.

    Attributes:
        model: its name.
        fields: of the model.
        provider: from a factor of the weights' ranges to what quantizes.
    """

    model: str
    fields: Mapping[str, Any]
    provider: Callable[[float], OdmlQat]


def odml_of(config: Mapping[str, Any]) -> Odml:
    with reading(config, "an ODML model") as given:
        rule, options = given.nested("rule"), given.nested("provider")
        model, fields = given.take("model"), given.nested("model_fields")
    rule_of(rule, 1.0)
    with reading(options, "a provider") as given:
        ranges = ("fixed_range_for_inputs", "fixed_range_for_outputs")
        found = {name: tuple(given.take(name)) for name in ranges if name in given}
        found["disable_per_channel_weights"] = given.take("disable_per_channel_weights", False)
    return Odml(model, fields, lambda nudge: OdmlQat(rule_of(rule, nudge), **found))


def rule_of(rule: Mapping[str, Any], nudge: float) -> Rule:
    """Qwix's rule; `nudge` is a factor of the weights' ranges."""
    with reading(rule, "a rule of ODML") as given:
        weight = act = None
        weight_method = range_of(given.take("weight_calibration_method", "absmax"), nudge)
        if given.take("weight_qtype", None) is not None:
            weight = Int8Weight.let(calibration_impl=weight_method, **format_of(given.take("weight_qtype")))
        act_method = range_of(given.take("act_calibration_method", "minmax"), 1.0)
        kind = Int8Act if given.take("act_static_scale", True) else Int8DynamicAct
        if given.take("act_qtype", None) is not None:
            act = kind.let(calibration_impl=act_method, **format_of(given.take("act_qtype")))
        names = given.take("op_names", None)
        return Rule(
            path_of(given.take("module_path", ".*")),
            op=None if names is None else tuple(names),
            weight_quant=weight,
            output_quant=act,
        )


def quantized(case: Case, inputs: Arrays, x: Any, nudge: float = 1.0) -> tuple[Any, Any]:
    """The float model and the quantized one."""
    odml = odml_of(case["config"])
    params = {k.removeprefix("params/"): v for k, v in inputs.items() if k.startswith("params/")}
    stats = {k.removeprefix("batch_stats/"): v for k, v in inputs.items() if k.startswith("batch_stats/")}
    model = model_of(odml.model, odml.fields, params | stats, x)
    return model, odml.provider(nudge).quantize(model, x)


def outputs(y: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves(y)
    return {f"y{i}": leaf for i, leaf in enumerate(leaves)} | ({"y": leaves[0]} if len(leaves) == 1 else {})


ENDS = {"count": "counter", "sum_of_min": "sum_of_min"}


def average_of(model: Any, name: str) -> Any:
    """The average of the site whose statistics Qwix calls `name`.

    A norm's are there those of the module that calls it. A tensor that two operations take is recorded under the first.
    """
    site = name.replace("/", ".")
    last = site.rpartition(".")[2]
    twins = [s for s in model.op_quant if s.endswith(f".{last}") and ("norm_op" in last or "lhs" in s)]
    places = [site] if site in model.op_quant else twins
    if not places:
        raise CannotDrive(f"no site has the statistics {name}; there are {sorted(model.op_quant)}")
    return model.op_quant[places[0]].tensor_quant.scaling_impl.averaging_impl


def statistics(model: Any, wanted: Any) -> dict[str, Any]:
    """The statistics that a case names."""
    found = {}
    for name in wanted:
        path, _, what = name.rpartition("/")
        average = average_of(model, path)
        variable = ENDS.get(what, "sum_of_max")
        value = getattr(average, variable).get_value()
        found[name] = value.astype(jnp.int32) if what == "count" else value
    return found


@nnx.jit
def compiled(model: Any, x: Any) -> Any:
    return model(x)


def steps(case: Case, inputs: Arrays, nudge: float = 1.0) -> dict[str, Any]:
    count = sum(name.endswith("/x") and name.startswith("step") for name in inputs)
    x = jnp.asarray(inputs["step0/x"])
    plain, model = quantized(case, inputs, x, nudge)
    found: dict[str, Any] = {}
    for step in range(count):
        prefix = f"step{step}/"
        x = jnp.asarray(inputs[prefix + "x"])
        before = nnx.state(nnx.clone(model))
        y = compiled(model, x)
        named = outputs(y)
        found |= {prefix + name: value for name, value in named.items()}
        wanted = {
            n.removeprefix(prefix + "quant_stats/"): spec
            for n, spec in case["outputs"].items()
            if n.startswith(prefix + "quant_stats/")
        }
        for name, value in statistics(model, wanted).items():
            found[f"{prefix}quant_stats/{name}"] = np.asarray(value).reshape(wanted[name]["shape"])
        if prefix + "dx" in case["outputs"]:
            nnx.update(model, before)
            g = [jnp.asarray(inputs[n]) for n in sorted(inputs) if n.startswith(prefix + "g")]

            def loss(model: Any, x: Any, g: Any = g) -> Any:
                return sum(jnp.sum(a * b) for a, b in zip(jax.tree.leaves(model(x)), g, strict=True))

            dparams, dx = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(model, x)
            found[prefix + "dx"] = dx
            for path, leaf in nnx.to_flat_state(dparams):
                found[prefix + "dparams/" + "/".join(map(str, path))] = leaf.get_value()
    if "eval/x" in inputs:
        x = jnp.asarray(inputs["eval/x"])
        model.eval()
        found |= {f"eval/{name}": value for name, value in outputs(compiled(model, x)).items()}
        found |= {f"eval_float/{name}": value for name, value in outputs(plain(x)).items()}
    return found


def driven(case: Case, inputs: Arrays) -> Iterator[dict[str, Any]]:
    """What a case gives, for every way in which ties of weights may fall."""
    if "composites" in (case.get("json_outputs") or {}):
        yield from (conversion(case, inputs, least) for least in (-127, -128))
        return
    for nudge in TIES:
        yield steps(case, inputs, nudge)


def conversion(case: Case, inputs: Arrays, least: int) -> dict[str, Any]:
    """What a converted model gives, with weights from `least` up: Qwix's marks say -127, its numbers -128."""
    x = jnp.asarray(next(v for k, v in inputs.items() if k.split("/")[-1] == "x"))
    _, model = quantized(case, inputs, x)
    for name, value in inputs.items():
        if name.startswith("quant_stats/"):
            path, _, what = name.removeprefix("quant_stats/").rpartition("/")
            average = average_of(model, path)
            variable = getattr(average, ENDS.get(what, "sum_of_max"))
            variable.set_value(jnp.asarray(value, variable.dtype).reshape(()))
            if what == "sum_of_absmax":
                average.sum_of_min.set_value(-average.sum_of_max.get_value())
    converted = OdmlConversion().quantize(model, x)
    for marker in converted.op_quant.held.values():
        if marker.is_weight:
            marker.least = least
    graphdef, state = nnx.split(converted)
    program = jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))(state, x)
    return outputs(converted(x)) | {"composites": composites(program.jaxpr)}


def composites(jaxpr: Any) -> list[dict[str, Any]]:
    """Every `quant.fake_quant` of a program, in order."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "composite":
            found.append(
                {
                    "name": eqn.params["name"],
                    "version": eqn.params["version"],
                    "attributes": {k: plain_value(v) for k, v in _pairs(eqn.params["attributes"])},
                    "result_shape": list(eqn.outvars[0].aval.shape),
                }
            )
            continue
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if type(inner).__name__ == "Jaxpr":
                found += composites(inner)
    return found


def _pairs(attributes: Any) -> list[tuple[str, Any]]:
    return [(name, jax.tree.unflatten(tree, leaves)) for name, leaves, tree in attributes]


def plain_value(value: Any) -> Any:
    """An attribute as JSON has it."""
    value = getattr(value, "val", value)
    return np.asarray(value).tolist() if not isinstance(value, str) else value
