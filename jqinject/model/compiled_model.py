"""`compiled`: a model as one compiled function that holds its own state, for serving.

`nnx.split` takes the arrays out of the model, and `jax.jit` compiles a function of them, which donates the caches. All
checks are made where JAX traces this function: Python runs it only for arguments that it does not know.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.dot import LowBitCache, is_low_bit_cache
from jqinject.inject.errors import did_you_mean
from jqinject.model.walk import listed, place_name
from jqinject.program import CALL, Call, Method, checked_method, dotted
from jqinject.program.jaxpr import Body, Equation

OWN_ARGUMENTS = 2
"""How many arguments of the compiled function come before those of the call: the arrays of the model."""
ARRAYS = (jax.Array, np.ndarray)
MODES = ("deterministic", "use_running_average")
"""The attributes that `model.eval()` sets."""


class Argument(NamedTuple):
    """An array among the arguments of a call.

    Attributes:
        name: the parameter's name, and keys below it.
        dtype, shape: of the array.
        in_low_bits: whether it is a cache in low bits.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    in_low_bits: bool

    def __str__(self) -> str:
        return f"{self.name}={self.dtype}{list(self.shape)}{' in low bits' * self.in_low_bits}"

    def difference(self, first: Argument) -> str:
        """In what it differs from the argument of another call, sizes aside; "" for nothing."""
        if self.in_low_bits != first.in_low_bits:
            return "a cache of another kind"
        if self.dtype != first.dtype:
            return "another dtype"
        return "another number of axes" if len(self.shape) != len(first.shape) else ""


class Signature(NamedTuple):
    """The arguments of one program.

    Attributes:
        tree: their structure.
        arrays: the arrays among them.
        flags: everything else, None in the place of arrays.
    """

    tree: object
    arrays: tuple[Argument, ...]
    flags: tuple[object, ...]

    @classmethod
    def of(cls, model: nnx.Module, call: Call) -> Signature:
        """That of a call, maybe one that is being traced."""
        arrays = tuple(
            Argument(dotted(path), np.dtype(x.dtype), tuple(x.shape), is_low_bit_cache(x))
            for path, x in zip(call.places(model), call.arrays, strict=False)
        )
        return cls(call.frame.tree, arrays, call.frame.others)

    def __str__(self) -> str:
        return ", ".join([*map(str, self.arrays), *(repr(flag) for flag in self.flags if flag is not None)])

    def check_like(self, first: Signature) -> None:
        """Refuse arguments that differ from the first ones in more than sizes and flags.

        Raises:
            TypeError: another structure, dtype or number of axes. Named by argument.
        """
        if self.tree != first.tree or len(self.arrays) != len(first.arrays):
            raise TypeError(
                f"compiled: called with ({self}), and compiled for ({first}): the arguments are other ones, or not "
                "arrays.\n  cure: the same arguments in the same places; jqinject.compiled(model, ...) once more for "
                "another way to call the model"
            )
        for argument, before in zip(self.arrays, first.arrays, strict=True):
            difference = argument.difference(before)
            if difference:
                raise TypeError(
                    f"compiled: got {argument}, and the model was compiled for {before}: {difference}.\n"
                    f"  cure: give what it was compiled for; or jqinject.compiled(model, ...) once more for this one"
                )


