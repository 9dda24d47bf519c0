"""`refresh`: new float weights into a frozen model, in place, one weight at a time: weight sync of a rollout server."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jqinject.core import GradSlot, GradStat, Quantizer, QuantParam, QuantStat, RangeScaling
from jqinject.core.state import kind_of
from jqinject.dot import FrozenParam, is_low_bit_cache
from jqinject.model.compiled_model import CompiledModel
from jqinject.model.frozen_weights import (
    KernelInOp,
    frozen_with_masters,
    geometry_of,
    quantized_op,
    requantized_by_op,
)
from jqinject.model.state import checkpoint_entries as entries_of
from jqinject.model.state import loading
from jqinject.model.walk import (
    ModelIndex,
    Path,
    PlainArray,
    VariableEntry,
    check_module,
    is_finite,
    place_name,
)
from jqinject.nn.base.slots import WEIGHT
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.nn.freeze_layer import CUT, number_of_slices, requantized
from jqinject.nn.requantizer import REQUANTIZER, Requantizer, zeros_without_memory
from jqinject.ops.processes import Bound, is_traced, on_host
from jqinject.program import HELD, QuantizedProgram, listed
from jqinject.proxy import write
from jqinject.quant_tensor import is_concrete

Scales = Literal["measured", "kept"]
Numbers = dict[str, jax.Array]


@dataclass(frozen=True)
class RefreshReport(loading.LoadReport):
    """What `refresh` did: as `LoadReport`, of what is not quantized.

    Attributes:
        quantized: paths of the weights that were quantized again.
    """

    quantized: tuple[str, ...] = ()

    def _lines(self) -> list[str]:
        count = len(self.quantized)
        return [f"quantized {count} weight{'' if count == 1 else 's'} again", *super()._lines()]


#: Variables of quantizers, unlike the weights of layers, which some of them hold too.
OF_QUANTIZERS = (QuantParam, QuantStat, nnx.RngState)
Model = TypeVar("Model", bound=nnx.Module)


def refresh(
    served: Model | CompiledModel[Model],
    float_state: object,
    *,
    source_dtype: DTypeLike | None = None,
    scales: Scales = "measured",
    missing: nnx.filterlib.Filter = False,
) -> RefreshReport:
    """Write new float weights into a frozen model, in place: `refresh(served, nnx.state(trainer))` after each step.

    The paths are those of the float model. A weight `w` whose place low-bit numbers have is quantized as `freeze` does:

        codes, scale, zero point = quantize(cast(round(w)))

    with `round` to `source_dtype` and `cast` to the served weight's dtype. The codes are those of `freeze(trainer)`, to
    the bit, if the trainer's weights are of this dtype. Everything else (biases, norms, float embeddings, statistics)
    is copied and cast to the served dtype; `source_dtype` does not apply to it.

    Everything is checked before anything is written. Then weight follows weight: at most one float copy of a weight is
    in memory, and none where the array has its dtype and sharding already. New payloads take the memory of the old ones
    (donated), so models that share these arrays (`nnx.clone`; the model that was compiled) lose them. Arrays keep
    their shardings. One program is compiled for all weights that are alike, in the first call; a compiled or jitted
    call of the model is not traced again. Caches stay as they are: begin new ones for new weights. No call of the model
    may run meanwhile.

    `freeze` keeps the static part of a weight's quantizer, so nothing is declared again. What a quantizer learned or
    collected comes from the state: learned scales are taken if it holds them (a trained model, or its whole state),
    else refused. Averaged ranges of inputs that the state holds become constants again.

    Source: the weight sync of vLLM, SGLang and verl; there, quantized layers are loaded again.

    Args:
        served: a frozen model, or a compiled one (`jqinject.compiled`), whose next call has the new weights.
        float_state: as for `load_state`: an `nnx.State`, a nested dict of arrays, or the trainer's model itself,
            quantized or not. State of gradient quantizers in a model is left out.
        source_dtype: round weights to this float dtype first, such as `jnp.bfloat16` if the trainer computes in it;
            None for no rounding.
        scales: "measured" from the new weights, or "kept": the codes are rounded to nearest on the present scales and
            zero points.
        missing: an NNX filter for Variables that the state need not hold; `...` for all. Caches need not be there, and
            no base if the state holds adapters alone.

    Returns:
        A report.

    Raises:
        TypeError: `served` or `float_state` is of another kind; `source_dtype` is no float dtype.
        ValueError: the state does not fit, as for `load_state`; nan or inf in a weight that is quantized; learned
            scales that the state does not hold; codes that a solver chose; scales that several weights share; weights
            that came in low bits, or are stored for transforms of their inputs, which a float state knows nothing of:
            all by path. Nothing is changed then.

    Example:
        >>> from jqinject import freeze
        >>> from jqinject.nn import QuantLinear
        >>> trainer, served = QuantLinear(4, 2, rngs=nnx.Rngs(0)), freeze(QuantLinear(4, 2, rngs=nnx.Rngs(1)))
        >>> print(refresh(served, nnx.state(trainer)))
        quantized 1 weight again
        loaded 1 variable
        re-assembled 0 quantizers
        >>> bool((served.quant_weight().int() == trainer.quant_weight().int()).all())
        True
    """
    source = None if source_dtype is None else jnp.dtype(source_dtype)
    if source is not None and not jnp.issubdtype(source, jnp.floating):
        raise TypeError(f"refresh: source_dtype is {source}; expected a float dtype, such as jnp.bfloat16.")
    if scales not in ("measured", "kept"):
        raise ValueError(f"refresh: scales is 'measured' or 'kept', got {scales!r}")
    sync = partial(_refreshed, state=float_state, how=_How(source, scales == "kept"), missing=missing)
    if isinstance(served, CompiledModel):
        return served.rewrite(sync)
    check_module(served, "refresh")
    return sync(served)


class _How(NamedTuple):
    """How weights are quantized.

    Attributes:
        source: the dtype that they are rounded to first; None for none.
        keeps_scales: whether scales and zero points stay.
    """

    source: np.dtype | None
    keeps_scales: bool

    def rounded(self, value: object, target: np.dtype) -> jax.Array | np.ndarray:
        """A weight rounded to its source's dtype, and to its own unless that holds all its numbers.

        By operations of their own: within a program XLA may leave out a conversion to fewer bits and back.
        """
        array = value if isinstance(value, jax.Array) else np.asarray(value)
        if self.source is not None and array.dtype != self.source:
            array = array.astype(self.source)
        source, own = jnp.finfo(array.dtype), jnp.finfo(target)
        holds = own.nmant >= source.nmant and own.maxexp >= source.maxexp and own.minexp <= source.minexp
        return array if holds else array.astype(target)


class FloatIndex(ModelIndex):
    """An index of a frozen model, by the paths of the float model.

    A frozen weight is a float parameter without memory; the state of its quantizer, which freezing dropped, is without
    memory too. Masters and caches in low bits are left out.
    """

    @cached_property
    def frozen(self) -> list[tuple[VariableEntry, FrozenParam]]:
        """The frozen weights, each with its entry."""
        paths = defaultdict[int, list[Path]](list)
        for path, node in self.places:
            if isinstance(node, FrozenParam):
                paths[id(node)].append(path)
        return [
            (
                VariableEntry(
                    nnx.Param(zeros_without_memory(param.shape, param.dtype)), paths[id(param)], False
                ),
                param,
            )
            for param in self.frozen_parameters.values()
        ]

    @cached_property
    def stand_ins(self) -> set[int]:
        """The ids of the entries that are not of the model."""
        return {id(entry) for entry in self.variables} - {id(entry) for entry in self._own}

    @cached_property
    def _own(self) -> list[VariableEntry]:
        masters = {id(holder.master) for holder, _ in frozen_with_masters(self)}
        return [
            entry
            for entry in ModelIndex.variables.func(self)
            if not issubclass(kind_of(entry.variable), FrozenParam)
            and id(entry.variable) not in masters
            and not is_low_bit_cache(entry.variable.get_value())
        ]

    @cached_property
    def variables(self) -> list[VariableEntry]:
        """The Variables and arrays of the float model, each once, with all its paths."""
        entries = [*self._own, *(entry for entry, _ in self.frozen)]
        present = {path for entry in self._own for path in entry.paths}
        for entry, param in self.frozen:
            bases, requantizer = self.bases(entry), requantizer_of(param)
            has_state = requantizer is not None and requantizer.dropped
            for inner in ModelIndex(requantizer.proxy()).variables if has_state else ():
                paths = [(*base, *inner.path) for base in bases]
                if not (isinstance(inner.variable, nnx.RngState) or present & {*paths}):
                    kind = kind_of(inner.variable)
                    kind = QuantStat if kind is PlainArray else kind
                    entries.append(VariableEntry(kind(inner.variable.get_value()), paths, True))
        return entries

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


def _refreshed(
    model: nnx.Module, *, state: object, how: _How, missing: nnx.filterlib.Filter
) -> RefreshReport:
    """Check a state, write what is not quantized, then quantize weight after weight."""
    index = FloatIndex(model)
    trainer = ModelIndex(state) if isinstance(state, nnx.Module) else None
    flat = entries_of.flat_entries(state, "refresh") if trainer is None else _entries_of_model(trainer, index)
    _check_concrete(index, flat)
    entries = loading.checked_entries(flat, index, nnx.Any(missing, nnx.Cache), caller="refresh")
    weights, problems = list[_Weight](), list[entries_of.Problem]()
    for entry, param in index.frozen:
        if any(path in entries for path in entry.paths):
            try:
                weights.append(_Weight(index, entry, param, entries, how))
            except _Refused as problem:
                problems.append((entry.path, str(problem)))
            except (TypeError, ValueError) as error:
                problems.append((entry.path, f"cannot be quantized again: {error}"))
    loading.refuse(problems, caller="refresh")
    if weights:
        _refuse_transforms(index, trainer, entries)
    plain = {path: x for path, x in entries.items() if id(index.by_path[path]) not in index.stand_ins}
    loaded = loading.all_or_nothing(index, lambda: loading.load_checked(model, plain, index, copies=True))
    _make_constants(index, entries)
    payloads = Counter(id(param.numbers["value"]) for _, param in index.frozen)
    masters = {id(param): holder.master for holder, param in frozen_with_masters(index)}
    for weight in weights:
        weight.quantize(payloads[id(weight.param.numbers["value"])] > 1, masters.get(id(weight.param)))
    not_loaded = (entry for entry in entries_of.not_in(entries, index) if not entry.in_quantizer)
    absent = tuple(place_name(entry.path) for entry in not_loaded)
    alone = loading.holds_adapters_alone(entries, index.by_path)
    facts = {**vars(loaded), "missing": () if alone else absent, "base": absent if alone else ()}
    return RefreshReport(**facts, quantized=tuple(place_name(weight.path) for weight in weights))


def _entries_of_model(trainer: ModelIndex, index: FloatIndex) -> entries_of.Entries:
    """The arrays of a trainer's model, under the paths of the served one; without those of gradient quantizers."""
    entries: entries_of.Entries = {}
    for entry in trainer.variables:
        paths = [path for path in entry.paths if path in index.by_path]
        if paths or not issubclass(kind_of(entry.variable), GradStat | GradSlot):
            entries |= dict.fromkeys(paths or [entry.path], entry.variable.get_value())
    return entries


