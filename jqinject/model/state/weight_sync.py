"""How `refresh` quantizes one frozen weight again. Next: `refresh` checks a state and goes from weight to weight."""

from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike

from jqinject.core import QuantParam, QuantStat
from jqinject.core.state import kind_of
from jqinject.dot import FrozenParam, is_low_bit_cache
from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.dot.frozen.frozen_numbers import Numbers
from jqinject.dot.schemes.quantized_op import QuantizedOp
from jqinject.model.frozen_weights import (
    Geometry,
    KernelInOp,
    frozen_with_masters,
    geometry_of,
    numbers_by_op,
    quantized_op,
)
from jqinject.model.state.checkpoint_entries import Entries, with_checkpoint_defaults
from jqinject.model.walk import ModelIndex, Path, PlainArray, VariableEntry, is_finite, place_name
from jqinject.nn.base.slots import WEIGHT
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.nn.freeze_layer import CUT, State, number_of_slices, numbers_of_form, requantized
from jqinject.nn.requantizer import REQUANTIZER, Requantizer, zeros_without_memory
from jqinject.ops.processes import Bound, on_host
from jqinject.program import HELD, QuantizedProgram, listed
from jqinject.proxy import write

Shardings = tuple[tuple[str, jax.sharding.Sharding | None], ...]
#: Graphdef of an op, geometry of its layer, and the dtype in which this contracts.
OpFacts = tuple[nnx.GraphDef[QuantizedOp], Geometry, DTypeLike | None]
#: State of an op, and the mask of its layer.
OpState = tuple[State, jax.Array | None]
#: Variables of quantizers, unlike the weights of layers, which some of them hold too.
OF_QUANTIZERS = (QuantParam, QuantStat, nnx.RngState)


class FloatIndex(ModelIndex):
    """An index of a frozen model, by the paths of the float model.

    A frozen weight is a float parameter without memory; the state of its quantizer, which freezing dropped, is without
    memory too. Masters and caches in low bits are left out.
    """

    @cached_property
    def frozen(self) -> list[tuple[VariableEntry, FrozenParam]]:
        """The frozen weights, each with its entry."""
        frozen: dict[int, tuple[VariableEntry, FrozenParam]] = {}
        for path, node in self.places:
            if isinstance(node, FrozenParam):
                like = nnx.Param(zeros_without_memory(node.shape, node.dtype))
                frozen.setdefault(id(node), (VariableEntry(like, [], False), node))[0].paths.append(path)
        return list(frozen.values())

    @cached_property
    def stand_ins(self) -> list[VariableEntry]:
        """The entries that are not of the model: frozen weights, and the state of their quantizers."""
        entries = [entry for entry, _ in self.frozen]
        for entry, param in self.frozen:
            bases, requantizer = self.bases(entry), requantizer_of(param)
            if requantizer is not None and requantizer.dropped:
                for inner in ModelIndex(requantizer.proxy()).variables:
                    kind = QuantStat if isinstance(inner.variable, PlainArray) else kind_of(inner.variable)
                    paths = [(*base, *inner.path) for base in bases]
                    if not issubclass(kind, nnx.RngState):
                        entries.append(VariableEntry(kind(inner.variable.get_value()), paths, True))
        return entries

    @cached_property
    def variables(self) -> list[VariableEntry]:
        """The Variables and arrays of the float model, each once, with all its paths."""
        masters = {id(holder.master) for holder, _ in frozen_with_masters(self)}
        own = [
            entry
            for entry in ModelIndex.variables.func(self)
            if not issubclass(kind_of(entry.variable), FrozenParam)
            and id(entry.variable) not in masters
            and not is_low_bit_cache(entry.variable.get_value())
        ]
        return [*self.stand_ins, *own]

    def bases(self, entry: VariableEntry) -> list[Path]:
        """Where the quantizer of a frozen weight was: in its layer, or among those of a model that runs it."""
        bases: list[Path] = []
        for path in entry.paths:
            if isinstance(self.nodes.get(path[:-1]), QuantWeightLayer):
                bases.append((*path[:-1], WEIGHT.name))
            for end in reversed(range(len(path))):
                if isinstance(self.nodes.get(path[:end]), QuantizedProgram):
                    bases.append((*path[:end], HELD, "weights", place_name(path[end:]), WEIGHT.name))
        return bases


