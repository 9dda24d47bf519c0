"""A model's call as a program: its equations, and which of its inputs are weights."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
from flax import nnx

from jqinject.core.flax_internals import change_class
from jqinject.core.state import RecordPart, flat_parts
from jqinject.dot import FrozenParam, LowBitCache, is_low_bit_cache
from jqinject.program.call import ARRAYS, Call, SplitCall
from jqinject.program.class_swap import original_class
from jqinject.program.jaxpr import Body
from jqinject.program.kept_state import STATE, KeptState, label, mark_state, place_at
from jqinject.program.policy import HELD, dotted
from jqinject.program.scopes import scopes
from jqinject.program.tracked_value import Origin, Path, StatePlace, Tracked


class Program(NamedTuple):
    """A traced call.

    Attributes:
        body: the program: state and array arguments in; outputs, then the new state, out.
        inputs: its inputs, as tracked values.
        paths: of its inputs in the state, as in `new_state`; () for the arguments.
        output_tree: the structure of the outputs.
        new_state: path and Variable of each entry of the new state; a path begins with 0 for the model, with 1 and so
            on for the modules among the arguments.
    """

    body: Body
    inputs: list[Tracked]
    output_tree: Any
    new_state: list[tuple[Path, Any]]
    paths: list[Path]

    def changed(self, values: list[jax.Array], state: KeptState) -> list[tuple[Path, Any, jax.Array]]:
        """Path, Variable and value of every change of the state.

        Args:
            values: the outputs of the program.
            state: of the model's layers, after the program.
        """
        first = len(values) - len(self.new_state)
        rows = zip(self.new_state, self.body.returns_input[first:], values[first:], strict=True)
        return [
            (path, variable, value)
            for (path, variable), is_input, value in rows
            if not is_input or label(path) in state.written
        ]


def trace(
    model: nnx.Module, call: Call, is_leaf: Callable[[object], bool], mark_all: bool = False
) -> Program:
    """The program of a call.

    Args:
        model: an NNX module; a copy of it, of its original class, is traced, so that methods call one another as they
            were written.
        call: the call.
        is_leaf: whether a module is not looked into.
        mark_all: whether quantizers mark all their state, although it may not have changed.
    """
    split = SplitCall(model, call)
    flat, treedef = jax.tree.flatten_with_path(split.state, is_leaf=is_low_bit_cache)
    traced: dict[str, Any] = {}

    def run(leaves: list[object], arrays: list[jax.Array]) -> tuple[list[jax.Array], list[object]]:
        copy, copied_call = split.merged(jax.tree.unflatten(treedef, leaves), arrays)
        change_class(copy, original_class(type(copy)))
        # Hidden from the forward: a bridge to Linen would treat every attribute as its own.
        put_aside = {HELD: vars(copy).pop(HELD)} if HELD in vars(copy) else {}
        with scopes(copy, is_leaf), dequantized_for_linen(copy):
            mark_state((copy, *copied_call.modules), is_leaf, mark_all)
            out = copied_call(copy)
        vars(copy).update(put_aside)
        traced["state"] = flat_parts(nnx.state((copy, *copied_call.modules), graph=True))
        traced["tree"] = jax.tree.structure(out)
        return jax.tree.leaves(out), [_value(leaf) for _, leaf in traced["state"]]

    try:
        closed = jax.make_jaxpr(run)(
            [_stand_in(leaf) for _, leaf in flat], [_stand_in(x) for x in call.arrays]
        )
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        error.add_note(
            f"{type(model).__name__} is read as a program, so that what it contracts by itself can be quantized: each "
            "call outside of nnx.jit traces it, and it cannot branch in Python on the values of arrays.\n"
            "  cure: jnp.where, jax.lax.cond; or a Python flag as an argument"
        )
        raise
    variables = {tuple(path): leaf for path, leaf in nnx.to_flat_state(split.state)}
    places = call.places(model)
    modules = [(), *places[len(call.arrays) :]]
    inputs = [_state_input(path, leaf, variables, modules) for path, leaf in flat]
    inputs += [
        Tracked(array, Origin.ACTIVATION, cache=dotted(place), cache_ndim=len(array.shape))
        for array, place in zip(call.arrays, places, strict=False)
    ]
    paths = [_keys(path) for path, _ in flat]
    new_state = [(tuple(path), leaf) for path, leaf in traced["state"]]
    return Program(Body.of(closed), inputs, traced["tree"], new_state, [*paths, *(() for _ in call.arrays)])


def _value(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable | RecordPart) else leaf


def _keys(path: Path) -> Path:
    return tuple(part.key for part in path if isinstance(part, jax.tree_util.DictKey))


def _stand_in(leaf: object) -> Any:
    """What the model's code sees of an input: of a cache in low bits, the float array in whose place it stands."""
    return leaf.stand_in if isinstance(leaf, LowBitCache) else leaf


def _state_input(
    path: Path, leaf: object, variables: dict[Path, Any], modules: list[tuple[str, ...]]
) -> Tracked:
    keys = _keys(path)
    holder = next((keys[:end] for end in range(len(keys), 0, -1) if keys[:end] in variables), ())
    variable = variables.get(holder)
    state = StatePlace(label(keys)) if isinstance(variable, STATE) else None
    if isinstance(variable, nnx.Param):
        return Tracked(leaf, Origin.WEIGHT, weight_path=holder[1:], state=state)
    if isinstance(variable, FrozenParam):
        return Tracked(leaf, Origin.WEIGHT, weight_path=holder[1:], form=variable.form)
    if not holder or not isinstance(leaf, ARRAYS):
        return Tracked(leaf, state=state)
    name = dotted((*modules[keys[0]], *holder[1:]))
    return Tracked(leaf, state=state, cache=name, cache_ndim=len(leaf.shape))


@contextlib.contextmanager
def dequantized_for_linen(model: nnx.Module) -> Generator[None]:
    """Let bridges to Linen hold dequantized parameters while a private copy of a model is called.

    A bridge tells Linen's collections by the types of Variables, and knows `nnx.Param` alone. In a program each is one
    equation that dequantizes, which the interpreter recognizes.

    Args:
        model: a private copy.
    """
    parameters = [
        (module, path, frozen)
        for _, module in nnx.iter_modules(model, graph=True)
        if isinstance(module, nnx.bridge.ToNNX)
        for path, frozen in nnx.to_flat_state(nnx.state(module, FrozenParam, graph=True))
    ]
    for module, path, frozen in parameters:
        place_at(module, path, nnx.Param(frozen[...]))
    yield
    for module, path, frozen in parameters:
        place_at(module, path, frozen)