def _check_concrete(index: FloatIndex, flat: Mapping[Path, object]) -> None:
    """Refuse tracers, abstract models, and payloads that another model's refresh has own."""
    if is_traced([*flat.values()]):
        raise ValueError(
            "refresh writes arrays, and the state holds tracers.\n  cure: call it outside of jit"
        )
    for path, node in index.first_places.items():
        leaves = jax.tree.leaves(node.get_raw_value()) if isinstance(node, nnx.Variable) else []
        for leaf in leaves:
            name = place_name(path)
            if not isinstance(leaf, jax.Array | np.ndarray) or not is_concrete(leaf):
                raise ValueError(
                    f"refresh writes arrays, and {name} holds {type(leaf).__name__}.\n  cure: a model with numbers in "
                    "it, outside of jit; load_frozen, or freeze and load_state, make one of an abstract model"
                )
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise ValueError(
                    f"refresh: the numbers of {name} are gone: another model that shared them was refreshed.\n"
                    "  cure: refresh one of the models that share arrays; of a compiled one, answer.model() is a model "
                    "with its present weights"
                )


def _refuse_transforms(index: FloatIndex, trainer: ModelIndex | None, entries: Mapping[Path, object]) -> None:
    names = [*entries_of.quantizers_with_transforms(index)]
    own = () if trainer is None else entries_of.quantizers_with_transforms(trainer)
    if {*names} <= {*own} or (trainer is None and any(index.by_path[path].in_quantizer for path in entries)):
        return
    raise ValueError(
        "refresh: the state holds weights and no quantizers, as a float model's does, and this model's weights are "
        f"stored for transforms of their inputs: {listed(tuple(names))}. With other weights it computes something "
        "else.\n"
        "  cure: the recipe that made this model, on a float model with that state, and freeze; or the trainer's model "
        "itself, if its quantizers have these transforms"
    )