def requantizer_of(param: FrozenParam) -> Requantizer | None:
    """What `freeze` kept of a frozen weight's quantizer; None if it was not frozen by a quantizer."""
    return param.get_metadata(REQUANTIZER, None)


class How(NamedTuple):
    """How weights are quantized.

    Attributes:
        source: the dtype that they are rounded to first; None for no rounding.
        keeps_scales: whether scales and zero points stay.
    """

    source: np.dtype | None
    keeps_scales: bool

    def rounded(self, value: object, target: np.dtype) -> jax.Array | np.ndarray:
        """A weight rounded to `source`, in its own dtype.

        By operations of their own: within a program XLA may leave out a conversion to fewer bits and back.
        """
        array = value if isinstance(value, jax.Array) else np.asarray(value)
        return array.astype(self.source or target, copy=False).astype(target, copy=False)


@lru_cache(maxsize=1024)
def sync_program(numbers: Bound, depth: int, one_by_one: bool, shardings: Shardings) -> jax.stages.Wrapped:
    """A compiled function that quantizes a weight, shared by weights that are alike; it overwrites their payloads.

    Args:
        numbers: function of the quantizer's state, the weight and the present numbers; see `requantized`.
        depth: leading axes of a stack.
        one_by_one: whether the weights of a stack follow each other.
        shardings: of the new numbers, by name; None of those on one device.
    """

    def of_one(arguments: tuple[object, ...]) -> tuple[Numbers, jax.Array]:
        return numbers(*arguments)

    def requantize(payload: jax.Array, *arguments: object) -> tuple[Numbers, jax.Array]:
        mapped = of_one
        for _ in range(depth):
            mapped = partial(jax.lax.map, mapped) if one_by_one else jax.vmap(mapped)
        new, valid = mapped(arguments)
        valid = jnp.all(valid)
        return {**new, "value": jnp.where(valid, new["value"], payload)}, valid

    return jax.jit(requantize, donate_argnums=0, keep_unused=True, out_shardings=(dict(shardings), None))


class Unfit(ValueError):
    """What speaks against quantizing a weight, with its cure."""


class WeightSync:
    """A frozen weight, and the float array that is to be quantized in its place.

    Args:
        index: of the model.
        entry, param: the weight.
        entries: of the state.
        how: how it is quantized.

    Raises:
        ValueError, TypeError: what speaks against it.
    """

    def __init__(
        self, index: FloatIndex, entry: VariableEntry, param: FrozenParam, entries: Entries, how: How
    ) -> None:
        self.param, self.path, self.how = param, entry.path, how
        self.value = next(entries[path] for path in entry.paths if path in entries)
        if not is_finite(how.rounded(self.value, param.dtype)):
            raise Unfit(f"has nan or inf as {how.source or param.dtype}.\n    cure: optax.apply_if_finite")
        parents = [index.nodes.get(path[:-1]) for path in entry.paths]
        self._layer = next((parent for parent in parents if isinstance(parent, KernelInOp)), None)
        slices, stored = number_of_slices(param.nbytes, param.sharding), self._stored()
        if self._layer is None:
            requantizer, self._state = _quantizer_of(param, entries, index.bases(entry), how.keeps_scales)
            depth = param.ndim - requantizer.ndim
            numbers = Bound(requantized, (requantizer, 1 if depth else slices, param.form))
        elif how.keeps_scales:
            raise Unfit("has scales that its layer's op measures.\n    cure: scales='measured'")
        else:
            graphdef, geometry = nnx.graphdef(quantized_op(self._layer), graph=True), geometry_of(self._layer)
            depth = param.ndim - geometry.ndim
            facts = graphdef, geometry, vars(self._layer).get("dtype")
            numbers = Bound(_requantized_by_op, (facts, param.form))
        placed = ((name, x.sharding) for name, x in sorted(param.numbers.items()) if name not in stored)
        shardings = tuple((name, None if isinstance(x, SingleDeviceSharding) else x) for name, x in placed)
        self.program = sync_program(numbers, depth, slices > 1, shardings)
        like = jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=param.sharding)
        self.program.trace(*self.arguments(param.numbers["value"], like))

    def _stored(self) -> Numbers:
        """The present numbers that stay."""
        stays = self.how.keeps_scales
        return {name: x for name, x in self.param.numbers.items() if stays and name not in CUT}

    def arguments(self, payload: jax.Array, weight: jax.Array | jax.ShapeDtypeStruct) -> tuple[object, ...]:
        """Those of the program: payload, state of the quantizer, weight, and the numbers that stay."""
        if self._layer is not None:
            self._state = nnx.state(quantized_op(self._layer), graph=True), vars(self._layer).get("mask")
        return payload, self._state, weight, self._stored()

    def quantize(self, shares_payload: bool, master: nnx.Variable[jax.Array] | None) -> None:
        """Quantize the array, and wait for it, so that no other is on its way meanwhile.

        Args:
            shares_payload: whether another weight of the model has the same payload array.
            master: the float weight, where it was kept.
        """
        param, numbers = self.param, self.param.numbers
        weight = _placed(self.how.rounded(self.value, param.dtype), param.sharding)
        payload = jnp.copy(numbers["value"]) if shares_payload else numbers["value"]
        new, valid = jax.block_until_ready(self.program(*self.arguments(payload, weight)))
        param.set_value({**numbers, **(new if valid else {"value": new["value"]})})
        if not valid:
            raise ValueError(
                f"refresh: {place_name(self.path)}: its quantizer made values that are not its integers times the "
                "scale; this weight and those after it are as they were.\n  cure: values on the quantizer's grid"
            )
        if master is not None:
            write(master, weight.copy())


