"""Which layers a proxy serves, kept outside of both.

A proxy keeps no layer: as a child it would be a cycle, as static metadata it would retrace and lead clones back to the
original. The truth is the model. What stands here is a weak index of it, filled where a layer is seen to hold a proxy:
when a layer is built, when its proxy is read from it (`link_if_proxy`), and when a model is walked.
"""

import weakref
from typing import Any

from flax import nnx

_LAYERS: weakref.WeakKeyDictionary[nnx.Module, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()
_PARAMETERS: weakref.WeakKeyDictionary[nnx.Module, Any] = weakref.WeakKeyDictionary()


def link(proxy: nnx.Module, layer: Any) -> None:
    """Note that `layer` holds `proxy`; does nothing if that is known."""
    known = _LAYERS.setdefault(proxy, [])
    if not any(reference() is layer for reference in known):
        known.append(weakref.ref(layer))


def link_if_proxy(layer: Any, held: Any, parameters: Any = None) -> None:
    """Note that `layer` holds `held`, where that is a proxy: layers call it when one of their attributes is read.

    So `clone.weight_quant.scale()` and `clone.weight_quant.init_tensor_quant()` are about the clone: a copy is linked
    when its proxy is first read through it, also inside a transform.

    Args:
        layer: the layer that is read.
        held: the attribute.
        parameters: what the proxy may be asked about after the layer is gone, as in
            `QuantLinear(...).weight_quant.scale()`; it must not refer to the layer or the proxy, or both would live
            forever.
    """
    if isinstance(held, nnx.Module):
        link(held, layer)
        if parameters is not None:
            _PARAMETERS[held] = parameters


def parameters_of(proxy: nnx.Module) -> Any:
    """The parameters of the layer through which `proxy` was read last; None if it was not."""
    return _PARAMETERS.get(proxy)


def linked_layers(proxy: nnx.Module) -> tuple[Any, ...]:
    """The living layers known to hold `proxy`, in the order in which they were seen."""
    living = [reference() for reference in _LAYERS.get(proxy, ())]
    return tuple(layer for layer in living if layer is not None and holds(layer, proxy))


def relink(proxy: nnx.Module, layers: tuple[Any, ...]) -> tuple[Any, ...]:
    """Note the layers that a walk has found, in its order.

    A walk of part of a model does not find the layers in the rest of it: then the order is that in which all were seen.

    Returns:
        All the layers.
    """
    known = linked_layers(proxy)
    holders = layers if _within(known, layers) else (*known, *(n for n in layers if not _within((n,), known)))
    _LAYERS[proxy] = [weakref.ref(layer) for layer in holders]
    return holders


def _within(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return all(any(layer is other for other in others) for layer in some)


def holds(layer: Any, proxy: nnx.Module) -> bool:
    """Whether `proxy` is an attribute of `layer`."""
    return any(child is proxy for child in vars(layer).values())