def _make_constants(index: ModelIndex, entries: Mapping[Path, object]) -> None:
    """Freeze ranges again whose averages were written, and whose constants were not."""
    for path, node in index.first_places.items():
        if isinstance(node, Quantizer) and isinstance(node.scaling_impl, RangeScaling):
            scaling, own = node.scaling_impl, (*path, "scaling_impl")
            below = [entry[len(own) :] for entry in entries if entry[: len(own)] == own]
            if scaling.record is not None and below and all(entry[:1] != ("record",) for entry in below):
                scaling.unfreeze()
                node.freeze_range()


class _Program(NamedTuple):
    """What is static in quantizing a weight: weights that are alike share one compiled program.

    Attributes:
        numbers: function of the quantizer's state, the weight and the present numbers; see `requantized`.
        depth: leading axes of a stack.
        one_by_one: whether the weights of a stack follow each other.
        dtype: of the weight.
        shardings: of the new numbers, by name; None of those on one device.
    """

    numbers: Bound
    depth: int
    one_by_one: bool
    dtype: np.dtype
    shardings: tuple[tuple[str, jax.sharding.NamedSharding | None], ...]


@lru_cache(maxsize=1024)
def _compiled(program: _Program) -> jax.stages.Wrapped:
    """The program as a compiled function, which overwrites the payload that it is source."""

    def numbers(
        payload: jax.Array, weight: jax.Array, state: object, stored: Numbers
    ) -> tuple[Numbers, jax.Array]:
        mapped = program.numbers
        for _ in range(program.depth):
            mapped = partial(_one_by_one, mapped) if program.one_by_one else jax.vmap(mapped)
        new, valid = mapped(state, weight.astype(program.dtype), stored)
        valid = jnp.all(valid)
        return {**new, "value": jnp.where(valid, new["value"], payload)}, valid

    shardings = dict(program.shardings)
    return jax.jit(numbers, donate_argnums=0, keep_unused=True, out_shardings=(shardings, None))


