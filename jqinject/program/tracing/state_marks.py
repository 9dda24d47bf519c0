"""Layers and quantizers of a model that is traced mark the state that their calls change. Next: `kept_state`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flax import nnx
from flax.errors import TraceContextError
from jax.ad_checkpoint import checkpoint_name

from jqinject.core import GradSlot, GradStat, QuantParam, QuantStat
from jqinject.core.state import state_parts
from jqinject.dot.schemes.quantized_op import QuantizedOp
from jqinject.program.tracing.intercept import Around, intercept, release
from jqinject.program.tracing.kept_state import MARK, Path, label
from jqinject.proxy import QuantProxyFromInjector

STATE = (QuantParam, QuantStat, GradStat, GradSlot, nnx.RngState)
METHODS = ("__call__", "attend")


@dataclass(frozen=True)
class _Marks(Around):
    """Marks the state that a call has changed.

    Attributes:
        held: of each Variable, its path in the called module, and its path in the model.
        always: whether state is marked although it has not changed.
    """

    held: tuple[tuple[Path, Path], ...]
    always: bool

    def __call__(self, layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `Around`."""
        with contextlib.ExitStack() as stack:
            parts = [
                (part, label((*path, *name)))
                for inside, path in self.held
                for name, part in state_parts(stack.enter_context(_writable(layer, inside)))
            ]
            before = [part.get_value() for part, _ in parts]
            out = call(*args, **kwargs)
            for (part, text), old in zip(parts, before, strict=True):
                new = part.get_value()
                if new is not old or self.always:
                    part.set_value(checkpoint_name(new, MARK + text))
        return out


@contextlib.contextmanager
def _writable(layer: Any, path: Path) -> Iterator[nnx.Variable[Any]]:
    """A Variable of a layer; in its place a copy, if the layer stems from outside of a transformation of JAX.

    NNX lets nobody write to such a Variable, because the value would be lost; a mark keeps it.
    """
    holder = layer
    for name in path[:-1]:
        holder = _children(holder)[name]
    children = _children(holder)
    variable = children[path[-1]]
    try:
        variable.set_value(variable.get_raw_value())
    except TraceContextError:
        children[path[-1]] = variable.copy()
        try:
            yield children[path[-1]]
        finally:
            children[path[-1]] = variable
    else:
        yield variable


def _children(node: Any) -> Any:
    return node if isinstance(node, list | tuple | dict) else vars(node)


@contextlib.contextmanager
def state_marks(called: tuple[Any, ...], is_leaf: Callable[[Any], bool], always: bool) -> Iterator[None]:
    """Let every layer and every quantizer of private copies mark the state that its calls change.

    Args:
        called: copies of the model, and of the modules among the arguments.
        is_leaf: whether a module is not looked into.
        always: whether state is marked although it has not changed.
    """
    paths = {id(variable): path for path, variable in nnx.to_flat_state(nnx.state(called, graph=True))}
    marked: list[tuple[Any, str]] = []
    for module, variables in _holders(called, is_leaf, set()):
        held = tuple((inside, paths[id(one)]) for inside, one in variables if id(one) in paths)
        for method in METHODS if held else ():
            if method in dir(type(module)):
                intercept(module, _Marks(held, always), method)
                marked.append((module, method))
    yield
    for module, method in reversed(marked):
        release(module, _Marks, method)


Holder = tuple[Any, list[tuple[Path, Any]]]


def _holders(node: Any, is_leaf: Callable[[Any], bool], seen: set[int]) -> Iterator[Holder]:
    """The outermost modules whose calls change the state of quantizers, with that state by its path in them."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, nnx.Module) and (_is_quantizer(node) or is_leaf(node)):
        below = list(_below(node, (), set()))
        if any(_is_quantizer(one) for _, one in below):
            state = [(path, one) for path, one in below if isinstance(one, STATE)]
            yield node, state
            return
    for _, child in _items(node):
        yield from _holders(child, is_leaf, seen)


def _is_quantizer(node: Any) -> bool:
    return isinstance(node, QuantProxyFromInjector | QuantizedOp)


def _below(node: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    """A module, and the modules and Variables in it, each once."""
    if id(node) in seen:
        return
    seen.add(id(node))
    yield path, node
    for name, child in _items(node):
        yield from _below(child, (*path, name), seen)


def _items(node: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(node, nnx.Variable):
        return
    if isinstance(node, nnx.Pytree):
        named: Any = vars(node).items()
    elif isinstance(node, dict):
        named = node.items()
    else:
        named = enumerate(node)
    for name, child in named:
        if isinstance(child, nnx.Pytree | nnx.Variable | dict | list | tuple):
            yield name, child
