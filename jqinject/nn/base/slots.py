"""The places for quantizers on a layer, as attributes that know their layer, and how a constructor fills them.

A layer class declares its slots as class attributes, `weight_quant: Any = WEIGHT`: the declaration says what the
attribute, the keyword and the prefix of overrides are called, which proxies fit, and which quantizer is the default. A
constructor calls `_init_layer`, which makes the layer of Flax, then fills the slots from the user's keywords.
"""

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, NoReturn

import jax
from flax import nnx

from jqinject.core.flax_internals import note_child
from jqinject.inject import Binding, ExtendedInjector, errors
from jqinject.proxy import (
    ActQuantProxyFromInjector,
    BiasQuantProxyFromInjector,
    GradQuantProxyFromInjector,
    IntegerFormat,
    QuantProxyFromInjector,
    TruncQuantProxyFromInjector,
    WeightQuantProxyFromInjector,
    complete,
    links_of,
)
from jqinject.quant import QuantizerLike, enums
from jqinject.quant_tensor import on_integers


class LayerParameters(NamedTuple):
    """What a weight's or bias's proxy may be asked about: it stays when the layer is gone.

    Attributes:
        weight, bias: Variables, or None.
        input_quant: the proxy of the input, or None.
    """

    weight: Any
    bias: Any
    input_quant: Any

    def input_format(self) -> IntegerFormat | None:
        """Of the quantized input, as far as `input_quant` says it."""
        return input_format(self)


def check_input_for_weight(layer: Any) -> None:
    """Refuse a weight quantizer that reads the input's format where no input is quantized, or not to integers.

    Args:
        layer: a layer that holds its quantizers.

    Raises:
        TypeError: the input is not quantized to integers.
        ValueError: the layer has no quantized input, or it is too wide for the accumulator.
    """
    weight_quant, input_quant = layer.weight_quant, layer.input_quant
    if weight_quant is None or not weight_quant.is_quant_enabled or not weight_quant.requires_quant_input:
        return
    if type(layer).input_quant is None:
        raise ValueError(
            f"{type(layer).__name__}: {weight_quant.binding.base.__name__} quantizes the weight for the integers that "
            "it is multiplied with, and this layer has no quantized input.\n  cure: another weight quantizer, such as "
            "Int8WeightPerChannelFloat"
        )
    if input_quant is not None and input_quant.is_quant_enabled:
        weight_quant.check_input(_sample(input_quant))


def warn_of_cut_groups(proxy: QuantProxyFromInjector, layer: Any, where: str) -> None:
    """Warn if groups of a weight end with an axis although the contraction sums over another one too.

    Args:
        proxy: of the weight.
        layer: the layer.
        where: what the user called.
    """
    summed = getattr(layer, "summed_axes", ())
    size, dim = proxy.quant_metadata.group_size, proxy.quant_metadata.group_dim
    # Groups without padding are refused where they do not fill the axis.
    padded = getattr(getattr(proxy.tensor_quant, "input_view_impl", None), "group_padding", True)
    if size is None or dim is None or len(summed) < 2 or not padded:
        return
    shape = tuple(layer.weight_shape)[-layer.weight_ndim :]
    axis = dim % len(shape)
    last = shape[axis] % size
    if axis in summed and last:
        which = "groups of" if shape[axis] < size else "the last group of each row has"
        warnings.warn(
            f"{where}: {proxy.binding.base.__name__} declares groups of {size}, and axis "
            f"{axis} of {shape} ends before: {which} {last}, although the contraction sums over axes {summed}.\n"
            f"  cure: group_size={math.gcd(shape[axis], size)}; for groups across these axes, a weight that has "
            "them as one axis",
            UserWarning,
            stacklevel=2,
        )


def input_format(layer: Any) -> IntegerFormat | None:
    """The format of a layer's quantized input, as far as its `input_quant` says it; None without one."""
    proxy = layer.input_quant
    sample = _sample(proxy) if proxy is not None and proxy.is_quant_enabled else None
    return IntegerFormat(sample.bit_width, sample.signed) if on_integers(sample) else None


def _sample(proxy: QuantProxyFromInjector) -> object:
    """One quantized 0, of which bits and sign are read; only traced if bits are static, so that nothing runs."""
    traced = jax.eval_shape(proxy.sample)
    static = not on_integers(traced) or isinstance(traced.bit_width, int)
    return traced if static else proxy.sample()