def _one_by_one(
    function: Callable[..., tuple[Numbers, jax.Array]], *args: object
) -> tuple[Numbers, jax.Array]:
    return jax.lax.map(lambda arguments: function(*arguments), args)


class _Refused(ValueError):
    """What speaks against quantizing a weight, with its cure."""

    def __init__(self, why: str, cure: str) -> None:
        super().__init__(f"{why}.\n    cure: {cure}")


class _Weight:
    """A frozen weight, and the float array that is to be quantized in its place.

    Args:
        index: of the model.
        entry, param: of the weight.
        entries: of the state.
        how: how it is quantized.

    Raises:
        ValueError, TypeError: what speaks against it.
    """

    def __init__(
        self,
        index: FloatIndex,
        entry: VariableEntry,
        param: FrozenParam,
        entries: entries_of.Entries,
        how: _How,
    ) -> None:
        self.param, self.path, self.how = param, entry.path, how
        self.value = next(entries[path] for path in entry.paths if path in entries)
        rounded = how.rounded(self.value, param.dtype)
        if not is_finite(rounded):
            source = "" if how.source is None else f" as {how.source}"
            cure = "skip updates whose gradient is not finite (optax.apply_if_finite)"
            raise _Refused(f"has nan or inf{source}, which have no low-bit value", cure)
        parents = [index.nodes[path[:-1]] for path in entry.paths if path[-1] == KernelInOp.weight_name]
        self._layer = next((parent for parent in parents if isinstance(parent, KernelInOp)), None)
        self._state: object = ()
        if self._layer is None:
            self._state = _state_of(requantizer_of(param), entries, index.bases(entry), how.keeps_scales)
        elif how.keeps_scales:
            why = "is quantized by the scheme of its layer's op, which measures the scales of what it gets"
            raise _Refused(why, "scales='measured'")
        self._program = self._static()
        like = jax.ShapeDtypeStruct(param.shape, rounded.dtype, sharding=param.sharding)
        new, _ = _compiled(self._program).trace(*self._arguments(param.numbers["value"], like)).out_info
        for name, x in new.items():
            present = param.numbers[name]
            if (x.shape, x.dtype) != (present.shape, present.dtype):
                raise ValueError(f"its {name} would be {_kind(x)}, and is {_kind(present)}")

    def _static(self) -> _Program:
        param, layer = self.param, self._layer
        slices = number_of_slices(param.nbytes, param.sharding)
        if layer is None:
            requantizer = requantizer_of(param)
            assert requantizer is not None, "checked"
            depth = param.ndim - requantizer.ndim
            numbers = Bound(requantized, (requantizer, 1 if depth else slices, param.form))
        else:
            geometry, op = geometry_of(layer), quantized_op(layer)
            depth = param.ndim - geometry.ndim
            graphdef = nnx.graphdef(op, graph=True)
            numbers = Bound(requantized_by_op, (graphdef, geometry, vars(layer).get("dtype"), param.form))
        stay = self._stored()
        shardings = tuple(
            (name, x.sharding if isinstance(x.sharding, jax.sharding.NamedSharding) else None)
            for name, x in sorted(param.numbers.items())
            if name not in stay
        )
        return _Program(numbers, depth, slices > 1, param.dtype, shardings)

    def _stored(self) -> Numbers:
        """The present numbers that stay."""
        numbers = self.param.numbers if self.how.keeps_scales else {}
        return {name: x for name, x in numbers.items() if name not in CUT}

    def _arguments(self, payload: jax.Array, weight: jax.Array | jax.ShapeDtypeStruct) -> tuple[object, ...]:
        state = self._state
        if self._layer is not None:
            state = nnx.state(quantized_op(self._layer), graph=True), vars(self._layer).get("mask")
        return payload, weight, state, self._stored()

    def quantize(self, shares_payload: bool, master: nnx.Variable[jax.Array] | None) -> None:
        """Quantize the array, and wait for it, so that no other is on its way meanwhile.

        Args:
            shares_payload: whether another weight of the model has the same payload array.
            master: the float weight, where it was kept.
        """
        param, numbers = self.param, self.param.numbers
        weight = _placed(self.how.rounded(self.value, param.dtype), param.sharding)
        payload = jnp.copy(numbers["value"]) if shares_payload else numbers["value"]
        new, valid = jax.block_until_ready(_compiled(self._program)(*self._arguments(payload, weight)))
        param.set_value({**numbers, **new})
        if master is not None:
            write(master, weight.astype(param.dtype).copy())
        if not bool(valid):
            raise ValueError(
                f"refresh: {place_name(self.path)}: its quantizer made values that are not its integers times the "
                "scale; the codes of this weight, and the weights after it, are as they were.\n"
                "  cure: a quantizer whose values are on its grid"
            )


