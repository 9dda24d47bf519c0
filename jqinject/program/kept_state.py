"""The state of quantizers that a model's layers hold, kept through whatever the model does to itself.

A model may split a block, call a copy of it inside `jax.checkpoint` or `lax.scan`, and throw the copy away, with all
that its quantizers recorded. So the interpreter threads that state itself (`KeptState`). While a private copy of the
model is traced, each call of a layer leaves two marks in the program for each of its Variables (`mark_state`): one
where it reads the Variable, which gives it the newest value, and one where it has written it. See `nested.carried` for
how the state crosses a loop.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
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
from jqinject.ops import processes
from jqinject.program import class_swap, jaxpr, policy
from jqinject.program.moves import only_moves
from jqinject.program.policy import dotted
from jqinject.program.tracked_value import Path, StatePlace, Tracked, shape_of
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant_tensor import is_concrete

READ, WRITTEN = "jqinject_read:", "jqinject_written:"


class KeptState:
    """The state of a model's layers while its program, or a part of it, runs.

    Args:
        values: label -> value, as it begins.
        lost: labels of state that cannot be kept; shared by all parts of the program.

    Attributes:
        values: label -> newest value; in a loop over slices of a value, of this step's slice.
        written: labels of the values that have changed.
        thrown: those of them that the program throws away, once it has ended.
    """

    thrown: set[str]

    def __init__(self, values: Mapping[str, jax.Array] | None = None, lost: set[str] | None = None) -> None:
        self.values: dict[str, jax.Array] = dict(values or {})
        self.written: set[str] = set()
        self.lost: set[str] = set() if lost is None else lost
        self._before = dict(self.values)
        self._last_read: dict[str, StatePlace | None] = {}

    def within(self) -> KeptState:
        """That of a part of the program."""
        part = KeptState(self.values, self.lost)
        part.written |= self.written
        return part

    def begin(self, inputs: list[Tracked]) -> list[Tracked]:
        """Adopt inputs of the program, or of a part, that are the state; return them."""
        self.values |= {
            x.state.label: x.array for x in inputs if x.state is not None and x.state.places is None
        }
        self._before = dict(self.values)
        return inputs

    def end(self, outputs: Sequence[Tracked]) -> list[Tracked]:
        """The outputs of the program with the newest state among them; note what the program throws away of it."""
        returned = {x.state.label for x in outputs if x.state is not None and self.is_newest(x)}
        self.thrown = self.written - returned
        return list(map(self.newest, outputs))

    @property
    def changed(self) -> list[str]:
        """Labels of the state that is not what it was as the part began."""
        return [text for text, value in self.values.items() if value is not self._before[text]]

    def is_newest(self, x: Tracked) -> bool:
        """Whether a value is the newest one of the whole of its state."""
        return x.state is not None and x.value is self.values[x.state.label]

    def leaving(self, text: str) -> jax.Array:
        """The newest value, of the dtype of the one that the part began with."""
        return jax.lax.convert_element_type(self.values[text], self._before[text].dtype)

    def newest(self, x: Tracked) -> Tracked:
        """`x`; if it is state that has been written since, the newest value."""
        if x.state is None or x.state.label not in self.written:
            return x
        value, places = self.values[x.state.label], x.state.places
        value = value if places is None else value.reshape(-1)[places]
        if value.shape != shape_of(x):  # the whole of it, in a step of a loop that has written a slice
            self.lost.add(x.state.label)
            return x
        return replace(x, value=value, twins={})

    def read(self, name: str, x: Tracked) -> Tracked:
        """The newest value of the state that a mark names, in the place of `x`."""
        text = name.removeprefix(READ)
        self._last_read[text] = x.state if x.state is not None and x.state.label == text else None
        return self.newest(x)

    def write(self, name: str, x: Tracked, is_used: bool) -> Tracked:
        """`x` as the new value of the state that a mark names, in the place that was read last.

        Args:
            name: of the mark.
            x: the value.
            is_used: whether the program goes on with it.
        """
        text = name.removeprefix(WRITTEN)
        state = self._last_read[text]
        if state is not None and self.put(state, x.array):
            return replace(x, state=state, twins={})
        if not is_used:
            self.lost.add(text)  # one for each row of a batch that is mapped over, for example
        return replace(x, state=None, twins={})

    def put(self, state: StatePlace, value: jax.Array) -> bool:
        """Keep a new value, if it has the shape of the old one."""
        text, places = state
        before = self.values[text]
        if value.shape != (before.shape if places is None else places.shape):
            return False
        if places is not None:
            if jnp.issubdtype(value.dtype, jax.dtypes.extended):
                return True  # a slot, of which only the cotangent counts
            value = before.reshape(-1).at[places].set(value).reshape(before.shape)
        self.values[text] = value
        self.written.add(text)
        return True

    def followed(self, eqn: jaxpr.Equation, inputs: list[Tracked], outputs: list[Tracked]) -> list[Tracked]:
        """The outputs of an operation; if it only moves numbers of state, with the places of these numbers."""
        state = inputs[0].state if inputs else None
        if state is None or len(outputs) != 1 or not only_moves(eqn.name):
            return outputs
        others = [x.array for x in inputs[1:]]
        if not is_concrete(*others):
            return outputs
        shape, places = shape_of(inputs[0]), state.places
        before = np.arange(math.prod(shape), dtype=np.int32).reshape(shape) if places is None else places
        moved = eqn.replaced(new_dtype=before.dtype) if "new_dtype" in eqn.params else eqn
        with jax.ensure_compile_time_eval():
            (after,) = moved.bind([before, *others])
        return [replace(outputs[0], state=state._replace(places=np.asarray(after)), twins={})]

    def warn_of_lost(self, model: nnx.Module) -> None:
        """Tell which state is lost."""
        if self.lost:
            shown = policy.listed(sorted(of_model(text) for text in self.lost))
            warnings.warn(
                f"{type(model).__name__} throws away what its quantizers record in {shown}: "
                "copies of their layers are called inside a transformation that does not give this state back.\n"
                "  cure: nnx.remat, nnx.scan, nnx.vmap, nnx.cond, which do; or jax.checkpoint and jax.lax.scan on the "
                "state that nnx.split returns, as it is; model.eval() records nothing",
                LostStateWarning,
                stacklevel=4,
            )

    def check_unchanged_part(self, eqn: jaxpr.Equation) -> None:
        """Note the state that a part of the program which runs as it is throws away."""
        inner = (equation for body in eqn.bodies for equation in body.everywhere())
        labels = (equation.label for equation in inner if equation.is_read == (False,))
        self.lost.update(label.removeprefix(WRITTEN) for label in labels if label.startswith(WRITTEN))


def of_model(text: str) -> str:
    """A label without the number that says of which module it is."""
    return text.split(".", 1)[-1]


QUANTIZERS = (QuantProxyFromInjector, QuantizedOp)
STATE = (QuantParam, QuantStat, GradStat, GradSlot, nnx.RngState)


def _marked(
    variables: tuple[tuple[Path, Path], ...],
    always: bool,
    layer: nnx.Module,
    call: Callable[..., object],
    *args: object,
    **kwargs: object,
) -> object:
    """A call that marks the state that it reads, and what it has changed; see `intercept`.

    Args:
        variables: of each Variable, its path in the called module, and its path in the model.
        always: whether state is marked although it has not changed.
        layer: the called module.
        call: its call, with `args` and `kwargs`.
    """
    with contextlib.ExitStack() as stack:
        parts = [
            (part, dotted((*path, *name)))
            for inside, path in variables
            for name, part in state_parts(stack.enter_context(_writable(layer, inside)))
        ]
        before = [part.get_value() for part, _ in parts]
        read = [checkpoint_name(old, READ + text) for old, (_, text) in zip(before, parts, strict=True)]
        for (part, _), value in zip(parts, read, strict=True):
            part.set_value(value)
        out = call(*args, **kwargs)
        for (part, text), old, value in zip(parts, before, read, strict=True):
            new = part.get_value()
            is_written = new is not value or always
            part.set_value(checkpoint_name(new, WRITTEN + text) if is_written else old)
    return out


@contextlib.contextmanager
def _writable(layer: object, path: Path) -> Generator[nnx.Variable[Any]]:
    """A Variable of a layer; in its place a copy, if the layer stems from outside of a transformation of JAX.

    NNX refuses a write to such a Variable, because the value would be lost; a mark keeps it.
    """
    variable = node_at(layer, path)
    try:
        variable.set_value(variable.get_raw_value())
    except TraceContextError:
        copy = variable.copy()
        place_at(layer, path, copy)
        try:
            yield copy
        finally:
            place_at(layer, path, variable)
    else:
        yield variable


def node_at(root: Any, path: Path) -> Any:
    """What is at a path below a module."""
    for key in path:
        is_item = isinstance(root, list | tuple | dict | nnx.List | nnx.Dict)
        root = root[key] if is_item else vars(root)[key]
    return root


def place_at(root: object, path: Path, value: object) -> None:
    """Place a value at a path below a module, unchecked."""
    parent, name = node_at(root, path[:-1]), path[-1]
    if isinstance(parent, nnx.Pytree):
        vars(parent)[str(name)] = value
    else:
        parent[name] = value


def mark_state(called: Path, is_leaf: Callable[[object], bool], always: bool) -> None:
    """Let every layer and every quantizer of private copies mark the state that its calls change.

    Args:
        called: copies of the model, and of the modules among the arguments.
        is_leaf: whether a module is not looked into.
        always: whether state is marked although it has not changed.
    """
    paths = {id(variable): path for path, variable in nnx.to_flat_state(nnx.state(called, STATE, graph=True))}
    holders: dict[Path, tuple[nnx.Module, tuple[tuple[Path, Path], ...]]] = {}
    for path, node in nnx.iter_graph(called, graph=True) if paths else ():
        if isinstance(node, nnx.Module) and (isinstance(node, QUANTIZERS) or is_leaf(node)):
            below = list(nnx.iter_graph(node, graph=True))
            state = tuple((inside, paths[id(inner)]) for inside, inner in below if id(inner) in paths)
            if state and any(isinstance(inner, QUANTIZERS) for _, inner in below):
                holders[path] = node, state
    for path, (node, state) in holders.items():
        if not any(path[:end] in holders for end in range(len(path))):  # the outermost ones
            class_swap.intercept(node, processes.Bound(_marked, (state, always)), *class_swap.METHODS)
