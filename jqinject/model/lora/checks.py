"""What `lora` refuses, before it changes anything."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from flax import nnx

from jqinject.dot import FrozenParam
from jqinject.model.quantizing.parameter_sites import PlannedParameter
from jqinject.model.quantizing.plan import idle_rules
from jqinject.model.quantizing.rule_policy import OURS, PlannedSites
from jqinject.model.quantizing.rules import Rule
from jqinject.model.walk import ModelIndex, dotted
from jqinject.program import QuantizedProgram
from jqinject.proxy import QuantProxyFromInjector

Start = Literal["zeros", "error"]
Update = Literal["beside", "inside"]


def refuse_bias_quantizers(rules: Iterable[Rule], caller: str) -> None:
    """Refuse rules that quantize biases."""
    biased = [str(rule) for rule in rules if rule.quantizer("bias_quant") is not None]
    if biased:
        raise ValueError(
            f"{caller} runs layers as parts of the model's program, where biases have no quantizer: {biased[0]}.\n"
            "  cure: a rule without bias_quant"
        )


def check_numbers(alpha: Any, dropout: Any, rngs: Any) -> None:
    """Refuse numbers without a meaning."""
    if alpha is not None and not (isinstance(alpha, int | float) and math.isfinite(alpha) and alpha != 0):
        raise ValueError(f"lora: alpha is a finite number other than 0, got {alpha!r:.40}")
    if not (isinstance(dropout, int | float) and 0 <= dropout < 1):
        raise ValueError(f"lora: dropout is a share from 0 to below 1, got {dropout!r:.40}")
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"lora: rngs is an nnx.Rngs, got {type(rngs).__name__}.\n  cure: rngs=nnx.Rngs(0)")


def check_update(update: Any, dropout: float, start: Start) -> None:
    """Refuse an unknown place of the update, and what it has no meaning with."""
    if update not in get_args(Update):
        raise ValueError(f"lora: update is 'beside' or 'inside', got {update!r:.40}")
    if update == "inside" and dropout:
        raise ValueError(
            f"lora: dropout is of an adapter's input, and an update inside the quantizer has none; got {dropout}.\n"
            "  cure: dropout=0; or update='beside'"
        )
    if update == "inside" and start == "error":
        raise ValueError(
            "lora: start='error' makes up for the rounding of a stored weight, and inside the quantizer the update is "
            "rounded too.\n  cure: start='zeros'; or update='beside'"
        )


def refuse_adapted(index: ModelIndex) -> None:
    """Refuse a model that has adapters, or that is quantized already."""
    adapted = [dotted(path) for path, node in index.places if isinstance(node, nnx.LoRAParam)]
    if adapted:
        raise ValueError(
            f"lora: the model has adapters already: {_listed(adapted)}.\n"
            "  cure: jqinject.merge_lora(model) puts them into the weights; or adapt the model without them"
        )
    quantized = [
        dotted(path)
        for path, node in index.places
        if isinstance(node, (*OURS, QuantizedProgram, FrozenParam))
    ]
    if quantized:
        raise ValueError(
            f"lora: the model is quantized already, in {_listed(quantized)}.\n"
            "  cure: lora(float_model, rules, ...), whose rules quantize the base"
        )


def _listed(paths: list[str]) -> str:
    return ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")


def check_rules(rules: tuple[Rule, ...], found: PlannedSites, bases: Mapping[str, PlannedParameter]) -> None:
    """Refuse rules that take nothing, and quantizers that are proxies."""
    idle = idle_rules(rules, (), found.used)
    if idle:
        known = dict.fromkeys(dotted(use.weight_path) for use in found.uses)
        shown = "\n".join(f"    {rules[index]}" for index in idle)
        raise ValueError(
            f"lora: rules that take nothing (the first rule that matches wins):\n{shown}\n"
            f"  weights here: {_listed(list(known)) or 'none'}\n  cure: mend the path or the order"
        )
    shared = [name for name, base in bases.items() if isinstance(base.quantizer, QuantProxyFromInjector)]
    if shared:
        raise TypeError(
            f"lora: the weight quantizer of {_listed(shared)} is a proxy, and frozen weights have none to share.\n"
            "  cure: its injector, such as NF4WeightPerGroupFloat"
        )
