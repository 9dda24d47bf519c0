"""One call of a model, a method and its arguments, and the program that it is traced to.

Everything that calls a model does it through here.

Arrays and modules among the arguments (caches, `nnx.Rngs`) are traced; everything else, a flag or a size, is a constant
of the program, as in a direct call: the model may branch on it.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from jqinject.core.flax_internals import change_class
from jqinject.core.state import RecordPart, flat_parts
from jqinject.dot import FrozenParam, LowBitCache, is_low_bit_cache
from jqinject.inject.errors import did_you_mean
from jqinject.program.class_swap import original_class
from jqinject.program.function_model import FunctionModel
from jqinject.program.jaxpr import Body
from jqinject.program.kept_state import STATE, KeptState, mark_state, place_at
from jqinject.program.policy import HELD, dotted
from jqinject.program.scopes import scopes
from jqinject.program.tracked_value import Origin, Path, StatePlace, Tracked

_Result = TypeVar("_Result")

CALL = "__call__"
ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct, LowBitCache)
#: A method of a model: its name, or a function that takes the model first, such as `Whisper.encode`.
Method = str | Callable[..., object]


@dataclass(frozen=True)
class Frame:
    """A call without its arrays and modules; compared by value, so that a compiled call is found again.

    Attributes:
        method: name of the method, or a function that takes the model first.
        tree: the structure of the arguments.
        others: their leaves; None in the place of arrays and modules.
        arrays: places of the arrays.
        modules: places of the modules.
    """

    method: Method
    tree: Any
    others: Path
    arrays: tuple[int, ...]
    modules: tuple[int, ...]

    def filled(self, arrays: Iterable[ArrayLike | jax.ShapeDtypeStruct], modules: Iterable[object]) -> Call:
        """The call with these arrays and modules."""
        leaves = list(self.others)
        for place, leaf in zip((*self.arrays, *self.modules), (*arrays, *modules), strict=True):
            leaves[place] = leaf
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return Call(args, kwargs, self.method)


class Call:
    """A call of a model.

    Args:
        args: positional arguments, of any kind: pytrees of arrays, `jax.ShapeDtypeStruct`s, modules, flags, None.
        kwargs: arguments by keyword.
        method: name of the method, or a function that takes the model first.

    Attributes:
        arrays: the arrays among the arguments, also in pytrees.
        modules: the modules and Variables among them, whose state the call may change.
        frame: everything else.

    Example:
        >>> call = Call((2.0,), {"inputs": np.ones((1, 4), np.float32)}, lambda m, scale, inputs: scale * m(inputs))
        >>> call(nnx.Linear(4, 2, rngs=nnx.Rngs(0))).shape, len(call.arrays)
        ((1, 2), 1)
    """

    def __init__(self, args: Sequence[object], kwargs: Mapping[str, object], method: Method = CALL) -> None:
        self.args, self.kwargs, self.method = tuple(args), dict(kwargs), method
        leaves, tree = jax.tree.flatten((self.args, self.kwargs), is_leaf=_is_leaf)
        arrays = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, ARRAYS))
        modules = tuple(i for i, leaf in enumerate(leaves) if _is_module(leaf))
        self.arrays = [leaves[i] for i in arrays]
        self.modules = [leaves[i] for i in modules]
        traced = {*arrays, *modules}
        others = tuple(None if i in traced else leaf for i, leaf in enumerate(leaves))
        self.frame = Frame(method, tree, others, arrays, modules)

    def __call__(self, model: Any) -> Any:
        """Call a model."""
        if isinstance(self.method, str):
            return operator.methodcaller(self.method, *self.args, **self.kwargs)(model)
        return self.method(model, *self.args, **self.kwargs)

    def __str__(self) -> str:
        """The arguments, arrays by dtype and shape."""
        args, kwargs = jax.tree.map(_in_words, (self.args, self.kwargs), is_leaf=_is_leaf)
        return ", ".join([*map(str, args), *(f"{name}={leaf}" for name, leaf in kwargs.items())])

    def places(self, model: nnx.Module) -> list[tuple[str, ...]]:
        """Where each array, then each module, is among the arguments: the parameter's name, and keys below it.

        Args:
            model: whose method is called.
        """
        flat, _ = jax.tree_util.tree_flatten_with_path((self.args, self.kwargs), is_leaf=_is_leaf)
        names = self.names(model)
        paths = [tuple(jax.tree_util.keystr((key,), simple=True) for key in path[1:]) for path, _ in flat]
        named = [
            (names[int(path[0])], *path[1:]) if place[0].idx == 0 else path
            for path, (place, _) in zip(paths, flat, strict=True)
        ]
        return [named[place] for place in (*self.frame.arrays, *self.frame.modules)]

    def names(self, model: nnx.Module) -> list[str]:
        """The names of the parameters that the positional arguments are for."""
        count = len(self.args)
        function = getattr(type(model), self.method) if isinstance(self.method, str) else self.method
        if isinstance(model, FunctionModel) and self.method == CALL:
            function = model.function
        try:
            parameters = list(inspect.signature(function).parameters.values())[1:]
        except (TypeError, ValueError):
            parameters = []
        names = [
            parameter.name
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        return [*names[:count], *(f"argument{place}" for place in range(len(names), count))]

    @property
    def name(self) -> str:
        """The method's name."""
        return self.method if isinstance(self.method, str) else getattr(self.method, "__name__", "method")


