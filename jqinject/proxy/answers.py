"""What a proxy says of its quantizer: declared facts, the range, the numbers that it makes, and which layers it serves.

A proxy keeps no layer: as a child it would be a cycle, as static metadata it would retrace and lead clones back to the
original. The truth is the model: the layers that hold the proxy. What stands here is a weak index of it, filled

* by the proxy, for the layer that it is made for;
* by who has found layers, in their order: a walk of a model, or one that takes over a shared proxy (`relink`);
* by the first read through a layer of a copy (`complete`, called by the layer's slots). NNX makes copies, by `clone`,
  `merge`, pickling or a transformation, without telling the layer, so that the first read is the first sight of one.

A read only completes what is missing: a proxy of which as many layers are known as it serves is never linked anew, so
reading it changes nothing.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import AmaxScaling, StaticRange, UncalibratedWarning, _protocols, state
from jqinject.core.component import InnerModule
from jqinject.core.transforms import Chain, Sized, Transform, along
from jqinject.inject import Binding
from jqinject.ops import FloatGrid
from jqinject.proxy import assembly, metadata
from jqinject.quant_tensor import Operand, as_array, is_concrete
from jqinject.quant_tensor.array_methods import attribute


class Links:
    """What is known of the layers of one proxy.

    Attributes:
        layers: weak references to them, one at least, in the order in which they were seen.
        parameters: what the proxy may be asked about when the first of them is gone, as in
            `QuantLinear(...).weight_quant.scale()`; it must not refer to layer or proxy, or both would live forever.
    """

    parameters: Any = None

    def __init__(self, *layers: object) -> None:
        self.layers = list(map(weakref.ref, layers))


class Linked:
    """Abstract: what a proxy knows beside its graph. NNX neither sees it nor copies it: a copy knows nothing.

    Attributes:
        _links: the layers; unset where none was seen.
        _range_checked: set once an evaluation has checked that the range saw data; else unset.
    """

    __slots__ = ("_links", "_range_checked")
    _links: Links


CHECKED, LINKS = "_range_checked", "_links"
del Linked.__slots__  # NNX refuses classes that have the name; the slots stay


def said(name: str, doc: str) -> Any:
    """An answer that is read from the declaration, once per assembly."""
    return attribute(f"quant_metadata.{name}", doc)


def asked(question: Callable[[object], object], doc: str) -> Any:
    """An answer that the quantizer itself gives, each time anew."""
    return property(lambda proxy: question(proxy.tensor_quant), doc=doc)


class Answers(Linked, InnerModule):
    """Abstract: holds a quantizer and answers for it.

    Attributes:
        binding: the injector and the overrides.
        tensor_quant: the quantizer; None if the injector says so (no quantization).
        quant_metadata: what the injector declares of the numbers.
        disable_quant: set it to let the tensor through as it is.
        quantizes_activations: whether it is used on what flows, so that its range can be collected (it then answers the
            protocol of `core.StaticRange` for the components that the quantizer holds).
        observing: set it to collect statistics only: the QuantTensor has the scale, and the tensor's own value.
        served_layers: how many layers share it.
        role: what it quantizes: "weight", "bias", "activation", "operand", "gradient", "accumulator", or "parameter" if
            unset.
        use_running_average: eval mode, in NNX's word; `model.train()` and `model.eval()` set it.
        pre_transform: comes before a quantizer of what flows; None without one.
        undo_transform: whether what is quantized is transformed back, so that nothing else has to know of it.
        transform_axes: the axes of the tensor that it transforms, those that the layer contracts.
    """

    binding: Binding
    tensor_quant: Any
    quant_metadata: metadata.QuantMetadata
    use_running_average: bool
    # Class attributes until set, so that what few proxies need costs the others nothing.
    disable_quant: bool = False
    observing: bool = False
    served_layers: int = 1
    pre_transform: Transform | None = None
    undo_transform: bool = False
    transform_axes: tuple[int, ...] = (-1,)
    quantizes_activations: ClassVar[bool] = False
    role: ClassVar[str] = "parameter"

    is_signed: bool | None = said("signed", "Whether the integers have a sign.")
    is_narrow_range: bool | None = said("narrow_range", "Whether the range leaves out one integer.")
    rounding_mode: str | None = said("rounding_mode", "In capitals; None if a component rounds.")
    group_size: int | None = said("group_size", "Elements that share a scale; None without groups.")
    group_dim: int | None = said("group_dim", "The axis that is cut into groups; None without groups.")
    requires_quant_input: bool = said("requires_quant_input", "Whether the format of the input counts.")
    has_whole_zero_points: bool = said("whole_zero_points", "Whether zero points are integers.")

    # with its `.newest` and `.amax_history`
    amax_history: AmaxScaling | None = asked(_protocols.amax_history, "What records amaxes; None without.")
    has_zero_point: bool = asked(_protocols.has_zero_point, "Whether a zero point may be other than 0.")
    is_dynamic: bool = asked(_protocols.is_dynamic, "Whether the scale is that of the given tensor.")
    # times one for all, unless they are powers of two
    scale_dtype: np.dtype | None = asked(_protocols.scale_dtype, "The 8-bit dtype that holds every scale.")
    scale_factor: jax.Array | None = asked(_protocols.scale_factor, "The constant factor of all scales.")

    @property
    def is_quant_enabled(self) -> bool:
        """Whether a tensor is quantized on its way through."""
        return self.tensor_quant is not None and not self.disable_quant

    def has_range(self) -> bool | None:
        """Whether data were seen; None if nothing is collected: of weights, constant and dynamic ranges, and while
        quantization is off."""
        used = self.is_quant_enabled and self.quantizes_activations
        ranges = ranges_in(self.tensor_quant) if used else []
        return all(component.has_range() for component in ranges) if ranges else None

    def begin_calibration(self) -> None:
        """Switch to training mode and start to collect anew."""
        self.set_attributes(use_running_average=False, raise_if_not_found=False)
        for component in ranges_in(self.tensor_quant):
            component.begin_calibration()

    def end_calibration(self) -> None:
        """Take what was collected as the range."""
        for component in ranges_in(self.tensor_quant):
            component.end_calibration()

    def _copy(self, force_eval: bool = False) -> Any:
        """The quantizer as a copy, so that a call moves no state; with `force_eval`, in eval mode."""
        quantizer = nnx.clone(self.tensor_quant, graph=True)
        if force_eval:
            assembly.set_mode(quantizer, use_running_average=True, deterministic=True)
        return quantizer

    # The numbers. Each answer is None if quantization is off.

    def sample(self, force_eval: bool = True) -> Any:
        """Return a QuantTensor of the quantizer that shows what its numbers are; None if it makes none by itself.

        Args:
            force_eval: as eval mode would, also in training mode.
        """
        return None

    def scale(self, force_eval: bool = True) -> jax.Array | None:
        """Return the float per integer step, float32.

        Args:
            force_eval: the scale that eval mode would use, also in training mode.

        Raises:
            RuntimeError: it is made from the given tensor.
        """
        return self._asked("scale", force_eval)

    def zero_point(self, force_eval: bool = True) -> jax.Array | None:
        """Return the integer that represents 0, float32.

        Args:
            force_eval: the zero point that eval mode would use, also in training mode.

        Raises:
            RuntimeError: it is made from the given tensor.
        """
        return self._asked("zero_point", force_eval)

    def bit_width(self, force_eval: bool = True) -> int | jax.Array | None:
        """Return the bits of one number.

        Args:
            force_eval: the bit width that eval mode would use, also in training mode.
        """
        return self._asked("bit_width", force_eval)

    def _asked(self, name: str, *how: Any) -> Any:
        if not self.is_quant_enabled:
            return None
        measured = None if name == "bit_width" else self._measured()
        if measured is not None:
            what, which, call = measured
            raise RuntimeError(
                f"the {name.replace('_', ' ')} of {self.binding.base.__name__} depends on the {what}: it is made from "
                f"{which}.\n  cure: {call}.{name}"
            )
        return getattr(self.sample(*how), name, None)

    def _measured(self) -> tuple[str, str, str] | None:
        """What scale and zero point depend on, what they are made from, and the call that returns them, as text for an
        error; None unless they are made from the tensor that is quantized."""
        return None

    # Minifloats; an AttributeError where the numbers are others. A format does not depend on the mode.

    def exponent_bit_width(self, force_eval: bool = True) -> Any:
        """Bits of the exponent of a minifloat: an int, or an array if learned."""
        return self._of_minifloat("exponent_bit_width")

    def mantissa_bit_width(self, force_eval: bool = True) -> Any:
        """Bits of the mantissa of a minifloat, without the implicit 1: an int, or an array if learned."""
        return self._of_minifloat("mantissa_bit_width")

    def exponent_bias(self, force_eval: bool = True) -> Any:
        """What is subtracted from the exponent field of a minifloat."""
        return self._of_minifloat("exponent_bias")

    def is_saturating(self, force_eval: bool = True) -> Any:
        """Whether what is too large becomes the largest minifloat."""
        return self._of_minifloat("saturating")

    def inf_values(self, force_eval: bool = True) -> Any:
        """Mantissas that mean inf together with the largest exponent; None if there are none."""
        return self._of_minifloat("inf_values")

    def nan_values(self, force_eval: bool = True) -> Any:
        """Mantissas that mean nan together with the largest exponent; None if there are none."""
        return self._of_minifloat("nan_values")

    @property
    def is_ocp(self) -> bool:
        """Whether it is one of OCP's 8-bit formats, e4m3 or e5m2."""
        form = self._minifloat()
        return form is not None and form.is_ocp

    @property
    def is_fnuz(self) -> bool:
        """Whether it is one of the 8-bit formats without inf and negative 0, e4m3 or e5m2."""
        form = self._minifloat()
        return form is not None and form.is_fnuz

    def _minifloat(self) -> FloatGrid | None:
        if not self.is_quant_enabled:
            return None
        said = _protocols.number_format(self.tensor_quant)
        form = getattr(self.sample(), "format", None) if said is None else said
        return form if form is not None and form.is_minifloat else None

    def _of_minifloat(self, name: str) -> Any:
        form = self._minifloat()
        if form is None and self.is_quant_enabled:
            raise AttributeError(
                f"{self.binding.base.__name__} makes no minifloats: it has no exponent, mantissa, or codes for inf and "
                "nan.\n  cure: proxy.bit_width(), proxy.scale() and proxy.zero_point() describe integers"
            )
        return None if form is None else getattr(form, name)


