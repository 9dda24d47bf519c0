"""From what a user gives for a quantizer to the proxy that a layer holds."""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from flax import nnx

from jqinject.inject import Binding, ExtendedInjector
from jqinject.nn.base.keywords import split_overrides
from jqinject.nn.base.slots import ACT, Slot, slots_of
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant.enums import ScalingPerOutputType, chooses

CHANNEL_SHAPE = "activation_channel_shape"


def make_proxy(
    layer: Any,
    slot: Slot,
    given: Any,
    overrides: Mapping[str, Any],
    rngs: nnx.Rngs | None,
    stack: tuple[int, ...] = (),
    channel_shape: tuple[int, ...] | None = None,
    offered: Mapping[str, Any] | None = None,
) -> Any:
    """The proxy for what was given: a new one for an injector, the same one for a proxy, None for None.

    A proxy to be shared is returned unchanged; `share` makes it serve the layer, once the layer holds it.

    Args:
        layer: the layer, which has its weights.
        slot: the place for the quantizer.
        given: an injector, a binding, a proxy or None.
        overrides: names declared anew.
        rngs: for quantizers that draw random numbers.
        stack: sizes of the leading axes that the layer is stacked along.
        channel_shape: the shape of a scale for each channel of what flows through the slot, if the layer knows it.
        offered: names that the layer declares, for an injector that asks for them and has not been given them.

    Raises:
        TypeError: what was given is not a quantizer, or is one of another kind; or overrides have nothing to act on.
        ValueError: a proxy to share has a scale for each of other channels.
    """
    where = f"{type(layer).__name__}({slot.name}=...)"
    if given is None or isinstance(given, QuantProxyFromInjector):
        _refuse_overrides(where, slot, given, overrides)
        if given is not None:
            _check_kind(where, slot, type(given), "a proxy")
            _check_channels(where, given, channel_shape)
        return given
    if not isinstance(given, Binding) and not (
        inspect.isclass(given) and issubclass(given, ExtendedInjector)
    ):
        raise TypeError(
            f"{where} takes an injector (a class that derives from ExtendedInjector), a proxy to share "
            f"(other_layer.{slot.name}) or None, got {_shown(given)}"
        )
    binding = given if isinstance(given, Binding) else Binding(given)
    if channel_shape is not None and _is_per_channel(binding.let(**overrides), layer):
        offered = {**(offered or {}), CHANNEL_SHAPE: channel_shape}
    named = binding.let(**overrides) if overrides else binding
    proxy_class = named.resolve("proxy_class") if named.declares("proxy_class") else slot.proxy_class
    _check_kind(where, slot, proxy_class, binding.base.__name__)
    called = (
        f"{type(layer).__name__}({slot.prefix}...)" if slot.prefix else f"{type(layer).__name__}(...)",
        slot.prefix,
    )
    make = partial(proxy_class, binding, layer, overrides=overrides, rngs=rngs, where=called, stack=stack)
    proxy = make(offered=offered)
    if "axis_name" in (offered or {}) and proxy.quantizes_activations and proxy.has_range() is None:
        # Nothing is kept that devices have to agree on, and no mode says where the tensor is whole.
        return make(offered={name: offer for name, offer in (offered or {}).items() if name != "axis_name"})
    return proxy