@dataclass(frozen=True)
class Slot:
    """One place for a quantizer on a layer, and the attribute that holds its proxy.

    The proxy stands in `vars(layer)`, where NNX looks for children; read through the slot, it knows its layer. Without
    one the attribute is None. A subclass without the slot declares `input_quant = None`.

    A read of a proxy all of whose layers are known changes nothing. It links the layer otherwise, as a copy that NNX
    made has to be seen once (`jqinject.proxy.answers`).

    Attributes:
        name: the attribute, as in `weight_quant`.
        prefix: what overrides for it start with, as in `weight_`; empty for an activation layer's own quantizer.
        proxy_class: the proxy of injectors that name none.
        what: what it quantizes, for error texts.
        of_parameter: whether that is the weight or bias, which the proxy may be asked about after its layer is gone.
        argument: the argument of the layer; if it is not given, it is called as the attribute.
        default: the quantizer without that argument.
        also: other roles of quantizers that fit, by `proxy_class`.
        annotation: the type of the argument.
    """

    name: str
    prefix: str
    proxy_class: type[QuantProxyFromInjector]
    what: str
    of_parameter: bool = False
    argument: str = ""
    default: QuantizerLike = field(default=None, compare=False)
    also: tuple[str, ...] = ()
    annotation: ClassVar[str] = "QuantizerLike"

    def __post_init__(self) -> None:
        object.__setattr__(self, "argument", self.argument or self.name)

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        if layer is None:
            return self
        attributes = vars(layer)
        proxy = attributes.get(self.name)
        if isinstance(proxy, QuantProxyFromInjector):
            links = links_of(proxy)
            if links is None or links.layers[0]() is not layer:
                links = complete(proxy, layer)
            if self.of_parameter and links.layers[0]() is layer:
                weight = attributes.get("master", attributes.get(layer.weight_name))
                links.parameters = LayerParameters(
                    weight, attributes.get("bias"), attributes.get("input_quant")
                )
        return proxy

    def __set__(self, layer: Any, proxy: Any) -> None:
        vars(layer)[self.name] = proxy
        note_child(layer, self.name, proxy)

    def __delete__(self, layer: object) -> None:
        if self.name not in vars(layer):
            raise AttributeError(f"{type(layer).__name__} holds no {self.name}")
        del vars(layer)[self.name]

    def of(self, name: str) -> "Slot":
        """Another slot that is filled from the same argument."""
        return replace(self, name=name)

    def by_default(self, quantizer: QuantizerLike) -> "Slot":
        """The slot of a layer that has this quantizer unless its user gives another."""
        return replace(self, default=quantizer)


class LayerFacts(NamedTuple):
    """What a layer knows of its tensors when its quantizers are made.

    Attributes:
        stack: sizes of the leading axes that the layer is stacked along.
        channel_shapes: slot of activations -> the shape of a scale for each channel, as far as it is known.
        offered: slot -> names that the layer declares, for an injector that asks for them and has not been given them.
        is_mapped: whether every call is within the mapped axes that are offered, also in evaluation.
    """

    stack: tuple[int, ...] = ()
    channel_shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    offered: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    is_mapped: bool = False


class Option(NamedTuple):
    """An argument of a layer that is no quantizer.

    Attributes:
        argument: its name.
        annotation: its type.
        default: what it is if it is not given.
    """

    argument: str
    annotation: str
    default: Any = None


RETURN = Option("return_quant_tensor", "bool", False)
ACT_INPUT = Option("act_quant", "QuantizerLike")  # another name of `input_quant`


def act_slot(prefix: str) -> Slot:
    """The place for a quantizer of activations whose overrides start with `prefix`."""
    return Slot(f"{prefix}quant", prefix, ActQuantProxyFromInjector, "activations")


WEIGHT = Slot("weight_quant", "weight_", WeightQuantProxyFromInjector, "weights", of_parameter=True)
BIAS = Slot("bias_quant", "bias_", BiasQuantProxyFromInjector, "biases", of_parameter=True)
INPUT, OUTPUT = act_slot("input_"), act_slot("output_")
GRAD = Slot("grad_quant", "grad_", GradQuantProxyFromInjector, "gradients")
TRUNC = Slot("trunc_quant", "", TruncQuantProxyFromInjector, "accumulators")
ACT = Slot("act_quant", "", ActQuantProxyFromInjector, "activations")


@functools.cache
def slots_of(layer: type) -> tuple[Slot, ...]:
    """The slots that a class of layers declares, those of its bases first, each in the order of its declaration."""
    bodies = (vars(cls) for cls in reversed(layer.__mro__))
    names = dict.fromkeys(name for body in bodies for name in body if isinstance(body[name], Slot))
    declared = (getattr(layer, name) for name in names)
    return tuple(slot for slot in declared if isinstance(slot, Slot))


