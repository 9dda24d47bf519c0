"""Layer reuse: quantizers are assembled for one layer of a kind and copied for the others."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
from flax import nnx

from jqinject.program import change_class


class LayerReuse:
    """Remembers quantized layers without their arrays, to quantize the next one of the same kind by copying.

    Copying works only if assembling neither reads nor stores numbers: it is tried on shapes alone, and the quantizers
    must have no state. Other layers are assembled one by one.
    """

    def __init__(self) -> None:
        self.seen: dict[Hashable, Any] = {}

    def quantized(self, layer: Any, how: Hashable, quantize: Callable[[Any], None]) -> bool:
        """Quantize a layer like an earlier one of the same kind, if there was one.

        Args:
            layer: a Flax layer.
            how: identifies the quantizers that it gets.
            quantize: quantizes a layer.

        Returns:
            Whether it is quantized now.
        """
        kind = (how, *_kind(layer))
        try:
            first = kind not in self.seen
        except TypeError:  # metadata that is not hashable
            return False
        if first:
            self.seen[kind] = _ONCE
            return False
        if self.seen[kind] is _ONCE:
            self.seen[kind] = _without_numbers(layer, quantize)
        made = self.seen[kind]
        if made is None:
            return False
        _take(layer, made)
        return True


_ONCE = object()


def _kind(layer: Any) -> tuple[Any, ...]:
    graphdef, state = nnx.split(layer, graph=True)
    leaves = jax.tree.leaves(state)
    return graphdef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _without_numbers(layer: Any, quantize: Callable[[Any], None]) -> Any:
    """The layer quantized on shapes alone; None if that fails, or adds state."""

    def traced(layer: Any) -> Any:
        quantize(layer)
        return layer

    try:
        made = nnx.eval_shape(traced, layer)
    except Exception:  # assembling reads numbers; its own errors were raised for the first layer
        return None
    had, has = (len(jax.tree.leaves(nnx.state(one, graph=True))) for one in (layer, made))
    return made if had == has else None


def _take(layer: Any, made: Any) -> None:
    """Give a layer copies of another's quantizers."""
    added = {name: held for name, held in vars(made).items() if name not in vars(layer)}
    modules = {name: held for name, held in added.items() if isinstance(held, nnx.Module)}
    copies = nnx.clone(modules, graph=True)
    change_class(layer, type(made))
    for name, held in added.items():
        setattr(layer, name, copies.get(name, held))
