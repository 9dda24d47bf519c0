"""Transforms that stay before the inputs of sites: as a part of the rules that quantize them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jqinject.core.transforms import Chain, Sized, Transform, along
from jqinject.inject import Binding
from jqinject.model.quantizing.rules import Rule, counterpart_of, slots_for, takes_layer
from jqinject.model.walk import ModelIndex
from jqinject.program import dotted
from jqinject.quant import NoneActQuant
from jqinject.recipes.stream.flat_program import FlatProgram, FlatStep, Slot
from jqinject.recipes.stream.matrices import ConvolutionMatrices, RaggedMatrices
from jqinject.recipes.stream.site import CASTS, MOVES, ContractionSite, ProgramSites

Path = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Online:
    """A transform that stays before the inputs of the sites of one parameter, whose weights are stored for it.

    Attributes:
        transform: with its numbers.
        module: path of the module that contracts the parameter.
    """

    transform: Transform
    module: str

    def declared(self, label: str) -> Any:
        """What a quantizer declares for such a transform: a value, without the numbers.

        Args:
            label: tells it from transforms with other numbers.
        """
        return _declared(self.transform, label)

    def fill(self, held: Transform) -> None:
        """Give a transform that was made from the declaration the numbers of this one.

        Args:
            held: of one layer, or of a stack of layers, which all get them.
        """
        if isinstance(held, nnx.Module):
            _fill(self.transform, held)

    def rule(self, name: str, model: ModelIndex, rules: Sequence[Rule]) -> Rule:
        """The rule for a parameter: that which takes it, with the transform before the input's quantizer.

        Args:
            name: path of the parameter.
            model: the float model.
            rules: given for it; the first that takes it counts.

        Raises:
            ValueError: that rule cannot carry a transform.
        """
        took, path = rule_of(name, self.module, model, rules)
        why = why_not(took)
        if why:
            raise ValueError(f"{name}: no transform can be kept before its input: {why}")
        given: dict[str, Any] = {} if took is None else dict(took.quantizers)
        overrides = {} if took is None else dict(took.overrides)
        own = {
            key.removeprefix("input_"): overrides.pop(key) for key in [*overrides] if key.startswith("input_")
        }
        wanted = given.get("input_quant", NoneActQuant)
        binding = wanted if isinstance(wanted, Binding) else Binding(wanted)
        given["input_quant"] = binding.let(**own, pre_transform=self.declared(name))
        contraction = "auto" if took is None else took.contraction
        return Rule(
            re.escape(path),
            op=None if took is None else took.op,
            contraction=contraction,
            **given,
            **overrides,
        )


def rule_of(name: str, module: str, model: ModelIndex, rules: Sequence[Rule]) -> tuple[Rule | None, str]:
    """The first rule that takes a parameter, or None, and the path by which rules name it.

    Args:
        name: path of the parameter.
        module: that of the module that contracts it.
        model: the float model.
        rules: given for it.
    """
    holder = name.rpartition(".")[0]
    node = next((node for path, node in model.places if ".".join(path) == holder), None)
    if counterpart_of(node) is not None:
        return next((rule for rule in rules if takes_layer(rule, node, holder)), None), holder
    paths = (name, holder, module)
    return next((rule for rule in rules if rule.takes_weights and any(map(rule.matches, paths))), None), name


def quantizes_weight(site: ContractionSite, model: ModelIndex, rules: Sequence[Rule]) -> bool:
    """Whether a rule quantizes the weight of a site.

    Args:
        site: of the float model's program.
        model: the float model.
        rules: given for it.
    """
    took, _ = rule_of(dotted(site.path), _module_of(site), model, rules)
    return took is not None and (took.configures or took.quantizer("weight_quant") is not None)


def why_not(rule: Rule | None) -> str:
    """Why a rule can carry no transform; empty if it can."""
    if rule is None:
        return ""
    if rule.configures:
        return "a scheme quantizes it"
    if isinstance(rule.quantizer("input_quant"), nnx.Module):
        return "its input shares another layer's quantizer"
    return ""


def why_not_online(
    model: ModelIndex,
    rules: Sequence[Rule],
    program: FlatProgram,
    found: ProgramSites,
    sites: Sequence[ContractionSite],
    slot: Slot,
) -> str:
    """Why no transform can stay before the inputs of the sites of a parameter; empty if one can.

    Args:
        model: the float model.
        rules: given for it.
        program: its program.
        found: the sites of that.
        sites: those of the parameter.
        slot: of the parameter.
    """
    name = dotted(sites[0].path)
    took, _ = rule_of(name, _module_of(sites[0]), model, rules)
    holder = next((node for path, node in model.places if ".".join(path) == name.rpartition(".")[0]), None)
    counterpart = counterpart_of(holder)
    if counterpart is not None and "input_quant" not in slots_for(holder, counterpart, named=False):
        return f"a {type(holder).__name__} has no quantizer of its input"
    if any(isinstance(site.matrices, ConvolutionMatrices) and site.matrices.groups > 1 for site in sites):
        return "the convolution sees its channels in groups"
    if any(site.place != 0 and site.operation != "dot_general" and site.place != 1 for site in sites):
        return f"it is the image of a {sites[0].operation}"
    known = {site.step for site in sites}
    return why_not(took) or _other_use(program, found, slot, known)


def _other_use(program: FlatProgram, found: ProgramSites, slot: Slot, known: set[int]) -> str:
    """Who else reads a parameter's numbers; empty if no one does."""
    owned = {slot}
    for index, step in enumerate(program.steps):
        if index in known or not owned & {*step.inputs}:
            continue
        if step.name in (*CASTS, *MOVES) and step.outputs[0] in found.fixed and step.inputs[0] in owned:
            owned.update(step.outputs)
        else:
            return f"{step.name}{_at(step)} reads the parameter too"
    return ""


