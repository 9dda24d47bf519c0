"""`load_state` loads weights into a model and re-assembles its quantizers; `reassemble` does only the second."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import Quantizer, RangeScaling
from jqinject.dot import is_low_bit_cache
from jqinject.model.state import checkpoint_entries as entries_of
from jqinject.model.state.checkpoint_entries import Entries, Problem
from jqinject.model.walk import Holders, ModelIndex, Path, VariableEntry, is_finite, place_name
from jqinject.nn.base.parameter_site import ParameterSite
from jqinject.program import listed
from jqinject.proxy import WeightQuantProxyFromInjector, write
from jqinject.quant_tensor import is_concrete


@dataclass(frozen=True)
class ReassemblyReport:
    """What re-assembly did.

    Attributes:
        reassembled: paths of the re-assembled proxies.
        replaced: those whose quantizer is a new object, because its structure, shapes or dtypes changed: optimizers,
            `nnx.view`s and `nnx.cached_partial`s made before must be recreated.
    """

    reassembled: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        lines = [f"re-assembled {_count(self.reassembled, 'quantizer')}"]
        if self.replaced:
            lines.append(
                f"replaced {_count(self.replaced, 'quantizer')} (structure or shapes changed; make optimizers, views "
                f"and cached_partials again): {', '.join(self.replaced)}"
            )
        return lines


@dataclass(frozen=True)
class LoadReport(ReassemblyReport):
    """What `load_state` did.

    Attributes:
        loaded: paths that were written from the state.
        missing: paths that the state does not hold, except those of quantizers that were re-assembled or kept.
        base: instead, if the state holds adapters alone: what they lie beside, which stays as it is.
        cast: path -> "dtype -> dtype" for floats of another width.
        not_finite: paths of loaded weights that hold nan or inf.
        kept: paths of activation and gradient quantizers of the layers whose weights were loaded. They do not depend on
            weights, and keep what they learned and collected if the state holds nothing for them.
        below_zero: paths of learned scales below 0, whose magnitude counts.
        transformed: quantizers with a transform before them, for which weights are stored, if the state holds no
            quantizers and so knows nothing of it.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    base: tuple[str, ...] = ()
    cast: dict[str, str] = field(default_factory=dict)
    not_finite: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    below_zero: tuple[str, ...] = ()
    transformed: tuple[str, ...] = ()

    def _lines(self) -> list[str]:
        lines = [f"loaded {_count(self.loaded, 'variable')}"]
        if self.base:
            base = _count(self.base, "variable")
            lines.append(f"the state holds adapters alone: kept {base} of their base")
        paths = {
            "not in the state": self.missing,
            "cast": [f"{path} ({how})" for path, how in self.cast.items()],
            "nan or inf in": self.not_finite,
            "scales below 0, read by their magnitude": self.below_zero,
            "weights are stored for transforms of inputs here": self.transformed,
        }
        lines += [f"{what}: {', '.join(names)}" for what, names in paths.items() if names]
        lines += super()._lines()
        if self.kept:
            lines.append(
                f"kept {_count(self.kept, 'quantizer')} that no weight decides: {', '.join(self.kept)}"
            )
        return lines


def _count(items: tuple[str, ...], what: str) -> str:
    return f"{len(items)} {what}{'' if len(items) == 1 else 's'}"


def reassemble(model: object) -> ReassemblyReport:
    """Re-assemble every quantizer of a model, from the layers that hold it.

    For use after writing weights by other means than `load_state` (`nnx.update`, in-place writes). The layers are found
    by walking the model, so this also works for clones, copies, unpickled and merged models. A quantizer of the same
    structure keeps its Variables and takes the new values; learned scales and statistics start afresh.

    Args:
        model: a module; shared quantizers are found wherever they are held.

    Returns:
        A report.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(8, 4, rngs=nnx.Rngs(0))
        >>> fc.kernel[...] = jnp.ones((8, 4))
        >>> reassemble(fc).reassembled
        ('weight_quant',)
    """
    return reassemble_held(ModelIndex(model).proxies)


