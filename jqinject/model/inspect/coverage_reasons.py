"""Why a weight of a model is not quantized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jqinject.model.frozen_weights import quantized_op
from jqinject.model.inspect.weight_flow import TracedContraction
from jqinject.model.inspect.weight_numbers import ModelWeight, ModelWeights
from jqinject.model.quantizing.rule_policy import OURS, RulePolicy
from jqinject.model.quantizing.rules import COUNTERPARTS, Rule
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import HELD, WeightUse, operation_of

UNKNOWN = "no inputs were given, so the program was not looked at"
UNREAD = "no traced call reads it; other methods are traced if they are named: methods={...}"
CUSTOM = "a function with a derivative of its own"
PARTS = {
    "cond": "a branch (cond)",
    "while": "a loop of unknown length (while)",
    "pallas_call": "a kernel (pallas_call)",
    "ffi_call": "a foreign function (ffi_call)",
    "pure_callback": "a function outside of the program (pure_callback)",
    "custom_jvp_call": f"{CUSTOM} (custom_jvp)",
    "custom_vjp_call": f"{CUSTOM} (custom_vjp)",
}


class Reasons:
    """Says why a weight is not quantized.

    Args:
        weights: of the model.
        rules: that it was quantized by; None for those that it keeps, if it keeps them.
    """

    def __init__(self, weights: ModelWeights, rules: Sequence[Rule] | None) -> None:
        self._weights = weights
        held = vars(weights.model).get(HELD)
        kept = held.policy.rules if held is not None and isinstance(held.policy, RulePolicy) else None
        self._rules = tuple(rules) if rules is not None else kept
        self._traced = held is not None
        self._is_float = held is None and not any(
            isinstance(node, OURS) or quantized_op(node) is not None for node in weights.nodes.values()
        )

    def of_unread(self, weight: ModelWeight) -> str:
        """Why, of a weight that no traced call reads."""
        return self._of_itself(weight) or UNREAD

    def of_unknown(self, weight: ModelWeight) -> str:
        """Why, of a weight in a program that was not traced."""
        layer = self._weights.nodes.get(weight.path[:-1])
        named = type(layer) in COUNTERPARTS
        return self._of_itself(weight) or (self._of_rules(weight, "", "dot_general") if named else UNKNOWN)

    def of_contracted(self, weight: ModelWeight, one: TracedContraction, use: WeightUse | None) -> str:
        """Why, of a weight that is contracted or looked up."""
        layer = self._weights.nodes.get(weight.path[:-1])
        own = self._of_itself(weight)
        if own:
            return own
        if use is not None:
            return self._of_rules(weight, one.path, use.operation)
        if type(layer) in COUNTERPARTS and one.path == ".".join(weight.path[:-1]):
            return self._of_rules(weight, one.path, one.operation)
        if one.inside:
            return (
                f"it is contracted inside {PARTS.get(one.inside, one.inside)}, which runs as it was written"
            )
        if one.through:
            return (
                f"it is not followed because of {one.through} between the parameter and its "
                f"{'look-up' if one.operation == 'take' else 'contraction'}"
            )
        return f"its {one.operation} in {one.path or 'the model itself'} runs as it was written"

    def _of_itself(self, weight: ModelWeight) -> str:
        """What in the weight itself, or in its layer, keeps it float; "" if nothing does."""
        layer = self._weights.nodes.get(weight.path[:-1])
        if not weight.is_parameter:
            kind = f"numbers of {weight.dtype}" if weight.kind in ("Param", "FrozenParam") else weight.kind
            return f"it is not a float nnx.Param, but {_with_article(kind)}"
        if isinstance(layer, QuantWeightLayer):
            if weight.path[-1] != layer.weight_name:
                return f"its {type(layer).__name__} quantizes the {layer.weight_name} alone"
            return "its layer has no weight quantizer" if layer.weight_quant is None else _switched_off(layer)
        site: Any = self._weights.sites.get(".".join(weight.path))
        return "" if site is None else _switched_off(site)

    def _of_rules(self, weight: ModelWeight, path: str, operation: str) -> str:
        name, layer = ".".join(weight.path), self._weights.nodes.get(weight.path[:-1])
        if self._rules is None:
            if self._is_float:
                return "the model is not quantized"
            found = self._traced or type(layer) in COUNTERPARTS
            return "no rule took it" if found else f"{UNKNOWN} when the model was quantized"
        places = (path, name, name.rpartition(".")[0])
        for number, rule in enumerate(self._rules):
            by_class = rule.op is not None and type(layer).__name__ in rule.op
            takes = rule.op is None or by_class or operation_of(operation).name in rule.op
            if takes and any(rule.matches(place) for place in places):
                if rule.keeps_float:
                    return f"rule {number} keeps it float: {rule}"
                if rule.quantizer("weight_quant") is None and not rule.configures:
                    return f"rule {number} has no weight_quant: {rule}"
                return (
                    "no inputs were given when the model was quantized"
                    if not self._traced
                    else "no rule took it"
                )
        return "no rule matches its path"


def _switched_off(holder: Any) -> str:
    proxy = holder.weight_quant
    return "its quantizer is switched off" if proxy is not None and not proxy.is_quant_enabled else ""


def _with_article(kind: str) -> str:
    if kind.startswith("numbers"):
        return kind
    return f"{'an' if kind[:1] in 'aeiouAEIOU' else 'a'} {kind}"


def is_rule_of_use(why: str) -> bool:
    """Whether a rule for the path would take the weight, given why it is not quantized."""
    return not why.startswith(("it is not a float", "it is contracted inside", "it is not followed"))
