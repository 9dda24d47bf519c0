"""A model whose call is run as a program, with quantizers between its operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from jqinject.core.construction.assign import assign
from jqinject.core.state.record import RecordPart, flat_parts
from jqinject.program.class_swap import ClassMixin, derived_class
from jqinject.program.interpreter import Interpreter
from jqinject.program.policy import Policy, Site
from jqinject.program.quantizers import Finder, HeldQuantizers, Quantizers
from jqinject.program.tracing import Arguments, trace
from jqinject.proxy import ActQuantProxyFromInjector

HELD = "op_quant"


class OpQuantizers(nnx.Module):
    """The quantizers between the operations of a model, by the names of their sites.

    Args:
        policy: decides what is quantized; static, compared by value.
        held: name -> proxy.
    """

    policy: Policy
    held: nnx.Dict[ActQuantProxyFromInjector]

    def __init__(self, policy: Policy, held: dict[str, ActQuantProxyFromInjector]) -> None:
        assign(self, policy=policy, held=nnx.Dict(held))

    def __getitem__(self, name: str) -> ActQuantProxyFromInjector:
        return self.held[name]

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
        return HeldQuantizers(self.op_quant.held)


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
    program = trace(model, call, arguments, policy.leaf_modules, HELD)
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
    return [x.value for x in (*outputs, *found[count:])]


def _in_words(leaf: Any) -> Any:
    is_array = isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
    return f"{leaf.dtype}{list(leaf.shape)}" if is_array else leaf


def find_sites(
    model: Any, policy: Policy, args: Any, kwargs: Any, quantizers: Quantizers | None = None
) -> dict[str, Site]:
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
        program = trace(model, kind.__call__, Arguments(args, kwargs), policy.leaf_modules, HELD)
    except Exception as error:
        shapes = jax.tree.map(_in_words, (args, kwargs))
        error.add_note(
            f"while {kind.__name__} was traced, to find its operations, with {shapes[0]} {shapes[1] or ''}"
        )
        raise
    interpreter = Interpreter(policy, quantizers or Finder(), constants_now=quantizers is not None)
    variable = [quantizers is None or x.is_activation for x in program.inputs]

    def look(values: list[Any]) -> Any:
        given = iter(values)
        inputs = [
            replace(x, value=next(given), twins={}) if free else x
            for x, free in zip(program.inputs, variable, strict=True)
        ]
        return _outputs(interpreter, program._replace(inputs=inputs))

    jax.eval_shape(look, [x.value for x, free in zip(program.inputs, variable, strict=True) if free])
    return interpreter.sites