def reassemble_held(holders: Iterable[Holders]) -> ReassemblyReport:
    """Re-assemble the given proxies, each from the layers that hold it."""
    done, replaced = [], []
    for entry in holders:
        path = place_name(entry.paths[0])
        done.append(path)
        try:
            is_new = entry.proxy.init_tensor_quant(*entry.layers)
        except Exception as error:
            error.add_note(f"while re-assembling {path}")
            raise
        if is_new:
            replaced.append(path)
    return ReassemblyReport(tuple(done), tuple(replaced))


Result = TypeVar("Result")
Filter = nnx.filterlib.Filter
LOAD = "load_state"
SHOWN = 50
COMMITTED = ("record", "scale")


def load_state(model: object, state: object, *, missing: Filter = False) -> LoadReport:
    """Load weights into a model and re-assemble its quantizers from them.

    In this order: quantizers for which the state has committed scales (`jqinject.recipes`) are committed too; weights
    and other Variables; re-assembly of every quantizer that depends on the loaded weights;
    quantizer Variables that the state holds, which thus win over re-assembly. So a float checkpoint fits a quantized
    model, and a quantized checkpoint is restored bit for bit. Everything is checked before it is written. An abstract
    model (`nnx.eval_shape`) becomes a real one.

    Quantizers of activations and gradients depend on weights only if their injector asks for `module`. Otherwise they
    keep what they learned and collected; `jqinject.reassemble(model)` resets it.

    Source: Brevitas's `load_state_dict`. Differs from Brevitas: no flag is needed for a float checkpoint; nothing is
    written if anything is wrong; Variables stay the same objects, so optimizers stay valid; ranges of activations
    stay (there, every quantizer is rebuilt).

    Args:
        model: a module.
        state: an `nnx.State`, a nested dict of arrays (also as Orbax restores it), or another module. A shared Variable
            may stand under any of its paths.
        missing: an NNX filter for Variables that the state need not hold, as in `missing=nnx.BatchStat`; `...` for all.
            Quantizer Variables (also of components assembled by hand) and arrays without a Variable (the mask of a
            convolution) may always be missing; so may the base, if the state holds adapters alone.

    Returns:
        A report: what was loaded, cast, missing, re-assembled and kept, and which weights hold nan or inf.

    Warns:
        UserWarning: the state is a float model's, and weights of this one are stored for transforms of their inputs
            (`jqinject.recipes.Rotate`).

    Raises:
        ValueError: names every unknown path, missing path (of an abstract model all count), wrong shape and wrong dtype
            (a float of another width is cast); frozen numbers of another form, if the state is a module; a statistic,
            scale or counter of a quantizer that cannot be right (nan, inf; below 0, except for a learned scale, whose
            magnitude counts; a scale of 0); a variance below 0; flat keys, and an array in pieces. Nothing is changed
            then.
        TypeError: `state` is none of the three kinds.

    Example:
        >>> from jqinject.nn import QuantLinear
        >>> from jqinject.quant import Int8WeightPerChannelFloat
        >>> floats = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        >>> quantized = QuantLinear(8, 4, weight_quant=Int8WeightPerChannelFloat, rngs=nnx.Rngs(1))
        >>> print(load_state(quantized, nnx.state(floats)))
        loaded 2 variables
        re-assembled 1 quantizer
    """
    index = ModelIndex(model)
    _refuse_traced(index.variables)
    report = all_or_nothing(
        index, lambda: _checked(model, state, missing, _committed_as(state, model, index))
    )
    if report.transformed:
        warnings.warn(
            "load_state: the state holds weights and no quantizers, as a float model's does, and this model's weights "
            f"are stored for transforms of their inputs: {listed(report.transformed)}. With other weights it computes "
            "something else.\n"
            "  cure: the recipe that made this model, on a float model with that state; or a state of this model",
            UserWarning,
            2,
        )
    return report


def _checked(model: object, state: object, missing: Filter, index: ModelIndex) -> LoadReport:
    """Load a state that fits; raises before it writes otherwise."""
    flat, forms = entries_of.flat_entries(state), entries_of.other_forms(state, index)
    return load_checked(model, checked_entries(flat, index, missing, forms), index)