def _requantized_by_op(
    facts: OpFacts, form: FrozenForm, state: OpState, kernel: jax.Array, stored: Numbers
) -> tuple[Numbers, jax.Array]:
    """As `requantized`, by the op of a Flax layer, with the layer's mask."""
    graphdef, geometry, dtype = facts
    frozen = numbers_by_op(nnx.merge(graphdef, state[0]), geometry, dtype, kernel, state[1])
    return numbers_of_form(frozen, form), jnp.bool_(True)


def _quantizer_of(
    param: FrozenParam, entries: Entries, bases: list[Path], keeps_scales: bool
) -> tuple[Requantizer, State]:
    """How a frozen weight is quantized, and the state of its quantizer, from the entries of a state.

    Raises:
        Unfit: that is not known.
    """
    requantizer = requantizer_of(param)
    if requantizer is None:
        raise Unfit("came in low bits, without a quantizer.\n    cure: freeze(quantize(float_model, rules))")
    proxy = requantizer.proxy()
    name = proxy.binding.base.__name__
    if proxy.requires_quant_input:
        raise Unfit(f"is quantized by {name} for its input's format.\n    cure: freeze the trainer once more")
    kinds = [kind for _, kind, _ in requantizer.dropped if kind is not None]
    if not keeps_scales and not all(issubclass(kind, OF_QUANTIZERS) for kind in kinds):
        raise Unfit(f"shares its scales ({name}).\n    cure: a quantizer for each layer; or scales='kept'")
    below = [(base, path) for base in bases for path in entries if path[: len(base)] == base]
    index, absent = ModelIndex(proxy), list[Path]()
    own = with_checkpoint_defaults(index, {path[len(base) :]: entries[path] for base, path in below})
    for entry in index.variables:
        value = next((own[path] for path in entry.paths if path in own), None)
        if value is not None:
            value = on_host(value) if isinstance(value, jax.Array) else value
            entry.variable.set_value(np.asarray(value, entry.variable.dtype))
        elif not issubclass(kind_of(entry.variable), nnx.RngState):
            absent.append((*(bases or [()])[0], *entry.path))
    if absent and not keeps_scales and proxy.committed:
        raise Unfit(
            "holds codes that a solver chose, which rounding to nearest would not choose.\n    cure: the recipe and "
            "freeze once more; or scales='kept', which rounds to nearest on the solver's scales"
        )
    if absent and not keeps_scales:
        raise Unfit(
            f"has scales that {name} learned or collected, and the state does not hold "
            f"{listed(tuple(map(place_name, absent)))}.\n    cure: the trainer's model or its whole state "
            "(nnx.state(trainer)), not weights alone; or scales='kept'"
        )
    return requantizer, nnx.state(proxy, graph=True)


def _placed(value: jax.Array | np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """An array with a sharding, each device with its part only; as it is if it has it."""
    array = jnp.asarray(value) if len(sharding.device_set) == 1 else value
    if isinstance(array, jax.Array) and array.sharding == sharding:
        return array
    return jax.device_put(array, sharding)
