"""A model whose call is run as a program, with quantizers between its operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
from flax import nnx

from jqinject.core.component import InnerModule, component, hidden_method
from jqinject.core.state import RecordPart, flat_parts
from jqinject.program.adapter import Adapter, dropout_name, with_adapters
from jqinject.program.cache_writes import check_caches_stay
from jqinject.program.call import Call
from jqinject.program.class_swap import ClassMixin, derived_class
from jqinject.program.finding import names_of, outputs_of
from jqinject.program.interpreter import Interpreter
from jqinject.program.kept_state import node_at
from jqinject.program.policy import CacheSite, Policy, dotted
from jqinject.program.quantizers import HeldQuantizers, Quantizers
from jqinject.program.trace import trace
from jqinject.program.tracked_value import Path

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
        caches: caches whose rows are quantized when they are written.
        same: see `FoundSites`.
        unstored: paths of parameters that a scheme quantizes within a contraction, and why they cannot be stored.
        stacks: name of a tensor in a loop over stacked layers -> the number of leading axes of its quantizer's state.
        adapters: path of a parameter, as text -> its adapter; None if absent.
    """

    policy: Policy
    held: nnx.Dict[Any]
    weights: nnx.Dict[Any] | None = None
    tied: tuple[Path, ...] = ()
    caches: tuple[CacheSite, ...] = ()
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
    def tied_quantizers(self) -> dict[str, Any]:
        """The quantizers, by path as text, of parameters that belong to a layer of ours."""
        return {dotted(path): node_at(self, path[:-1]).weight_quant for path in self.op_quant.tied}

    @hidden_method
    def quantizers(self) -> Quantizers:
        """The quantizers of the sites."""
        modules = self.op_quant
        sites = modules.weight_sites()
        weights = {name: sites[name].weight_quant for name in sites} | self.tied_quantizers()
        dropouts = {
            dropout_name(path): adapter.dropout
            for path, adapter in modules.adapters_by_path().items()
            if adapter.dropout is not None
        }
        enabled = {name: q for name, q in weights.items() if q is not None}
        depths = {name: sites[name].stacked if name in sites else 0 for name in enabled}
        again = frozenset(name for name in sites if sites[name].rounded_again)
        return HeldQuantizers({**_members(modules.held), **dropouts, **enabled}, depths, again)


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
    return kind._base_class if issubclass(kind, QuantizedProgram) else kind


def methods_of(kind: type) -> tuple[str, ...]:
    """The methods that `quantized_class` replaced in `kind`; none if it did not make it."""
    return kind._made_from[2] if issubclass(kind, QuantizedProgram) else ()  # pyright: ignore


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