def checked_entries(
    flat: Entries, index: ModelIndex, missing: Filter, problems: Iterable[Problem] = (), caller: str = LOAD
) -> Entries:
    """The entries of a state that fits, with what components complete.

    Args:
        flat: path -> array.
        index: of the model.
        missing: a filter for Variables that need not be there.
        problems: what else is wrong with the state.
        caller: the calling function's name, for the error text.

    Raises:
        ValueError: the state does not fit.
    """
    by_path = index.by_path
    flat = entries_of.unwrapped(flat, by_path)
    refuse(*entries_of.ill_formed(flat, by_path), caller)
    entries = entries_of.with_checkpoint_defaults(index, flat)
    if holds_adapters_alone(entries, by_path):
        missing = nnx.Any(missing, nnx.Not(nnx.LoRAParam))
    refuse([*entries_of.unfit(entries, index, missing), *problems], caller=caller)
    stored = {path: value for path, value in entries.items() if path in flat}
    contradictions = [*entries_of.contradictions(entries, by_path)]
    refuse(contradictions or [*entries_of.never_right(index, stored)], caller=caller)
    return entries


def _committed_as(state: object, model: object, index: ModelIndex) -> ModelIndex:
    """Prepare the quantizers that the state has more of than the model, and return the model's index.

    Weight quantizers are committed for which the state has committed scales; averaged ranges become constants, without
    numbers yet, where the state has constants, as that of a model has that was calibrated before it was frozen.
    """
    ends = {path[:-1] if path[-1:] == ("value",) else path for path in entries_of.flat_entries(state)}
    changed = False
    for holders in index.proxies:
        proxy = holders.proxy
        of_weights = isinstance(proxy, WeightQuantProxyFromInjector)
        if of_weights and not proxy.committed and any((*path, *COMMITTED) in ends for path in holders.paths):
            proxy.commit(*holders.layers)
            changed = True
    for path, node in index.places:
        if isinstance(node, Quantizer) and (*path, "scaling_impl", *COMMITTED) in ends:
            changed |= _make_constant(node)
    return ModelIndex(model) if changed else index


def _make_constant(quantizer: Quantizer) -> bool:
    """Freeze the averaged range of a quantizer as one whose numbers are unknown yet; False if it has none."""
    scaling = quantizer.scaling_impl
    if not isinstance(scaling, RangeScaling) or scaling.record is not None or scaling.averaging_impl is None:
        return False
    average = scaling.averaging_impl.record
    numbers = average.get_raw_value()
    average.set_value(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), numbers))
    try:
        quantizer.freeze_range()
    finally:
        average.set_value(numbers)
    return True


def refuse(problems: list[Problem], cure: str = "", caller: str = LOAD) -> None:
    """Raise a ValueError that lists what is wrong with a state, if anything is."""
    if not problems:
        return
    shown = [f"  {place_name(path)}: {problem}" for path, problem in problems[:SHOWN]]
    more = [f"  ... and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    raise ValueError(
        f"{caller}: the state does not fit the model, nothing was changed ({len(problems)} "
        f"problem{'s' if len(problems) > 1 else ''}):\n" + "\n".join([*shown, *more]) + cure
    )


