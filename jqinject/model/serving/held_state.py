"""The state of a model as flat tuples of arrays: what calls may change, what they only read, small arrays packed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.dot import is_low_bit_cache
from jqinject.model.walk import listed, place_name
from jqinject.program.jaxpr import Body, Equation, Scan, While

Arrays = tuple[Any, ...]
MODES = ("deterministic", "use_running_average")
"""The attributes that `model.eval()` sets."""


class HeldArrays(NamedTuple):
    """The arrays of a model.

    Attributes:
        read: what calls only read.
        changing: what calls may change: caches.
    """

    read: Arrays
    changing: Arrays


class StateLayout:
    """How a model is taken apart into arrays, and put together again.

    Args:
        model: an NNX module in evaluation mode, with arrays.
        changing: an NNX filter: the Variables that calls may change, beside caches in low bits.

    Raises:
        ValueError: the model is in training mode, or abstract; nothing in it is what `changing` names.
    """

    def __init__(self, model: nnx.Module, changing: Any) -> None:
        _check_evaluates(model)
        self._chosen = nnx.filterlib.to_predicate(changing)
        self._graphdef, *states = self._split(model)
        flat = [jax.tree_util.tree_flatten_with_path(state) for state in states]
        self._trees = [tree for _, tree in flat]
        self.paths = [[_dotted(path) for path, _ in leaves] for leaves, _ in flat]
        abstract = [path for leaves, _ in flat for path, leaf in leaves if not isinstance(leaf, ARRAYS)]
        if abstract:
            raise ValueError(
                f"compiled: {_dotted(abstract[0])} is not an array: the model is abstract, or is being traced.\n"
                "  cure: a model with numbers in it, outside of jax.jit"
            )
        if not self.paths[0] and changing is not nnx.Cache:
            raise ValueError(
                f"compiled: no Variable of the model is what changing={changing!r} names.\n"
                "  cure: a type of Variables, nnx.PathContains('name'), or any other filter of nnx"
            )

    def arrays(self, model: nnx.Module) -> HeldArrays:
        """The arrays of a model of the same structure; of what changes, copies, since calls overwrite them.

        Raises:
            ValueError: the model is in training mode, has another structure, or arrays of other shapes or dtypes.
        """
        _check_evaluates(model)
        graphdef, *states = self._split(model)
        if [jax.tree.structure(state) for state in states] != self._trees or graphdef != self._graphdef:
            raise ValueError(
                f"compiled: this {type(model).__name__} has another structure than the model that was compiled "
                "(layers, static attributes, what is frozen).\n  cure: jqinject.compiled(model, ...) of this one"
            )
        changing, read = (tuple(jax.tree.leaves(state)) for state in states)
        return HeldArrays(tuple(map(_on_device, read)), tuple(map(jnp.array, changing)))

    def model(self, arrays: HeldArrays) -> Any:
        """A model with these arrays, or with those of a trace."""
        parts = zip(self._trees, (arrays.changing, arrays.read), strict=True)
        return nnx.merge(self._graphdef, *(jax.tree.unflatten(tree, leaves) for tree, leaves in parts))

    def changed(self, model: object, before: HeldArrays) -> tuple[Arrays, tuple[int, ...]]:
        """What a call has done to a model of `model(before)`.

        Returns:
            The arrays that may change, as they are now, and the numbers of those arrays that may not change and are
            others now.

        Raises:
            ValueError: the call has made or removed Variables, or changed static attributes, or the shape of a cache.
        """
        graphdef, *states = self._split(model)
        after = [jax.tree.leaves(state) for state in states]
        if [jax.tree.structure(state) for state in states] != self._trees or graphdef != self._graphdef:
            paths = [_dotted(path) for state in states for path in _paths(state)]
            new = [path for path in paths if path not in {*self.paths[0], *self.paths[1]}]
            raise ValueError(
                f"compiled: the call changes more of the model than arrays: {listed(tuple(new)) or 'its attributes'}.\n"
                "  cure: a call that returns what it makes; caches made before (init_cache); without sow"
            )
        for path, new, old in zip(self.paths[0], after[0], before.changing, strict=True):
            if _kind(new) != _kind(old):
                raise ValueError(
                    f"compiled: the call makes {path} {_kind(new)}, and it was {_kind(old)}: each call would be "
                    "compiled.\n  cure: a cache of full length from the beginning, into which the call writes"
                )
        rows = enumerate(zip(after[1], before.read, strict=True))
        return tuple(after[0]), tuple(place for place, (new, old) in rows if new is not old)

    def leaves(self, model: object) -> Arrays:
        """The arrays of a model: those that calls may change, then those that they only read."""
        _, *states = self._split(model)
        return tuple(jax.tree.leaves(states))

    def check_same(self, new: HeldArrays, old: HeldArrays) -> None:
        """Refuse arrays of other shapes or dtypes.

        Raises:
            ValueError: names the first.
        """
        named = zip(
            [*self.paths[1], *self.paths[0]],
            [*new.read, *new.changing],
            [*old.read, *old.changing],
            strict=True,
        )
        for path, own, compiled in named:
            if _kind(own) != _kind(compiled):
                raise ValueError(
                    f"update: {path} is {_kind(own)}, and was compiled as {_kind(compiled)}.\n"
                    "  cure: a model of the same sizes; or jqinject.compiled(model, ...) of this one"
                )

    def refuse_changes(self, program: Body, places: Sequence[int]) -> None:
        """Refuse a call that changes what it may only read.

        Args:
            program: of the call: the arrays that are read in; these, as they are afterwards, out at the end.
            places: numbers of the arrays that look changed: they may have gone through a loop.

        Raises:
            ValueError: some are; names them.
        """
        first = len(program.outputs) - len(self.paths[1])
        same = unchanged_inputs(program)[first:]
        names = dict.fromkeys(self.paths[1][place] for place in places if same[place] != place)
        if names:
            last = next(iter(names)).rpartition(".")[2]
            raise ValueError(
                f"compiled: the call changes {listed(tuple(names))}, which are not caches: a served model changes "
                "caches only (nnx.Cache, and what jqinject.quantized_cache made).\n"
                "  cure: model.eval(), for statistics and dropout; changing=nnx.Any(nnx.Cache, "
                f"nnx.PathContains({last!r})), if calls are to change them"
            )

    def _split(self, model: object) -> Any:
        return nnx.split(model, self._may_change, ..., graph=True)

    def _may_change(self, path: Any, node: Any) -> bool:
        value = node.get_raw_value() if isinstance(node, nnx.Variable) else node
        return is_low_bit_cache(value) or bool(self._chosen(path, node))


ARRAYS = (jax.Array, np.ndarray)


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


def _on_device(x: object) -> Any:
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _kind(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _paths(state: object) -> list[Any]:
    return [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]


def _dotted(path: Any) -> str:
    """The keys of a state's leaf that are the model's: without the attribute in which a Variable has its array."""
    keys = [part for part in path if not isinstance(part, jax.tree_util.GetAttrKey)]
    return ".".join(jax.tree_util.keystr((key,), simple=True) for key in keys)


Number = int | None
"""That of the input which a value is; None if it is computed."""


def unchanged_inputs(body: Body) -> list[Number]:
    """For each output of a program, the number of the input that it is; None if it is computed.

    Args:
        body: a program.

    Example:
        >>> import jax
        >>> looped = jax.make_jaxpr(lambda w, x: jax.lax.scan(lambda c, _: ((c[0], c[1] + 1), None), (w, x), length=2))
        >>> unchanged_inputs(Body.of(looped(1.0, 2.0)))
        [0, None]
    """
    return _run(body, range(len(body.inputs)))


def _run(body: Body, inputs: Sequence[Number]) -> list[Number]:
    return body.run(inputs, _passed, _constant)


def _constant(value: object) -> None:
    """A constant is no input."""


def _passed(equation: Equation, inputs: list[Number]) -> list[Number]:
    """What an operation makes of values: those that it only passes on stay."""
    if equation.scan:
        return _of_scan(equation.scan, inputs)
    if equation.loop:
        return _of_while(equation.loop, inputs)
    if equation.branches:
        outputs = zip(*(_run(branch, inputs[1:]) for branch in equation.branches), strict=True)
        return [numbers[0] if len(set(numbers)) == 1 else None for numbers in outputs]
    body, count = equation.body, len(equation.outputs)
    return [None] * count if body is None or len(body.outputs) != count else _run(body, inputs)


def _of_while(loop: While, inputs: list[Number]) -> list[Number]:
    _, constants, carry = loop.split(inputs)
    inside = enumerate(unchanged_inputs(loop.body), len(constants))
    return [x if place == source else None for x, (place, source) in zip(carry, inside, strict=True)]


def _of_scan(scan: Scan, inputs: list[Number]) -> list[Number]:
    """Of a carry that stays, and of slices that are put together again as they were taken apart."""
    slices = scan.constants + scan.carries
    outputs: list[Number] = []
    for place, source in enumerate(unchanged_inputs(scan.body)):
        is_carry = place < scan.carries
        same = source is not None and (source == scan.constants + place if is_carry else source >= slices)
        outputs.append(inputs[source] if same and source is not None else None)
    return outputs


SMALL = 4096
"""Bytes up to which an array is packed: a program copies so few in less time than another argument takes."""


@dataclass(frozen=True)
class PackedPlaces:
    """Where arrays lie.

    Attributes:
        flat: for each flat array, the numbers of the arrays in it, in order.
        unpacked: the numbers of the arrays that are not packed.
        shapes: of all arrays.
    """

    flat: tuple[tuple[int, ...], ...]
    unpacked: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, arrays: Sequence[jax.Array]) -> PackedPlaces:
        """Those of some arrays: small ones lie together by dtype and device."""
        alike = defaultdict(list)
        for number, x in enumerate(arrays):
            if _is_small(x):
                alike[x.dtype, x.sharding, x.committed].append(number)
        flat = tuple(tuple(numbers) for numbers in alike.values() if len(numbers) > 1)
        packed = {number for numbers in flat for number in numbers}
        unpacked = tuple(number for number in range(len(arrays)) if number not in packed)
        return cls(flat, unpacked, tuple(x.shape for x in arrays))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedArrays:
    """Arrays, the small ones copied into flat arrays. A pytree whose structure says where each of them lies.

    Attributes:
        flat: the flat arrays.
        unpacked: the other arrays as they are.
        places: where the arrays lie.

    Example:
        >>> packed = PackedArrays.of((jnp.ones(2), jnp.arange(2.0)))
        >>> packed.flat, packed.arrays()[1]
        ((Array([1., 1., 0., 1.], dtype=float32),), Array([0., 1.], dtype=float32))
    """

    flat: tuple[Any, ...]
    unpacked: tuple[Any, ...]
    places: PackedPlaces = field(metadata={"static": True})

    @classmethod
    def of(cls, arrays: Sequence[jax.Array]) -> PackedArrays:
        """Pack some arrays.

        Args:
            arrays: concrete ones.
        """
        places = PackedPlaces.of(arrays)
        flat = tuple(_joined([arrays[at] for at in numbers]) for numbers in places.flat)
        return cls(flat, tuple(arrays[at] for at in places.unpacked), places)

    def arrays(self) -> tuple[Any, ...]:
        """The arrays, in their order."""
        places, by_number = self.places, {}
        by_number.update(zip(places.unpacked, self.unpacked, strict=True))
        for flat, numbers in zip(self.flat, places.flat, strict=True):
            start = 0
            for at in numbers:
                end = start + math.prod(places.shapes[at])
                by_number[at] = jax.lax.slice(flat, (start,), (end,)).reshape(places.shapes[at])
                start = end
        return tuple(by_number[at] for at in range(len(places.shapes)))


@jax.jit
def _joined(arrays: list[jax.Array]) -> jax.Array:
    return jnp.concatenate([x.reshape(-1) for x in arrays])


def _is_small(x: jax.Array) -> bool:
    """Whether an array is packed: a small one on one device, of plain numbers that know their dtype."""
    on_one = isinstance(x.sharding, jax.sharding.SingleDeviceSharding)
    plain = not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return on_one and plain and not jax.typeof(x).weak_type and x.nbytes <= SMALL
