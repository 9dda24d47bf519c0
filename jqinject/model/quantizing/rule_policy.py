"""Rules for operations outside layers, and the calls that are traced to find these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.dot import QConvGeneralDilated, QDotGeneral, QRaggedDot
from jqinject.dot.schemes.scheme import SchemeLike
from jqinject.dot.schemes.scheme_fits import (
    RAGGED,
    quantizes_backward,
    ragged_input_quantizer,
    rounds_weight_again,
    weight_quantizer,
    why_not_stored,
)
from jqinject.inject import Binding, ExtendedInjector
from jqinject.model.frozen_weights import KernelInOp
from jqinject.model.quantizing.rules import COUNTERPARTS, Rule
from jqinject.model.walk import ModelIndex
from jqinject.nn.activations import QuantActLayer
from jqinject.nn.base.layer_schemes import build_op
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.nn.dot_product_attention import QuantScaledDotProductAttention
from jqinject.nn.merging_and_resizing import QuantMergeLayer
from jqinject.nn.multi_head_attention import QuantMultiHeadAttention
from jqinject.nn.norms import QuantNormLayer
from jqinject.nn.pooling import QuantPoolLayer
from jqinject.program import (
    CALL,
    Call,
    Choice,
    Operation,
    Policy,
    Site,
    WeightUse,
    arguments_of,
    checked_method,
    contract_by,
    dotted,
    find_sites,
    original_class,
)
from jqinject.proxy import (
    ActQuantProxyFromInjector,
    GradQuantProxyFromInjector,
    QuantProxyFromInjector,
)


def by_scheme(scheme: SchemeLike, operation: str, weight_path: tuple[object, ...]) -> Choice | None:
    """The quantizers of an operation by a scheme; None of a look-up, which is no contraction.

    Args:
        scheme: the scheme.
        operation: the operation's name.
        weight_path: of the parameter that it contracts; empty for none.

    Raises:
        ValueError: a ragged contraction, by a scheme that does more than it can.
    """
    if operation == "take":
        return None
    if not weight_path:
        return Choice(scheme=scheme)
    parameter = weight_quantizer(scheme, operation)
    if operation != RAGGED or quantizes_backward(scheme):
        return Choice(scheme=scheme, parameter=parameter, rounds_again=rounds_weight_again(scheme))
    try:
        return Choice(parameter, ragged_input_quantizer(scheme), parameter=parameter)
    except ValueError as error:
        raise ValueError(f"{dotted(weight_path)}: {error}") from None


def unstored_weights(sites: Iterable[Site]) -> tuple[tuple[str, str], ...]:
    """The parameters that schemes quantize within contractions, and why they cannot be stored for serving."""
    within = (site for site in sites if site.contraction and site.weight_path and not site.is_weight)
    reasons = {dotted(site.weight_path): why_not_stored(site.quantizer, site.contraction) for site in within}
    return tuple((name, why) for name, why in reasons.items() if why)


SLOTS_OF_CHOICE = {
    "weight": "weight",
    "inputs": "input",
    "output": "output",
    "lhs": "lhs",
    "rhs": "rhs",
    "grad": "grad",
}
CONTRACTIONS = {
    "dot_general": QDotGeneral,
    "conv_general_dilated": QConvGeneralDilated,
    "ragged_dot_general": QRaggedDot,
}
OURS = (
    QuantWeightLayer,
    QuantNormLayer,
    QuantActLayer,
    QuantMultiHeadAttention,
    QuantScaledDotProductAttention,
    QuantMergeLayer,
    QuantPoolLayer,
    KernelInOp,
)


@dataclass(frozen=True)
class RulePolicy(Policy):
    """Quantizes what rules name outside of layers; it does not look inside layers.

    A rule without an operation takes every contraction with a parameter, and every look-up in one.

    Attributes:
        rules: the rules.
        into_layers: whether Flax's layers are looked into, so that their weights are sites.
    """

    rules: tuple[Rule, ...]
    into_layers: bool = False

    follows_parameters = True

    def is_leaf(self, module: object) -> bool:
        """See `Policy`."""
        # A report intercepts calls, by a subclass of the layer's own class.
        kind = original_class(type(module))
        return isinstance(module, OURS) or (kind in COUNTERPARTS and not self.into_layers)

    def choose(
        self, path: str, operation: Operation, weight_path: tuple[object, ...] = (), name: str = ""
    ) -> Choice | None:
        """See `Policy`."""
        index = self.rule_of(path, operation, weight_path, name)
        if index is None:
            return None
        rule = self.rules[index]
        slots = {field: _declared(rule, f"{slot}_quant") for field, slot in SLOTS_OF_CHOICE.items()}
        if rule.keeps_float:
            return None
        if rule.configures:
            return by_scheme(rule.scheme, operation.name, weight_path)
        weight = {"parameter": slots["weight"]} if weight_path else {"lhs": slots["lhs"], "rhs": slots["rhs"]}
        return Choice(
            slots["weight"],
            slots["inputs"],
            slots["output"],
            grad=slots["grad"],
            contraction=rule.contraction,
            share=rule.share,
            **weight,
        )

    def rule_of(
        self, path: str, operation: Operation, weight_path: tuple[object, ...] = (), name: str = ""
    ) -> int | None:
        """The index of the first rule for an operation, or None."""
        places = (path, dotted(weight_path), dotted(weight_path[:-1])) if weight_path else (path,)
        for index, rule in enumerate(self.rules):
            takes = bool(weight_path) and rule.takes_weights if rule.op is None else operation.name in rule.op
            own = (name,) if rule.op is not None and name else ()
            if takes and rule.matches(*places, *own):
                return index
        return None

    def cache_quantizer(self, path: str, cache: str) -> Any:
        """See `Policy`."""
        index = self.cache_rule_of(path, cache)
        return None if index is None else _declared(self.rules[index], "cache_quant")

    def cache_rule_of(self, path: str, cache: str) -> int | None:
        """The index of the first rule for a cache, or None."""
        places = (path, cache, cache.rpartition(".")[0])
        for index, rule in enumerate(self.rules):
            takes = rule.quantizer("cache_quant") is not None or (rule.keeps_float and rule.op is None)
            if takes and rule.matches(*places):
                return index
        return None


@dataclass(frozen=True)
class _Watching(RulePolicy):
    """Records which rules matched an operation."""

    used: set[int] = field(default_factory=set, compare=False)
    caches: dict[str, int | None] = field(default_factory=dict, compare=False)
    taken: set[tuple[tuple[Any, ...], str]] = field(default_factory=set, compare=False)

    def rule_of(
        self, path: str, operation: Operation, weight_path: tuple[object, ...] = (), name: str = ""
    ) -> int | None:
        """See `RulePolicy`."""
        index = super().rule_of(path, operation, weight_path, name)
        if index is not None:
            self.used.add(index)
            self.taken.add((weight_path, operation.name))
        return index

    def cache_rule_of(self, path: str, cache: str) -> int | None:
        """See `RulePolicy`."""
        index = super().cache_rule_of(path, cache)
        self.caches[cache] = index
        if index is not None:
            self.used.add(index)
        return index


def needs_inputs(index: ModelIndex, rules: tuple[Rule, ...]) -> bool:
    """Whether rules cannot be applied without tracing the model: they name operations, or it holds Linen modules."""
    layers = {kind.__name__ for kind in COUNTERPARTS}
    linen = any(isinstance(node, nnx.bridge.ToNNX) for node in index.modules)
    caches = any(rule.quantizer("cache_quant") is not None for rule in rules)
    return linen or caches or any(rule.op is not None and not set(rule.op) <= layers for rule in rules)


class PlannedSites(NamedTuple):
    """What rules quantize outside of layers.

    Attributes:
        sites: name -> site of a tensor.
        uses: where parameters are contracted or looked up, whether or not a rule takes them.
        used: the indices of the rules that take something.
        caches: name of a cache that the calls write -> the index of its rule, or None.
        taken: the path of a parameter and the name of an operation on it, where a rule takes it.
        same: name of a site of one method -> its name in the program of an earlier one.
    """

    sites: Mapping[str, Site]
    uses: Sequence[WeightUse]
    used: frozenset[int]
    caches: Mapping[str, int | None]
    taken: frozenset[tuple[tuple[Any, ...], str]] = frozenset()
    same: Mapping[str, str] = {}


NO_SITES = PlannedSites({}, (), frozenset(), {})


def plan_sites(model: nnx.Module, policy: RulePolicy, calls: Sequence[Call]) -> PlannedSites:
    """What rules quantize outside of layers in calls of a model."""
    watching = _Watching(policy.rules, policy.into_layers)
    sites = find_sites(model, watching, calls)
    used, taken = frozenset(watching.used), frozenset(watching.taken)
    return PlannedSites(sites.sites, sites.uses, used, watching.caches, taken, sites.same)


def held_at(site: Site, rngs: nnx.Rngs | None) -> Any:
    """The quantizer of a tensor outside of layers, or the contraction by a scheme.

    Raises:
        TypeError: a weight quantizer for an activation; not an injector; an override that has no effect.
    """
    if site.contraction:
        kind = CONTRACTIONS[site.contraction]
        return build_op(
            kind, site.quantizer, partial(_contracted, site), site.stack, rngs, bool(site.is_weight)
        )
    is_injector = isinstance(site.quantizer, type) and issubclass(site.quantizer, ExtendedInjector)
    if not (is_injector or isinstance(site.quantizer, Binding)):
        raise TypeError(
            f"{site.name} takes an injector (a class that derives from ExtendedInjector), got {site.quantizer!r:.80}"
        )
    declared = site.quantizer if isinstance(site.quantizer, Binding) else Binding(site.quantizer)
    kind = declared.resolve("proxy_class") if declared.declares("proxy_class") else None
    expected = GradQuantProxyFromInjector if site.name.endswith("_grad") else ActQuantProxyFromInjector
    what = "a gradient" if expected is GradQuantProxyFromInjector else "an activation"
    roles = (expected.role, QuantProxyFromInjector.role)
    if kind is not None and kind.role not in roles and not site.is_weight:
        raise TypeError(
            f"{site.name} is {what}, and {declared.base.__name__} is not for these: its proxy is a "
            f"{kind.__name__}.\n  cure: a quantizer of {what.split()[-1]}s, such as "
            f"{'Int8DynamicGradPerTensorFloat' if what == 'a gradient' else 'Int8ActPerTensorMinMax'}"
        )
    axes = site.overrides.get("channelwise_axes", ())
    return expected(
        declared.base,
        Operand(site),
        overrides=declared.overrides,
        offered={"channelwise_axes": axes} if axes else {},
        rngs=rngs,
        where=(f"the quantizer of {site.name}", ""),
        stack=site.stack,
    )


def _contracted(site: Site, op: object) -> jax.Array:
    """The contraction at a site, of arrays of its shapes."""
    lhs, rhs, *rest = (jnp.zeros(x.shape, x.dtype) for x in site.equation.inputs)
    return contract_by(op, site, lhs, rhs, rest=rest)


class Operand:
    """A tensor of a program, with the facts of a layer that weight quantizers ask for.

    Args:
        site: where it is quantized.
    """

    def __init__(self, site: Site) -> None:
        self.weight_shape = site.shape
        self.weight_ndim = len(site.shape)
        self.output_channel_dim = tuple(site.overrides.get("channelwise_axes", ())) or self.weight_ndim - 1
        self.input_axes = site.transformed or (-1,)


def _declared(rule: Rule, slot: str) -> Any:
    quantizer, prefix = rule.quantizer(slot), slot.removesuffix("quant")
    own = {n.removeprefix(prefix): v for n, v in rule.overrides if n.startswith(prefix)}
    # Compared by value: every trace makes the same choice.
    return Binding(quantizer, own) if quantizer is not None and own else quantizer


Methods = Mapping[str | Callable[..., Any], Any]


def call_with(inputs: object) -> Call | None:
    """The call with these inputs: an array, a tuple of positional arguments or a dict of keywords; None without any.

    Raises:
        TypeError: they are not arguments.
    """
    if inputs is None:
        return None
    return Call(*_arguments(inputs, "inputs are what the model is called with", "inputs="))


def traced_calls(
    model: nnx.Module, call: Call | None, methods: Methods | None, caller: str
) -> tuple[Call, ...]:
    """The calls of a model to trace, one for each method.

    Args:
        model: an NNX module.
        call: of `__call__`, or None.
        methods: method -> its arguments, as for `call_with`.
        caller: the calling function's name, for the error text.

    Raises:
        TypeError: the arguments are none; a method is not one of the model's class.
        ValueError: the model has no such method; a method is given twice.
    """
    calls: dict[str, Call] = {} if call is None else {CALL: call}
    for named, arguments in (methods or {}).items():
        method = checked_method(model, named, caller)
        if not isinstance(method, str) or not callable(getattr(type(model), method, None)):
            raise TypeError(
                f"{caller}: methods are those of {type(model).__name__}, by name, and {named!r:.80} is not a method of "
                "this class.\n  cure: write it as a method of the class; a module's own call is reached through the "
                "method that calls it"
            )
        if method in calls:
            raise ValueError(
                f"{caller}: {method} is given twice, and a method has one program.\n  cure: inputs=... is the short "
                "way to say methods={'__call__': ...}; give one of them"
            )
        said = f"methods[{method!r}] is what it is called with"
        calls[method] = Call(*_arguments(arguments, said, f"{method!r}: "), method)
    return tuple(calls.values())


def _arguments(arguments: object, said: str, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not isinstance(arguments, Mapping | tuple | list | jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise TypeError(
            f"{said}, got {type(arguments).__name__}.\n"
            f"  cure: {name}x, an array; {name}(x, y), several; {name}{{'x': x}}, by keyword"
        )
    return arguments_of(arguments)
