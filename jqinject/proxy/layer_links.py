"""Which layers a proxy serves, kept outside of both; its check of static ranges, and its transform.

A proxy keeps no layer: as a child it would be a cycle, as static metadata it would retrace and lead clones back to the
original. The truth is the model: the layers that hold the proxy. What stands here is a weak index of it, filled

* by the proxy, for the layer that it is made for;
* by who has found layers, in their order: a walk of a model, or one that takes over a shared proxy (`relink`);
* by the first read through a layer of a copy (`complete`, called by the layer's slots). NNX makes copies, by `clone`,
  `merge`, pickling or a transformation, without telling the layer, so that the first read is the first sight of one.

A read only completes what is missing: a proxy of which as many layers are known as it serves is never linked anew, so
reading it changes nothing.
"""

import warnings
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core import StaticRange, UncalibratedWarning, state
from jqinject.core._protocols import ServedLayer
from jqinject.core.transforms import Chain, Sized, Transform, along
from jqinject.inject import Binding
from jqinject.quant_tensor import is_concrete


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
    # What a proxy has in its graph.
    binding: Binding
    tensor_quant: Any
    use_running_average: bool
    observing: bool
    served_layers: int
    role: ClassVar[str]
    reads: ClassVar[frozenset[str]]
    pre_transform: Transform | None
    transform_axes: tuple[int, ...]

    def has_range(self) -> bool | None:
        """See `StaticRange`; None here, of quantizers without a range to calibrate."""
        return None


CHECKED, LINKS = "_range_checked", "_links"
del Linked.__slots__  # NNX refuses classes that have the name; the slots stay


def remember(proxy: Linked, name: str, value: object) -> None:
    """Set what a proxy knows beside its graph, past NNX, which would take it for a part of the graph."""
    object.__setattr__(proxy, name, value)


def links_of(proxy: Linked) -> Links | None:
    """What is known of the layers of a proxy; None where none was seen."""
    return getattr(proxy, LINKS, None)


def complete(proxy: Linked, layer: ServedLayer) -> Links:
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


def known_layers(proxy: Linked) -> tuple[ServedLayer, ...]:
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


def first_parameters(proxy: Linked) -> Any:
    """What has the weight and bias of the first layer of `proxy`: the layer, or what is remembered of a lost one."""
    links = links_of(proxy)
    if links is not None and links.parameters is not None and len(linked_layers(proxy)) < proxy.served_layers:
        return links.parameters
    return known_layers(proxy)[0]


def linked_layers(proxy: Linked) -> tuple[ServedLayer, ...]:
    """The living layers known to hold `proxy`, in the order in which they were seen."""
    links = links_of(proxy)
    living = () if links is None else (reference() for reference in links.layers)
    return tuple(n for n in living if n is not None and any(child is proxy for child in vars(n).values()))


def relink(proxy: Linked, layers: tuple[ServedLayer, ...]) -> tuple[ServedLayer, ...]:
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


def check_range(proxy: Linked, x: jax.Array, held_as: str = "") -> None:
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


def name_of(proxy: Linked, held_as: str = "") -> str:
    """Where a proxy is found, with its injector: `QuantLinear.input_quant (Int8ActPerTensorFloat)`."""
    injector = proxy.binding.base.__name__
    holders = [held_as] if held_as else []
    for layer in () if held_as else linked_layers(proxy):
        holders += [f"{type(layer).__name__}.{name}" for name, child in vars(layer).items() if child is proxy]
    return f"{' and '.join(holders)} ({injector})" if holders else injector


PRE_TRANSFORM = "pre_transform"


def declare_transform(
    proxy: Linked, layer: ServedLayer, stack: tuple[int, ...], trace: set[str], handed: Mapping[str, object]
) -> None:
    """Make the transform that the injector of a proxy under construction declares.

    Args:
        proxy: of activations or gradients.
        layer: that holds it.
        stack: sizes of the leading axes that the layer is stacked along; each layer's transform has its own numbers.
        trace: takes the names that are read.
        handed: what an assembly is handed.

    Raises:
        TypeError: what is declared is no transform, or the layer does not undo it.
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
    axes = getattr(layer, "input_axes", proxy.transform_axes)
    if axes != proxy.transform_axes:
        attributes["transform_axes"] = axes


def transformed(proxy: Linked, x: jax.Array) -> jax.Array:
    """A tensor as the proxy's quantizer sees it.

    Args:
        proxy: of activations.
        x: the tensor.
    """
    return x if proxy.pre_transform is None else along(proxy.pre_transform, x, proxy.transform_axes)
