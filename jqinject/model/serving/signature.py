"""What the arguments of a compiled model are: arrays, whose sizes may differ from call to call, and flags."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jqinject.dot import LowBitCache, is_low_bit_cache
from jqinject.inject.errors import did_you_mean
from jqinject.program import Call, dotted

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
    def of(cls, model: Any, call: Call) -> Signature:
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
        for place, (own, known) in enumerate(zip(self.kinds, first.kinds, strict=True)):
            if own != known:
                other = "another dtype" if own[0] != known[0] else "another number of axes"
                raise TypeError(
                    f"compiled: got {self._in_words(place)}, and the model was compiled for {first._in_words(place)}: "
                    f"{other if own[2] == known[2] else 'a cache of another kind'}.\n"
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


def places_of(model: Any, call: Call, donate: Collection[str]) -> ArgumentPlaces:
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
    given: list[tuple[str, Any]] = [*zip(names, call.args, strict=True), *call.kwargs.items()]
    static = {name for name, argument in given if _is_flag(name, argument)}
    known = [name for name, _ in given]
    for name in donate:
        if name not in known or name in static:
            hint = did_you_mean(name, known)
            raise ValueError(
                f"compiled: donate={name!r} is {'a flag' if name in static else 'not an argument of this call'}"
                f"{'; ' + hint if hint else ''}.\n  cure: one of {', '.join(n for n in known if n not in static)}"
            )

    def numbers(chosen: Collection[str]) -> tuple[int, ...]:
        return tuple(HELD + at for at, name in enumerate(names) if name in chosen)

    def keywords(chosen: Collection[str]) -> tuple[str, ...]:
        return tuple(name for name in call.kwargs if name in chosen)

    return ArgumentPlaces(numbers(static), keywords(static), numbers(donate), keywords(donate))


def with_arrays(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with NumPy's numbers as arrays, which is what `jax.jit` takes them for."""
    return jax.tree.map(
        lambda x: np.asarray(x) if isinstance(x, np.generic) else x,
        (tuple(args), dict(kwargs)),
        is_leaf=is_low_bit_cache,
    )


def _is_flag(name: str, argument: Any) -> bool:
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
