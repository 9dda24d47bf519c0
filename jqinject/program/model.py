"""A model whose call is run as a program, with quantizers between its operations; and what calls quantize, found by
tracing them."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
from flax import nnx

from jqinject.core.component import InnerModule, component, hidden_method
from jqinject.core.state import RecordPart, flat_parts
from jqinject.program.adapter import Adapter, dropout_name, with_adapters
from jqinject.program.cache_writes import check_caches_stay
from jqinject.program.call import CALL, Call, Program, trace
from jqinject.program.class_swap import ClassMixin, derived_class, original_class
from jqinject.program.interpreter import Interpreter
from jqinject.program.kept_state import node_at, of_model
from jqinject.program.moves import AxesInParameter
from jqinject.program.policy import HELD, FoundSites, Occurrence, Policy, Site, SiteNames, dotted
from jqinject.program.quantizers import HeldQuantizers, Quantizers
from jqinject.program.tracked_value import Path, Tracked, shape_of

V = TypeVar("V")


def _members(modules: Mapping[str, V]) -> Mapping[str, V]:
    """Return what a dict of modules holds, without what Flax's tools add to every module for a while."""
    return {name: modules[name] for name in modules if isinstance(modules[name], nnx.Module)}


@component
class OpQuantizers(InnerModule):
    """The quantizers of a model that stand outside of its layers: `model.op_quant[name]`.

    A tensor's is named by its operation (`blocks.0.dot_general1_lhs`), a parameter's by the parameter's path
    (`blocks.0.w`). Their state paths are `op_quant/held/<name>/...` and `op_quant/weights/<path>/weight_quant/...`;
    those of adapters, `op_quant/adapters/<path>/a` and `.../b`.

    Args:
        policy: decides what is quantized; static, compared by value.
        held: name of a tensor -> its quantizer.
        weights: path of a parameter, as text -> what holds its quantizer; None if absent.
        tied: paths of parameters that belong to a layer of ours and that the model contracts by itself too.
        caches: the sites of caches whose rows are quantized when they are written.
        same: see `FoundSites`.
        unstored: paths of parameters that a scheme quantizes within a contraction, and why they cannot be stored.
        stacks: name of a tensor in a loop over stacked layers -> the number of leading axes of its quantizer's state.
        adapters: path of a parameter, as text -> its adapter; None if absent.
    """

    policy: Policy
    held: nnx.Dict[Any]
    weights: nnx.Dict[Any] | None = None
    tied: tuple[Path, ...] = ()
    caches: tuple[Site, ...] = ()
    same: tuple[tuple[str, str], ...] = ()
    unstored: tuple[tuple[str, str], ...] = ()
    stacks: tuple[tuple[str, int], ...] = ()
    adapters: nnx.Dict[Any] | None = None

    def weight_sites(self) -> Mapping[str, Any]:
        """What holds the quantizers of parameters, by their paths as text."""
        return _members(vars(self).get("weights", {}))

    def adapters_by_path(self) -> Mapping[str, Adapter]:
        """The adapters of parameters, by their paths as text."""
        return _members(vars(self).get("adapters", {}))

    def __getitem__(self, name: str) -> Any:
        sites = self.weight_sites()
        return sites[name].weight_quant if name in sites else self.held[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*self.weight_sites(), *_members(self.held)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class QuantizedProgram(ClassMixin):
    """Mixin for the class of a model: its call, and maybe others of its methods, run with quantizers in them.

    A method that calls another one runs that one as it was written, as a part of its own program.

    Attributes:
        op_quant: the quantizers.
    """

    __slots__ = ()
    op_quant: OpQuantizers

    @classmethod
    def method(cls, kind: type, name: str) -> Callable[..., object]:
        """The model's own method of that name, run as a program."""

        @functools.wraps(getattr(kind, name))
        def quantized(self: Any, *args: object, **kwargs: object) -> object:
            return run(self, self.op_quant.policy, self.quantizers(), Call(args, kwargs, name))

        return quantized

    @hidden_method
    def quantizers(self) -> Quantizers:
        """The quantizers of the sites."""
        modules = self.op_quant
        sites = modules.weight_sites()
        weights = {name: sites[name].weight_quant for name in sites}
        weights |= {dotted(path): node_at(self, path[:-1]).weight_quant for path in modules.tied}
        dropouts = {
            dropout_name(path): adapter.dropout
            for path, adapter in modules.adapters_by_path().items()
            if adapter.dropout is not None
        }
        enabled = {name: q for name, q in weights.items() if q is not None}
        depths = {name: sites[name].stacked if name in sites else 0 for name in enabled}
        again = frozenset(name for name in sites if sites[name].rounded_again)
        return HeldQuantizers({**_members(modules.held), **dropouts, **enabled}, depths, again)


def quantized_class(kind: type, methods: Iterable[str] = ()) -> type:
    """The subclass of `kind` whose methods are run as programs; cached.

    Args:
        kind: a class of modules, or one that this function has made.
        methods: names of the methods; none means `__call__`.
    """
    return derived_class(program_class_of(kind), QuantizedProgram, *methods)


def program_class_of(kind: type) -> type:
    """The class from which `quantized_class` made `kind`; `kind` itself if it did not."""
    return kind._made_from[0] if issubclass(kind, QuantizedProgram) else kind


def run(model: nnx.Module, policy: Policy, quantizers: Quantizers, call: Call) -> object:
    """Run a call of a model with quantizers; the state of the model and the call's modules changes as in the call."""
    program = with_adapters(model, trace(model, call, policy.is_leaf))
    names = names_of(model, call)
    interpreter = Interpreter(policy, quantizers, names)
    values = outputs_of(interpreter, program)
    interpreter.kept.warn_of_lost(model)
    called = (model, *call.modules)
    live = dict(flat_parts(nnx.state(called, graph=True)))
    outputs = jax.tree.unflatten(program.output_tree, values[: program.output_tree.num_leaves])
    changed = program.changed(values, interpreter.kept)
    check_caches_stay(program, outputs, live, changed)
    for path, variable, value in changed:
        if path in live and isinstance(live[path], nnx.Variable | RecordPart):
            live[path].set_value(value)
        else:
            nnx.update(called[path[0]], nnx.from_flat_state([(path[1:], variable.replace(value))]))
    return outputs


def names_of(model: nnx.Module, call: Call) -> SiteNames:
    """The names of a call's sites: plain ones for `__call__`, else with the method and a colon in front.

    Args:
        model: which knows the sites that several methods run, if it is quantized.
        call: of it.
    """
    quantizers = vars(model).get(HELD)
    same = {} if quantizers is None else dict(quantizers.same)
    return SiteNames("" if call.name == CALL else f"{call.name}:", same)


def outputs_of(interpreter: Interpreter, program: Program) -> list[jax.Array]:
    """Run a program: its outputs, then the new state."""
    inputs = [interpreter.policy.model_input(x) if x.is_activation else x for x in program.inputs]
    count = program.output_tree.num_leaves
    results = interpreter.kept.end(interpreter.run(program.body, interpreter.kept.begin(inputs)))
    final = interpreter.policy.final_output
    outputs = [final(interpreter, x, index) for index, x in enumerate(results[:count])]
    # A parameter that the program hands through is not changed by having been quantized.
    parameters = {x.weight_path: x.array for x in program.inputs if x.is_weight and x.form is None}
    state = [
        parameters.get(x.weight_path, x.array) if x.is_weight and x.quantized else x.passed
        for x in results[count:]
    ]
    return [*(x.passed for x in outputs), *state]


def find_sites(
    model: nnx.Module, policy: Policy, calls: Iterable[Call], quantizers: Quantizers | None = None
) -> FoundSites:
    """The sites at which calls of a model would be quantized; the model is traced, not run.

    Args:
        model: an NNX module, concrete or abstract.
        policy: decides what is quantized.
        calls: of different methods.
        quantizers: called at the sites, with the model's weights and tracers for everything else; None for no calls.
    """
    sites, programs = FoundSites(), list[FoundSites]()
    for call in calls:
        program, names = program_of_call(model, policy, call), names_of(model, call)
        part = sites_of_program(program, policy, names, quantizers)
        programs.append(part)
        same = {**names.same, **same_places(programs)}
        if same != names.same:
            part = sites_of_program(program, policy, replace(names, same=same), quantizers)
        part.sites |= sites.sites
        sites.adopt(part)
        sites.same |= same
    return sites


def program_of_call(model: nnx.Module, policy: Policy, call: Call) -> Program:
    """The program of a call, in which a policy's sites can be found.

    Args:
        model: an NNX module, concrete or abstract.
        policy: says which modules are not looked into.
        call: of the model.
    """
    try:
        return with_adapters(model, trace(model, call, policy.is_leaf))
    except Exception as error:
        traced = original_class(type(model)).__name__ + ("" if call.name == CALL else f".{call.name}")
        error.add_note(f"while {traced} was traced, to find its operations, with {call}")
        raise


def sites_of_program(
    program: Program, policy: Policy, names: SiteNames, quantizers: Quantizers | None = None
) -> FoundSites:
    """See `find_sites`, of one traced call."""
    run = Interpreter(policy, quantizers or Quantizers(), names)
    if policy.follows_parameters and quantizers is None:
        program = program._replace(inputs=[_with_axes(x) for x in program.inputs])
    _look(run, program, lambda x: quantizers is None or x.is_activation)
    return run.recorded


def _look(run: Interpreter, program: Program, is_free: Callable[[Tracked], bool]) -> None:
    """Run a program on abstract values.

    Args:
        run: the run.
        program: of a call.
        is_free: whether an input is abstract; others are what they are.
    """

    def look(values: list[jax.Array]) -> list[jax.Array]:
        arrays = iter(values)
        inputs = [replace(x, value=next(arrays), twins={}) if is_free(x) else x for x in program.inputs]
        return outputs_of(run, program._replace(inputs=inputs))

    jax.eval_shape(look, [x.passed for x in program.inputs if is_free(x)])


def _with_axes(x: Tracked) -> Tracked:
    return replace(x, axes=AxesInParameter.of(shape_of(x)), twins={}) if x.is_weight and x.is_float else x


def throws_away(model: nnx.Module, policy: Policy, calls: Iterable[Call]) -> tuple[str, ...]:
    """Paths of quantizers' state that calls of a model would lose, unless they are run as programs.

    Args:
        model: a quantized NNX module; it is traced, not run.
        policy: which says which modules are layers.
        calls: of different methods.
    """
    labels: set[str] = set()
    for call in calls:
        program = trace(model, call, policy.is_leaf, mark_all=True)
        run = Interpreter(policy, Quantizers())
        _look(run, program, lambda x: True)
        labels |= run.kept.lost | run.kept.thrown
    return tuple(sorted(map(of_model, labels)))


def same_places(programs: Sequence[FoundSites]) -> dict[str, str]:
    """The sites of later programs that are those of earlier ones, by name.

    A place that reads a parameter, or is a layer, is the same if its module, its operation and what it reads are, and
    it is the n-th such place in both programs. Others are the same if they are the same operation in the same module,
    and either the same place reads what they make, as the same operand, or all their operands come from the same
    places. A site is not shared if it would have other axes of scales.

    Args:
        programs: what each has.
    """
    renamed: dict[str, str] = {}
    for index, program in enumerate(programs):
        own = {place.name for place in program.occurrences}
        for earlier in programs[:index]:
            matches = _matched(earlier.occurrences, program.occurrences)
            for name, site in program.sites.items():
                is_place = name in own
                place, _, operand = (name, "", "") if is_place else name.rpartition("_")
                same = matches.get(place, "") + ("" if is_place else f"_{operand}")
                before = earlier.sites.get(same)
                if name not in renamed and before is not None and _shared(site) == _shared(before):
                    renamed[name] = renamed.get(same, same)
    return {name: same for name, same in renamed.items() if name != same}


def _shared(site: Site) -> tuple[object, ...]:
    """What two sites have in common that one quantizer serves."""
    return site.quantizer, site.overrides, site.is_weight, len(site.shape), site.contraction, site.mesh_axes


def _matched(first: Sequence[Occurrence], second: Sequence[Occurrence]) -> dict[str, str]:
    """Name in the second program -> name of the same place in the first."""
    earlier, later = ({place.name: place for place in program} for program in (first, second))
    numbered = _numbered(first)
    matches = {name: numbered[key] for key, name in _numbered(second).items() if key in numbered}

    def match(name: str, same: str) -> bool:
        a, b = earlier[same], later[name]
        is_same = not a.read and a[:3] == b[:3] and name not in matches and same not in matches.values()
        if is_same:
            matches[name] = same
        return is_same

    readers = list(matches.items())
    for name, same in readers:
        for makers, makers_before in zip(later[name].sources, earlier[same].sources, strict=False):
            if len(makers) == len(makers_before) == 1:
                maker, maker_before = *makers, *makers_before
                if match(maker, maker_before):
                    readers.append((maker, maker_before))
    for name, place in later.items():
        own = tuple(frozenset(matches.get(source, "") for source in names) for names in place.sources)
        for same in earlier if any(own) else ():
            if earlier[same].sources == own and match(name, same):
                break
    return matches


def _numbered(program: Sequence[Occurrence]) -> dict[Path, str]:
    """Places that read something, with their number among those alike -> name."""
    counts: Counter[Path] = Counter()
    names: dict[Path, str] = {}
    for place in program:
        if place.read:
            names[*place[:3], counts[place[:3]]] = place.name
            counts[place[:3]] += 1
    return names
