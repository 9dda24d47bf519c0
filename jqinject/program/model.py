"""A model whose call is run as a program, with quantizers between its operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jqinject.core.construction.assign import assign
from jqinject.core.state.record import RecordPart, flat_parts
from jqinject.program.class_swap import ClassMixin, derived_class
from jqinject.program.interpreter import Interpreter
from jqinject.program.moves import Axes
from jqinject.program.policy import Policy, Site, WeightUse
from jqinject.program.quantizers import Finder, HeldQuantizers, Quantizers
from jqinject.program.tracing import Arguments, trace
from jqinject.program.tracked_value import Tracked, shape_of
from jqinject.program.weights import dotted

HELD = "op_quant"
Path = tuple[Any, ...]


class FoundSites(NamedTuple):
    """What a call of a model quantizes.

    Attributes:
        sites: name -> site of a tensor.
        uses: where parameters are contracted or looked up.
    """

    sites: dict[str, Site]
    uses: list[WeightUse]


class OpQuantizers(nnx.Module):
    """The quantizers between the operations of a model, by the names of their sites.

    Args:
        policy: decides what is quantized; static, compared by value.
        held: name -> proxy.
        weights: path of a parameter, as text -> what holds its quantizer.
        tied: paths of parameters that belong to a layer of ours and that the model contracts by itself too.
    """

    policy: Policy
    held: nnx.Dict[Any]
    weights: nnx.Dict[Any]
    tied: tuple[Path, ...] = ()

    def __init__(
        self,
        policy: Policy,
        held: Mapping[str, Any],
        weights: Mapping[str, Any] | None = None,
        tied: tuple[Path, ...] = (),
    ) -> None:
        assign(self, policy=policy, held=nnx.Dict(held))
        if weights:
            assign(self, weights=nnx.Dict(weights))
        if tied:
            self.tied = tied

    def __getitem__(self, name: str) -> Any:
        return self.held[name]

    def weight_sites(self) -> Mapping[str, Any]:
        """What holds the quantizers of parameters, by their paths as text."""
        return vars(self).get("weights", {})

    def __iter__(self) -> Any:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class QuantizedProgram(ClassMixin):
    """Mixin for the class of a model: its call is run with quantizers between its operations.

    Attributes:
        op_quant: the quantizers.
    """

    __slots__ = ()
    op_quant: OpQuantizers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own call, quantized."""
        held = self.op_quant
        return run(self, self.base_class.__call__, held.policy, self.quantizers(), args, kwargs)

    def quantizers(self) -> Quantizers:
        """The quantizers of the sites."""
        held = self.op_quant
        sites = held.weight_sites()
        weights = {name: sites[name].weight_quant for name in sites}
        stacked = {name: sites[name].stacked for name in sites if sites[name].stacked}
        weights |= {dotted(path): _node_at(self, path[:-1]).weight_quant for path in held.tied}
        return HeldQuantizers(held.held, {name: q for name, q in weights.items() if q is not None}, stacked)


def _node_at(root: Any, path: Path) -> Any:
    for key in path:
        root = root[key] if isinstance(root, list | tuple | dict | nnx.List | nnx.Dict) else getattr(root, key)
    return root


def quantized_class(kind: type, program: type[QuantizedProgram] = QuantizedProgram) -> type:
    """The subclass of `kind` whose call is run as a program; cached.

    Args:
        kind: a class of modules, or one that this function has made.
        program: `QuantizedProgram`, or a subclass of it.
    """
    return derived_class(program_class_of(kind), program)


def program_class_of(kind: type) -> type:
    """The class from which `quantized_class` made `kind`; `kind` itself if it did not."""
    return kind.base_class if issubclass(kind, QuantizedProgram) else kind


def run(model: Any, call: Any, policy: Policy, quantizers: Quantizers, args: Any, kwargs: Any) -> Any:
    """Run `call(model, *args, **kwargs)` with quantizers; the model's state changes as in the call itself."""
    arguments = Arguments(args, kwargs)
    program = trace(model, call, arguments, policy.is_leaf, HELD)
    interpreter = Interpreter(policy, quantizers)
    values = _outputs(interpreter, program)
    called = (model, *arguments.modules)
    live = dict(flat_parts(nnx.state(called, graph=True)))
    for path, variable, value in program.changed(values):
        if path in live and isinstance(live[path], nnx.Variable | RecordPart):
            live[path].set_value(value)
        else:
            nnx.update(called[path[0]], nnx.from_flat_state([(path[1:], variable.replace(value))]))
    return jax.tree.unflatten(program.output_tree, values[: program.output_tree.num_leaves])


def _outputs(interpreter: Interpreter, program: Any) -> list[Any]:
    closed = program.closed
    inputs = [interpreter.policy.model_input(x) if x.is_activation else x for x in program.inputs]
    found = interpreter.run(closed.jaxpr, closed.consts, inputs)
    count = program.output_tree.num_leaves
    final = interpreter.policy.final_output
    outputs = [final(interpreter, x, index) for index, x in enumerate(found[:count])]
    return [x.array for x in (*outputs, *found[count:])]


def _in_words(leaf: Any) -> Any:
    is_array = isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
    return f"{leaf.dtype}{list(leaf.shape)}" if is_array else leaf


def find_sites(
    model: Any, policy: Policy, args: Any, kwargs: Any, quantizers: Quantizers | None = None
) -> FoundSites:
    """The sites at which a call of a model would be quantized; the model is traced, not run.

    Args:
        model: an NNX module, concrete or abstract.
        policy: decides what is quantized.
        args: of the call: arrays or `jax.ShapeDtypeStruct`s, and anything else.
        kwargs: of the call.
        quantizers: called at the sites, with the model's weights and tracers for everything else; None for no calls.
    """
    kind = program_class_of(type(model))
    try:
        program = trace(model, kind.__call__, Arguments(args, kwargs), policy.is_leaf, HELD)
    except Exception as error:
        shapes = jax.tree.map(_in_words, (args, kwargs))
        error.add_note(
            f"while {kind.__name__} was traced, to find its operations, with {shapes[0]} {shapes[1] or ''}"
        )
        raise
    interpreter = Interpreter(policy, quantizers or Finder(), constants_now=quantizers is not None)
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

    jax.eval_shape(look, [x.array for x, free in zip(program.inputs, variable, strict=True) if free])
    return FoundSites(interpreter.sites, interpreter.uses)


def _with_axes(x: Tracked) -> Tracked:
    return replace(x, axes=Axes.of(shape_of(x)), twins={}) if x.is_weight and x.is_float else x
