"""Rules for operations outside layers, and the calls that are traced to find these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.dot import QConvGeneralDilated, QDotGeneral, QRaggedDot
from jqinject.dot.schemes import scheme_fits
from jqinject.dot.schemes.scheme import SchemeLike
from jqinject.model import frozen_weights, walk
from jqinject.model.quantizing import parameter_sites
from jqinject.model.quantizing.rules import COUNTERPARTS, LAYER_NAMES, LayerRule, Rule, plan_layers
from jqinject.model.walk import Path as ModulePath
from jqinject.nn import (
    activations,
    dot_product_attention,
    merging_and_resizing,
    multi_head_attention,
    norms,
    pooling,
)
from jqinject.nn.base import layer_schemes, slots, weight_layer
from jqinject.nn.base.parameter_site import PlannedParameter
from jqinject.program import (
    CALL,
    Call,
    Choice,
    Method,
    Operation,
    Policy,
    Site,
    arguments_of,
    checked_method,
    contract_by,
    dotted,
    find_sites,
    original_class,
)
from jqinject.program.policy import FoundSites
from jqinject.program.quantizers import scales_of
from jqinject.program.tracked_value import Path


def by_scheme(scheme: SchemeLike, operation: str, weight_path: Path) -> Choice | None:
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
    parameter = scheme_fits.weight_quantizer(scheme, operation)
    if operation != scheme_fits.RAGGED or scheme_fits.quantizes_backward(scheme):
        return Choice(
            scheme=scheme, parameter=parameter, rounds_again=scheme_fits.rounds_weight_again(scheme)
        )
    try:
        return Choice(parameter, scheme_fits.ragged_input_quantizer(scheme), parameter=parameter)
    except ValueError as error:
        raise ValueError(f"{dotted(weight_path)}: {error}") from None


CONTRACTIONS = {
    "dot_general": QDotGeneral,
    "conv_general_dilated": QConvGeneralDilated,
    "ragged_dot_general": QRaggedDot,
}
OURS = (
    weight_layer.QuantWeightLayer,
    norms.QuantNormLayer,
    activations.QuantActLayer,
    multi_head_attention.QuantMultiHeadAttention,
    dot_product_attention.QuantScaledDotProductAttention,
    merging_and_resizing.QuantMergeLayer,
    pooling.QuantPoolLayer,
    frozen_weights.KernelInOp,
)


@dataclass(frozen=True)
class RulePolicy(Policy):
    """Quantizes what rules name outside of layers; it does not look inside layers.

    A rule without an operation takes every contraction with a parameter, and every look-up in one.

    Attributes:
        rules: the rules.
        into_layers: whether Flax's layers are looked into, so that their weights are sites.
        taken: notes the index of the rule of each operation, if it is not None.
        caches: notes that of the rule of each cache, or None, likewise.
    """

    rules: tuple[Rule, ...]
    into_layers: bool = False
    taken: dict[tuple[Path, str, str, str], int] | None = field(default=None, compare=False, repr=False)
    caches: dict[str, int | None] | None = field(default=None, compare=False, repr=False)

    follows_parameters = True

    def is_leaf(self, module: object) -> bool:
        """See `Policy`."""
        # A report intercepts calls, by a subclass of the layer's own class.
        kind = original_class(type(module))
        return isinstance(module, OURS) or (kind in COUNTERPARTS and not self.into_layers)

    def choose(
        self, path: str, operation: Operation, weight_path: Path = (), name: str = ""
    ) -> Choice | None:
        """See `Policy`."""
        index = self.rule_of(path, operation, weight_path, name)
        if index is None:
            return None
        rule = self.rules[index]
        if rule.keeps_float:
            return None
        if rule.scheme is not None:
            return by_scheme(rule.scheme, operation.name, weight_path)
        weight = rule.declared("weight_quant")
        return Choice(
            weight,
            rule.declared("input_quant"),
            rule.declared("output_quant"),
            parameter=weight if weight_path else None,
            lhs=None if weight_path else rule.declared("lhs_quant"),
            rhs=None if weight_path else rule.declared("rhs_quant"),
            grad=rule.declared("grad_quant"),
            contraction=rule.contraction,
            share=rule.share,
        )

    def rule_of(self, path: str, operation: Operation, weight_path: Path = (), name: str = "") -> int | None:
        """The index of the first rule for an operation, or None."""
        places = (path, dotted(weight_path), dotted(weight_path[:-1])) if weight_path else (path,)
        for index, rule in enumerate(self.rules):
            takes = rule.takes(operation.name) and bool(weight_path or rule.op)
            own = (name,) if rule.op is not None and name else ()
            if takes and rule.matches(*places, *own):
                if self.taken is not None:
                    self.taken[weight_path, operation.name, path, name] = index
                return index
        return None

    def cache_quantizer(self, path: str, cache: str) -> object:
        """See `Policy`."""
        places = (path, cache, cache.rpartition(".")[0])
        matching = (i for i, rule in enumerate(self.rules) if _for_caches(rule) and rule.matches(*places))
        index = next(matching, None)
        if self.caches is not None:
            self.caches[cache] = index
        return None if index is None else self.rules[index].declared("cache_quant")


def _for_caches(rule: Rule) -> bool:
    """Whether a rule quantizes caches, or keeps what matches its path alone float."""
    return rule.quantizer("cache_quant") is not None or (rule.keeps_float and rule.op is None)


def needs_inputs(index: walk.ModelIndex, rules: tuple[Rule, ...]) -> bool:
    """Whether rules cannot be applied without tracing the model: they name operations, or it holds Linen modules."""
    linen = any(isinstance(node, nnx.bridge.ToNNX) for node in index.modules)
    caches = any(rule.quantizer("cache_quant") is not None for rule in rules)
    return linen or caches or any(rule.op is not None and not {*rule.op} <= {*LAYER_NAMES} for rule in rules)


@dataclass(frozen=True)
class QuantizationPlan:
    """What rules quantize in a float model.

    Attributes:
        rules: the rules.
        policy: with them.
        calls: that were traced, one for each method.
        layers: path -> the rule of a layer; empty if layers are looked into.
        outside: what the calls contract and look up outside of these layers.
        taken: path of a parameter, operation, path of the module and name of the operation -> the index of its rule.
        caches: name of a cache that the calls write -> the index of its rule, or None.
    """

    rules: tuple[Rule, ...]
    policy: RulePolicy
    calls: tuple[Call, ...]
    layers: Mapping[ModulePath, LayerRule]
    outside: FoundSites
    taken: Mapping[tuple[Path, str, str, str], int]
    caches: Mapping[str, int | None]

    @classmethod
    def of(
        cls, model: nnx.Module, index: walk.ModelIndex, policy: RulePolicy, calls: tuple[Call, ...]
    ) -> QuantizationPlan:
        """Plan a model; calls with arguments are traced, unless the model itself is a layer that a rule takes."""
        layers = {} if policy.into_layers else plan_layers(index, policy.rules)
        watching = replace(policy, taken={}, caches={})
        own = layers.get(())
        traced = calls if has_arguments(calls) and not (own is not None and own.slots) else ()
        outside = find_sites(model, watching, traced)
        return cls(policy.rules, policy, calls, layers, outside, watching.taken or {}, watching.caches or {})

    @property
    def idle(self) -> tuple[int, ...]:
        """Indices of the rules that take nothing."""
        of_layers = (entry.rule for entry in self.layers.values())
        used = {*of_layers, *self.taken.values(), *self.caches.values()}
        return tuple(index for index in range(len(self.rules)) if index not in used)

    @cached_property
    def parameters(self) -> dict[str, PlannedParameter]:
        """The parameters outside of layers that rules quantize, by their paths as text; see `plan_parameters`."""
        return parameter_sites.plan_parameters(self.outside.uses)

    @property
    def unstored(self) -> tuple[tuple[str, str], ...]:
        """The parameters that schemes quantize within contractions, and why they cannot be stored for serving."""
        sites = self.outside.sites.values()
        within = (site for site in sites if site.contraction and site.weight_path and not site.is_weight)
        reasons = {
            dotted(site.weight_path): scheme_fits.why_not_stored(site.quantizer, site.contraction)
            for site in within
        }
        return tuple((name, why) for name, why in reasons.items() if why)


def has_arguments(calls: Iterable[Call]) -> bool:
    """Return whether any of the calls has arguments."""
    return any(call.args or call.kwargs for call in calls)


def quantizer_at(site: Site, rngs: nnx.Rngs | None) -> Any:
    """Return the quantizer of a tensor outside of layers, or the contraction by a scheme.

    Raises:
        TypeError: a weight quantizer for an activation; not an injector; an override that has no effect.
    """

    def contracted(op: object) -> jax.Array:
        return contract_by(op, site, [jnp.zeros(x.shape, x.dtype) for x in site.equation.inputs])

    if site.contraction:
        kind = CONTRACTIONS[site.contraction]
        return layer_schemes.build_op(
            kind, site.quantizer, contracted, site.stack, rngs, bool(site.is_weight)
        )
    also = ("weight", parameter_sites.OPERAND) if site.is_weight else ()
    slot = slots.GRAD if site.name.endswith("_grad") else replace(slots.ACT, also=also)
    axes = site.overrides.get("channelwise_axes", ())
    # Each device has its own rows and groups.
    is_mapped = bool(site.mesh_axes) and not scales_of(site.quantizer)
    offered = {"channelwise_axes": axes} if axes else {}
    offered |= {"axis_name": site.mesh_axes} if is_mapped else {}
    facts = slots.LayerFacts(site.stack, offered={slot.name: offered}, is_mapped=is_mapped)
    return parameter_sites.proxy_of(Operand(site), slot, site.quantizer, rngs, facts, site.name)


class Operand:
    """A tensor of a program, with the facts of a layer that weight quantizers ask for.

    Args:
        site: where it is quantized.
    """

    def __init__(self, site: Site) -> None:
        self.weight_shape = site.shape
        self.weight_ndim = len(site.shape)
        self.output_channel_dim = tuple(site.overrides.get("channelwise_axes", ())) or self.weight_ndim - 1
        self.input_axes = site.transform_axes or (-1,)


Methods = Mapping[Method, object]


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


def _arguments(arguments: object, said: str, name: str) -> tuple[Path, dict[str, object]]:
    if not isinstance(arguments, Mapping | tuple | list | jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise TypeError(
            f"{said}, got {type(arguments).__name__}.\n"
            f"  cure: {name}x, an array; {name}(x, y), several; {name}{{'x': x}}, by keyword"
        )
    return arguments_of(arguments)
