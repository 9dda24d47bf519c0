"""What comes before the inputs of sites: transforms, as a part of the rules that quantize them, and quantizers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core.transforms import Sized, Transform, along
from jqinject.model.quantizing.rules import COUNTERPARTS, Rule, takes_layer, weight_rule
from jqinject.model.walk import ModelIndex
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import HELD, Call, OpQuantizers, find_sites
from jqinject.program.operations import operand_axes
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant import NoneActQuant
from jqinject.quant_tensor import as_array, on_integers
from jqinject.recipes.stream.flat_program import ContractionSite


@dataclass(frozen=True, eq=False)
class Online:
    """A transform that stays before the inputs of the sites of one parameter, whose weights are stored for it.

    Attributes:
        transform: with its numbers.
        channels: how many it transforms.
        module: path of the module that contracts the parameter.
    """

    transform: Transform = field(repr=False)
    channels: int
    module: str

    def __call__(self, channels: int) -> Transform:
        """A transform with the numbers of this one: the `kind` of a `Sized`, which quantizers declare."""
        return nnx.clone(self.transform, graph=True)

    def rule(self, name: str, model: ModelIndex, rules: Sequence[Rule]) -> Rule:
        """The rule for a parameter: that which takes it, with the transform before the input's quantizer.

        Args:
            name: path of the parameter.
            model: the float model.
            rules: for it; the first that takes it counts.
        """
        took, path, _ = rule_of(name, self.module, model, rules)
        with_numbers = isinstance(self.transform, nnx.Module)
        declared = Sized(self, self.channels) if with_numbers else self.transform
        return rule_with_transform(took, path, {"input_quant": took.declared("input_quant")}, declared)


def rule_with_transform(
    rule: Rule, path: str, quantizers: Mapping[str, Any], transform: Transform | Sized, op: str | None = None
) -> Rule:
    """A rule for one path with a transform before the quantizers of some slots; other inputs have none.

    Args:
        rule: as it is.
        path: that of a parameter, a layer or an operation.
        quantizers: slot -> the quantizer declared for it, None for a transform alone.
        transform: before all of them.
        op: the operation; those of the rule by default.
    """
    slots: dict[str, Any] = {slot: rule.declared(slot) for slot, _ in rule.quantizers} | {"input_quant": None}
    for slot, quantizer in quantizers.items():
        slots[slot] = (quantizer or NoneActQuant).let(pre_transform=transform)
    return Rule(re.escape(path), op=op or rule.op, contraction=rule.contraction, **slots)


#: It quantizes nothing.
NO_RULE = Rule()


def rule_of(
    name: str, module: str, model: ModelIndex, rules: Sequence[Rule]
) -> tuple[Rule, str, object | None]:
    """Return the first rule that takes a parameter, or `NO_RULE`; the path by which rules name it; what holds it.

    Args:
        name: path of the parameter.
        module: that of the module that contracts it.
        model: the float model.
        rules: for it.
    """
    holder = name.rpartition(".")[0]
    node = next((node for path, node in model.places if ".".join(path) == holder), None)
    if type(node) in COUNTERPARTS:
        return next((rule for rule in rules if takes_layer(rule, node, holder)), NO_RULE), holder, node
    return weight_rule(rules, name, holder, module) or NO_RULE, name, node


def stored(sites: Sequence[ContractionSite], transform: Transform, value: jax.Array) -> jax.Array:
    """Return what is stored of a parameter for a transform before the inputs of its sites.

    Args:
        sites: all that contract it.
        transform: of their inputs.
        value: the parameter, float32.
    """
    taken = np.zeros(value.size, bool)
    for site in sites:
        if site.places.mark(taken):  # a parameter that is contracted twice is stored once
            axes = operand_axes(site.step.equation)[site.place].summed
            value = site.places.put(value, along(transform.dual, site.places.taken(value), axes))
    return value


class InputQuantizers:
    """The quantizers of the inputs of sites, in a quantized model.

    Args:
        model: quantized, in evaluation mode.
        call: of it.
    """

    def __init__(self, model: nnx.Module, call: Call) -> None:
        self._shared = _shared_names(model, call)
        # By the path of a layer's weight, or the name of an operand: the quantizer, and how deep it is stacked.
        self._inputs: dict[str, tuple[Any, int]] = {}
        for path, node in ModelIndex(model).places:
            if isinstance(node, QuantWeightLayer):
                depth = len(node.weight_shape) - node.weight_ndim
                self._inputs[".".join((*path, node.weight_name))] = node.input_quant, depth
            elif isinstance(node, OpQuantizers):
                stacks = dict(node.stacks)
                self._inputs |= {name: (x, stacks.get(name, 0)) for name, x in node.held.items()}

    def of(self, site: ContractionSite) -> Any:
        """The quantizer of a site's input, of a stack that of the layer in its turn; None if it has none."""
        name = self._shared.get(site.step.site, "")
        proxy, depth = self._inputs.get(site.path) or self._inputs.get(name, (None, 0))
        turn = site.step.turn[:depth]
        if proxy is None or not turn:
            return proxy
        graphdef, state = nnx.split(proxy, graph=True)
        return nnx.merge(graphdef, jax.tree.map(lambda stacked: stacked[turn], state))

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
        quantized = self.of(site)(x) if self.is_on(site) else x
        if not on_integers(quantized) or isinstance(quantized.bit_width, jax.Array):
            return None
        return quantized.bit_width, quantized.signed

    def quantize(self, site: ContractionSite, x: jax.Array) -> jax.Array:
        """A site's input as the quantized model sees it, in float."""
        proxy = self.of(site)
        return x if proxy is None else _quantized(*nnx.split(proxy, graph=True), x)

    def bits(self, site: ContractionSite) -> int | None:
        """How many bits a number of a site's input has; None if it is not quantized."""
        proxy = self.of(site)
        width = None if proxy is None else proxy.bit_width()
        return None if width is None else int(np.max(np.asarray(width)))


@partial(jax.jit, static_argnums=0)
def _quantized(
    quantizer: nnx.GraphDef[QuantProxyFromInjector], state: nnx.State[str, object], x: jax.Array
) -> jax.Array:
    """A tensor through a quantizer, in float: one program, where each operation would be compiled singly."""
    return jnp.asarray(as_array(nnx.merge(quantizer, state)(x)))


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
