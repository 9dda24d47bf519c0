"""The plan of `quantize` by itself: which layers every rule matches, and which ranges must see data."""

from collections.abc import Iterable
from dataclasses import dataclass

from flax import nnx

from jqinject.core import StaticRange
from jqinject.model.inspect import page
from jqinject.model.inspect.coverage import Coverage, coverage_of
from jqinject.model.quantizing import quantize_model, rule_policy
from jqinject.model.quantizing.rules import LayerRule, Rule, checked_rules
from jqinject.model.walk import ModelIndex, check_module, static_ranges, uncalibrated
from jqinject.program import Call, QuantizedProgram


@dataclass(frozen=True)
class RulesReport(page.Shown):
    """Which layers every rule matches, and which rules match none.

    `str()` shows it as a table.

    Attributes:
        rules: the rules.
        layers: an entry for every layer that could be quantized, by path.
        sites: names of the quantized sites between layers; empty if no inputs were given.
        idle: indices of the rules that match nothing.
        uncalibrated: paths of activation quantizers whose static range must see data first (`calibrate`, or training).
        coverage: which weights the rules quantize, how, and why not the others.
    """

    rules: tuple[Rule, ...]
    layers: tuple[LayerRule, ...]
    sites: tuple[str, ...]
    idle: tuple[int, ...]
    uncalibrated: tuple[str, ...]
    coverage: Coverage

    def table(self) -> page.Table:
        """See `Shown`: the layers."""
        return ("layer", "class", "rule", "quantizers"), [
            (x.path, x.layer, "-" if x.rule is None else str(x.rule), ", ".join(x.slots) or "stays float")
            for x in self.layers
        ]

    def notes(self) -> tuple[str, ...]:
        """See `Shown`: the coverage comes last."""
        return (
            *(f"between layers: {name}" for name in self.sites),
            *(f"rule {index}: {rule}" for index, rule in enumerate(self.rules)),
            *(f"rule {index} takes nothing" for index in self.idle),
            *(f"to be calibrated: {path}" for path in self.uncalibrated),
            *self.coverage.summary,
        )


def rules_report(
    model: nnx.Module,
    rules: Rule | Iterable[Rule],
    *inputs: object,
    methods: rule_policy.Methods | None = None,
    **kwargs: object,
) -> RulesReport:
    """Report which layers of a model every rule matches, and which rules match none; nothing is changed.

    Args:
        model: a float NNX module, concrete or abstract.
        rules: as for `quantize`.
        inputs: the model's arguments, if rules are for operations between layers.
        methods: the arguments of other methods, as for `quantize`.
        kwargs: its keyword arguments.

    Returns:
        The plan, and which of its static ranges must see data before serving.

    Raises:
        TypeError: `model` is not an NNX module; `rules` are not rules; a quantizer does not fit its slot.
        ValueError: a rule names an operation that does not exist; the model has no such method.

    Example:
        >>> from jqinject.quant import Int8WeightPerChannelFloat
        >>> model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
        >>> print(rules_report(model, Rule(".*0", weight_quant=Int8WeightPerChannelFloat)))
        layer     class   rule  quantizers
        layers.0  Linear  0     weight_quant
        layers.1  Linear  -     stays float
        rule 0: Rule('.*0', weight_quant=Int8WeightPerChannelFloat)
        coverage: 1 of 2 matrices quantized, 66.7% of the weight bytes, multiply-adds unknown
        not quantized: 1 more, of at most 1,024 numbers each
    """
    check_module(model, "rules_report")
    checked = checked_rules(rules)
    call = Call(inputs, kwargs) if inputs or kwargs else None
    calls = rule_policy.traced_calls(model, call, methods, "rules_report")
    index = ModelIndex(model)
    plan = rule_policy.QuantizationPlan.of(model, index, rule_policy.RulePolicy(checked), calls)
    unseen, planned = uncalibrated(index), model
    if not isinstance(model, QuantizedProgram):
        planned = quantize_model.planned_model(model, plan)
        unseen += tuple(_planned_ranges(index, planned, plan))
    covered = coverage_of(planned, calls, checked)
    names = (*plan.parameters, *plan.outside.sites)
    return RulesReport(checked, tuple(plan.layers.values()), names, plan.idle, unseen, covered)


def _planned_ranges(index: ModelIndex, planned: nnx.Module, plan: rule_policy.QuantizationPlan) -> list[str]:
    """Paths of the static ranges that rules would create, or share before they have seen data.

    Args:
        index: of the float model.
        planned: the abstract quantized model.
        plan: by which it was quantized.
    """
    listed = {*static_ranges(index)}
    for path, entry in plan.layers.items():
        rule = Rule() if entry.rule is None else plan.rules[entry.rule]
        for slot in entry.slots:
            shared = rule.quantizer(slot)
            if isinstance(shared, StaticRange) and shared.has_range():
                listed.add(".".join((*path, slot)))
    ranges = static_ranges(ModelIndex(planned)).items()
    new = (path for path, holder in ranges if holder.has_range() is not None and path not in listed)
    # Shapes alone have lost the order of the model's attributes.
    places = {".".join(path): at for at, path in enumerate(plan.layers)}
    return sorted(new, key=lambda path: places.get(path.rpartition(".")[0], len(places)))
