"""`compiled`: a model as one compiled function that holds its own state, for serving."""

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
from jqinject.model.serving.held_state import HeldArrays, PackedArrays, StateLayout
from jqinject.program import CALL, Call, Method, checked_method, dotted
from jqinject.program.jaxpr import Body

HELD = 2
"""Arguments of the compiled function before the model's own: the arrays that it holds."""


class Signature(NamedTuple):
    """The arguments of one program.

    Attributes:
        tree: their structure.
        names: of the arrays among them.
        kinds: of each array: dtype, number of axes, and whether it is a cache in low bits.
        shapes: of each array.
        flags: everything else, None in the place of arrays.
    """

    tree: Any
    names: tuple[str, ...]
    kinds: tuple[tuple[Any, int, bool], ...]
    shapes: tuple[tuple[int, ...], ...]
    flags: tuple[Any, ...]

    @classmethod
    def of(cls, model: nnx.Module, call: Call) -> Signature:
        """That of a call, maybe one that is being traced."""
        names = tuple(dotted(path) for path in call.places(model)[: len(call.arrays)])
        kinds = tuple((np.dtype(x.dtype), x.ndim, is_low_bit_cache(x)) for x in call.arrays)
        shapes = tuple(tuple(x.shape) for x in call.arrays)
        return cls(call.frame.tree, names, kinds, shapes, call.frame.others)

    def __str__(self) -> str:
        flags = [repr(flag) for flag in self.flags if flag is not None]
        return ", ".join([*map(self._in_words, range(len(self.names))), *flags])

    def _in_words(self, place: int) -> str:
        dtype, _, in_low_bits = self.kinds[place]
        return f"{self.names[place]}={dtype}{list(self.shapes[place])}{' in low bits' * in_low_bits}"

    def check_like(self, first: Signature) -> None:
        """Refuse arguments that differ from the first ones in more than sizes and flags.

        Raises:
            TypeError: another structure, dtype or number of axes. Named by argument.
        """
        if self.tree != first.tree or len(self.names) != len(first.names):
            raise TypeError(
                f"compiled: called with ({self}), and compiled for ({first}): the arguments are other ones, or not "
                "arrays.\n  cure: the same arguments in the same places; jqinject.compiled(model, ...) once more for "
                "another way to call the model"
            )
        for place, (own, first_kind) in enumerate(zip(self.kinds, first.kinds, strict=True)):
            if own != first_kind:
                difference = "another dtype" if own[0] != first_kind[0] else "another number of axes"
                raise TypeError(
                    f"compiled: got {self._in_words(place)}, and the model was compiled for {first._in_words(place)}: "
                    f"{difference if own[2] == first_kind[2] else 'a cache of another kind'}.\n"
                    f"  cure: give what it was compiled for; or jqinject.compiled(model, ...) once more for this one"
                )


class ArgumentPlaces(NamedTuple):
    """Which arguments of the compiled function are constants of the program, and which are given away.

    Attributes:
        static_numbers, static_names: positional and keyword arguments that hold no arrays.
        donated_numbers, donated_names: those whose memory the results may take.
    """

    static_numbers: tuple[int, ...]
    static_names: tuple[str, ...]
    donated_numbers: tuple[int, ...]
    donated_names: tuple[str, ...]


def places_of(model: nnx.Module, call: Call, donate: Collection[str]) -> ArgumentPlaces:
    """Sort the arguments of a call.

    Args:
        model: whose method is called.
        call: the call.
        donate: names of arguments.

    Raises:
        TypeError: a module among them; a flag inside of a tree of arrays; one that cannot be hashed.
        ValueError: `donate` names none of them, or a flag.
    """
    names = call.names(model)
    arguments: list[tuple[str, Any]] = [*zip(names, call.args, strict=True), *call.kwargs.items()]
    static = {name for name, argument in arguments if _is_flag(name, argument)}
    known_names = [name for name, _ in arguments]
    for name in donate:
        if name not in known_names or name in static:
            hint = did_you_mean(name, known_names)
            raise ValueError(
                f"compiled: donate={name!r} is {'a flag' if name in static else 'not an argument of this call'}"
                f"{'; ' + hint if hint else ''}.\n  cure: one of {', '.join(n for n in known_names if n not in static)}"
            )

    def numbers(chosen: Collection[str]) -> tuple[int, ...]:
        return tuple(HELD + at for at, name in enumerate(names) if name in chosen)

    def keywords(chosen: Collection[str]) -> tuple[str, ...]:
        return tuple(name for name in call.kwargs if name in chosen)

    return ArgumentPlaces(numbers(static), keywords(static), numbers(donate), keywords(donate))


