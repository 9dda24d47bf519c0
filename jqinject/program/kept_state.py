"""The state of quantizers that a model's layers hold, kept through whatever the model does to itself.

A model may split a block, call a copy of it inside `jax.checkpoint` or `lax.scan`, and throw the copy away, with all
that its quantizers recorded. While a private copy of the model is traced, every change of a quantizer's state leaves an
equation in the program that names the Variable (`state_marks`). The interpreter knows which inputs of the program are
that state. A new value that nothing reads was thrown away: from then on, whoever reads an older value gets it instead,
and so does the model at the end (`KeptState`). See `Interpreter.carried` for how it crosses a loop.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import TraceContextError
from jax.ad_checkpoint import checkpoint_name

from jqinject.core import GradSlot, GradStat, LostStateWarning, QuantParam, QuantStat
from jqinject.core.state import state_parts
from jqinject.dot.schemes.quantized_op import QuantizedOp
from jqinject.program.class_swap import Around, intercept, release
from jqinject.program.jaxpr import Equation
from jqinject.program.moves import only_moves
from jqinject.program.tracked_value import Origin, Path, StateVersion, Tracked, shape_of
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant_tensor import is_concrete

MARK = "jqinject_state:"
SHOWN = 8


class KeptState:
    """State that a program computes and throws away.

    Args:
        numbers: of versions, in the order of the program; shared by all its parts.

    Attributes:
        newest: label -> the newest value that was thrown away.
        lost: labels of state that cannot be kept.
    """

    def __init__(self, numbers: Iterator[int] | None = None, lost: set[str] | None = None) -> None:
        self._numbers = itertools.count(1) if numbers is None else numbers
        self.newest: dict[str, Tracked] = {}
        self._whole: dict[str, Tracked] = {}
        self.lost: set[str] = set() if lost is None else lost

    def within(self) -> KeptState:
        """That of a part of the program, whose inputs are up to date."""
        return KeptState(self._numbers, self.lost)

    def begin(self, inputs: Iterable[Tracked]) -> None:
        """Know the inputs of the program, or of the part, which are the whole state there."""
        self._whole = {x.state.label: x for x in inputs if x.state is not None}

    def marked(self, name: str, x: Tracked) -> Tracked:
        """`x`, known as a new value of the state that the mark names."""
        return replace(x, state=StateVersion(name.removeprefix(MARK), next(self._numbers)), twins={})

    def followed(self, eqn: Equation, inputs: list[Tracked], outputs: list[Tracked]) -> list[Tracked]:
        """The outputs of an operation; if it only moves numbers of state, with the places of these numbers."""
        state = inputs[0].state if inputs else None
        others = [x.array for x in inputs[1:]]
        moves = state is not None and len(outputs) == 1 and only_moves(eqn.name)
        if state is None or not moves or not is_concrete(*others):
            return outputs
        shape, places = shape_of(inputs[0]), state.places
        before = np.arange(math.prod(shape), dtype=np.int32).reshape(shape) if places is None else places
        moved = eqn.replaced(new_dtype=before.dtype) if "new_dtype" in eqn.params else eqn
        with jax.ensure_compile_time_eval():
            (after,) = moved.bind([before, *others])
        return [replace(outputs[0], state=state._replace(places=np.asarray(after)), twins={})]

    def put(self, text: str, value: jax.Array, places: np.ndarray | None = None) -> None:
        """Keep a value.

        Args:
            text: its label.
            value: of the state, or of the numbers at some places in it.
            places: None for all numbers, in their order.
        """
        if places is not None:
            state = self.newest.get(text, self._whole.get(text))
            if state is None or jnp.issubdtype(value.dtype, jax.dtypes.extended):
                return  # a slot, of which only the cotangent counts
            value = state.array.reshape(-1).at[places].set(value).reshape(shape_of(state))
        self.newest[text] = Tracked(value, Origin.ACTIVATION, state=StateVersion(text, next(self._numbers)))

    def thrown_away(self, x: Tracked) -> None:
        """Keep a value of the program that nothing reads, if it is a new value of state."""
        if x.state is None or x.state.number <= self._number(x.state.label):
            return
        if x.state.places is None:
            self.newest[x.state.label] = x
        else:
            self.put(x.state.label, x.array, x.state.places)

    def current(self, x: Tracked) -> Tracked:
        """`x`, or the value that replaced it and was thrown away."""
        if x.state is None or x.state.number >= self._number(x.state.label):
            return x
        newest, places = self.newest[x.state.label], x.state.places
        if places is not None:
            value = newest.array.reshape(-1)[places]
            return replace(
                newest,
                value=value,
                state=StateVersion(x.state.label, self._number(x.state.label), places),
                twins={},
            )
        if shape_of(newest) == shape_of(x):
            return newest
        self.lost.add(x.state.label)  # one for each row of a batch that is mapped over
        return x

    def _number(self, text: str) -> int:
        newest = self.newest.get(text)
        return 0 if newest is None or newest.state is None else newest.state.number

    def _shape(self, text: str) -> tuple[int, ...] | None:
        return shape_of(self.newest[text]) if text in self.newest else None

    def not_returned(self, outputs: Iterable[Tracked]) -> list[str]:
        """Labels of what was thrown away, without newer values among the outputs."""
        returned = {x.state.label: x.state.number for x in outputs if x.state is not None}
        return [text for text in self.newest if returned.get(text, 0) < self._number(text)]

    def crossing(self, outer: list[Tracked], inputs: list[Tracked], outputs: list[Tracked]) -> dict[str, int]:
        """What a part of the program throws away: label -> place of the input that it came in by.

        Args:
            outer: the inputs of the part.
            inputs: the same, as the part sees them.
            outputs: of the part.
        """
        states = [(x.state.label, place) for place, x in enumerate(inputs) if x.state is not None]
        # State may come in twice, but not by parts, of which a mark does not say which it was.
        forms = {(x.state.label, shape_of(x), id(x.state.places)) for x in outer if x.state is not None}
        times = collections.Counter(text for text, *_ in forms)
        entered = {
            text: place
            for text, place in states
            if shape_of(inputs[place]) == self._shape(text) and times[text] == 1
        }
        left = self.not_returned(outputs)
        self.lost.update(text for text in left if text not in entered)
        return {text: entered[text] for text in left if text in entered}

    def value(self, text: str, like: Tracked) -> jax.Array:
        """The newest value, of the dtype of an older one."""
        return jax.lax.convert_element_type(self.newest[text].array, like.array.dtype)

    def warn_of_lost(self, model: nnx.Module) -> None:
        """Tell which state is lost."""
        if self.lost:
            paths = sorted(of_model(text) for text in self.lost)
            more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
            warnings.warn(
                f"{type(model).__name__} throws away what its quantizers record in {', '.join(paths[:SHOWN])}{more}: "
                "copies of their layers are called inside a transformation that does not give this state back.\n"
                "  cure: nnx.remat, nnx.scan, nnx.vmap, nnx.cond, which do; or jax.checkpoint and jax.lax.scan on the "
                "state that nnx.split returns, as it is; model.eval() records nothing",
                LostStateWarning,
                stacklevel=4,
            )

    def check_unchanged_part(self, eqn: Equation) -> None:
        """Note the state that a part of the program which runs as it is throws away."""
        inner = (equation for body in eqn.bodies for equation in body.everywhere())
        labels = (equation.label for equation in inner if equation.is_read == (False,))
        self.lost.update(label.removeprefix(MARK) for label in labels if label.startswith(MARK))


def strong(x: jax.Array) -> jax.Array:
    """`x` with a dtype that does not give way to others, which a loop cannot carry."""
    return jax.lax.convert_element_type(x, x.dtype)


def label(path: Path) -> str:
    """The path of a state's array, as text; it begins with the number of the module among those of the call."""
    return ".".join(map(str, path))