def _at(step: FlatStep) -> str:
    return f" in {step.path}" if step.path else ""


def _module_of(site: ContractionSite) -> str:
    return site.operand.rpartition(".")[0]


def online_of(site: ContractionSite, transform: Transform, before: Online | None) -> Online:
    """A transform before the inputs of a site, after one that may be there already."""
    whole = transform if before is None else Chain((before.transform, transform))
    return Online(whole, _module_of(site))


def transformed_input(online: Mapping[str, Online], site: ContractionSite, x: jax.Array) -> jax.Array:
    """The other operand of a site as it is contracted.

    Args:
        online: path of a parameter -> the transform before its sites.
        site: of the program.
        x: the operand.
    """
    found = online.get(dotted(site.path))
    return x if found is None else along(found.transform, x, input_axes(site))


def input_axes(site: ContractionSite) -> tuple[int, ...]:
    """The axes of a site's other operand that a transform takes, in the order of the weight's columns."""
    matrices = site.matrices
    if isinstance(matrices, ConvolutionMatrices):
        return (dict(matrices.window)["dimension_numbers"].lhs_spec[1],)
    if isinstance(matrices, RaggedMatrices):
        return (1,)
    return matrices.other.axes[sum(matrices.other.split) :]


def stored_for(sites: Sequence[ContractionSite], transform: Transform) -> Callable[[Any], Any]:
    """From a parameter, float32, to what is stored for a transform before the inputs of its sites.

    Args:
        sites: all that contract it.
        transform: of their inputs.
    """
    # A parameter that is contracted twice is stored once.
    distinct = {
        (
            site.places.start,
            site.places.size,
            None if site.places.each is None else site.places.each.tobytes(),
        ): site
        for site in sites
    }

    def change(value: Any) -> Any:
        for site in distinct.values():
            matrices = site.weights(value)
            if isinstance(site.matrices, ConvolutionMatrices):
                channels = _channels(site)
                cut = matrices.reshape(*matrices.shape[:2], channels, -1).swapaxes(2, 3)
                made = transform.dual(cut).swapaxes(2, 3).reshape(matrices.shape)
            else:
                made = transform.dual(matrices)
            value = site.places.put(value, site.as_operand(made))
        return value

    return change


def columns_of(site: ContractionSite) -> int:
    """How many channels a site contracts: of a convolution, those of its image."""
    if isinstance(site.matrices, ConvolutionMatrices):
        return _channels(site)
    _, rows = site.matrices.weight.split
    stack = site.matrices.weight.split[0]
    total = 1
    for size in site.matrices.weight.shape[stack + rows :]:
        total *= size
    return total


def _channels(site: ContractionSite) -> int:
    return site.matrices.weight.shape[1]


def _declared(transform: Transform, label: str) -> Any:
    if not isinstance(transform, nnx.Module):
        return transform
    if isinstance(transform, Chain):
        return Chain(
            tuple(_declared(part, f"{label}[{place}]") for place, part in enumerate(transform.parts))
        )
    return Sized(type(transform), vars(transform)["channels"], label)


def _fill(source: Transform, held: Transform) -> None:
    for (_, one), (_, other) in zip(_variables(source), _variables(held), strict=True):
        shape = other.get_value().shape
        other.set_value(jax.numpy.broadcast_to(one.get_value(), shape))


def _variables(node: Any) -> list[tuple[Any, Any]]:
    found = nnx.iter_graph(node, graph=True)
    return sorted(
        ((path, one) for path, one in found if isinstance(one, nnx.Variable)), key=lambda pair: str(pair[0])
    )
