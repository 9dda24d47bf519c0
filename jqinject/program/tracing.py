"""A model's call as a program: its equations, and which of its inputs are weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jqinject.core.state.record import RecordPart, flat_parts
from jqinject.program.scopes import scopes
from jqinject.program.tracked_value import Origin, Tracked

Path = tuple[Any, ...]


class Program(NamedTuple):
    """A traced call.

    Attributes:
        closed: the program: state and array arguments in; outputs, then the new state, out.
        inputs: its inputs, as tracked values.
        output_tree: the structure of the outputs.
        new_state: path and Variable of each entry of the new state; a path begins with 0 for the model, with 1 and so
            on for the modules among the arguments.
    """

    closed: Any
    inputs: list[Tracked]
    output_tree: Any
    new_state: list[tuple[Path, Any]]

    def changed(self, values: list[Any]) -> list[tuple[Path, Any, Any]]:
        """Path, Variable and value of every change of the state.

        Args:
            values: the outputs of the program.
        """
        jaxpr = self.closed.jaxpr
        known = set(jaxpr.invars)
        first = len(jaxpr.outvars) - len(self.new_state)
        rows = zip(self.new_state, jaxpr.outvars[first:], values[first:], strict=True)
        return [(path, variable, value) for (path, variable), var, value in rows if var not in known]


class Arguments:
    """Arguments of a call: arrays and modules become inputs of the program, everything else is static.

    Args:
        args: positional ones.
        kwargs: by keyword.

    Attributes:
        arrays: the arrays among them.
        modules: the NNX objects among them: `nnx.Rngs`, whose counts the call moves.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self._tree = jax.tree.flatten((args, kwargs), is_leaf=lambda x: isinstance(x, nnx.Pytree))
        self._leaves = leaves
        kinds = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
        self._arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, kinds)]
        self._modules = [i for i, leaf in enumerate(leaves) if isinstance(leaf, nnx.Pytree)]
        self.arrays = [leaves[i] for i in self._arrays]
        self.modules = [leaves[i] for i in self._modules]

    def filled(self, arrays: Sequence[Any], modules: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with their arrays and modules replaced."""
        leaves = list(self._leaves)
        for place, given in zip((*self._arrays, *self._modules), (*arrays, *modules), strict=True):
            leaves[place] = given
        return jax.tree.unflatten(self._tree, leaves)


def trace(
    model: Any, call: Callable[..., Any], arguments: Arguments, is_leaf: Callable[[Any], bool], skip: str = ""
) -> Program:
    """The program of `call(model, *args, **kwargs)`.

    Args:
        model: an NNX module; a copy of it is traced.
        call: its forward.
        arguments: its arguments.
        is_leaf: whether a module is not looked into.
        skip: attribute of the model that its forward does not call.
    """
    graphdef, state = nnx.split((model, *arguments.modules), graph=True)
    flat, treedef = jax.tree.flatten_with_path(state)
    found: dict[str, Any] = {}

    def run(leaves: list[Any], arrays: list[Any]) -> Any:
        copies = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        copy, modules = copies[0], copies[1:]
        # Hidden from the forward: a bridge to Linen would treat every attribute as its own.
        put_aside = {skip: vars(copy).pop(skip)} if skip in vars(copy) else {}
        args, kwargs = arguments.filled(arrays, modules)
        with scopes(copy, is_leaf):
            out = call(copy, *args, **kwargs)
        vars(copy).update(put_aside)
        found["state"] = flat_parts(nnx.state(copies, graph=True))
        found["tree"] = jax.tree.structure(out)
        return jax.tree.leaves(out), [_value(leaf) for _, leaf in found["state"]]

    closed = jax.make_jaxpr(run)([leaf for _, leaf in flat], arguments.arrays)
    variables = {tuple(path): leaf for path, leaf in nnx.to_flat_state(state)}
    inputs = [_state_input(path, leaf, variables) for path, leaf in flat]
    inputs += [Tracked(array, Origin.ACTIVATION) for array in arguments.arrays]
    return Program(closed, inputs, found["tree"], [(tuple(path), leaf) for path, leaf in found["state"]])


def _value(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable | RecordPart) else leaf


def _state_input(path: tuple[Any, ...], leaf: Any, variables: dict[Path, Any]) -> Tracked:
    keys = tuple(part.key for part in path if isinstance(part, jax.tree_util.DictKey))
    holder = next((keys[:end] for end in range(len(keys), 0, -1) if keys[:end] in variables), ())
    if isinstance(variables.get(holder), nnx.Param):
        return Tracked(leaf, Origin.WEIGHT, weight_path=holder[1:])
    return Tracked(leaf)