def load_checked(model: object, entries: Entries, index: ModelIndex, *, copies: bool = False) -> LoadReport:
    """Write entries that were checked, and re-assemble the quantizers that depend on them.

    Args:
        model: the model.
        entries: path -> array.
        index: of the model.
        copies: whether arrays of JAX are copied, else shared with the state.
    """
    by_path, transformed = index.by_path, tuple(entries_of.transformed_inputs(index, entries))
    chosen = {by_path[path].path: value for path, value in entries.items()}
    cast = {
        place_name(path): f"{value.dtype} -> {by_path[path].variable.dtype}"
        for path, value in chosen.items()
        if getattr(value, "dtype", by_path[path].variable.dtype) != by_path[path].variable.dtype
    }
    weights = {path: value for path, value in chosen.items() if not by_path[path].in_quantizer}

    def owned(value: object) -> object:
        return value.copy() if copies and isinstance(value, jax.Array) else value

    for path, value in weights.items():
        write(by_path[path].variable, owned(value))
    affected = proxies_beside(index, [by_path[path].variable for path in weights])
    report = reassemble_held(holders for holders in affected if holders.proxy.depends_on_layers())
    unchanged = tuple(
        place_name(holders.paths[0]) for holders in affected if not holders.proxy.depends_on_layers()
    )
    # Re-assembly may have replaced Variables.
    after = ModelIndex(model) if report.replaced else index
    now = after.by_path
    for path, value in chosen.items():
        if by_path[path].in_quantizer:
            why: str | None = "does not exist any more"
            if path in now:
                why = entries_of.problem_of(value, now[path].variable.get_value())
            if why:
                raise ValueError(
                    f"load_state: after re-assembly from the loaded weights {place_name(path)} {why}; nothing was "
                    "changed"
                )
            write(now[path].variable, owned(value))
    proxies = tuple(f"{path}." for path in (*report.reassembled, *unchanged))
    names = (place_name(entry.path) for entry in entries_of.not_in(entries, index))
    absent = tuple(name for name in names if not name.startswith(proxies))
    of_adapters = holds_adapters_alone(entries, by_path)
    return LoadReport(
        **vars(report),
        loaded=tuple(place_name(path) for path in chosen),
        missing=() if of_adapters else absent,
        base=absent if of_adapters else (),
        cast=cast,
        not_finite=tuple(place_name(path) for path, x in weights.items() if not is_finite(jnp.asarray(x))),
        kept=unchanged,
        below_zero=tuple(place_name(path) for path in entries_of.read_by_magnitude(after, entries)),
        transformed=transformed,
    )


def holds_adapters_alone(entries: Mapping[Path, object], by_path: Mapping[Path, VariableEntry]) -> bool:
    """Whether a state has numbers for low-rank adapters, and for nothing else of the model."""
    kinds = {type(by_path[path].variable) for path in entries if path in by_path}
    return bool(kinds) and all(issubclass(kind, nnx.LoRAParam) for kind in kinds)


def proxies_beside(index: ModelIndex, changed: list[object]) -> list[Holders]:
    """The proxies held by a layer that holds one of the Variables itself."""
    written = {id(variable) for variable in changed}
    return [
        holders
        for holders in index.proxies
        if any(id(child) in written for layer in holders.layers for child in children_of(layer))
    ]


def children_of(layer: object) -> Iterable[object]:
    """What a layer holds, and the weight of one that holds only its quantizer."""
    return (layer.weight, *vars(layer).values()) if isinstance(layer, ParameterSite) else vars(layer).values()


def _refuse_traced(targets: list[VariableEntry]) -> None:
    for entry in targets:
        value = entry.variable.get_value()
        if is_low_bit_cache(value):
            raise ValueError(
                f"load_state: {place_name(entry.path)} holds a cache in low bits, which is not loaded.\n"
                "  cure: load the model before jqinject.quantized_cache(model); nnx.update(model, state) puts a whole "
                "state back"
            )
        if entries_of.is_abstract(entry):
            continue
        if not isinstance(value, jax.Array | np.ndarray) or not is_concrete(value):
            raise ValueError(
                f"load_state writes arrays, and {place_name(entry.path)} holds {type(value).__name__}.\n"
                "  cure: call it outside of jit and of the function that eval_shape traces"
            )


def all_or_nothing(index: ModelIndex, load: Callable[[], Result]) -> Result:
    """Run `load`; if it raises, restore everything."""
    values = [(entry.variable, entry.variable.get_value()) for entry in index.variables]
    ranges = (node for _, node in index.places if isinstance(node, RangeScaling))
    changing = [*(holders.proxy for holders in index.proxies), *ranges]
    before = [(module, dict(vars(module))) for module in changing]
    try:
        return load()
    except Exception:
        for variable, value in values:
            if variable.get_value() is not value:
                variable.set_value(value)
        for module, attributes in before:
            for name in vars(module).keys() - attributes.keys():
                delattr(module, name)
            vars(module).update(attributes)
        raise
