"""The checks of `quantize`: rules that do not fit a model are refused before anything is built."""

import warnings
from collections.abc import Collection, Sequence

from flax import nnx

from jqinject.inject.errors import did_you_mean
from jqinject.model.inspect.coverage import coverage_of
from jqinject.model.quantizing.rule_policy import (
    OURS,
    QuantizationPlan,
    RulePolicy,
    has_arguments,
    needs_inputs,
)
from jqinject.model.quantizing.rules import COUNTERPARTS, Rule, nearest_pattern, weight_rule
from jqinject.model.walk import ModelIndex, bytes_of, place_name
from jqinject.program import HELD, Call, QuantizedProgram, listed

NOT_CONTRACTED = (
    "no call contracts it or looks rows up in it (one that is multiplied by elements, "
    "or read by a kernel, stays float)"
)


def check_model(
    index: ModelIndex, model: nnx.Module, rules: tuple[Rule, ...], calls: tuple[Call, ...]
) -> None:
    """Refuse a model that rules cannot be applied to, before it is traced."""
    traces, has_inputs = needs_inputs(index, rules), has_arguments(calls)
    has_layers = any(type(module) in COUNTERPARTS for module in index.modules)
    _refuse_quantized(index, model, has_layers, traces)
    if not has_layers and not traces and not has_inputs:
        raise ValueError(
            f"{type(model).__name__} has no layer of Flax's own classes; what it contracts by itself is found by "
            "tracing it.\n  cure: quantize(model, rules, inputs=(x,)), with arrays or jax.ShapeDtypeStructs"
        )
    if traces and not has_inputs:
        raise ValueError(
            "these rules are about operations, which are found by tracing the model.\n"
            "  cure: quantize(model, rules, inputs=(x,)), with arrays or jax.ShapeDtypeStructs; "
            "methods={'encode': (x,)} for other methods than its call"
        )


def check_plan(index: ModelIndex, model: nnx.Module, plan: QuantizationPlan) -> None:
    """Refuse rules that take nothing, and rules that quantize nothing."""
    _check_caches(plan)
    refuse_idle(index, model, plan)
    if not (plan.parameters or plan.outside.sites or any(entry.slots for entry in plan.layers.values())):
        shown = "\n".join(f"    {rule}" for rule in plan.rules)
        raise ValueError(
            f"these rules quantize nothing: what they match stays float.\n{shown}\n"
            "  cure: weight_quant=..., input_quant=..., of a kind that the layers take; or allow_idle=True"
        )


def refuse_idle(index: ModelIndex, model: nnx.Module, plan: QuantizationPlan) -> None:
    """Refuse rules that take nothing."""
    rules, layers = plan.rules, plan.layers.values()
    if plan.idle:
        weights = dict.fromkeys(place_name(use.weight_path) for use in plan.outside.uses)
        names = [*(entry.path for entry in layers), *weights]
        shown = "\n".join(f"    {rules[at]}{nearest_pattern(rules[at], names)}" for at in plan.idle)
        unreached = _unreached(index, model, plan, names)
        raise ValueError(
            f"rules that take nothing (the first rule that matches wins):\n{shown}\n"
            f"  layers and weights here: {listed(tuple(names)) or 'none'}\n{unreached}"
            "  cure: mend the path or the order, or allow_idle=True; jqinject.rules_report(model, rules) shows the plan"
        )


def _unreached(index: ModelIndex, model: nnx.Module, plan: QuantizationPlan, reached: Collection[str]) -> str:
    """Why weights that idle rules match can be taken by none, a line each; empty if there are none.

    Args:
        index: of the model.
        model: the float model.
        plan: of it.
        reached: paths of layers, and of parameters that are contracted.
    """
    idle = [plan.rules[at] for at in plan.idle]
    sizes = asked_bytes(index, idle) if has_arguments(plan.calls) else {}
    names = [name for name in sizes if not {name, name.rpartition(".")[0]} & {*reached}]
    reasons = {row.parameter: row.why for row in coverage_of(model, plan.calls).missed} if names else {}
    lines = [f"    {name}: {reasons.get(name, NOT_CONTRACTED)}\n" for name in names[:SHOWN]]
    more = f"    and {len(names) - SHOWN} more\n" if len(names) > SHOWN else ""
    return "  weights that they match, and that are not reached:\n" + "".join(lines) + more if names else ""


def _check_caches(plan: QuantizationPlan) -> None:
    """Refuse a rule for caches that takes none."""
    idle = [
        rule
        for number, rule in enumerate(plan.rules)
        if rule.quantizer("cache_quant") is not None and number not in plan.caches.values()
    ]
    if idle:
        hint = did_you_mean(idle[0].path, plan.caches)
        names = ", ".join(plan.caches) or "none; caches are float arrays among the arguments, or Variables"
        raise ValueError(
            f"{idle[0]} finds no cache to quantize{'; ' + hint if hint else '.'}\n  caches that the calls write: "
            f"{names}\n  cure: inputs that hold a cache, as in a step of generation; mend the path or the order"
        )


