"""A model whose call is run as a program, with quantizers between its operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import jax
from flax import nnx

from jqinject.core.construction.assign import assign
from jqinject.core.state.record import RecordPart, flat_parts
from jqinject.program.call import CALL, Call
from jqinject.program.class_swap import ClassMixin, derived_class, original_class
from jqinject.program.interpreter import Interpreter
from jqinject.program.policy import Policy, Site
from jqinject.program.quantizers import Finder, HeldQuantizers, Quantizers
from jqinject.program.tracing import trace
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

    def quantizers(self) -> Quantizers:
        """The quantizers of the sites."""
        return HeldQuantizers(self.op_quant.held)


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
    program = trace(model, call, policy.leaf_modules, HELD)
    interpreter = Interpreter(policy, quantizers, prefix=prefix_of(call))
    values = _outputs(interpreter, program)
    called = (model, *call.modules)
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


def find_sites(
    model: Any, policy: Policy, calls: Iterable[Call], quantizers: Quantizers | None = None
) -> dict[str, Site]:
    """The sites at which calls of a model would be quantized; the model is traced, not run.

    Args:
        model: an NNX module, concrete or abstract.
        policy: decides what is quantized.
        calls: of different methods.
        quantizers: called at the sites, with the model's weights and tracers for everything else; None for no calls.
    """
    sites: dict[str, Site] = {}
    for call in calls:
        sites |= _sites_of_call(model, policy, call, quantizers)
    return sites


def _sites_of_call(model: Any, policy: Policy, call: Call, quantizers: Quantizers | None) -> dict[str, Site]:
    try:
        program = trace(model, call, policy.leaf_modules, HELD)
    except Exception as error:
        traced = original_class(type(model)).__name__ + ("" if call.name == CALL else f".{call.name}")
        error.add_note(f"while {traced} was traced, to find its operations, with {call}")
        raise
    interpreter = Interpreter(
        policy, quantizers or Finder(), constants_now=quantizers is not None, prefix=prefix_of(call)
    )
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