def remember(proxy: Answers, name: str, value: object) -> None:
    """Set what a proxy knows beside its graph, past NNX, which would take it for a part of the graph."""
    object.__setattr__(proxy, name, value)


def links_of(proxy: Answers) -> Links | None:
    """What is known of the layers of a proxy; None where none was seen."""
    return getattr(proxy, LINKS, None)


def complete(proxy: Answers, layer: _protocols.ServedLayer) -> Links:
    """Note that `layer` holds `proxy`, as a read has shown, unless all the layers that the proxy serves are known.

    So `clone.weight_quant.scale()` and `clone.weight_quant.init_tensor_quant()` are about the clone, also inside a
    transformation, and no read can change which layer a proxy is about.

    Args:
        proxy: what was read.
        layer: the layer that holds it.

    Returns:
        What is known now.
    """
    links, holders = links_of(proxy), linked_layers(proxy)
    if len(holders) < proxy.served_layers and not _within((layer,), holders):
        holders = (*holders, layer)
    if links is None or [reference() for reference in links.layers] != [*holders]:
        links = Links(*holders)
        remember(proxy, LINKS, links)
    return links


def known_layers(proxy: Answers) -> tuple[_protocols.ServedLayer, ...]:
    """All the layers that `proxy` serves.

    Raises:
        ValueError: some of them are not known.
    """
    holders = linked_layers(proxy)
    if not holders or len(holders) < proxy.served_layers:
        raise ValueError(
            f"this {type(proxy).__name__} serves {proxy.served_layers} layer(s), and {len(holders)} of them are known: "
            "it is part of a copy, was read from the model past its layers, or the layer is gone.\n"
            "  cure: jqinject.reassemble(model), which finds the layers by walking the model; "
            "or give them: proxy.init_tensor_quant(layer, ...). Of a layer made on the spot, "
            "QuantLinear(...).weight_quant, keep the layer in a variable"
        )
    return holders


