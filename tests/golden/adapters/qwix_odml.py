"""Drives Qwix's ODML cases: training steps with their statistics, and conversion with its markers.

The largest magnitude of a weight lies on a tie (127.5 steps), which goes either way by the last bit of the scale. The
manifest accepts both; here a case is run with the ties as they fall, with all of them down, and with all of them up,
and has to agree with one of the three in everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject import Rule
from jqinject.odml import Int8Act, Int8ActDynamic, Int8Weight, OdmlConversion, OdmlQat
from tests.golden.adapters.qwix_models import model_of
from tests.golden.adapters.qwix_rules import format_of, range_of

Case = dict[str, Any]
Arrays = dict[str, np.ndarray]


TIES = (1.0, 1 + 1e-6, 1 - 1e-6)


def rule_of(given: dict[str, Any], nudge: float) -> Rule:
    """Qwix's rule; `nudge` is a factor of the weights' ranges."""
    weight = act = None
    if given.get("weight_qtype"):
        method = range_of(given.get("weight_calibration_method", "absmax"), nudge)
        weight = Int8Weight.let(calibration_impl=method, **format_of(given["weight_qtype"]))
    if given.get("act_qtype"):
        kind = Int8Act if given.get("act_static_scale", True) else Int8ActDynamic
        method = range_of(given.get("act_calibration_method", "minmax"), 1.0)
        act = kind.let(calibration_impl=method, **format_of(given["act_qtype"]))
    return Rule(
        given.get("module_path", ".*"),
        op=tuple(given["op_names"]) if given.get("op_names") else None,
        weight_quant=weight,
        output_quant=act,
    )


def options_of(given: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}


def quantized(case: Case, inputs: Arrays, x: Any, nudge: float = 1.0) -> tuple[Any, Any]:
    """The float model and the quantized one."""
    config = case["config"]
    params = {k.removeprefix("params/"): v for k, v in inputs.items() if k.startswith("params/")}
    stats = {k.removeprefix("batch_stats/"): v for k, v in inputs.items() if k.startswith("batch_stats/")}
    model = model_of(config["model"], config.get("model_fields", {}), params | stats, x)
    qat = OdmlQat(rule_of(config["rule"], nudge), **options_of(config.get("provider", {})))
    return model, qat.quantize(model, x)


def outputs(y: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves(y)
    return {f"y{i}": leaf for i, leaf in enumerate(leaves)} | ({"y": leaves[0]} if len(leaves) == 1 else {})


def statistics(model: Any, wanted: Any) -> dict[str, Any]:
    """The statistics that a case names; a tensor that two operations take is recorded under the first."""
    found = {}
    for name in wanted:
        path, _, what = name.rpartition("/")
        site = path.replace("/", ".")
        if site not in model.op_quant:
            site = next(s for s in model.op_quant if s.endswith(site.rpartition(".")[2]) and "lhs" in s)
        average = model.op_quant[site].tensor_quant.averaging_impl
        variable = {"count": "count", "sum_of_min": "sum_of_min"}.get(what, "sum_of_max")
        found[name] = getattr(average, variable).get_value()
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
    if case["id"].startswith("odml_conv/") or case["id"].endswith("-conversion"):
        yield conversion(case, inputs)
        return
    for nudge in TIES:
        yield steps(case, inputs, nudge)


def conversion(case: Case, inputs: Arrays) -> dict[str, Any]:
    x = jnp.asarray(next(v for k, v in inputs.items() if k.split("/")[-1] == "x"))
    _, model = quantized(case, inputs, x)
    for name, value in inputs.items():
        if name.startswith("quant_stats/"):
            path, _, what = name.removeprefix("quant_stats/").rpartition("/")
            site = path.replace("/", ".")
            if site in model.op_quant:
                average = model.op_quant[site].tensor_quant.averaging_impl
                ends = {"count": ["count"], "sum_of_min": ["sum_of_min"]}.get(what, ["sum_of_max"])
                for end in ends:
                    variable = getattr(average, end)
                    variable.set_value(jnp.asarray(value, variable.dtype).reshape(()))
                if what == "sum_of_absmax":
                    average.sum_of_min.set_value(-average.sum_of_max.get_value())
    converted = OdmlConversion().quantize(model, x)
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
