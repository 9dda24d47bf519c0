"""`refresh`: new float weights into a frozen model, in place, one weight at a time: weight sync of a rollout server."""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jqinject.core import GradSlot, GradStat, Quantizer, RangeScaling
from jqinject.core.state import kind_of
from jqinject.model.compiled_model import CompiledModel, Model
from jqinject.model.frozen_weights import frozen_with_masters
from jqinject.model.state import checkpoint_entries as entries_of
from jqinject.model.state import loading
from jqinject.model.state.weight_sync import FloatIndex, How, Unfit, WeightSync
from jqinject.model.walk import ModelIndex, check_module, place_name
from jqinject.program import listed
from jqinject.quant_tensor import is_concrete


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


def refresh(
    served: Model | CompiledModel[Model],
    float_state: object,
    *,
    source_dtype: DTypeLike | None = None,
    scales: Literal["measured", "kept"] = "measured",
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
    sync = partial(_refreshed, state=float_state, how=How(source, scales == "kept"), missing=missing)
    if isinstance(served, CompiledModel):
        return served.rewrite(sync)
    check_module(served, "refresh")
    return sync(served)


def _refreshed(model: nnx.Module, *, state: object, how: How, missing: nnx.filterlib.Filter) -> RefreshReport:
    """Check a state, write what is not quantized, then quantize weight after weight."""
    index = FloatIndex(model)
    _check_concrete(index)
    trainer = ModelIndex(state) if isinstance(state, nnx.Module) else None
    flat = entries_of.flat_entries(state, "refresh") if trainer is None else _entries_of_model(trainer, index)
    entries = loading.checked_entries(flat, index, nnx.Any(missing, nnx.Cache), caller="refresh")
    weights, problems = list[WeightSync](), list[entries_of.Problem]()
    for entry, param in index.frozen:
        if any(path in entries for path in entry.paths):
            try:
                weights.append(WeightSync(index, entry, param, entries, how))
            except (TypeError, ValueError) as error:
                why = "" if isinstance(error, Unfit) else "cannot be quantized again: "
                problems.append((entry.path, why + str(error)))
    loading.refuse(problems, caller="refresh")
    if weights:
        _refuse_transforms(index, trainer, entries)
    stand_ins = {id(entry) for entry in index.stand_ins}
    plain = {path: value for path, value in entries.items() if id(index.by_path[path]) not in stand_ins}
    loaded = loading.all_or_nothing(index, lambda: loading.load_checked(model, plain, index, copies=True))
    _make_constants(index, entries)
    payloads = Counter(id(param.numbers["value"]) for _, param in index.frozen)
    masters = {id(param): holder.master for holder, param in frozen_with_masters(index)}
    for weight in weights:
        weight.quantize(payloads[id(weight.param.numbers["value"])] > 1, masters.get(id(weight.param)))
    absent = tuple(place_name(x.path) for x in entries_of.not_in(entries, index) if not x.in_quantizer)
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


def _check_concrete(index: FloatIndex) -> None:
    """Refuse tracers, abstract models, and numbers that another model's refresh has taken."""
    variables = [(path, node) for path, node in index.first_places.items() if isinstance(node, nnx.Variable)]
    for path, leaf in ((path, x) for path, node in variables for x in jax.tree.leaves(node.get_raw_value())):
        if not isinstance(leaf, jax.Array | np.ndarray) or not is_concrete(leaf):
            raise ValueError(
                f"refresh writes arrays, and {place_name(path)} holds {type(leaf).__name__}.\n"
                "  cure: a model with numbers in it, outside of jit"
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(
                f"refresh: the numbers of {place_name(path)} are gone: a model that shared them was refreshed.\n"
                "  cure: refresh one of the models that share arrays; of a compiled one take answer.model()"
            )


def _refuse_transforms(index: FloatIndex, trainer: ModelIndex | None, entries: entries_of.Entries) -> None:
    names = [*entries_of.quantizers_with_transforms(index)]
    own = () if trainer is None else entries_of.quantizers_with_transforms(trainer)
    if not {*names} <= {*own} and (trainer or not any(index.by_path[path].in_quantizer for path in entries)):
        raise ValueError(
            "refresh: this model's weights are stored for transforms of their inputs, and the state's are not: "
            f"{listed(tuple(names))}.\n  cure: the recipe that made this model, on a float model with that state, and "
            "freeze; or the trainer's model itself, if its quantizers have these transforms"
        )


def _make_constants(index: ModelIndex, entries: entries_of.Entries) -> None:
    """Freeze ranges again whose averages were written, and whose constants were not."""
    for path, node in index.first_places.items():
        if isinstance(node, Quantizer) and isinstance(node.scaling_impl, RangeScaling):
            scaling, own = node.scaling_impl, (*path, "scaling_impl")
            below = [entry[len(own)] for entry in entries if entry[: len(own)] == own]
            if scaling.record is not None and below and "record" not in below:
                scaling.unfreeze()
                node.freeze_range()