def split_overrides(
    layer: object, slots: Sequence[Slot], overrides: Mapping[str, object]
) -> dict[str, dict[str, Any]]:
    """Overrides by the argument whose quantizer they are for, without their prefixes.

    Raises:
        TypeError: a keyword that starts with no prefix of the layer; names the nearest argument.
    """
    by_argument: dict[str, dict[str, object]] = {slot.argument: {} for slot in slots}
    longest_first = sorted(slots, key=lambda slot: -len(slot.prefix))
    for keyword, override in overrides.items():
        slot = next((slot for slot in longest_first if keyword.startswith(slot.prefix)), None)
        if slot is None:
            kind, prefixes = type(layer), ", ".join(dict.fromkeys(slot.prefix for slot in longest_first))
            text = (
                f"{kind.__name__} takes no argument {keyword!r}: overrides of quantizers start with one of "
            )
            arguments = [*inspect.signature(kind).parameters, *(slot.argument for slot in longest_first)]
            cure = f"{kind.__name__}.overrides() lists them; a name of your own: Mine.let({keyword}=...)"
            raise TypeError(errors.lines(text + prefixes, errors.did_you_mean(keyword, arguments) or cure))
        by_argument[slot.argument][keyword.removeprefix(slot.prefix)] = override
    return by_argument


def binding_of(quantizer: object) -> Binding | None:
    """The binding of an injector; None of anything else."""
    if inspect.isclass(quantizer) and issubclass(quantizer, ExtendedInjector):
        return Binding.of(quantizer)
    return quantizer if isinstance(quantizer, Binding) else None


CHANNEL_SHAPE = "activation_channel_shape"


def make_proxy(
    layer: object,
    slot: Slot,
    quantizer: object,
    overrides: Mapping[str, object],
    rngs: nnx.Rngs | None,
    facts: LayerFacts,
    where: str = "",
) -> Any:
    """The proxy for what was given: a new one for an injector, the same one for a proxy, None for None.

    A proxy to be shared is returned unchanged; `share` makes it serve the layer, once the layer holds it.

    Args:
        layer: the layer, which has its weights.
        slot: the place for the quantizer.
        quantizer: an injector, a binding, a proxy or None.
        overrides: names declared anew.
        rngs: for quantizers that draw random numbers.
        facts: what the layer knows.
        where: what the quantizer is of, for error texts; empty for the layer's argument.

    Raises:
        TypeError: what was given is not a quantizer, or is one of another kind; or overrides have nothing to act on.
        ValueError: a proxy to share has a scale for each of other channels.
    """
    called = (where, "") if where else (f"{type(layer).__name__}({slot.prefix}...)", slot.prefix)
    where = where or f"{type(layer).__name__}({slot.name}=...)"
    channel_shape, offered = facts.channel_shapes.get(slot.name), facts.offered.get(slot.name, {})
    if quantizer is None or isinstance(quantizer, QuantProxyFromInjector):
        if overrides:
            _refuse_overrides(where, slot, quantizer, overrides)
        if quantizer is not None:
            _check_kind(where, slot, type(quantizer), "a proxy")
            _check_channels(where, quantizer, channel_shape)
        return quantizer
    binding = binding_of(quantizer)
    if binding is None:
        raise TypeError(
            f"{where} takes an injector (a class that derives from ExtendedInjector), a proxy to share "
            f"(other_layer.{slot.name}) or None, got {_shown(quantizer)}"
        )
    named = binding.let(**overrides) if overrides else binding
    if channel_shape is not None and named.declares("scaling_per_output"):
        shares = named.resolve("scaling_per_output", module=layer)
        if isinstance(shares, str) and shares.lower() == enums.ScalingPerOutputType.CHANNEL.value:
            offered = {**offered, CHANNEL_SHAPE: channel_shape}
    proxy_class = named.resolve("proxy_class") if named.declares("proxy_class") else slot.proxy_class
    proxy_class = _check_kind(where, slot, proxy_class, binding.base.__name__)
    make = partial(
        proxy_class, binding, layer, overrides=overrides, rngs=rngs, where=called, stack=facts.stack
    )
    proxy = make(offered=offered)
    if slot.name == WEIGHT.name and proxy.group_dim is not None:
        warn_of_cut_groups(proxy, layer, called[0])
    of_part = "axis_name" in offered and not facts.is_mapped
    if of_part and proxy.quantizes_activations and proxy.has_range() is None:
        # Nothing is kept that devices have to agree on, and no mode says where the tensor is whole.
        return make(offered={name: offer for name, offer in offered.items() if name != "axis_name"})
    return proxy