def of_model(text: str) -> str:
    """A label without the number that says of which module it is."""
    return text.split(".", 1)[-1]


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

    def __call__(
        self, layer: nnx.Module, call: Callable[..., object], *args: object, **kwargs: object
    ) -> object:
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
def _writable(layer: object, path: Path) -> Iterator[nnx.Variable[Any]]:
    """A Variable of a layer; in its place a copy, if the layer stems from outside of a transformation of JAX.

    NNX refuses a write to such a Variable, because the value would be lost; a mark keeps it.
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


def _children(node: object) -> Any:
    return node if isinstance(node, list | tuple | dict) else vars(node)


@contextlib.contextmanager
def state_marks(called: Path, is_leaf: Callable[[object], bool], always: bool) -> Iterator[None]:
    """Let every layer and every quantizer of private copies mark the state that its calls change.

    Args:
        called: copies of the model, and of the modules among the arguments.
        is_leaf: whether a module is not looked into.
        always: whether state is marked although it has not changed.
    """
    paths = {id(variable): path for path, variable in nnx.to_flat_state(nnx.state(called, graph=True))}
    marked: list[tuple[Any, str]] = []
    for module, variables in _holders(called, is_leaf, set()):
        state = tuple(
            (inside, paths[id(variable)]) for inside, variable in variables if id(variable) in paths
        )
        for method in METHODS if state else ():
            if callable(getattr(type(module), method, None)):
                intercept(module, _Marks(state, always), method)
                marked.append((module, method))
    yield
    for module, method in reversed(marked):
        release(module, _Marks, method)


Holder = tuple[Any, list[tuple[Path, Any]]]


def _holders(node: object, is_leaf: Callable[[object], bool], visited: set[int]) -> Iterator[Holder]:
    """The outermost modules whose calls change the state of quantizers, with that state by its path in them."""
    if id(node) in visited:
        return
    visited.add(id(node))
    if isinstance(node, nnx.Module) and (_is_quantizer(node) or is_leaf(node)):
        below = list(_below(node, (), set()))
        if any(_is_quantizer(child_node) for _, child_node in below):
            state = [(path, child_node) for path, child_node in below if isinstance(child_node, STATE)]
            yield node, state
            return
    for _, child in _items(node):
        yield from _holders(child, is_leaf, visited)


def _is_quantizer(node: object) -> bool:
    return isinstance(node, QuantProxyFromInjector | QuantizedOp)


def _below(node: object, path: Path, visited: set[int]) -> Iterator[tuple[Path, Any]]:
    """A module, and the modules and Variables in it, each once."""
    if id(node) in visited:
        return
    visited.add(id(node))
    yield path, node
    for name, child in _items(node):
        yield from _below(child, (*path, name), visited)


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