def _state_of(
    requantizer: Requantizer | None, entries: entries_of.Entries, bases: list[Path], keeps_scales: bool
) -> nnx.State[object, object]:
    """The state of a frozen weight's quantizer, from the entries of a state.

    Raises:
        _Refused: how the weight is quantized is not known.
    """
    if requantizer is None:
        why = "came in low bits, so how float values become such numbers is not known"
        raise _Refused(why, "serve freeze(quantize(model, rules)) of a float model, which remembers it")
    if requantizer.known_input is None:
        why = "is quantized for the format of its input, which is not static"
        raise _Refused(why, "freeze the trainer's model once more")
    if not requantizer.dropped:
        return nnx.State({})
    proxy, absent = requantizer.proxy(), list[Path]()
    index, name = ModelIndex(proxy), proxy.binding.base.__name__
    kinds = [dropped.kind for dropped in requantizer.dropped if dropped.kind is not None]
    if not keeps_scales and not all(issubclass(kind, OF_QUANTIZERS) for kind in kinds):
        why = f"has scales that {name} measures of several weights together"
        raise _Refused(why, "a quantizer for each layer; or scales='kept'")
    own = {
        path[len(base) :]: value
        for path, value in entries.items()
        for base in bases
        if path[: len(base)] == base
    }
    own = entries_of.with_checkpoint_defaults(index, own)
    for entry in index.variables:
        value = next((own[path] for path in entry.paths if path in own), None)
        if value is not None:
            value = on_host(value) if isinstance(value, jax.Array) else value
            entry.variable.set_value(np.asarray(value, entry.variable.dtype))
        elif not isinstance(entry.variable, nnx.RngState):
            absent.append((*(bases or [()])[0], *entry.path))
    if absent and not keeps_scales and proxy.committed:
        raise _Refused(
            "holds codes that a solver chose (committed), and new weights would only be rounded to nearest",
            "the recipe once more, on the float model with this state, and freeze; or scales='kept', which rounds to "
            "nearest on the solver's scales",
        )
    if absent and not keeps_scales:
        places = listed(tuple(map(place_name, absent)))
        raise _Refused(
            f"has scales that {name} learned or collected, and the state does not hold {places}",
            "the trainer's model or its whole state (nnx.state(trainer)), not weights alone; or scales='kept'",
        )
    return nnx.state(proxy, graph=True)


def _placed(value: jax.Array | np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """An array with a sharding, each device with its part only; as it is if it has it."""
    if len(sharding.device_set) == 1:
        value = jnp.asarray(value)
    return (
        value
        if isinstance(value, jax.Array) and value.sharding == sharding
        else jax.device_put(value, sharding)
    )


def _kind(x: jax.Array | jax.ShapeDtypeStruct) -> str:
    return f"{x.dtype}{[*x.shape]}"