def first_parameters(proxy: Answers) -> Any:
    """What has the weight and bias of the first layer of `proxy`: the layer, or what is remembered of a lost one."""
    links = links_of(proxy)
    if links is not None and links.parameters is not None and len(linked_layers(proxy)) < proxy.served_layers:
        return links.parameters
    return known_layers(proxy)[0]


def linked_layers(proxy: Answers) -> tuple[_protocols.ServedLayer, ...]:
    """The living layers known to hold `proxy`, in the order in which they were seen."""
    links = links_of(proxy)
    living = () if links is None else (reference() for reference in links.layers)
    return tuple(n for n in living if n is not None and any(child is proxy for child in vars(n).values()))


def relink(proxy: Answers, layers: tuple[_protocols.ServedLayer, ...]) -> tuple[_protocols.ServedLayer, ...]:
    """Note the layers that a walk has found, in its order.

    A walk of part of a model does not find the layers in the rest of it: then the order is that in which all were seen.

    Returns:
        All the layers.
    """
    linked = linked_layers(proxy)
    holders = (
        layers if _within(linked, layers) else (*linked, *(n for n in layers if not _within((n,), linked)))
    )
    if holders:
        remember(proxy, LINKS, Links(*holders))
    return holders


def _within(some: tuple[object, ...], others: tuple[object, ...]) -> bool:
    return all(any(layer is candidate for candidate in others) for layer in some)


def ranges_in(quantizer: object) -> list[StaticRange]:
    """The components of a quantizer that collect a range."""
    if not isinstance(quantizer, nnx.Module):
        return []
    nodes = (node for _, node in nnx.iter_modules(quantizer, graph=True) if isinstance(node, StaticRange))
    return [node for node in nodes if node.has_range() is not None]


