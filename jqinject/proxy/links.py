"""The layers of a proxy, its ranges, and its transform.

Which layers a proxy serves, kept outside of both.

A proxy keeps no layer: as a child it would be a cycle, as static metadata it would retrace and lead clones back to the
original. The truth is the model: the layers that hold the proxy. What stands here is a weak index of it, filled

* by the proxy, for the layer that it is made for;
* by who has found layers, in their order: a walk of a model, or one that takes over a shared proxy (`relink`);
* by the first read through a layer of a copy (`complete`, called by the layer's slots). NNX makes copies, by `clone`,
  `merge`, pickling or a transformation, without a word to the layer, so that the first read is the first sight of one.

A read only completes what is missing: a proxy of which as many layers are known as it serves is never linked anew, so
reading it changes nothing.

The static ranges that a quantizer holds.

The transform that an injector declares before its quantizer: `pre_transform`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core import StaticRange, warn_if_uncalibrated
from jqinject.core.transforms import Sized, SizedChain, Transform, along
from jqinject.inject import Binding


class Links:
    """What is known of the layers of one proxy.

    Attributes:
        layers: weak references to them, one at least, in the order in which they were seen.
        parameters: what the proxy may be asked about when the first of them is gone, as in
            `QuantLinear(...).weight_quant.scale()`; it must not refer to layer or proxy, or both would live forever.
    """

    __slots__ = ("layers", "parameters")

    def __init__(self, *layers: Any) -> None:
        self.layers = list(map(weakref.ref, layers))
        self.parameters: Any = None

    def knows(self, layer: Any) -> bool:
        """Whether `layer` is one of them."""
        return any(reference() is layer for reference in self.layers)


LINKS: weakref.WeakKeyDictionary[nnx.Module, Links] = weakref.WeakKeyDictionary()


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


def ranges_in(quantizer: Any) -> list[StaticRange]:
    """The components of a quantizer that collect a range."""
    if not isinstance(quantizer, nnx.Module):
        return []
    nodes = (node for _, node in nnx.iter_modules(quantizer, graph=True) if isinstance(node, StaticRange))
    return [node for node in nodes if node.has_range() is not None]


def check_range(proxy: Any, x: Any, held_as: str = "") -> None:
    """Warn if a proxy is about to quantize `x` in evaluation in a range that never saw data; once for each proxy.

    Args:
        proxy: the proxy.
        x: what it quantizes.
        held_as: where the user finds it; empty for an attribute of the layers that hold it.
    """
    if proxy.use_running_average and not proxy.observing:
        warn_if_uncalibrated(proxy, lambda: name_of(proxy, held_as), x)


def name_of(proxy: Any, held_as: str = "") -> str:
    """Where a proxy is found, with its injector: `QuantLinear.input_quant (Int8ActPerTensorFloat)`."""
    injector = proxy.binding.base.__name__
    holders = [held_as] if held_as else _attributes(proxy)
    return f"{' and '.join(holders)} ({injector})" if holders else injector


def _attributes(proxy: Any) -> list[str]:
    return [
        f"{type(layer).__name__}.{name}"
        for layer in linked_layers(proxy)
        for name, child in vars(layer).items()
        if child is proxy
    ]


PRE_TRANSFORM = "pre_transform"


def transform_of(quantizer: Any) -> Any:
    """What an injector declares before its quantizer: a transform, or the declaration of one; None without one.

    Example:
        >>> from jqinject.core.transforms import Hadamard
        >>> from jqinject.quant import Int8ActPerTensorFloat
        >>> transform_of(Int8ActPerTensorFloat.let(pre_transform=Hadamard(8))).block_size
        8
    """
    if quantizer is None or isinstance(quantizer, nnx.Module):
        return None
    return _declared(quantizer if isinstance(quantizer, Binding) else Binding(quantizer))


@lru_cache(maxsize=256)
def _declared(binding: Binding) -> Any:
    return binding.resolve(PRE_TRANSFORM) if binding.declares(PRE_TRANSFORM) else None


def declared_transform(
    binding: Binding, stack: tuple[int, ...], trace: set[str], given: Mapping[str, Any]
) -> Transform | None:
    """The transform that an injector declares; None if it declares that there is none.

    Args:
        binding: the injector, which declares one.
        stack: sizes of the leading axes that the layer is stacked along; each layer's transform has its own numbers.
        trace: takes the names that are read.
        given: what an assembly is handed.

    Raises:
        TypeError: what is declared is no transform.
    """
    found = binding.resolve(PRE_TRANSFORM, trace=trace, **given)
    sized = isinstance(found, Sized | SizedChain)
    made = found.made() if sized else found
    if made is not None and (not isinstance(made, Transform) or (isinstance(made, nnx.Module) and not sized)):
        own = isinstance(made, nnx.Module)
        what = "holds numbers, so each quantizer needs its own" if own else "is no transform"
        raise TypeError(
            f"{binding.base.__name__}: {PRE_TRANSFORM} = {found!r:.80} {what}.\n"
            "  cure: jqinject.core.transforms.Hadamard(), or Sized(ChannelScale, channels)"
        )
    if stack and isinstance(made, nnx.Module):
        for _, variable in nnx.iter_graph(made, graph=True):
            if isinstance(variable, nnx.Variable):
                value = variable.get_value()
                variable.set_value(jnp.broadcast_to(value, (*stack, *value.shape)))
    return made


def transformed(proxy: Any, x: jax.Array) -> jax.Array:
    """A tensor as the proxy's quantizer sees it.

    Args:
        proxy: of activations.
        x: the tensor.
    """
    return x if proxy.pre_transform is None else along(proxy.pre_transform, x, proxy.transform_axes)
