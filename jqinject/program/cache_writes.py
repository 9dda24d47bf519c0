"""Caches of a program: arrays that it is given and writes into, float or in low bits, by row of features.

A cache is a float array among the arguments, or in a Variable, into which the program writes by
`dynamic_update_slice`, by a scatter that replaces (`.at[...].set`), or by a concatenation. What it writes goes through
the quantizer that a rule has for the cache. A float cache gets the rounded numbers; a `LowBitCache` gets their payload
and scales. Reading a `LowBitCache` in any other operation reads a QuantTensor; an array where its transform is undone.
A contraction takes the rows as they are stored: the transform then goes on the other operand, or off the output.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jqinject.core.transforms import along
from jqinject.dot import LowBitCache, is_low_bit_cache
from jqinject.program import call, jaxpr, moves, quantizers
from jqinject.program.operations import operand_axes
from jqinject.program.policy import Site
from jqinject.program.run import OperationRun
from jqinject.program.tracked_value import Origin, Path, Tracked, shape_of
from jqinject.proxy import transform_of, undone_transform_of


def opened(x: Tracked) -> Tracked:
    """A cache in low bits as a QuantTensor; anything else as it is."""
    if not isinstance(x.value, LowBitCache):
        return x
    if x.value.transform is not None:
        return _after(x, x.value.dequantized())
    return replace(_after(x, x.value.quant_tensor()), quantized=True)


def opened_to_contract(
    eqn: jaxpr.Equation, operands: Sequence[Tracked], quantizes: Sequence[bool]
) -> tuple[list[Tracked], Callable[[jax.Array], jax.Array] | None]:
    """Two operands of a contraction, of which a cache in low bits keeps its transform if the product allows it.

    A row `k T` that is summed over its features meets `q T^-T` instead of `q`; where its features are axes of the
    output, this is multiplied by `T^-1`. So one query and one output are transformed, not all positions of the cache.

    Args:
        eqn: the contraction.
        operands: of it.
        quantizes: for each, whether a quantizer waits for it, which takes the numbers as a float cache has them.

    Returns:
        The operands, and what the output goes through; None for nothing.
    """
    for place, cache in enumerate(operands if eqn.name == "dot_general" else ()):
        rows, partner = cache.value, operands[1 - place]
        if not isinstance(rows, LowBitCache) or rows.transform is None:
            continue
        axes, features = operand_axes(eqn)[place], rows.ndim - 1
        if quantizes[place] or features in axes.batch or not partner.is_activation:
            continue
        partner, undo = opened(partner), None
        if features in axes.free:
            undo = partial(along, rows.transform.inverse, axes=(axes.results[features],))
        else:
            query = along(rows.transform.dual, partner.array, (axes.partners[features],))
            partner = replace(partner.with_value(query), quantized=False, site="")
        stored = replace(_after(cache, rows.quant_tensor()), quantized=True)
        return [partner, stored] if place else [stored, partner], undo
    return list(map(opened, operands)), None


def written(step: OperationRun) -> list[Tracked] | None:
    """The cache after an operation that writes into one; None for any other operation.

    Raises:
        ValueError: a rule takes the cache, and the write is of a part of a row; a cache in low bits of another form
            than its quantizer's, or that no rule takes.
    """
    eqn, name, policy = step.eqn, step.eqn.name, step.run.policy
    if name not in WRITES or not policy.follows_parameters:
        return None
    # A write may be into those in low bits, else into the first array that the program was given.
    caches = [place for place, x in enumerate(step.inputs) if isinstance(x.value, LowBitCache)]
    caches = caches or [place for place, x in enumerate(step.inputs) if x.cache and x.is_float][:1]
    if not caches or not (caches[0] == 0 or name == "concatenate"):
        return None
    cache = step.inputs[caches[0]]
    if name == "concatenate" and eqn.params["dimension"] == len(shape_of(cache)) - 1:
        return None  # features beside features, which no cache grows by
    if name in ("copy", "name", "sharding_constraint"):
        return _placed(eqn, cache) if isinstance(cache.value, LowBitCache) else None
    quantizer = policy.cache_quantizer(step.path, cache.cache)
    if quantizer is None and not isinstance(cache.value, LowBitCache):
        return None
    if name == "concatenate":
        step.choose()
        new = [place for place in range(len(step.inputs)) if place not in caches]
    else:
        new = [1 if name == "dynamic_update_slice" else 2]
    return [_write(step, cache, quantizer, new)]


def _write(step: OperationRun, cache: Tracked, quantizer: object, new: Sequence[int]) -> Tracked:
    """The cache after a write of some operands."""
    run, eqn, inputs = step.run, step.eqn, step.inputs
    where = f"the cache {cache.cache}, written in {step.path or 'the model'} by {eqn.name},"
    if quantizer is None:
        raise ValueError(
            f"{where} is in low bits, and no rule of the model has cache_quant for it.\n"
            "  cure: Rule(cache_quant=...) in quantize, or a float cache"
        )
    if not _writes_rows(eqn, inputs, new):
        raise ValueError(
            f"{where} has other axes than the quantizer needs: a part of the last axis of {shape_of(cache)} is "
            "written, which has one scale.\n  cure: a layout with the features last, written as a whole; or a rule "
            f"that keeps it float, Rule({cache.cache!r}), before the others"
        )
    low_bits = cache.value if isinstance(cache.value, LowBitCache) else None
    site = Site(
        cache.cache,
        quantizer,
        shape=shape_of(inputs[new[0]]),
        cache_ndim=cache.cache_ndim,
        is_stored=low_bits is not None,
    )
    run.add(site)
    rounded = {place: run.quantizers.quantize(site, inputs[place].array) for place in new}
    if low_bits is None or type(run.quantizers) is quantizers.Quantizers:
        values = [rounded.get(place, x.value) for place, x in enumerate(inputs)]
        (value,) = eqn.bind([Tracked(value).array for value in values])
        return _after(cache, value, transform_of(quantizer))
    how = "zero_point" in low_bits.form.names, undone_transform_of(quantizer)
    rows = {place: LowBitCache.of(x, *how) for place, x in rounded.items()}
    if not all(low_bits.fits(row) for row in rows.values()):
        raise ValueError(
            f"{where} is stored as {low_bits}, and its quantizer makes {next(iter(rows.values()))}.\n"
            "  cure: jqinject.quantized_cache(model, cache) with this model"
        )
    operands, numbers = [rows.get(place, x.value) for place, x in enumerate(inputs)], {}
    for name, array in low_bits.numbers.items():
        arrays = [x.numbers[name] if isinstance(x, LowBitCache) else x for x in operands]
        numbers[name] = WRITES[eqn.name](eqn, arrays, array.ndim - low_bits.ndim)
    return _after(cache, low_bits.with_numbers(numbers), transform_of(quantizer))


def _after(cache: Tracked, value: object, transform: object = None) -> Tracked:
    """A cache with other numbers."""
    transform = cache.transform if transform is None else transform
    return replace(cache.with_value(value), origin=Origin.ACTIVATION, transform=transform)


def _writes_rows(eqn: jaxpr.Equation, inputs: Sequence[Tracked], new: Sequence[int]) -> bool:
    """Whether whole rows of features are written, and the features are the last axis of what is written."""
    name, shape = eqn.name, shape_of(inputs[0])
    if not shape or any(shape_of(inputs[place])[-1:] != shape[-1:] for place in new):
        return False
    last = len(shape) - 1
    if name in ("concatenate", "dynamic_update_slice"):
        return True
    numbers = eqn.params["dimension_numbers"]
    indexed = {
        *numbers.inserted_window_dims,
        *numbers.scatter_dims_to_operand_dims,
        *numbers.operand_batching_dims,
    }
    return last not in indexed and len(shape_of(inputs[2])) - 1 in numbers.update_window_dims


# Each writes one array of a cache, which has as many axes more than the float array as are `added` at its end.


def _updated(eqn: jaxpr.Equation, operands: Sequence[jax.Array], added: int) -> jax.Array:
    x, rows, *starts = operands
    zero = jnp.zeros_like(starts[-1])
    return lax.dynamic_update_slice(x, rows, [*starts[:-1], *(zero,) * (added + 1)])


def _scattered(eqn: jaxpr.Equation, operands: Sequence[jax.Array], added: int) -> jax.Array:
    x, indices, rows = operands
    numbers = eqn.params["dimension_numbers"]
    window = (*numbers.update_window_dims, *range(rows.ndim - added, rows.ndim))
    options = {name: eqn.params[name] for name in ("indices_are_sorted", "unique_indices", "mode")}
    return lax.scatter(x, indices, rows, numbers._replace(update_window_dims=window), **options)


def _placed(eqn: jaxpr.Equation, x: Tracked) -> list[Tracked]:
    """A cache after an operation that leaves its numbers: its arrays lie where the float array would."""
    cache, sharding = x.value, eqn.params.get("sharding")
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return [x]
    specs = cache.form.partition_specs(sharding.spec, cache.numbers)
    placed = {
        name: lax.with_sharding_constraint(x, sharding.update(spec=specs[name]))
        for name, x in cache.numbers.items()
    }
    return [x.with_value(cache.with_numbers(placed))]


WRITES: dict[str, Any] = {
    "dynamic_update_slice": _updated,
    "scatter": _scattered,
    "concatenate": lambda eqn, operands, added: lax.concatenate(operands, eqn.params["dimension"]),
    **dict.fromkeys(("copy", "name", "sharding_constraint")),
}


def check_caches_stay(
    program: call.Program, outputs: object, live: Mapping[Path, object], changed: Iterable[Path]
) -> None:
    """Refuse a call that was given a cache in low bits and leaves a float array in its place.

    Args:
        program: of the call.
        outputs: of the call. A cache is found again by where the program moves its rows.
        live: the Variables, by path.
        changed: path, Variable and new value of those that the call changes.

    Raises:
        ValueError: it does.
    """
    places = [place for place, x in enumerate(program.inputs) if isinstance(x.value, LowBitCache)]
    if not places:
        return
    lost = [
        ".".join(map(str, path))
        for path, _, value in changed
        if path in live and _holds_low_bits(live[path]) and not isinstance(value, LowBitCache)
    ]
    flat, _ = jax.tree_util.tree_flatten_with_path(outputs, is_leaf=is_low_bit_cache)
    for place in places:
        name, is_cache = program.inputs[place].cache, [x == place for x in range(len(program.inputs))]
        holding = program.body.run(is_cache, _holding, lambda value: False)
        named_outputs = [(path, value, _is_named(path, name)) for path, value in flat]
        outputs_of_cache = [x for x, holds in zip(named_outputs, holding, strict=False) if holds or x[2]]
        floats = [
            (path, named) for path, value, named in outputs_of_cache if not isinstance(value, LowBitCache)
        ]
        if floats and (len(floats) == len(outputs_of_cache) or any(named for _, named in floats)):
            path, named = max(floats, key=lambda entry: entry[1])
            left = jax.tree_util.keystr(path, simple=True, separator=".")
            lost.append(name if named else f"{name} (in the output{' ' * bool(left)}{left})")
    _refuse(lost, "the call")


def check_caches_carried(
    carried: Sequence[Tracked], before: Sequence[object], after: Sequence[object]
) -> None:
    """Refuse a loop that carries a cache in low bits and leaves a float array in its place.

    Args:
        carried: what the loop carries.
        before: the same, as an iteration sees it.
        after: what it leaves to the next one.

    Raises:
        ValueError: it does.
    """
    rows = zip(carried, before, after, strict=False)
    _refuse(
        [x.cache for x, old, new in rows if is_low_bit_cache(old) and not is_low_bit_cache(new)], "a loop"
    )


def check_caches_of_branches(first: Sequence[Tracked], second: Sequence[Tracked]) -> None:
    """Refuse branches of which one leaves a cache in low bits and one a float array, given the outputs of both.

    Raises:
        ValueError: they do.
    """
    pairs = zip(first, second, strict=True)
    differing = [pair for pair in pairs if len({isinstance(x.value, LowBitCache) for x in pair}) > 1]
    _refuse([x.cache or y.cache for x, y in differing], "a branch")


def _refuse(lost: list[str], where: str) -> None:
    if lost:
        raise ValueError(
            f"{', '.join(dict.fromkeys(lost))}: the cache was given in low bits, and {where} leaves a float array in "
            f"its place: it is written by an operation other than {', '.join(SERVED)} (`where`, a loop), "
            "or moved (reshaped, padded, stacked with others, reordered).\n  cure: write it by one of these, "
            "as a whole row of features; or a rule that keeps it float"
        )


def _is_named(path: Path, cache: str) -> bool:
    """Whether an output has the name that a cache has below its argument."""
    own = cache.split(".")[1:]
    keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
    return bool(own) and keys[-len(own) :] == own


def _holds_low_bits(variable: object) -> bool:
    return isinstance(variable, nnx.Variable) and isinstance(variable.get_raw_value(), LowBitCache)


SERVED = ("dynamic_update_slice", ".at[...].set", "concatenate")


# What these make are no rows of a cache any more, even if it has as many of them.
_ENDS = frozenset(
    {"dot_general", "ragged_dot_general", "conv_general_dilated", "sort", "top_k", "argmax", "argmin"}
)


def _holding(eqn: jaxpr.Equation, inputs: Sequence[bool]) -> list[bool]:
    """Whether the outputs hold numbers of a cache: moved, combined with others, or replaced in part."""
    if eqn.name in _ENDS or not any(inputs):
        return [False] * len(eqn.outputs)
    if eqn.call is not None:
        return eqn.call.run(inputs, _holding, lambda value: False)
    # A reduction has fewer numbers than what it reads.
    fewest = min(x.size for x, holds in zip(eqn.inputs, inputs, strict=True) if holds)
    return [moves.only_moves(eqn.name) or x.size >= fewest for x in eqn.outputs]
