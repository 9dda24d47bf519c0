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
from jqinject.core.state.record import state_parts
from jqinject.dot.schemes.quantized_op import QuantizedOp
from jqinject.program.intercept import Around, intercept, release
from jqinject.program.kept_state import MARK, Path, label
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
    for key in path[:-1]:
        holder = _children(holder)[_name(holder, key)]
    children, name = _children(holder), _name(holder, path[-1])
    variable = children[name]
    try:
        variable.set_value(variable.get_raw_value())
    except TraceContextError:
        children[name] = variable.copy()
        try:
            yield children[name]
        finally:
            children[name] = variable
    else:
        yield variable


def _children(node: Any) -> Any:
    return node if isinstance(node, list | dict) else vars(node)


def _name(node: Any, key: Any) -> Any:
    # NNX's lists keep their items as attributes, under their numbers.
    return str(key) if isinstance(node, nnx.Pytree) else key


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
    for module in _holders(called, is_leaf):
        state = nnx.to_flat_state(nnx.state(module, STATE, graph=True))
        held = tuple((inside, paths[id(variable)]) for inside, variable in state)
        for method in METHODS if held else ():
            if callable(getattr(type(module), method, None)):
                intercept(module, _Marks(held, always), method)
                marked.append((module, method))
    yield
    for module, method in reversed(marked):
        release(module, _Marks, method)


def _holders(called: Any, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """The outermost modules whose calls change the state of quantizers."""
    found: list[Any] = []
    below: set[int] = set()
    for _, module in nnx.iter_modules(called, graph=True):
        ours = isinstance(module, QuantProxyFromInjector | QuantizedOp) or is_leaf(module)
        if ours and _has_state(module):
            found.append(module)
            below |= {id(node) for _, node in nnx.iter_modules(module, graph=True) if node is not module}
    return [module for module in found if id(module) not in below]


def _has_state(module: Any) -> bool:
    return any(
        isinstance(node, QuantProxyFromInjector | QuantizedOp)
        for _, node in nnx.iter_modules(module, graph=True)
    )
