"""`compiled`: a model as one compiled function that holds its own state, for serving.

`nnx.split` takes the arrays out of the model, and `jax.jit` compiles a function of them, which donates the caches. All
checks are made where JAX traces this function: Python runs it only for arguments that it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Generic, Literal, TypeVar, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.dot import is_low_bit_cache
from jqinject.inject.errors import did_you_mean
from jqinject.model.frozen_weights import without_requantizers
from jqinject.model.fused_products import with_fused_products
from jqinject.model.walk import check_module, place_name
from jqinject.program import CALL, Call, Method, checked_method, dotted, jaxpr, listed

#: The attributes that `model.eval()` sets.
MODES = ("deterministic", "use_running_average")
#: In what an array must not differ from that of the first call.
DIFFERENCES = ("a cache of another kind", "another dtype", "another number of axes")


Model = TypeVar("Model", bound=nnx.Module)
Result = TypeVar("Result")
Filter = nnx.filterlib.Filter
Arrays = tuple[jax.Array, ...]
Shapes = Literal["any", "given"]


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

    On one CPU with compiled kernels, a product of integers is fused with the elementwise operations around it: the
    rounding of its input, scales, zero points, bias, activation, and the rounding for the next product. Results are
    those of the model under `jax.jit`; where XLA may choose which product it rounds together with a sum, the last bit
    may differ, and a row with a nan stays nan.

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
    check_module(model, "compiled")
    if shapes not in ("any", "given"):
        raise ValueError(f"compiled: shapes is 'any' or 'given', got {shapes!r}")
    call = Call(inputs, keywords, checked_method(model, method, "compiled"))
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
        constants, donated = _places(model, call, donate)
        self._call_tree, self._first = call.frame.tree, _named(model, call)
        _check_evaluates(model)
        self._may_change = nnx.Any(_is_low_bit, changing)
        self._graphdef, *states = nnx.split(model, self._may_change, ..., graph=True)
        # As tuples: a state is flattened by Python code, in every call and Variable by Variable.
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(tuple(states))
        self._paths = [_dotted(path) for path, _ in leaves]
        for path, (_, leaf) in zip(self._paths, leaves, strict=True):
            if not isinstance(leaf, jax.Array | np.ndarray):
                raise ValueError(
                    f"compiled: {path} is not an array: the model is abstract, or is being traced.\n"
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
        self._programs: list[str] = []
        self._read, self._changing = self._arrays(model)
        # Caches on several devices stay where they are; the rest is left to the compiler.
        shardings = [x.sharding if len(x.sharding.device_set) > 1 else None for x in self._changing]
        fuses = jax.default_backend() == "cpu" and all(map(_lies_on_one_cpu, (*self._read, *self._changing)))
        self._run = jax.jit(
            with_fused_products(self._traced) if fuses else self._traced,
            static_argnums=tuple(place + 2 for place in constants),
            donate_argnums=(1, *(place + 2 for place in donated)),
            out_shardings=(None, tuple(shardings)),
        )
        self.prepare(*call.args, **call.kwargs)

    def __call__(self, *inputs: object, **keywords: object) -> Any:
        """Call the model.

        Raises:
            TypeError: another dtype, number of axes or structure than it was compiled for.
            ValueError: sizes that were not prepared, with `shapes="given"`.
        """
        out, self._changing = self._run(*self._arguments(inputs, keywords))
        return out

    def _arguments(self, inputs: tuple[object, ...], keywords: dict[str, object]) -> tuple[Any, ...]:
        """The arguments of the compiled function: what it only reads, what it overwrites, and the call's leaves."""
        leaves, tree = jax.tree.flatten((inputs, keywords), is_leaf=is_low_bit_cache)
        if tree != self._call_tree:
            raise TypeError(
                f"compiled: the arguments are other ones than in ({self._programs[0]}), or not arrays.\n  cure: the "
                "same arguments in the same places; jqinject.compiled(model, ...) once more for another way to call it"
            )
        return self._read, self._changing, *leaves

    def prepare(self, *inputs: object, **keywords: object) -> None:
        """Compile for other sizes ahead of the call; nothing is run.

        Args:
            inputs, keywords: as in a call, or shapes in the place of arrays.
        """
        self._prepared = True
        try:
            self._run.lower(*self._arguments(inputs, keywords)).compile()
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
        self._graphdef, self._tree, _ = self._split(model)

    def rewrite(self, change: Callable[[Model], Result]) -> Result:
        """Let a function write other arrays into the Variables of the model, with which later calls go on.

        Args:
            change: takes a model that shares all arrays, caches too, and changes it in place; what it returns is
                returned. Arrays that it overwrites are lost to other models that share them.
        """
        model = self._merged(self._read, self._changing)
        try:
            return change(model)
        finally:
            leaves = self._leaves(model)
            assert leaves is not None, "arrays are other ones, not the structure"
            self._changing, self._read = tuple(leaves[: self._count]), tuple(leaves[self._count :])

    @property
    def programs(self) -> tuple[str, ...]:
        """The arguments that it is compiled for."""
        return tuple(self._programs)

    def __repr__(self) -> str:
        return f"CompiledModel({self._name}: {'; '.join(self.programs)})"

    def _leaves(self, model: Model) -> list[jax.Array] | None:
        """The arrays of a model, those first that calls may change; None if it has another structure."""
        graphdef, tree, leaves = self._split(model)
        if (graphdef, tree) == (self._graphdef, self._tree):
            return leaves
        own = self._merged(self._read, self._changing)
        # What is frozen by other quantizers is alike: no call reads them.
        alike = self._split(without_requantizers(model))[:2] == self._split(without_requantizers(own))[:2]
        return leaves if alike else None

    def _split(self, model: Model) -> tuple[nnx.GraphDef[Model], Any, list[jax.Array]]:
        """The structure of a model, static part and state, and its arrays, those first that calls may change."""
        graphdef, *states = nnx.split(model, self._may_change, ..., graph=True)
        leaves, tree = jax.tree.flatten(tuple(states))
        return graphdef, tree, leaves

    def _arrays(self, model: Model) -> tuple[Arrays, Arrays]:
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

    def _traced(self, read: Arrays, changing: Arrays, *leaves: object) -> Any:
        """What is compiled."""
        args, kwargs = jax.tree.unflatten(self._call_tree, leaves)
        call = Call(args, kwargs, self._method)
        model = self._merged(read, changing)
        described = self._checked(model, call)
        try:
            out = call(model)
        except Exception as error:
            has_arguments = call.args or call.kwargs
            cure = "" if has_arguments else "\n  cure: compiled(model, x), with the arguments of the call"
            error.add_note(f"while {self._name} was compiled for ({described}){cure}")
            raise
        after = self._leaves(model)
        if after is None:
            _, *states = nnx.split(model, self._may_change, ..., graph=True)
            flat, _ = jax.tree_util.tree_flatten_with_path(tuple(states))
            new = listed(tuple(sorted({_dotted(path) for path, _ in flat} - {*self._paths})))
            raise ValueError(
                f"compiled: the call changes more of the model than arrays: {new or 'its attributes'}.\n"
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
        self._programs.append(described)
        return out, tuple(after[: self._count])

    def _refuse_changes(self, call: Call, read: Arrays, changing: Arrays) -> None:
        """Refuse a call that changes what it may only read, be it that this goes through a part of its program."""

        def run(read: Arrays, changing: Arrays, arrays: Sequence[jax.Array]) -> list[jax.Array]:
            model = self._merged(read, changing)
            call.frame.filled(arrays, ())(model)
            return (self._leaves(model) or [])[self._count :]

        body = jaxpr.Body.of(jax.make_jaxpr(run)(read, changing, call.arrays))
        after = _inputs_of(body, range(len(body.inputs)))
        paths = self._paths[self._count :]
        names = tuple(dict.fromkeys(path for place, path in enumerate(paths) if after[place] != place))
        if names:
            raise ValueError(
                f"compiled: the call changes {listed(names)}, which are not caches: a served model changes "
                "caches only (nnx.Cache, and what jqinject.quantized_cache made).\n"
                "  cure: model.eval(), for statistics and dropout; changing=nnx.Any(nnx.Cache, "
                f"nnx.PathContains({names[0].rpartition('.')[2]!r})), if calls are to change them"
            )

    def _checked(self, model: nnx.Module, call: Call) -> str:
        """The arguments of a call as text: arrays by dtype and shape, and constants.

        Raises:
            TypeError: arrays that differ from those of the first call in more than sizes.
            ValueError: sizes that were not prepared, with `shapes="given"`.
        """
        arrays = _named(model, call)
        constants = (repr(leaf) for leaf in call.frame.others if leaf is not None)
        described = ", ".join((*(name for name, _ in arrays), *constants))
        for (name, facts), (before, first) in zip(arrays, self._first, strict=True):
            for difference, fact, expected in zip(DIFFERENCES, facts, first, strict=True):
                if fact != expected:
                    raise TypeError(
                        f"compiled: got {name}, and the model was compiled for {before}: {difference}.\n  cure: give "
                        "what it was compiled for; or jqinject.compiled(model, ...) once more for this one"
                    )
        if not self._prepared:
            raise ValueError(
                f"compiled: ({described}) was not prepared, and shapes='given'. It is compiled for: "
                f"{'; '.join(self.programs)}.\n"
                "  cure: answer.prepare(...) for these sizes, before answering; or shapes='any'"
            )
        return described


def _places(model: nnx.Module, call: Call, donate: Collection[str]) -> tuple[list[int], list[int]]:
    """The places among the leaves of a call of its constants, and of arrays that are given away.

    Raises:
        TypeError: a module among the arguments; a constant that cannot be hashed.
        ValueError: `donate` names none of them, or a flag.
    """
    names = [path[0] for path in call.places(model)]
    if call.modules:
        raise TypeError(
            f"compiled: {names[-1]} is a {type(call.modules[-1]).__name__}, whose changes a compiled function could "
            "not give back.\n  cure: a module that holds both, and is compiled: its call is "
            "`return self.model(x, self.cache)`"
        )
    constants = [place for place in range(len(call.frame.others)) if place not in call.frame.arrays]
    for leaf in map(call.frame.others.__getitem__, constants):
        if not isinstance(leaf, Hashable):
            raise TypeError(
                f"compiled: {leaf!r:.60} is a {type(leaf).__name__} without arrays: a constant of the program, which "
                "must be hashable.\n  cure: jnp.asarray, if it is numbers; method=lambda model, x: model(x, ...)"
            )
    flags = {*call.names(model), *call.kwargs} - {*names}
    for name in donate:
        if name not in names:
            hint = did_you_mean(name, names)
            raise ValueError(
                f"compiled: donate={name!r} is {'a flag' if name in flags else 'not an argument of this call'}"
                f"{'; ' + hint if hint else ''}.\n  cure: one of {', '.join(dict.fromkeys(names))}"
            )
    return constants, [place for place, name in zip(call.frame.arrays, names, strict=True) if name in donate]


def _named(model: nnx.Module, call: Call) -> list[tuple[str, tuple[object, ...]]]:
    """The arrays of a call as text, and what all programs have in common of each: see `DIFFERENCES`."""
    return [
        (
            f"{dotted(path)}={_kind(x)}{' in low bits' * is_low_bit_cache(x)}",
            (is_low_bit_cache(x), jax.dtypes.canonicalize_dtype(x.dtype), x.ndim),
        )
        for path, x in zip(call.places(model), call.arrays, strict=False)
    ]


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


def _is_low_bit(path: object, node: object) -> bool:
    return is_low_bit_cache(node.get_raw_value() if isinstance(node, nnx.Variable) else node)


def _lies_on_one_cpu(x: jax.Array) -> bool:
    return [device.platform for device in x.devices()] == ["cpu"]


def _kind(x: jax.Array) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _dotted(path: Sequence[object]) -> str:
    """The keys of a leaf without that of its state, and without the attribute in which a Variable has its array."""
    keys = [part for part in path[1:] if not isinstance(part, jax.tree_util.GetAttrKey)]
    return ".".join(jax.tree_util.keystr((key,), simple=True) for key in keys)


def _inputs_of(body: jaxpr.Body, inputs: Sequence[int | None]) -> list[int | None]:
    """For each output of a program, the number of the input that it is; None if it is computed.

    JAX itself passes on what loops and branches do not change; here the other programs within are looked into.
    """

    def passed(equation: jaxpr.Equation, inputs: list[int | None]) -> list[int | None]:
        inner = equation.body
        if inner is None or len(inner.outputs) != len(equation.outputs):
            return [None] * len(equation.outputs)
        return _inputs_of(inner, inputs)

    return body.run(inputs, passed, lambda constant: None)
