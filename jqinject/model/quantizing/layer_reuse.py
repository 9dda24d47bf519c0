"""Layers that are alike are quantized alike: the quantizers of one are assembled, the others get copies of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
from flax import nnx

from jqinject.program import change_class


class Alike:
    """Remembers quantized layers without their numbers, to quantize the next one of the same kind by copying.

    A copy serves only where assembling looks at no numbers and keeps none: it is tried on shapes alone, and the
    quantizers have no state. Other layers are assembled one by one.
    """

    def __init__(self) -> None:
        self.seen: dict[Hashable, Any] = {}

    def quantized(self, layer: Any, how: Hashable, quantize: Callable[[Any], None]) -> bool:
        """Quantize a layer as one before it, if there was one.

        Args:
            layer: a layer of Flax.
            how: says which quantizers it gets.
            quantize: does it.

        Returns:
            Whether it is quantized now.
        """
        kind = (how, *_kind(layer))
        try:
            first = kind not in self.seen
        except TypeError:  # metadata that has no hash
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
    """The layer quantized, of shapes alone; None where it can not be, or has more state than before."""

    def traced(layer: Any) -> Any:
        quantize(layer)
        return layer

    try:
        made = nnx.eval_shape(traced, layer)
    except Exception:  # assembling looks at numbers; errors of its own it has raised for the first layer
        return None
    had, has = (len(jax.tree.leaves(nnx.state(one, graph=True))) for one in (layer, made))
    return made if had == has else None


def _take(layer: Any, made: Any) -> None:
    """Let a layer hold copies of another's quantizers."""
    added = {name: held for name, held in vars(made).items() if name not in vars(layer)}
    modules = {name: held for name, held in added.items() if isinstance(held, nnx.Module)}
    copies = nnx.clone(modules, graph=True)
    change_class(layer, type(made))
    for name, held in added.items():
        setattr(layer, name, copies.get(name, held))
