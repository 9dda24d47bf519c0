"""What comes before the inputs of sites: transforms, as a part of the rules that quantize them, and quantizers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core.transforms import Chain, Sized, Transform, along
from jqinject.inject import Binding
from jqinject.model.quantizing.rules import COUNTERPARTS, Rule, slots_for, takes_layer
from jqinject.model.walk import ModelIndex
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import HELD, Call, OpQuantizers, find_sites
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant import NoneActQuant
from jqinject.quant_tensor import as_array, on_integers
from jqinject.recipes.stream.flat_program import ContractionSite, FlatProgram


@dataclass(frozen=True, eq=False)
class Online:
    """A transform that stays before the inputs of the sites of one parameter, whose weights are stored for it.

    Attributes:
        transform: with its numbers.
        module: path of the module that contracts the parameter.
    """

    transform: Transform
    module: str

    def fill(self, transform: Transform) -> None:
        """Give a transform that was made from the declaration the numbers of this one.

        Args:
            transform: of one layer, or of a stack of layers, which all get them.
        """
        if isinstance(transform, nnx.Module):
            for source, target in zip(_variables(self.transform), _variables(transform), strict=True):
                target.set_value(jnp.broadcast_to(source.get_value(), target.get_value().shape))

    def rule(self, name: str, model: ModelIndex, rules: Sequence[Rule]) -> Rule:
        """The rule for a parameter: that which takes it, with the transform before the input's quantizer.

        Args:
            name: path of the parameter.
            model: the float model.
            rules: for it; the first that takes it counts.

        Raises:
            ValueError: that rule cannot carry a transform.
        """
        took, path = rule_of(name, self.module, model, rules)
        why = _why_not(took)
        if why:
            raise ValueError(f"{name}: no transform can be kept before its input: {why}")
        quantizers = {"input_quant": declared_quantizer(took, "input_quant")}
        return rule_with_transform(took, re.escape(path), quantizers, _declared(self.transform, name))


def declared_quantizer(rule: Rule, *slots: str) -> Binding | None:
    """What a rule declares for the first of some slots that it has, with the rule's overrides; None if absent."""
    for slot in slots:
        quantizer = rule.quantizer(slot)
        if quantizer is not None:
            prefix = slot.removesuffix("quant")
            own = {name.removeprefix(prefix): x for name, x in rule.overrides if name.startswith(prefix)}
            return (quantizer if isinstance(quantizer, Binding) else Binding(quantizer)).let(**own)
    return None


def rule_with_transform(
    rule: Rule,
    path: str,
    quantizers: Mapping[str, Binding | None],
    transform: Transform | Sized,
    op: str | None = None,
) -> Rule:
    """A rule for one path with a transform before the quantizers of some slots; other inputs have none.

    Args:
        rule: as it is.
        path: a regular expression.
        quantizers: slot -> the quantizer declared for it, None for a transform alone.
        transform: before all of them.
        op: see `rule_like`.
    """
    slots = {
        slot: (Binding(NoneActQuant) if own is None else own).let(pre_transform=transform)
        for slot, own in quantizers.items()
    }
    taken = ("input_", *(slot.removesuffix("quant") for slot in slots))
    overrides = {name: x for name, x in rule.overrides if not name.startswith(taken)}
    return rule_like(rule, path, {"input_quant": None, **slots}, overrides, op)


def rule_like(
    rule: Rule, path: str, quantizers: Mapping[str, Any], overrides: Mapping[str, Any], op: Any = None
) -> Rule:
    """A rule for one path with other quantizers in some slots, and other overrides.

    Args:
        rule: as it is.
        path: a regular expression.
        quantizers: slot -> quantizer, None for an empty slot.
        overrides: all of them.
        op: the operations; those of the rule by default.
    """
    slots: dict[str, Any] = {**dict(rule.quantizers), **quantizers}
    return Rule(path, op=op or rule.op, contraction=rule.contraction, **slots, **overrides)


NO_RULE = Rule()
"""It quantizes nothing."""