def with_arrays(
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
Shapes = Literal["any", "given"]
MANY = 16
"""So many programs of one model are no surprise."""


def compiled(
    model: Model,
    *inputs: object,
    method: Method = CALL,
    changing: object = nnx.Cache,
    donate: str | Collection[str] = (),
    shapes: Shapes = "any",
    **keywords: object,
) -> CompiledModel[Model]:
    """Compile a model into one function that holds its state: `answer = compiled(model, x)`, then `answer(x)`.

    `nnx.jit` walks through all modules of a model in each call. Here the arrays are taken out once, and each call hands
    them to the program as they lie: they stay arguments of it (not constants), in their dtypes and shardings, shared
    with the model. Those of at most 4 KiB on one device are also copied into one flat array for each dtype, because
    every argument costs about half a microsecond in each call. Later changes of the model do not count: `update` takes
    them. Caches that the call changes are carried from call to call in place (donated); the model that was given keeps
    its own.

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
    args, kwargs = with_arrays(inputs, keywords)
    call = Call(args, kwargs, checked_method(model, method, "compiled"))
    names = (donate,) if isinstance(donate, str) else tuple(donate)
    return CompiledModel(model, call, changing, names, shapes)


@final
class CompiledModel(Generic[Model]):
    """A model as one compiled function; made by `jqinject.compiled`.

    Called as the model is. Several threads may call it at once if it changes no caches.
    """

    def __init__(
        self, model: Model, call: Call, changing: object, donate: Collection[str], shapes: Shapes
    ) -> None:
        places = places_of(model, call, donate)
        self._layout = StateLayout(model, changing)
        self._method, self._name = call.method, f"{type(model).__name__}.{call.name}"
        self._shapes, self._prepared = shapes, True
        self._signatures: list[Signature] = []
        self._read, self._changing = self._layout.arrays(model)
        self._packed = PackedArrays.of(self._read)
        self._run = jax.jit(
            self._traced,
            static_argnums=places.static_numbers,
            static_argnames=places.static_names,
            donate_argnums=(1, *places.donated_numbers),
            donate_argnames=places.donated_names,
            out_shardings=_shardings(self._changing),
        )
        self.prepare(*call.args, **call.kwargs)

    def __call__(self, *inputs: object, **keywords: object) -> Any:
        """Call the model.

        Raises:
            TypeError: another dtype, number of axes or structure than it was compiled for.
            ValueError: sizes that were not prepared, with `shapes="given"`.
        """
        out, self._changing = self._run(self._packed, self._changing, *inputs, **keywords)
        return out

    def prepare(self, *inputs: object, **keywords: object) -> None:
        """Compile for other sizes ahead of the call; nothing is run.

        Args:
            inputs, keywords: as in a call, or shapes in the place of arrays.
        """
        args, kwargs = with_arrays(inputs, keywords)
        self._prepared = True
        try:
            self._run.lower(self._packed, self._changing, *args, **kwargs).compile()
        finally:
            self._prepared = self._shapes == "any"

    def model(self) -> Model:
        """A model with the present state: weights shared, caches copied."""
        return self._layout.model(HeldArrays(self._read, tuple(map(jnp.copy, self._changing))))

    def update(self, model: Model) -> None:
        """Take the state of a model: other weights, or other caches, such as the empty ones of the first model.

        Args:
            model: of the same structure; it is not changed.

        Raises:
            ValueError: it is not, or has arrays of other shapes or dtypes; nothing is changed then.
        """
        arrays = self._layout.arrays(model)
        self._layout.check_same(arrays, HeldArrays(self._read, self._changing))
        if any(new is not old for new, old in zip(arrays.read, self._read, strict=True)):
            self._packed = PackedArrays.of(arrays.read)
        self._read, self._changing = arrays

    @property
    def programs(self) -> tuple[str, ...]:
        """The arguments that it is compiled for."""
        return tuple(map(str, self._signatures))

    def __repr__(self) -> str:
        return f"CompiledModel({self._name}: {'; '.join(self.programs)})"

    def _traced(self, read: PackedArrays, changing: Any, *args: Any, **kwargs: Any) -> Any:
        """What is compiled. Python runs it only where no program is known: this is where arguments are checked."""
        call = Call(args, kwargs, self._method)
        before = HeldArrays(read.arrays(), changing)
        model = self._layout.model(before)
        signature = Signature.of(model, call)
        self._check(signature)
        try:
            out = call(model)
        except Exception as error:
            error.add_note(f"while {self._name} was compiled for ({signature})")
            raise
        after, places = self._layout.changed(model, before)
        if places:
            self._layout.refuse_changes(self._program(call, before), places)
        self._signatures.append(signature)
        return out, after

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

    def _program(self, call: Call, state: HeldArrays) -> Body:
        """The program of a call, with all state among its inputs and its outputs."""

        def run(read: Any, changing: Any, arrays: Any) -> Any:
            model = self._layout.model(HeldArrays(read, changing))
            call.frame.filled(arrays, ())(model)
            return self._layout.leaves(model)

        return Body.of(jax.make_jaxpr(run)(state.read, state.changing, call.arrays))


def _shardings(changing: Any) -> Any:
    """Caches that lie on several devices stay as they lie; the rest is left to the compiler."""
    shardings = [x.sharding if len(x.sharding.device_set) > 1 else None for x in changing]
    return (None, tuple(shardings)) if any(sharding is not None for sharding in shardings) else None