def _refuse_quantized(index: ModelIndex, model: nnx.Module, has_layers: bool, needs_inputs: bool) -> None:
    """Refuse a model that is already quantized; operations may still be quantized after layers, by other rules."""
    if isinstance(model, QuantizedProgram) and (
        needs_inputs or not isinstance(model.op_quant.policy, RulePolicy)
    ):
        raise ValueError(
            f"{type(model).__name__} is quantized already: it holds quantizers between its operations, in {HELD}.\n"
            "  cure: quantize the float model, with all rules at once"
        )
    if has_layers or needs_inputs:
        return
    ours = tuple(place_name(path) for path, node in index.places if isinstance(node, OURS))
    if ours:
        raise ValueError(
            f"{type(model).__name__} is quantized already, in {listed(ours)}; it has no float layer left.\n"
            "  cure: quantize the float model; the weights of this one go into it by jqinject.load_state"
        )


HALF = 0.5
SHOWN = 4


class LowCoverageWarning(UserWarning):
    """`quantize` reached less than half of the weight bytes that its rules ask for."""


class OwnDerivativeWarning(UserWarning):
    """A rule quantizes the backward pass of a contraction in a function with a derivative of its own, which stays."""


def warn_of_own_derivatives(plan: QuantizationPlan) -> None:
    """Warn of rules whose backward pass the model's own derivatives replace.

    Warns:
        OwnDerivativeWarning: with the names of the contractions.
    """
    names = sorted(plan.outside.own_rules)
    if names:
        warnings.warn(
            f"{listed(names)}: a rule quantizes the backward pass, and the function around it has a derivative of its "
            "own (jax.custom_vjp, jax.custom_jvp), which stays: it is evaluated at the quantized numbers.\n"
            "  cure: a rule without grad_quant, or with a scheme that quantizes forward alone; or the function without "
            "its derivative rule",
            OwnDerivativeWarning,
            3,
        )


def asked_bytes(index: ModelIndex, rules: Sequence[Rule]) -> dict[str, int]:
    """The bytes of each parameter of at least two axes that the rules want quantized, by path.

    Args:
        index: of the float model.
        rules: the first that matches a parameter's path, or its module's, counts.
    """
    matrices = (
        (".".join(entry.path), entry.variable.get_value())
        for entry in index.variables
        if not entry.in_quantizer and isinstance(entry.variable, nnx.Param) and entry.variable.ndim > 1
    )
    return {path: bytes_of(value) for path, value in matrices if is_asked(path, rules)}


def is_asked(path: str, rules: Sequence[Rule]) -> bool:
    """Whether the rules want a parameter quantized."""
    rule = weight_rule(rules, path, path.rpartition(".")[0])
    return rule is not None and (rule.configures or rule.quantizer("weight_quant") is not None)


def warn_of_low_coverage(index: ModelIndex, model: nnx.Module, plan: QuantizationPlan) -> None:
    """Warn if less than half of the bytes that the rules ask for are reached.

    Args:
        index: of the float model.
        model: the quantized model.
        plan: by which it was quantized.

    Warns:
        LowCoverageWarning: with the coverage line, and the largest weights that are not reached.
    """
    sizes = asked_bytes(index, plan.rules)
    weights = {"weight_quant", "contraction"}
    layers = (".".join(path) for path, entry in plan.layers.items() if weights & {*entry.slots})
    reached = {*layers, *plan.parameters, *dict(plan.unstored)}
    reached_bytes = sum(size for path, size in sizes.items() if {path, path.rpartition(".")[0]} & reached)
    if reached_bytes >= HALF * sum(sizes.values()):
        return
    covered = coverage_of(model, plan.calls, plan.rules)
    missed = [row for row in covered.missed if is_asked(row.parameter, plan.rules)]
    if reached_bytes >= HALF * (reached_bytes + sum(row.float_bytes for row in missed)):
        return  # the others are only added or multiplied
    shown = "".join(f"\n    {row.parameter} ({row.size:,} numbers): {row.why}" for row in missed[:SHOWN])
    more = f"\n    and {len(missed) - SHOWN} more" if len(missed) > SHOWN else ""
    cure = (
        "jqinject.coverage(model, *inputs) lists every weight with why it stays float"
        if plan.calls
        else "quantize(model, rules, inputs=(x,)), with arrays or jax.ShapeDtypeStructs: what a model contracts by "
        "itself is found by tracing it"
    )
    warnings.warn(
        f"quantize reached less than half of the weight bytes that the rules ask for.\n  {covered.line}{shown}{more}\n"
        f"  cure: {cure}",
        LowCoverageWarning,
        3,
    )