def _options_of(model: nnx.Module, call: Call, donate: Collection[str]) -> dict[str, Any]:
    """The keywords of `jax.jit`: arguments without arrays are constants, and `donate` names what is given away.

    Raises:
        TypeError: a module among the arguments; a flag inside of a tree of arrays; one that cannot be hashed.
        ValueError: `donate` names none of them, or a flag.
    """
    names = call.names(model)
    arguments = dict([*zip(names, call.args, strict=True), *call.kwargs.items()])
    static = [name for name, argument in arguments.items() if _is_flag(name, argument)]
    for name in donate:
        if name not in arguments or name in static:
            hint = did_you_mean(name, arguments)
            raise ValueError(
                f"compiled: donate={name!r} is {'a flag' if name in static else 'not an argument of this call'}"
                f"{'; ' + hint if hint else ''}.\n  cure: one of {', '.join(n for n in arguments if n not in static)}"
            )

    def numbers(chosen: Collection[str]) -> tuple[int, ...]:
        return tuple(OWN_ARGUMENTS + place for place, name in enumerate(names) if name in chosen)

    return {
        "static_argnums": numbers(static),
        "static_argnames": [name for name in call.kwargs if name in static],
        "donate_argnums": (1, *numbers(donate)),
        "donate_argnames": [name for name in call.kwargs if name in donate],
    }


