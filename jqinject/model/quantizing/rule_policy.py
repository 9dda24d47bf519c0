"""Rules for operations outside layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jqinject.inject import Binding, ExtendedInjector
from jqinject.model.quantizing.counterparts import COUNTERPARTS
from jqinject.model.quantizing.rules import Rule
from jqinject.model.walk import ModelIndex
from jqinject.nn.attention.dot_product_attention import QuantScaledDotProductAttention
from jqinject.nn.attention.multi_head_attention import QuantMultiHeadAttention
from jqinject.nn.base.act_layer import QuantActLayer
from jqinject.nn.base.norm_layer import QuantNormLayer
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.nn.eltwise import QuantMergeLayer
from jqinject.nn.pooling import QuantPoolLayer
from jqinject.program import Call, Choice, Kind, Operation, Site, Tracked, find_sites, other_axes
from jqinject.proxy import ActQuantProxyFromInjector, QuantProxyFromInjector

OURS = (
    QuantWeightLayer,
    QuantNormLayer,
    QuantActLayer,
    QuantMultiHeadAttention,
    QuantScaledDotProductAttention,
    QuantMergeLayer,
    QuantPoolLayer,
)


@dataclass(frozen=True)
class RulePolicy:
    """Quantizes the operations that rules name; it does not look inside layers.

    Attributes:
        rules: the rules.
        linen: whether the model holds Linen modules, whose layers count as operations.
    """

    rules: tuple[Rule, ...]
    linen: bool = False

    delayed = False
    flattens_weights = False
    leaf_modules = (*OURS, *COUNTERPARTS)

    def choose(self, path: str, operation: Operation) -> Choice | None:
        """See `Policy`."""
        index = self.rule_of(path, operation)
        if index is None:
            return None
        rule = self.rules[index]
        found = Choice(*(_declared(rule, slot) for slot in ("weight_quant", "input_quant", "output_quant")))
        return None if found == Choice() else found

    def rule_of(self, path: str, operation: Operation) -> int | None:
        """The index of the first rule for an operation, or None."""
        for index, rule in enumerate(self.rules):
            is_layer = self.linen and operation.kind is Kind.CONTRACTION and rule.op is None
            if (is_layer or (rule.op is not None and operation.name in rule.op)) and rule.matches(path):
                return index
        return None

    def unknown(self, path: str, name: str) -> None:
        """Other operations stay as they are."""

    def not_an_activation(self, path: str, what: str) -> None:
        """Other operands stay as they are."""

    def channel_axes(self, summed: tuple[int, ...], ndim: int, is_weight: bool) -> tuple[int, ...]:
        """See `Policy`."""
        return other_axes(summed, ndim) if is_weight else ()

    def model_input(self, x: Tracked) -> Tracked:
        """See `Policy`."""
        return x

    def final_output(self, run: Any, x: Tracked, index: int) -> Tracked:
        """See `Policy`."""
        return x


class _Watching(RulePolicy):
    """Records which rules matched an operation."""

    def __init__(self, rules: tuple[Rule, ...], linen: bool) -> None:
        super().__init__(rules, linen)
        object.__setattr__(self, "used", set())

    used: set[int]

    def rule_of(self, path: str, operation: Operation) -> int | None:
        """See `RulePolicy`."""
        index = super().rule_of(path, operation)
        if index is not None:
            self.used.add(index)
        return index


def policy_for(index: ModelIndex, rules: tuple[Rule, ...]) -> RulePolicy | None:
    """The policy for operations outside layers; None if no rule concerns them."""
    linen = any(isinstance(node, nnx.bridge.ToNNX) for node in index.modules)
    layers = {kind.__name__ for kind in COUNTERPARTS}
    for_operations = [rule for rule in rules if rule.op is not None and not set(rule.op) <= layers]
    return RulePolicy(rules, linen) if for_operations or linen else None


def sites_of(model: Any, rules: tuple[Rule, ...], calls: Sequence[Call]) -> tuple[dict[str, Site], set[int]]:
    """The sites between layers that the rules quantize in calls, and the indices of these rules."""
    policy = policy_for(ModelIndex(model), rules)
    if policy is None:
        return {}, set()
    watching = _Watching(policy.rules, policy.linen)
    return find_sites(model, watching, calls), watching.used


def proxy_at(site: Site, rngs: nnx.Rngs | None) -> ActQuantProxyFromInjector:
    """The quantizer of a site between layers.

    Raises:
        TypeError: a weight quantizer for an activation; not an injector; an override that has no effect.
    """
    is_injector = isinstance(site.quantizer, type) and issubclass(site.quantizer, ExtendedInjector)
    if not (is_injector or isinstance(site.quantizer, Binding)):
        raise TypeError(
            f"{site.name} takes an injector (a class that derives from ExtendedInjector), got {site.quantizer!r:.80}"
        )
    declared = site.quantizer if isinstance(site.quantizer, Binding) else Binding(site.quantizer)
    kind = declared.resolve("proxy_class") if declared.declares("proxy_class") else None
    roles = (ActQuantProxyFromInjector.role, QuantProxyFromInjector.role)
    if kind is not None and kind.role not in roles and not site.is_weight:
        raise TypeError(
            f"{site.name} is an activation, and {declared.base.__name__} is not for these: its proxy is a "
            f"{kind.__name__}.\n  cure: a quantizer of activations, such as Int8ActPerTensorMinMax"
        )
    axes = site.overrides.get("channelwise_axes", ())
    return ActQuantProxyFromInjector(
        declared.base,
        Operand(site),
        overrides=declared.overrides,
        offered={"channelwise_axes": axes} if axes else {},
        rngs=rngs,
        where=(f"the quantizer of {site.name}", ""),
    )


class Operand:
    """A tensor of a program, with the facts of a layer that weight quantizers ask for.

    Args:
        site: where it is quantized.
    """

    def __init__(self, site: Site) -> None:
        self.weight_shape = site.shape
        self.weight_ndim = len(site.shape)
        self.output_channel_dim = tuple(site.overrides.get("channelwise_axes", ())) or self.weight_ndim - 1


def _declared(rule: Rule, slot: str) -> Any:
    quantizer, prefix = rule.quantizer(slot), slot.removesuffix("quant")
    own = {n.removeprefix(prefix): v for n, v in rule.overrides if n.startswith(prefix)}
    # Compared by value: every trace makes the same choice.
    return Binding(quantizer, own) if quantizer is not None and own else quantizer