def hold_proxies(
    layer: Any,
    arguments: Mapping[str, Any],
    overrides: Mapping[str, Any],
    rngs: nnx.Rngs | None,
    *,
    slots: Sequence[Slot] | None = None,
    stack: tuple[int, ...] = (),
    channel_shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    offered: Mapping[str, Any] | None = None,
) -> None:
    """Make the proxies of a layer, or share those that were given, and let the layer hold them.

    Args:
        layer: a layer under construction, or a layer of Flax that was just declared to be one of ours.
        arguments: what the user gave for each slot; `act_quant` is another name of `input_quant`.
        overrides: the user's further keywords.
        rngs: for quantizers that draw random numbers.
        slots: its places for quantizers; None for all that its class declares.
        stack: sizes of the leading axes that the layer is stacked along.
        channel_shapes: slot of activations -> the shape of a scale for each channel, as far as the layer knows it.
        offered: names that a layer declares, an activation layer for its own quantizer alone; see `make_proxy`.

    Raises:
        TypeError: a quantizer for a slot that the layer does not have, or what `make_proxy` refuses.
    """
    slots = slots_of(type(layer)) if slots is None else slots
    chosen = _by_slot(type(layer).__name__, slots, arguments)
    by_slot = split_overrides(layer, slots, overrides)
    proxies = {
        slot: make_proxy(
            layer,
            slot,
            chosen[slot.name],
            by_slot[slot.name],
            rngs,
            stack,
            channel_shapes.get(slot.name),
            offered if slot is ACT or ACT not in slots else None,
        )
        for slot in slots
    }
    for slot, proxy in proxies.items():
        if proxy is not None:
            # Not `assign`: a layer that was one of Flax's has its attributes registered already.
            setattr(layer, slot.name, proxy)
    for slot in slots:
        share(layer, chosen[slot.name])


def _by_slot(layer: str, slots: Sequence[Slot], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What was given for each slot, under its first name."""
    chosen = {name: value for name, value in arguments.items() if value is not None}
    act_quant = None if ACT in slots else chosen.pop("act_quant", None)
    if act_quant is not None:
        if "input_quant" in chosen:
            raise TypeError(
                f"{layer}: act_quant and input_quant are two names of one argument; give one of them"
            )
        chosen["input_quant"] = act_quant
    names = [slot.name for slot in slots]
    for name in chosen:
        if name not in names:
            raise TypeError(f"{layer} has no {name}: it takes {', '.join(names)}")
    return {name: chosen.get(name) for name in names}


def share(layer: Any, given: Any) -> None:
    """Make a proxy that was given serve one more layer, which holds it now."""
    if isinstance(given, QuantProxyFromInjector):
        given.add_tracked_module(layer)


def _check_kind(where: str, slot: Slot, proxy_class: Any, name: str) -> None:
    if not (inspect.isclass(proxy_class) and issubclass(proxy_class, QuantProxyFromInjector)):
        raise TypeError(f"{where}: proxy_class has to be a class of proxies, got {_shown(proxy_class)}")
    if proxy_class.role not in (slot.proxy_class.role, QuantProxyFromInjector.role):
        raise TypeError(
            f"{where} quantizes {slot.what}, and {name} is not for these: its proxy is a {proxy_class.__name__}, "
            f"expected a {slot.proxy_class.__name__}"
        )


def _is_per_channel(binding: Binding, layer: Any) -> bool:
    per_output = "scaling_per_output"
    return binding.declares(per_output) and chooses(
        binding.resolve(per_output, module=layer), ScalingPerOutputType.CHANNEL
    )


def _check_channels(where: str, proxy: QuantProxyFromInjector, channel_shape: tuple[int, ...] | None) -> None:
    held = proxy.binding.overrides.get(CHANNEL_SHAPE)
    if None not in (held, channel_shape) and held != channel_shape:
        raise ValueError(
            f"{where}: the proxy has scales of shape {held}, one for each channel of the layer it was made for, and "
            f"here they would be {channel_shape}.\n  cure: an injector, for a quantizer of its own"
        )


def _refuse_overrides(where: str, slot: Slot, given: Any, overrides: Mapping[str, Any]) -> None:
    if overrides:
        names = ", ".join(repr(slot.prefix + name) for name in overrides)
        why = (
            "there is no quantizer"
            if given is None
            else "the quantizer is shared with another layer as it is"
        )
        cure = (
            f"give an injector: {slot.name}=..."
            if given is None
            else f"give an injector of its own, {slot.name}=..., or override where the proxy is first made"
        )
        raise TypeError(f"{where}: {names} would have no effect: {why}.\n  cure: {cure}")


def _shown(given: Any) -> str:
    return (
        f"the class {given.__name__}" if inspect.isclass(given) else f"{type(given).__name__} {given!r:.80}"
    )
