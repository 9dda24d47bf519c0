"""A model whose call is run as a program, with quantizers between its operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from flax import nnx

from jqinject.core.construction.assign import assign
from jqinject.core.state.record import RecordPart, flat_parts
from jqinject.program.cache_writes import check_caches_stay
from jqinject.program.interpreter import Interpreter
from jqinject.program.policy import ActivationProduct, CacheSite, Policy, Site, WeightUse
from jqinject.program.quantizers import Finder, HeldQuantizers, Quantizers
from jqinject.program.tracing.call import CALL, Call
from jqinject.program.tracing.class_swap import ClassMixin, derived_class, original_class
from jqinject.program.tracing.kept_state import of_model
from jqinject.program.tracing.trace import Program, node_at, trace
from jqinject.program.tracked_value import Tracked, shape_of
from jqinject.program.weights.adapter import Adapter, dropout_name, with_adapters
from jqinject.program.weights.moves import Axes
from jqinject.program.weights.parameters import dotted

HELD = "op_quant"
Path = tuple[Any, ...]


class FoundSites(NamedTuple):
    """What a call of a model quantizes.

    Attributes:
        sites: name -> site of a tensor.
        uses: where parameters are contracted or looked up.
        products: contractions of two activations.
        adapted: the path of a parameter and the name of a contraction that its adapter takes part in, or of a look-up
            whose rows are then contracted.
    """

    sites: dict[str, Site]
    uses: list[WeightUse]
    products: list[ActivationProduct]
    adapted: set[tuple[Path, str]]


class OpQuantizers(nnx.Module):
    """The quantizers of a model that stand outside of its layers: `model.op_quant[name]`.

    A tensor's is named by its operation (`blocks.0.dot_general1_lhs`), a parameter's by the parameter's path
    (`blocks.0.w`). Their state paths are `op_quant/held/<name>/...` and `op_quant/weights/<path>/weight_quant/...`;
    those of adapters, `op_quant/adapters/<path>/a` and `.../b`.

    Args:
        policy: decides what is quantized; static, compared by value.
        held: name of a tensor -> its quantizer.
        weights: path of a parameter, as text -> what holds its quantizer.
        tied: paths of parameters that belong to a layer of ours and that the model contracts by itself too.
        caches: caches whose rows are quantized when they are written.
    """

    policy: Policy
    held: nnx.Dict[Any]
    weights: nnx.Dict[Any]
    adapters: nnx.Dict[Any]
    tied: tuple[Path, ...] = ()
    caches: tuple[CacheSite, ...] = ()

    def __init__(
        self,
        policy: Policy,
        held: Mapping[str, Any],
        weights: Mapping[str, Any] | None = None,
        tied: tuple[Path, ...] = (),
        caches: tuple[CacheSite, ...] = (),
    ) -> None:
        assign(self, policy=policy, held=nnx.Dict(held))
        if weights:
            assign(self, weights=nnx.Dict(weights))
        if tied:
            self.tied = tied
        if caches:
            self.caches = caches

    def weight_sites(self) -> Mapping[str, Any]:
        """What holds the quantizers of parameters, by their paths as text."""
        return vars(self).get("weights", {})

    def adapters_by_path(self) -> Mapping[str, Adapter]:
        """The adapters of parameters, by their paths as text."""
        return vars(self).get("adapters", {})

    def __getitem__(self, name: str) -> Any:
        sites = self.weight_sites()
        return sites[name].weight_quant if name in sites else self.held[name]

    def __iter__(self) -> Any:
        return iter((*self.weight_sites(), *self.held))

    def __len__(self) -> int:
        return len(self.held) + len(self.weight_sites())


class QuantizedProgram(ClassMixin):
    """Mixin for the class of a model: its call, and maybe others of its methods, run with quantizers in them.

    A method that calls another one runs that one as it was written, as a part of its own program.

    Attributes:
        op_quant: the quantizers.
    """

    __slots__ = ()
    op_quant: OpQuantizers

    @classmethod
    def method(cls, kind: type, name: str) -> Callable[..., Any]:
        """The model's own method of that name, run as a program."""

        @functools.wraps(getattr(kind, name))
        def quantized(self: Any, *args: Any, **kwargs: Any) -> Any:
            return run(self, self.op_quant.policy, self.quantizers(), Call(args, kwargs, name))

        return quantized

    def tied_quantizers(self) -> dict[str, Any]:
        """The quantizers, by path as text, of parameters that belong to a layer of ours."""
        return {dotted(path): node_at(self, path[:-1]).weight_quant for path in self.op_quant.tied}

    def quantizers(self) -> Quantizers:
        """The quantizers of the sites."""
        held = self.op_quant
        sites = held.weight_sites()
        weights = {name: sites[name].weight_quant for name in sites}
        stacked = {name: sites[name].stacked for name in sites if sites[name].stacked}
        weights |= self.tied_quantizers()
        dropouts = {
            dropout_name(path): adapter.dropout
            for path, adapter in held.adapters_by_path().items()
            if adapter.dropout is not None
        }
        known = {name: q for name, q in weights.items() if q is not None}
        return HeldQuantizers(held.held, known, stacked, dropouts)