class SplitCall:
    """A model and a call as a pure function of state and arrays; neither the model nor the call's modules change.

    Args:
        model: an NNX module.
        call: a call of it.

    Attributes:
        state: of the model and of the call's modules; its paths begin with 0 for the model, with 1 and so on for the
            modules.
        arrays: of the call.
    """

    def __init__(self, model: nnx.Module, call: Call) -> None:
        self._frame, self.arrays = call.frame, call.arrays
        self._graphdef, self.state = nnx.split((model, *call.modules), graph=True)

    def merged(self, state: object, arrays: Sequence[ArrayLike]) -> tuple[Any, Call]:
        """A copy of the model, and the call of it, with this state and these arrays."""
        model, *modules = nnx.merge(self._graphdef, state)
        return model, self._frame.filled(arrays, modules)


def compiled_call(run: Callable[..., _Result]) -> Callable[..., _Result]:
    """`run(model, call, *arrays)`, compiled; calls with the same flags and shapes share a program.

    Args:
        run: the function to compile; it may change the state of the model and of the call's modules.

    Example:
        >>> double = compiled_call(lambda model, call: 2 * call(model))
        >>> double(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), Call((np.zeros((1, 4), np.float32),), {}))
        Array([[0., 0.]], dtype=float32)
    """
    traced = nnx.jit(
        lambda model, arrays, modules, frame, *others: run(model, frame.filled(arrays, modules), *others),
        static_argnums=3,
    )

    def called(model: object, call: Call, *others: object) -> Any:
        return traced(model, call.arrays, call.modules, call.frame, *others)

    return called


def with_copied_modules(calls: Sequence[Call]) -> list[Call]:
    """The calls with copies of their modules, which may then be called again and again; shared ones stay shared."""
    if not any(call.modules for call in calls):
        return list(calls)
    copies = nnx.clone([call.modules for call in calls], graph=True)
    return [call.frame.filled(call.arrays, modules) for call, modules in zip(calls, copies, strict=True)]


def arguments_of(arguments: object) -> tuple[Path, dict[str, object]]:
    """The arguments in a tuple or list (positional), in a dict (keywords), or in anything else (a single one)."""
    if isinstance(arguments, Mapping):
        return (), dict(arguments)
    return (tuple(arguments), {}) if isinstance(arguments, tuple | list) else ((arguments,), {})


def checked_method(model: nnx.Module, method: object, caller: str) -> Method:
    """The method to call: the name of one of the model's methods, or a function that takes the model first.

    Args:
        model: an NNX module.
        method: a name, a method of the model's class, or any other function of a model.
        caller: the calling function's name, for the error text.

    Returns:
        A name, unless `method` is a function that is not a method of the model's class.

    Raises:
        TypeError: it is neither a name nor a function.
        ValueError: the model has no method of that name.
    """
    kind = original_class(type(model))
    if callable(method):
        function = method.__func__ if inspect.ismethod(method) and method.__self__ is model else method
        name = getattr(function, "__name__", "")
        return name if getattr(kind, name, None) is function else function
    if not isinstance(method, str):
        raise TypeError(
            f"{caller}: method must be the name of a method of {kind.__name__}, or a function that takes the model "
            f"first; got {type(method).__name__}"
        )
    if not callable(getattr(model, method, None)):
        public = [name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")]
        own = [name for name in public if name not in dir(nnx.Module)]
        hint = did_you_mean(method, own)
        raise ValueError(
            f"{caller}: {kind.__name__} has no method {method!r}{'; ' + hint if hint else '.'}\n"
            f"  cure: one of {', '.join(own) or CALL}, or a function: method=lambda model, x: ..."
        )
    return method


def _is_module(leaf: object) -> bool:
    return isinstance(leaf, nnx.Pytree | nnx.Variable)


def _is_leaf(leaf: object) -> bool:
    return _is_module(leaf) or isinstance(leaf, LowBitCache)


def _in_words(leaf: object) -> object:
    if _is_module(leaf):
        return type(leaf).__name__
    return f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, ARRAYS) else leaf


# --- a call as a program: its equations, and which of its inputs are weights


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
        before = {path: place for place, path in enumerate(self.paths)}
        rows = zip(self.new_state, self.body.returned_inputs[first:], values[first:], strict=True)
        return [
            (path, variable, value)
            for (path, variable), place, value in rows
            if place is None or place != before.get(path) or dotted(path) in state.written
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
    state = StatePlace(dotted(keys)) if isinstance(variable, STATE) else None
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