def hold_proxies(
    layer: Any,
    arguments: Mapping[str, object],
    overrides: Mapping[str, object],
    rngs: nnx.Rngs | None,
    *,
    slots: Sequence[Slot] | None = None,
) -> None:
    """Make the proxies of a layer, or share those that were given, and let the layer hold them.

    Args:
        layer: a layer under construction, or a layer of Flax that was just declared to be one of ours.
        arguments: what the user gave for each slot, as in the `locals()` of `__init__`; `act_quant` is another name of
            `input_quant`.
        overrides: the user's further keywords.
        rngs: for quantizers that draw random numbers.
        slots: its places for quantizers; None for all that its class declares.

    Raises:
        TypeError: a quantizer for a slot that the layer does not have, or what `make_proxy` refuses.
    """
    slots = slots_of(type(layer)) if slots is None else slots
    kind, names = type(layer).__name__, dict.fromkeys(map(attrgetter("argument"), slots))
    quantizers: dict[str, object] = {}
    for name, quantizer in arguments.items():
        if quantizer is None or not name.endswith("_quant"):
            continue
        if name == "act_quant" and ACT not in slots:
            name = "input_quant"
            if arguments.get(name) is not None:
                raise TypeError(
                    f"{kind}: act_quant and input_quant are two names of one argument; give one of them"
                )
        if name not in names:
            raise TypeError(f"{kind} has no {name}: it takes {', '.join(names)}")
        quantizers[name] = quantizer
    by_argument = split_overrides(layer, slots, overrides) if overrides else {}
    facts = layer._facts()
    proxies: dict[str, object] = {}
    for slot in slots:
        quantizer, named = quantizers.get(slot.argument), by_argument.get(slot.argument, {})
        proxies[slot.name] = make_proxy(layer, slot, quantizer, named, rngs, facts)
    for name, proxy in proxies.items():
        if proxy is not None:
            # Not `vars`: a layer that was one of Flax's has its attributes registered already.
            setattr(layer, name, proxy)
    for shared in quantizers.values():
        if isinstance(shared, QuantProxyFromInjector):
            shared.add_tracked_module(layer)


def _check_kind(where: str, slot: Slot, proxy_class: object, name: str) -> type[QuantProxyFromInjector]:
    """Return the class of the proxy of a quantizer that names `proxy_class`."""
    if not (inspect.isclass(proxy_class) and issubclass(proxy_class, QuantProxyFromInjector)):
        raise TypeError(f"{where}: proxy_class has to be a class of proxies, got {_shown(proxy_class)}")
    if proxy_class.role in slot.also:
        return slot.proxy_class
    if proxy_class.role not in (slot.proxy_class.role, QuantProxyFromInjector.role):
        raise TypeError(
            f"{where} quantizes {slot.what}, and {name} is not for these: its proxy is a {proxy_class.__name__}, "
            f"expected a {slot.proxy_class.__name__}"
        )
    return proxy_class


def _check_channels(where: str, proxy: QuantProxyFromInjector, channel_shape: tuple[int, ...] | None) -> None:
    shape = proxy.binding.overrides.get(CHANNEL_SHAPE)
    if None not in (shape, channel_shape) and shape != channel_shape:
        raise ValueError(
            f"{where}: the proxy has scales of shape {shape}, one for each channel of the layer it was made for, and "
            f"here they would be {channel_shape}.\n  cure: an injector, for a quantizer of its own"
        )


def _refuse_overrides(where: str, slot: Slot, quantizer: object, overrides: Mapping[str, object]) -> NoReturn:
    names = ", ".join(repr(slot.prefix + name) for name in overrides)
    why, cure = "there is no quantizer", f"give an injector: {slot.name}=..."
    if quantizer is not None:
        why = "the quantizer is shared with another layer as it is"
        cure = f"give an injector of its own, {slot.name}=..., or override where the proxy is first made"
    raise TypeError(f"{where}: {names} would have no effect: {why}.\n  cure: {cure}")


def _shown(thing: object) -> str:
    return (
        f"the class {thing.__name__}" if inspect.isclass(thing) else f"{type(thing).__name__} {thing!r:.80}"
    )


def is_on(proxy: object) -> bool:
    """Whether an object is a quantizer that is not switched off."""
    return isinstance(proxy, QuantProxyFromInjector) and proxy.is_quant_enabled


def through(proxy: Callable[[Any], Any] | None, x: object) -> Any:
    """`x` quantized, or unchanged without a quantizer."""
    return x if proxy is None else proxy(x)