def quantized_class(
    kind: type, program: type[QuantizedProgram] = QuantizedProgram, methods: Iterable[str] = ()
) -> type:
    """The subclass of `kind` whose methods are run as programs; cached.

    Args:
        kind: a class of modules, or one that this function has made.
        program: `QuantizedProgram`, or a subclass of it.
        methods: names of the methods; none means those of `kind` if this function has made it, else `__call__`.
    """
    return derived_class(program_class_of(kind), program, *(methods or methods_of(kind)))


def program_class_of(kind: type) -> type:
    """The class from which `quantized_class` made `kind`; `kind` itself if it did not."""
    return kind.base_class if issubclass(kind, QuantizedProgram) else kind


def methods_of(kind: type) -> tuple[str, ...]:
    """The methods that `quantized_class` replaced in `kind`; none if it did not make it."""
    return kind._made_from[2] if issubclass(kind, QuantizedProgram) else ()  # pyright: ignore


def prefix_of(call: Call) -> str:
    """What the names of a call's sites begin with: nothing for `__call__`, else the method and a colon."""
    return "" if call.name == CALL else f"{call.name}:"


def run(model: Any, policy: Policy, quantizers: Quantizers, call: Call) -> Any:
    """Run a call of a model with quantizers; the state of the model and the call's modules changes as in the call."""
    program = with_adapters(model, trace(model, call, policy.is_leaf, HELD))
    interpreter = Interpreter(policy, quantizers, prefix=prefix_of(call))
    values = _outputs(interpreter, program)
    interpreter.kept.warn_of_lost(model)
    called = (model, *call.modules)
    live = dict(flat_parts(nnx.state(called, graph=True)))
    outputs = jax.tree.unflatten(program.output_tree, values[: program.output_tree.num_leaves])
    changed = program.changed(values, interpreter.kept)
    check_caches_stay(program.inputs, outputs, live, changed)
    for path, variable, value in changed:
        if path in live and isinstance(live[path], nnx.Variable | RecordPart):
            live[path].set_value(value)
        else:
            nnx.update(called[path[0]], nnx.from_flat_state([(path[1:], variable.replace(value))]))
    return outputs


def _outputs(interpreter: Interpreter, program: Any) -> list[Any]:
    closed = program.closed
    inputs = [interpreter.policy.model_input(x) if x.is_activation else x for x in program.inputs]
    interpreter.kept.begin(inputs)
    found = interpreter.run(closed.jaxpr, closed.consts, inputs)
    count = program.output_tree.num_leaves
    final = interpreter.policy.final_output
    outputs = [final(interpreter, x, index) for index, x in enumerate(found[:count])]
    # A parameter that the program hands through is not changed by having been quantized.
    parameters = {x.weight_path: x.array for x in program.inputs if x.is_weight and x.form is None}
    state = [
        parameters.get(x.weight_path, x.array) if x.is_weight and x.quantized else x.passed
        for x in found[count:]
    ]
    return [*(x.passed for x in outputs), *state]


