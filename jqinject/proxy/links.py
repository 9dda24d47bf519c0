"""Which layers a proxy serves, kept outside of both.

A proxy keeps no layer: as a child it would be a cycle, as static metadata it would retrace and lead clones back to the
original. The truth is the model: the layers that hold the proxy. What stands here is a weak index of it, filled

* by who hands a proxy to a layer: when a layer is built, and when it takes over a shared proxy (`link`);
* by walks of a model, which see all layers in their order (`relink`);
* by the first read through a layer of a copy (`complete`, called by the layer's slots). NNX makes copies, by `clone`,
  `merge`, pickling or a transformation, without a word to the layer, so that the first read is the first sight of one.

A read only completes what is missing: a proxy of which as many layers are known as it serves is never linked anew, so
reading it changes nothing.
"""

import weakref
from typing import Any

from flax import nnx


class Links:
    """What is known of the layers of one proxy.

    Attributes:
        layers: weak references to them, one at least, in the order in which they were seen.
        parameters: what the proxy may be asked about when the first of them is gone, as in
            `QuantLinear(...).weight_quant.scale()`; it must not refer to layer or proxy, or both would live forever.
    """

    __slots__ = ("layers", "parameters")

    def __init__(self, *layers: Any) -> None:
        self.layers = [weakref.ref(layer) for layer in layers]
        self.parameters: Any = None

    def knows(self, layer: Any) -> bool:
        """Whether `layer` is one of them."""
        return any(reference() is layer for reference in self.layers)


LINKS: weakref.WeakKeyDictionary[nnx.Module, Links] = weakref.WeakKeyDictionary()


def link(proxy: nnx.Module, layer: Any) -> None:
    """Note that `layer` holds `proxy`; does nothing if that is known."""
    links = LINKS.get(proxy)
    if links is None:
        LINKS[proxy] = Links(layer)
    elif not links.knows(layer):
        links.layers.append(weakref.ref(layer))


def complete(proxy: Any, layer: Any) -> Links:
    """Note that `layer` holds `proxy`, as a read has shown, unless all the layers that the proxy serves are known.

    So `clone.weight_quant.scale()` and `clone.weight_quant.init_tensor_quant()` are about the clone, also inside a
    transformation, and no read can change which layer a proxy is about.

    Args:
        proxy: what was read.
        layer: the layer that holds it.

    Returns:
        What is known now.
    """
    links = LINKS.get(proxy)
    if links is not None and links.knows(layer) and links.layers[0]() is not None:
        return links
    known = linked_layers(proxy)
    if len(known) < proxy.served_layers and not _within((layer,), known):
        known = (*known, layer)
    if links is None or [reference() for reference in links.layers] != [*known]:
        links = LINKS[proxy] = Links(*known)
    return links


def known_layers(proxy: Any) -> tuple[Any, ...]:
    """All the layers that `proxy` serves.

    Raises:
        ValueError: some of them are not known.
    """
    known = linked_layers(proxy)
    if not known or len(known) < proxy.served_layers:
        raise ValueError(
            f"this {type(proxy).__name__} serves {proxy.served_layers} layer(s), and {len(known)} of them are known: "
            "it is part of a copy, was read from the model past its layers, or the layer is gone.\n"
            "  cure: jqinject.reassemble(model), which finds the layers by walking the model; "
            "or give them: proxy.init_tensor_quant(layer, ...). Of a layer made on the spot, "
            "QuantLinear(...).weight_quant, keep the layer in a variable"
        )
    return known


def first_parameters(proxy: Any) -> Any:
    """What has the weight and bias of the first layer of `proxy`: the layer, or what is remembered of a lost one."""
    known = linked_layers(proxy)
    if known and len(known) >= proxy.served_layers:
        return known[0]
    links = LINKS.get(proxy)
    return links.parameters if links is not None and links.parameters is not None else known_layers(proxy)[0]


def linked_layers(proxy: nnx.Module) -> tuple[Any, ...]:
    """The living layers known to hold `proxy`, in the order in which they were seen."""
    links = LINKS.get(proxy)
    living = () if links is None else (reference() for reference in links.layers)
    return tuple(layer for layer in living if layer is not None and holds(layer, proxy))


def relink(proxy: nnx.Module, layers: tuple[Any, ...]) -> tuple[Any, ...]:
    """Note the layers that a walk has found, in its order.

    A walk of part of a model does not find the layers in the rest of it: then the order is that in which all were seen.

    Returns:
        All the layers.
    """
    known = linked_layers(proxy)
    holders = layers if _within(known, layers) else (*known, *(n for n in layers if not _within((n,), known)))
    if holders:
        LINKS[proxy] = Links(*holders)
    return holders


def _within(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return all(any(layer is other for other in others) for layer in some)


def holds(layer: Any, proxy: nnx.Module) -> bool:
    """Whether `proxy` is an attribute of `layer`."""
    return any(child is proxy for child in vars(layer).values())
