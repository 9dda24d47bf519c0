"""Quantizers of parameters that a model contracts by itself: one for each, however many contractions read it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from flax import nnx

from jqinject.core._protocols import groups_of
from jqinject.inject import Binding, DependencyError
from jqinject.model.walk import ModelIndex
from jqinject.nn.base.parameter_site import ParameterSite, PlannedParameter
from jqinject.nn.base.slots import WEIGHT, LayerFacts, Slot, binding_of, make_proxy
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import WeightUse, dotted
from jqinject.program.tracked_value import Path
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant import ScalingPerOutputType

#: The role of a scheme's own quantizers, which take any operand; as a parameter's they are quantizers of weights.
OPERAND = "operand"
OF_PARAMETER = replace(WEIGHT, also=(OPERAND,))
#: Contractions of rows and columns.
ROWS = ("dot_general", "einsum")


def uses_by_path(uses: Iterable[WeightUse]) -> dict[Path, list[WeightUse]]:
    """Return the uses of each parameter, by its path."""
    by_path: dict[Path, list[WeightUse]] = {}
    for use in uses:
        by_path.setdefault(use.weight_path, []).append(use)
    return by_path


def plan_parameters(uses: Iterable[WeightUse]) -> dict[str, PlannedParameter]:
    """The parameters that rules quantize, by their paths as text.

    Raises:
        ValueError: two contractions of one parameter have different quantizers, or leave no axis for scales.
    """
    planned = {}
    for path, own in uses_by_path(uses).items():
        quantizers = list(dict.fromkeys(use.quantizer for use in own if use.quantizer is not None))
        if len(quantizers) > 1:
            raise ValueError(
                f"{dotted(path)} has one payload, and rules give its uses different quantizers:\n{_listed(own)}\n"
                "  cure: one rule for the parameter's path, before those that tell its uses apart"
            )
        if quantizers:
            planned[dotted(path)] = _planned(path, own, quantizers[0])
    return planned


def _planned(path: Path, uses: list[WeightUse], quantizer: object) -> PlannedParameter:
    stacked = min(use.stacked for use in uses)
    # Rows are looked up whatever their scales vary along; alone they have one each.
    contracted = [use for use in uses if use.operation != "take"] or uses
    shared = frozenset().union(*(use.shared for use in contracted))
    ndim = len(uses[0].shape)
    summed_over_all = len(contracted) > 1 and ndim - stacked > 1 and len(shared) == ndim - stacked
    if summed_over_all and not _has_one_scale(quantizer):
        name = dotted(path)
        raise ValueError(
            f"{name} is summed over every axis by one use or another, so no axis is left for scales:\n"
            f"{_listed(uses)}\n"
            "  cure, before the rule that takes it:\n"
            f"    one scale for the tensor: Rule({name!r}, weight_quant=Int8WeightPerTensorFloat)\n"
            f"    all uses in float: Rule({name!r})\n"
            "  or in the model: a copy for one of the uses, in an nnx.Param of its own, which gets scales of its own"
        )
    free = frozenset.intersection(*(use.free for use in contracted)) - shared - {*range(stacked)}
    along, unshared = (tuple(sorted(axis - stacked for axis in axes)) for axes in (shared, free))
    rows = all(use.operation in ROWS and use.shared == shared for use in contracted)
    lies_last = along == tuple(range(ndim - stacked))[-len(along) :]
    # What is looked up stays where a look-up finds it.
    summed = along if rows and (contracted == uses or lies_last) else ()
    rounded_again = any(use.rounds_again for use in uses)
    return PlannedParameter(path, quantizer, stacked, along, unshared, summed, rounded_again)


def _has_one_scale(quantizer: object) -> bool:
    """Whether an injector declares one scale for the whole tensor."""
    binding = binding_of(quantizer)
    declarations = {"scaling_per_output_type": ScalingPerOutputType.TENSOR, "channelwise_axes": ()}
    return binding is not None and any(_said(binding, name) == value for name, value in declarations.items())


def _said(binding: Binding, name: str) -> object:
    try:
        return binding.resolve(name) if binding.declares(name) else None
    except DependencyError:  # made from what a layer says
        return None


def _listed(uses: Iterable[WeightUse]) -> str:
    return "\n".join(
        f"    {use.name or use.operation} ({use.operation}): {getattr(use.quantizer, '__name__', use.quantizer)}, "
        f"one scale along axes {sorted(use.shared)} of {use.shape}"
        for use in uses
    )


def tied_to_layers(index: ModelIndex, planned: Mapping[str, PlannedParameter]) -> tuple[Path, ...]:
    """The planned parameters that are the weight of a layer of ours, which quantizes them."""
    paths = (parameter.path for parameter in planned.values())
    holders = ((path, index.nodes.get(tuple(map(str, path[:-1])))) for path in paths)
    return tuple(
        path
        for path, layer in holders
        if isinstance(layer, QuantWeightLayer)
        and path[-1] == layer.weight_name
        and layer.weight_quant is not None
    )


def parameter_site(index: ModelIndex, parameter: PlannedParameter, rngs: nnx.Rngs | None) -> ParameterSite:
    """The site of a parameter, with its quantizer.

    Raises:
        TypeError: no injector of a weight quantizer; one that depends on the input; an override that has no effect.
    """
    name, quantizer = dotted(parameter.path), parameter.quantizer
    variable: Any = index.by_path[tuple(map(str, parameter.path))].variable
    site = ParameterSite(variable, parameter)
    if isinstance(quantizer, QuantProxyFromInjector):
        site.weight_quant = quantizer
        quantizer.add_tracked_module(site)
        return site
    proxy = proxy_of(
        site, OF_PARAMETER, quantizer, rngs, LayerFacts(site.weight_shape[: parameter.stacked]), name
    )
    site.weight_quant, base = proxy, proxy.binding.base.__name__
    if proxy.requires_quant_input:
        raise TypeError(
            f"{name}: {base} quantizes a weight for one quantized input, and a parameter that the "
            "model contracts by itself may have several.\n  cure: another weight quantizer, such as "
            "Int8WeightPerChannelFloat"
        )
    _check_groups(name, base, proxy.tensor_quant, site)
    return site


def proxy_of(
    holder: object, slot: Slot, quantizer: object, rngs: nnx.Rngs | None, facts: LayerFacts, name: str
) -> Any:
    """Return the proxy for a tensor of a program, each of whose overrides must count.

    Args:
        holder: of the tensor, with the facts of a layer.
        slot: with the kind of quantizers that fit.
        quantizer: an injector, or a binding of one.
        rngs: for quantizers that draw random numbers.
        facts: as of a layer.
        name: of the tensor.

    Raises:
        TypeError: it is not an injector, or is one for tensors of another role; an override that has no effect.
    """
    declared = binding_of(quantizer)
    if declared is None:
        raise TypeError(
            f"{name} takes an injector (a class that derives from ExtendedInjector), got {quantizer!r:.80}"
        )
    where = f"the {'weight ' if slot.of_parameter else ''}quantizer of {name}"
    return make_proxy(holder, slot, declared.base, declared.overrides, rngs, facts, where)


def _check_groups(name: str, declared: str, quantizer: object, site: ParameterSite) -> None:
    """Refuse groups that do not fill an axis, unless they are filled up.

    Raises:
        ValueError: names the parameter.
    """
    groups, view = groups_of(quantizer), getattr(quantizer, "input_view_impl", None)
    if groups is None or getattr(view, "group_padding", True):
        return
    shape, (size, dim) = tuple(site.weight_shape)[site.stacked :], groups
    length = shape[dim]
    if length % size:
        raise ValueError(
            f"{name}: groups of {size} do not fill axis {dim} of {shape}, {length} numbers.\n"
            f"  cure: before this rule, Rule({name!r}, weight_quant={declared}.let(group_size="
            f"{math.gcd(length, size)})); or group_padding = True, which fills up the last group with zeros"
        )