def find_sites(
    model: Any, policy: Policy, calls: Iterable[Call], quantizers: Quantizers | None = None
) -> FoundSites:
    """The sites at which calls of a model would be quantized; the model is traced, not run.

    Args:
        model: an NNX module, concrete or abstract.
        policy: decides what is quantized.
        calls: of different methods.
        quantizers: called at the sites, with the model's weights and tracers for everything else; None for no calls.
    """
    found = FoundSites({}, [], [], set())
    for call in calls:
        own = _sites_of_call(model, policy, call, quantizers)
        found.sites.update(own.sites)
        found.uses.extend(own.uses)
        found.adapted.update(own.adapted)
        found.products.extend(own.products)
    return found


def program_of_call(model: Any, policy: Policy, call: Call) -> Program:
    """The program of a call, in which a policy's sites can be found.

    Args:
        model: an NNX module, concrete or abstract.
        policy: says which modules are not looked into.
        call: of the model.
    """
    try:
        return with_adapters(model, trace(model, call, policy.is_leaf, HELD))
    except Exception as error:
        traced = original_class(type(model)).__name__ + ("" if call.name == CALL else f".{call.name}")
        error.add_note(f"while {traced} was traced, to find its operations, with {call}")
        raise


def _sites_of_call(model: Any, policy: Policy, call: Call, quantizers: Quantizers | None) -> FoundSites:
    return sites_of_program(program_of_call(model, policy, call), policy, call, quantizers)


def sites_of_program(
    program: Program, policy: Policy, call: Call, quantizers: Quantizers | None = None
) -> FoundSites:
    """See `find_sites`, of one traced call."""
    interpreter = Interpreter(
        policy, quantizers or Finder(), constants_now=quantizers is not None, prefix=prefix_of(call)
    )
    variable = [quantizers is None or x.is_activation for x in program.inputs]
    if policy.follows_parameters and quantizers is None:
        program = program._replace(inputs=[_with_axes(x) for x in program.inputs])

    def look(values: list[Any]) -> Any:
        given = iter(values)
        inputs = [
            replace(x, value=next(given), twins={}) if free else x
            for x, free in zip(program.inputs, variable, strict=True)
        ]
        return _outputs(interpreter, program._replace(inputs=inputs))

    jax.eval_shape(look, [x.passed for x, free in zip(program.inputs, variable, strict=True) if free])
    return FoundSites(interpreter.sites, interpreter.uses, interpreter.products, interpreter.adapted)


def throws_away(model: Any, policy: Policy, calls: Iterable[Call]) -> tuple[str, ...]:
    """Paths of quantizers' state that calls of a model would lose, unless they are run as programs.

    Args:
        model: a quantized NNX module; it is traced, not run.
        policy: which says which modules are layers.
        calls: of different methods.
    """
    found: set[str] = set()
    for call in calls:
        program = trace(model, call, policy.is_leaf, HELD, mark_all=True)
        interpreter = Interpreter(policy, Finder())

        def look(values: list[Any], program: Any = program, interpreter: Interpreter = interpreter) -> Any:
            given = zip(program.inputs, values, strict=True)
            return _outputs(
                interpreter, program._replace(inputs=[replace(x, value=v, twins={}) for x, v in given])
            )

        jax.eval_shape(look, [x.array for x in program.inputs])
        found |= {*interpreter.kept.newest, *interpreter.kept.lost}
    return tuple(sorted(map(of_model, found)))


def _with_axes(x: Tracked) -> Tracked:
    return replace(x, axes=Axes.of(shape_of(x)), twins={}) if x.is_weight and x.is_float else x