def _with_arrays(
    args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with NumPy's numbers as arrays, which is what `jax.jit` takes them for."""
    return jax.tree.map(
        lambda x: np.asarray(x) if isinstance(x, np.generic) else x,
        (tuple(args), dict(kwargs)),
        is_leaf=is_low_bit_cache,
    )


def _is_flag(name: str, argument: object) -> bool:
    """Whether an argument is a constant of the program, and no tree of arrays."""
    alone = Call((argument,), {})
    if alone.modules:
        raise TypeError(
            f"compiled: {name} is a {type(alone.modules[0]).__name__}, whose changes a compiled function could not "
            "give back.\n  cure: a module that holds both, and is compiled: its call is "
            "`return self.model(x, self.cache)`"
        )
    others = [
        leaf
        for place, leaf in enumerate(alone.frame.others)
        if place not in alone.frame.arrays and not isinstance(leaf, LowBitCache)
    ]
    if not others:
        return False
    if alone.arrays:
        raise TypeError(
            f"compiled: {name} holds arrays, and {others[0]!r:.60} ({type(others[0]).__name__}), which is none.\n"
            "  cure: jnp.asarray of numbers; flags as arguments of their own, or method=lambda model, x: "
            "model(x, flag)"
        )
    try:
        hash(argument)
    except TypeError:
        raise TypeError(
            f"compiled: {name} is a {type(argument).__name__} without arrays: a constant of the program, which must be "
            "hashable.\n  cure: jnp.asarray, if it is numbers; a tuple; method=lambda model, x: model(x, ...)"
        ) from None
    return True


Model = TypeVar("Model", bound=nnx.Module)
Filter = nnx.filterlib.Filter
Arrays = tuple[jax.Array, ...]
Shapes = Literal["any", "given"]
MANY = 16
"""So many programs of one model are no surprise."""


def compiled(
    model: Model,
    *inputs: object,
    method: Method = CALL,
    changing: Filter = nnx.Cache,
    donate: str | Collection[str] = (),
    shapes: Shapes = "any",
    **keywords: object,
) -> CompiledModel[Model]:
    """Compile a model into one function that holds its state: `answer = compiled(model, x)`, then `answer(x)`.

    `nnx.jit` walks through all modules of a model in each call. Here the arrays are taken out once, and each call hands
    them to the program: they stay arguments of it (not constants), in their dtypes and shardings, shared with the
    model. Later changes of the model do not count: `update` takes them. Caches that the call changes are carried from
    call to call in place (donated); the model that was given keeps its own.

    The first program is compiled at once, from arrays or shapes. Other sizes of axes are compiled when they are first
    seen, once each; other dtypes, numbers of axes or arguments are refused. Arguments that hold no arrays (flags,
    numbers, strings) are constants: each value has its own program.

    Args:
        model: an NNX module in evaluation mode, frozen or not.
        inputs, keywords: what the model is called with: arrays, `jax.ShapeDtypeStruct`s, pytrees of them, flags; no
            modules.
        method: name of the method to call, or a function that takes the model first.
        changing: an NNX filter: the Variables that calls may change. Caches of `jqinject.quantized_cache` may always.
        donate: names of arguments whose memory the results may take; such an array is gone after the call. For a cache
            that is an argument and a result: `donate="cache"`.
        shapes: "any", or "given" to refuse sizes that were not prepared: then nothing is compiled while answering.

    Returns:
        The compiled function.

    Raises:
        TypeError: `model` is not an NNX module; a module among the inputs; a flag that cannot be hashed.
        ValueError: the model is in training mode, abstract, or its call changes what `changing` does not name: by path.
            No such method; `donate` names no argument.

    Example:
        >>> import jqinject
        >>> from jqinject.nn import QuantLinear
        >>> model = jqinject.freeze(QuantLinear(4, 2, rngs=nnx.Rngs(0)))
        >>> answer = compiled(model, jnp.ones((1, 4)))
        >>> answer(jnp.ones((1, 4))).shape, answer(jnp.ones((3, 4))).shape, len(answer.programs)
        ((1, 2), (3, 2), 2)
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"compiled takes an NNX module, got {type(model).__name__}")
    if shapes not in ("any", "given"):
        raise ValueError(f"compiled: shapes is 'any' or 'given', got {shapes!r}")
    args, kwargs = _with_arrays(inputs, keywords)
    call = Call(args, kwargs, checked_method(model, method, "compiled"))
    names = (donate,) if isinstance(donate, str) else tuple(donate)
    return CompiledModel(model, call, changing, names, shapes)


@final
class CompiledModel(Generic[Model]):
    """A model as one compiled function; made by `jqinject.compiled`.

    Called as the model is. Several threads may call it at once if it changes no caches.
    """

    def __init__(
        self, model: Model, call: Call, changing: Filter, donate: Collection[str], shapes: Shapes
    ) -> None:
        options = _options_of(model, call, donate)
        _check_evaluates(model)
        self._chosen = nnx.filterlib.to_predicate(changing)
        self._graphdef, *states = self._split(model)
        # As tuples: a state is flattened by Python code, in every call and Variable by Variable.
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(tuple(states))
        self._paths = [_dotted(path) for path, _ in leaves]
        abstract = [
            path for path, (_, leaf) in zip(self._paths, leaves, strict=True) if not isinstance(leaf, ARRAYS)
        ]
        if abstract:
            raise ValueError(
                f"compiled: {abstract[0]} is not an array: the model is abstract, or is being traced.\n"
                "  cure: a model with numbers in it, outside of jax.jit"
            )
        self._count = len(jax.tree.leaves(states[0]))  # of the arrays that calls may change, which come first
        if not self._count and changing is not nnx.Cache:
            raise ValueError(
                f"compiled: no Variable of the model is what changing={changing!r} names.\n"
                "  cure: a type of Variables, nnx.PathContains('name'), or any other filter of nnx"
            )
        self._method, self._name = call.method, f"{type(model).__name__}.{call.name}"
        self._shapes, self._prepared = shapes, True
        self._signatures: list[Signature] = []
        self._read, self._changing = self._arrays(model)
        self._run = jax.jit(self._traced, out_shardings=_shardings(self._changing), **options)
        self.prepare(*call.args, **call.kwargs)

    def __call__(self, *inputs: object, **keywords: object) -> Any:
        """Call the model.

        Raises:
            TypeError: another dtype, number of axes or structure than it was compiled for.
            ValueError: sizes that were not prepared, with `shapes="given"`.
        """
        out, self._changing = self._run(self._read, self._changing, *inputs, **keywords)
        return out

    def prepare(self, *inputs: object, **keywords: object) -> None:
        """Compile for other sizes ahead of the call; nothing is run.

        Args:
            inputs, keywords: as in a call, or shapes in the place of arrays.
        """
        args, kwargs = _with_arrays(inputs, keywords)
        self._prepared = True
        try:
            self._run.lower(self._read, self._changing, *args, **kwargs).compile()
        finally:
            self._prepared = self._shapes == "any"

    def model(self) -> Model:
        """A model with the present state: weights shared, caches copied."""
        return self._merged(self._read, tuple(map(jnp.copy, self._changing)))

    def update(self, model: Model) -> None:
        """Take the state of a model: other weights, or other caches, such as the empty ones of the first model.

        Args:
            model: of the same structure; it is not changed.

        Raises:
            ValueError: it is not, or has arrays of other shapes or dtypes; nothing is changed then.
        """
        read, changing = self._arrays(model)
        before, after = (*self._changing, *self._read), (*changing, *read)
        for path, old, new in zip(self._paths, before, after, strict=True):
            if _kind(new) != _kind(old):
                raise ValueError(
                    f"update: {path} is {_kind(new)}, and was compiled as {_kind(old)}.\n"
                    "  cure: a model of the same sizes; or jqinject.compiled(model, ...) of this one"
                )
        self._read, self._changing = read, changing

    @property
    def programs(self) -> tuple[str, ...]:
        """The arguments that it is compiled for."""
        return tuple(map(str, self._signatures))

    def __repr__(self) -> str:
        return f"CompiledModel({self._name}: {'; '.join(self.programs)})"

    def _split(self, model: nnx.Module) -> Any:
        """The graph, the state that calls may change, and the rest."""

        def may_change(path: tuple[Any, ...], node: object) -> bool:
            value = node.get_raw_value() if isinstance(node, nnx.Variable) else node
            return is_low_bit_cache(value) or bool(self._chosen(path, node))

        return nnx.split(model, may_change, ..., graph=True)

    def _leaves(self, model: nnx.Module) -> list[jax.Array] | None:
        """The arrays of a model, those first that calls may change; None if it has another structure."""
        graphdef, *states = self._split(model)
        leaves, tree = jax.tree.flatten(tuple(states))
        return leaves if tree == self._tree and graphdef == self._graphdef else None

    def _arrays(self, model: nnx.Module) -> tuple[Arrays, Arrays]:
        """What calls only read, and copies of what they change, since calls overwrite it.

        Raises:
            ValueError: the model is in training mode, or has another structure.
        """
        _check_evaluates(model)
        leaves = self._leaves(model)
        if leaves is None:
            raise ValueError(
                f"compiled: this {type(model).__name__} has another structure than the model that was compiled "
                "(layers, static attributes, what is frozen).\n  cure: jqinject.compiled(model, ...) of this one"
            )
        changing, read = leaves[: self._count], leaves[self._count :]
        return tuple(map(jnp.asarray, read)), tuple(map(jnp.array, changing))

    def _merged(self, read: Arrays, changing: Arrays) -> Model:
        return nnx.merge(self._graphdef, *jax.tree.unflatten(self._tree, (*changing, *read)))

    def _traced(self, read: Arrays, changing: Arrays, *args: object, **kwargs: object) -> Any:
        """What is compiled."""
        call = Call(args, kwargs, self._method)
        model = self._merged(read, changing)
        signature = Signature.of(model, call)
        self._check(signature)
        try:
            out = call(model)
        except Exception as error:
            error.add_note(f"while {self._name} was compiled for ({signature})")
            raise
        after = self._leaves(model)
        if after is None:
            raise ValueError(
                f"compiled: the call changes more of the model than arrays: {self._new_paths(model)}.\n"
                "  cure: a call that returns what it makes; caches made before (init_cache); without sow"
            )
        for path, new, old in zip(self._paths, after, changing, strict=False):
            if _kind(new) != _kind(old):
                raise ValueError(
                    f"compiled: the call makes {path} {_kind(new)}, and it was {_kind(old)}: each call would be "
                    "compiled.\n  cure: a cache of full length from the beginning, into which the call writes"
                )
        if any(new is not old for new, old in zip(after[self._count :], read, strict=True)):
            self._refuse_changes(call, read, changing)
        self._signatures.append(signature)
        return out, tuple(after[: self._count])

    def _new_paths(self, model: nnx.Module) -> str:
        """The paths of the Variables that a call has made, or what else it has changed."""
        flat, _ = jax.tree_util.tree_flatten_with_path(tuple(self._split(model)[1:]))
        new = {_dotted(path) for path, _ in flat} - {*self._paths}
        return listed(tuple(sorted(new))) or "its attributes"

    def _refuse_changes(self, call: Call, read: Arrays, changing: Arrays) -> None:
        """Refuse a call that changes what it may only read, be it that this goes through a part of its program."""

        def run(read: Arrays, changing: Arrays, arrays: Sequence[jax.Array]) -> list[jax.Array]:
            model = self._merged(read, changing)
            call.frame.filled(arrays, ())(model)
            return (self._leaves(model) or [])[self._count :]

        after = _inputs_of(Body.of(jax.make_jaxpr(run)(read, changing, call.arrays)))
        paths = self._paths[self._count :]
        names = tuple(dict.fromkeys(path for place, path in enumerate(paths) if after[place] != place))
        if names:
            raise ValueError(
                f"compiled: the call changes {listed(names)}, which are not caches: a served model changes "
                "caches only (nnx.Cache, and what jqinject.quantized_cache made).\n"
                "  cure: model.eval(), for statistics and dropout; changing=nnx.Any(nnx.Cache, "
                f"nnx.PathContains({names[0].rpartition('.')[2]!r})), if calls are to change them"
            )

    def _check(self, signature: Signature) -> None:
        if self._signatures:
            signature.check_like(self._signatures[0])
        if not self._prepared:
            prepared = "; ".join(self.programs)
            raise ValueError(
                f"compiled: ({signature}) was not prepared, and shapes='given'. It is compiled for: {prepared}.\n"
                "  cure: answer.prepare(...) for these sizes, before answering; or shapes='any'"
            )
        if len(self._signatures) == MANY:
            warnings.warn(
                f"compiled: {self._name} is compiled for more than {MANY} different arguments, now for ({signature}); "
                "each takes time and memory.\n  cure: inputs of few sizes (padded); jnp.asarray of numbers that change "
                "from call to call",
                UserWarning,
                stacklevel=2,
            )


def _check_evaluates(model: nnx.Module) -> None:
    training = tuple(
        f"{place_name(path)}.{name}" if path else name
        for path, node in nnx.iter_modules(model, graph=True)
        for name in MODES
        if vars(node).get(name) is False
    )
    if training:
        raise ValueError(
            f"compiled: the model is in training mode ({listed(training)} = False), and is served in evaluation mode.\n"
            "  cure: model.eval(), or jqinject.freeze(model)"
        )


def _shardings(changing: Arrays) -> object:
    """Caches that lie on several devices stay as they lie; the rest is left to the compiler."""
    shardings = [x.sharding if len(x.sharding.device_set) > 1 else None for x in changing]
    return (None, tuple(shardings)) if any(sharding is not None for sharding in shardings) else None


def _kind(x: jax.Array) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _dotted(path: Sequence[object]) -> str:
    """The keys of a leaf without that of its state, and without the attribute in which a Variable has its array."""
    keys = [part for part in path[1:] if not isinstance(part, jax.tree_util.GetAttrKey)]
    return ".".join(jax.tree_util.keystr((key,), simple=True) for key in keys)


def _inputs_of(body: Body) -> list[int | None]:
    """For each output of a program, the number of the input that it is; None if it is computed.

    JAX itself passes on what loops and branches do not change; here the other programs within are looked into.
    """

    def passed(equation: Equation, inputs: list[int | None]) -> list[int | None]:
        inner = equation.body
        if inner is None or len(inner.outputs) != len(equation.outputs):
            return [None] * len(equation.outputs)
        return inner.run(inputs, passed, _no_input)

    return body.run(range(len(body.inputs)), passed, _no_input)


def _no_input(value: object) -> None:
    """A constant is no input."""