def check_range(proxy: Answers, x: jax.Array, held_as: str = "") -> None:
    """Warn if a proxy is about to quantize `x` in evaluation in a range that never saw data; once for each proxy.

    Args:
        proxy: the proxy.
        x: what it quantizes.
        held_as: where the user finds it; empty for an attribute of the layers that hold it.
    """
    if not proxy.use_running_average or proxy.observing or not is_concrete(x) or hasattr(proxy, CHECKED):
        return
    remember(proxy, CHECKED, True)
    if proxy.has_range() is False:
        text = f"{name_of(proxy, held_as)} quantizes in evaluation, and {state.UNSEEN}.\n  cure: {state.CURE}"
        warnings.warn(text, UncalibratedWarning, 3)


def name_of(proxy: Answers, held_as: str = "") -> str:
    """Where a proxy is found, with its injector: `QuantLinear.input_quant (Int8ActPerTensorFloat)`."""
    injector = proxy.binding.base.__name__
    holders = [held_as] if held_as else []
    for layer in () if held_as else linked_layers(proxy):
        holders += [f"{type(layer).__name__}.{name}" for name, child in vars(layer).items() if child is proxy]
    return f"{' and '.join(holders)} ({injector})" if holders else injector


PRE_TRANSFORM, UNDO_TRANSFORM = "pre_transform", "undo_transform"


def declare_transform(
    proxy: Answers,
    layer: _protocols.ServedLayer,
    stack: tuple[int, ...],
    trace: set[str],
    handed: Mapping[str, object],
) -> None:
    """Make the transform that the injector of a proxy under construction declares.

    Args:
        proxy: of activations or gradients.
        layer: that holds it.
        stack: sizes of the leading axes that the layer is stacked along; each layer's transform has its own numbers.
        trace: takes the names that are read.
        handed: what an assembly is handed.

    Raises:
        TypeError: what is declared is no transform, or the layer does not undo it; `undo_transform` is no boolean.
    """
    name, attributes = proxy.binding.base.__name__, vars(proxy)
    declared = proxy.binding.resolve(PRE_TRANSFORM, trace=trace, **handed)
    sized = isinstance(declared, Sized | Chain) and not isinstance(declared, nnx.Module)
    transform = declared.made() if sized else declared
    if transform is None:
        return
    has_numbers = isinstance(transform, nnx.Module)
    if not isinstance(transform, Transform) or (has_numbers and not sized):
        what = "holds numbers, so each quantizer needs its own" if has_numbers else "is no transform"
        raise TypeError(
            f"{name}: {PRE_TRANSFORM} = {declared!r:.80} {what}.\n"
            "  cure: jqinject.core.transforms.Hadamard(), or Sized(ChannelScale, channels)"
        )
    if proxy.role == "gradient" and not getattr(layer, "rotates_both_operands", False):
        raise TypeError(
            f"{name} declares {PRE_TRANSFORM} = {transform!r}, and only a product whose operands both go through it "
            "undoes it.\n  cure: wgrad_grad and wgrad_lhs of a jqinject.dot.Scheme, not grad_quant"
        )
    for _, variable in nnx.iter_graph(transform, graph=True) if stack and has_numbers else ():
        if isinstance(variable, nnx.Variable):
            value = variable.get_value()
            variable.set_value(jnp.broadcast_to(value, (*stack, *value.shape)))
    attributes["pre_transform"] = transform
    if proxy.role == "activation" and proxy.binding.declares(UNDO_TRANSFORM):
        undo = proxy.binding.resolve(UNDO_TRANSFORM, trace=trace, **handed)
        if not isinstance(undo, bool):
            raise TypeError(f"{name}: {UNDO_TRANSFORM} has to be True or False, got {undo!r:.80}")
        if undo:
            attributes[UNDO_TRANSFORM] = undo
    axes = getattr(layer, "input_axes", proxy.transform_axes)
    if axes != proxy.transform_axes:
        attributes["transform_axes"] = axes


def transformed(proxy: Answers, x: jax.Array) -> jax.Array:
    """A tensor as the proxy's quantizer sees it.

    Args:
        proxy: of activations.
        x: the tensor.
    """
    return x if proxy.pre_transform is None else along(proxy.pre_transform, x, proxy.transform_axes)


def restored(proxy: Answers, x: Operand) -> jax.Array:
    """A quantized tensor as an array, without the transform that came before the quantizer.

    Args:
        proxy: of activations, with a transform.
        x: what its quantizer made of the transformed tensor.
    """
    assert proxy.pre_transform is not None, "asked for where a transform is undone"
    return along(proxy.pre_transform.inverse, as_array(x), proxy.transform_axes)