def rule_of(name: str, module: str, model: ModelIndex, rules: Sequence[Rule]) -> tuple[Rule, str]:
    """The first rule that takes a parameter, or `NO_RULE`, and the path by which rules name it.

    Args:
        name: path of the parameter.
        module: that of the module that contracts it.
        model: the float model.
        rules: for it.
    """
    holder, node = _holder_of(name, model)
    if type(node) in COUNTERPARTS:
        return next((rule for rule in rules if takes_layer(rule, node, holder)), NO_RULE), holder
    paths = (name, holder, module)
    took = (rule for rule in rules if rule.takes_weights and any(map(rule.matches, paths)))
    return next(took, NO_RULE), name


def _holder_of(name: str, model: ModelIndex) -> tuple[str, object]:
    holder = name.rpartition(".")[0]
    return holder, next((node for path, node in model.places if ".".join(path) == holder), None)


def quantizes_weight(site: ContractionSite, model: ModelIndex, rules: Sequence[Rule]) -> bool:
    """Whether a rule quantizes the weight of a site.

    Args:
        site: of the float model's program.
        model: the float model.
        rules: for it.
    """
    took, _ = rule_of(site.path, site.module, model, rules)
    return took.configures or took.quantizer("weight_quant") is not None


def _why_not(rule: Rule) -> str:
    """Why a rule can carry no transform; empty if it can."""
    if rule.configures:
        return "a scheme quantizes it"
    if isinstance(rule.quantizer("input_quant"), nnx.Module):
        return "its input shares another layer's quantizer"
    return ""


def why_not_online(
    model: ModelIndex, rules: Sequence[Rule], flat: FlatProgram, sites: Sequence[ContractionSite]
) -> str:
    """Why no transform can stay before the inputs of the sites of a parameter; empty if one can.

    Args:
        model: the float model.
        rules: for it.
        flat: its program.
        sites: those of the parameter.
    """
    first = sites[0]
    took, _ = rule_of(first.path, first.module, model, rules)
    _, holder = _holder_of(first.path, model)
    if type(holder) in COUNTERPARTS and "input_quant" not in slots_for(holder):
        return f"a {type(holder).__name__} has no quantizer of its input"
    convolution = first.operation == "conv_general_dilated"
    if convolution and any(site.matrices.weight.sizes[0] > 1 for site in sites):
        return "the convolution sees its channels in groups"
    why = _why_not(took)
    if why:
        return why
    reader = flat.other_use(flat.slot_of[first.path], {site.step for site in sites})
    return "" if reader is None else f"{reader.name}{reader.where} reads the parameter too"


def online_of(site: ContractionSite, transform: Transform, before: Online | None) -> Online:
    """A transform before the inputs of a site, after one that may be there already."""
    return Online(transform if before is None else Chain((before.transform, transform)), site.module)


def transformed_input(online: Mapping[str, Online], site: ContractionSite, x: jax.Array) -> jax.Array:
    """The other operand of a site as it is contracted.

    Args:
        online: path of a parameter -> the transform before its sites.
        site: of the program.
        x: the operand.
    """
    before = online.get(site.path)
    return x if before is None else along(before.transform, x, site.matrices.input_axes)


def stored_for(sites: Sequence[ContractionSite], transform: Transform) -> Callable[[jax.Array], jax.Array]:
    """From a parameter, float32, to what is stored for a transform before the inputs of its sites.

    Args:
        sites: all that contract it.
        transform: of their inputs.
    """

    def change(value: jax.Array) -> jax.Array:
        stored = np.zeros(value.size, bool)
        for site in sites:
            if site.places.all_in(stored):  # a parameter that is contracted twice is stored once
                continue
            site.places.mark(stored)
            matrices = site.weights(value)
            windows = matrices.reshape(*matrices.shape[:2], site.matrices.channels, -1).swapaxes(2, 3)
            dual = transform.dual(windows).swapaxes(2, 3).reshape(matrices.shape)
            value = site.places.put(value, site.as_operand(dual))
        return value

    return change


def _declared(transform: Transform, label: str) -> Transform | Sized:
    """What a quantizer declares for a transform: a value, without the numbers, which a label tells from others."""
    if not isinstance(transform, nnx.Module):
        return transform
    if isinstance(transform, Chain):
        parts: Any = (_declared(part, f"{label}[{place}]") for place, part in enumerate(transform.parts))
        return Chain(tuple(parts))
    return Sized(type(transform), vars(transform)["channels"], label)


def _variables(node: Transform) -> list[nnx.Variable[jax.Array]]:
    pairs = [(str(path), x) for path, x in nnx.iter_graph(node, graph=True) if isinstance(x, nnx.Variable)]
    return [variable for _, variable in sorted(pairs, key=lambda pair: pair[0])]


class InputQuantizers:
    """The quantizers of the inputs of sites, in a quantized model.

    Args:
        model: quantized, in evaluation mode.
        call: of it.
        online: path of a parameter -> the transform before the inputs of its sites.
    """

    def __init__(self, model: nnx.Module, call: Call, online: Mapping[str, Online] = {}) -> None:
        self._online, self._shared = online, _shared_names(model, call)
        places = ModelIndex(model).places
        self._layers = {".".join(path): node for path, node in places if isinstance(node, QuantWeightLayer)}
        self._proxies: dict[str, Any] = {}
        self._stacks: dict[str, int] = {}
        for _, node in places:
            if isinstance(node, OpQuantizers):
                self._proxies |= dict(node.held.items())
                self._stacks |= dict(node.stacks)

    def of(self, site: ContractionSite) -> Any:
        """The quantizer of a site's input, of a stack that of the layer in its turn; None if it has none."""
        proxy, depth = self._proxy_and_depth(site)
        turn = site.turn[:depth]
        if proxy is None or not turn:
            return proxy
        graphdef, state = nnx.split(proxy, graph=True)
        return nnx.merge(graphdef, jax.tree.map(lambda stacked: stacked[turn], state))

    def _proxy_and_depth(self, site: ContractionSite) -> tuple[Any, int]:
        """The quantizer that the model has for a site's input, and how many axes it is stacked along."""
        holder, _, name = site.path.rpartition(".")
        layer = self._layers.get(holder)
        if layer is not None and layer.weight_name == name:
            return layer.input_quant, len(layer.weight_shape) - layer.weight_ndim
        name = self._shared.get(site.operand.rpartition("_")[0], site.operand)
        return self._proxies.get(name), self._stacks.get(name, 0)

    def transform_of(self, site: ContractionSite) -> Transform | None:
        """The transform that the model has before a site's input; None if absent.

        Args:
            site: of the model.
        """
        proxy, _ = self._proxy_and_depth(site)
        return None if proxy is None else proxy.pre_transform

    def is_on(self, site: ContractionSite) -> bool:
        """Whether a site's input is quantized."""
        proxy = self.of(site)
        return proxy is not None and (not isinstance(proxy, QuantProxyFromInjector) or proxy.is_quant_enabled)

    def integers(self, site: ContractionSite, x: jax.Array) -> tuple[int, bool] | None:
        """Bits and sign of the integers that a site's input becomes; None if it becomes none.

        Args:
            site: of the model.
            x: an input.
        """
        if not self.is_on(site):
            return None
        quantized = self.of(site)(x)
        if not on_integers(quantized) or isinstance(quantized.bit_width, jax.Array):
            return None
        return quantized.bit_width, quantized.signed

    def quantize(self, site: ContractionSite, x: jax.Array) -> jax.Array:
        """A site's input as the quantized model sees it, in float."""
        proxy = self.of(site)
        if proxy is not None and (self.is_on(site) or proxy.pre_transform is not None):
            return jnp.asarray(as_array(proxy(x)))
        return transformed_input(self._online, site, x)

    def bits(self, site: ContractionSite) -> int | None:
        """How many bits a number of a site's input has; None if it is not quantized."""
        proxy = self.of(site)
        width = None if proxy is None else proxy.bit_width()
        return None if width is None else int(np.max(np.asarray(width)))


def _shared_names(model: nnx.Module, call: Call) -> dict[str, str]:
    """The name of the quantizer of each contraction's other operand, by the contraction's name in its method.

    An input that several contractions read goes through one quantizer, which the first of them names.

    Args:
        model: quantized.
        call: of it.
    """
    quantizers = vars(model).get(HELD)
    if not isinstance(quantizers, OpQuantizers) or not len(quantizers.held):
        return {}
    uses = find_sites(model, quantizers.policy, [call]).uses
    return {use.name.removeprefix(f"{call.name}:"): use.beside for use in uses if use.beside}
