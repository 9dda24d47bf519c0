"""The entries of a coverage: how each contraction of a weight is quantized, and why a weight is not."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx

from jqinject.dot import is_low_bit_cache
from jqinject.model.inspect.weight_flow import ARGUMENT, Flow, TracedContraction, WeightFlow
from jqinject.model.inspect.weight_numbers import ModelWeights, QuantizedFormat
from jqinject.program import (
    ActivationProduct,
    Call,
    Policy,
    Program,
    SplitCall,
    WeightUse,
    dotted,
    names_of,
    program_of_call,
    sites_of_program,
)
from jqinject.program.jaxpr import Body, Equation

BIG = 1024


@dataclass(frozen=True)
class ContractedWeight:
    """One contraction with a weight, or one look-up in one.

    Attributes:
        parameter: path of the weight.
        name: of the operation; the layer's path in a layer.
        operation: "dot_general", "einsum", "conv_general_dilated", "ragged_dot" or "take".
        weight: the weight's numbers, such as "int8"; "" if it is float.
        input: those of the other operand.
        contraction: "int", "fp8" or "float", as the program contracts them now; "none" for a look-up.
        operations: multiply-adds, those in a loop as often as it runs; 0 for a look-up.
        is_low_bit: whether both operands have at most 8 bits; of a look-up, whether the weight has.
        transform: what the other operand goes through before it is quantized, and whether the steps of a loop share its
            range; "" for nothing.
    """

    parameter: str
    name: str
    operation: str
    weight: str
    input: str
    contraction: str
    operations: int
    is_low_bit: bool
    transform: str = ""


@dataclass(frozen=True)
class ActivationContraction:
    """One contraction of two activations, such as attention scores.

    Attributes:
        name: of the operation; the layer's path in a layer.
        operation: "dot_general", "einsum", ...
        lhs, rhs: the numbers of the operands; "" if float.
        operations: multiply-adds.
        is_low_bit: whether both operands have at most 8 bits.
        transform: what its operands go through before they are quantized, in words; "" for nothing.
    """

    name: str
    operation: str
    lhs: str
    rhs: str
    operations: int
    is_low_bit: bool
    transform: str = ""


@dataclass(frozen=True)
class MissedWeight:
    """A weight that is contracted or looked up, or not read at all, and that is not quantized.

    Attributes:
        parameter: its path.
        size: the number of its elements.
        nbytes: of them.
        why: it is not quantized.
        rule: what would take it.
    """

    parameter: str
    size: int
    nbytes: int
    why: str
    rule: str


@dataclass(frozen=True)
class TracedCall:
    """What one call of a model contracts.

    Attributes:
        flow: of the program as the model was written.
        uses: where the interpreter reaches weights: (equation, path of the parameter) -> use.
        products: equation -> contraction of activations.
        kinds: weight -> kinds of its contractions in the program as it runs.
        program: holds the equations.
    """

    flow: WeightFlow
    uses: Mapping[tuple[Equation, str], WeightUse]
    products: Mapping[Equation, ActivationProduct]
    kinds: Mapping[str, frozenset[str]]
    program: Program


def traced(model: nnx.Module, call: Call, policy: Policy, weights: ModelWeights) -> TracedCall:
    """Trace a call of a model, and find what it contracts.

    Args:
        model: in evaluation mode.
        call: of it.
        policy: of the quantizers between its operations.
        weights: of the model.
    """
    program = program_of_call(model, policy, call)
    found = sites_of_program(program, policy, names_of(model, call))
    weights.at_sites |= {
        dotted(site.weight_path): site.name
        for site in found.sites.values()
        if site.weight_path and site.name in weights.held and site.is_weight != bool(site.contraction)
    }
    names = weights.names(program)
    flows = [
        ARGUMENT if not path or path[0] != 0 else Flow(sources=frozenset({name} if name else ()))
        for name, path in zip(names, program.paths, strict=True)
    ]
    flow = WeightFlow(program.body, flows, _constant)
    return TracedCall(
        flow,
        {(use.equation, dotted(use.weight_path)): use for use in found.uses},
        {product.equation: product for product in found.products},
        _kinds(model, call, flows),
        program,
    )


def _constant(value: Any) -> Flow:
    shape, dtype = getattr(value, "shape", ()), getattr(value, "dtype", None)
    big = int(np.prod(shape)) > BIG and np.issubdtype(dtype, np.floating)
    return Flow(sources=frozenset({f"a constant of the program, {dtype}{list(shape)}"} if big else ()))


def _kinds(model: nnx.Module, call: Call, flows: Sequence[Flow]) -> dict[str, frozenset[str]]:
    """How each weight is contracted when the model runs as it is."""
    split = SplitCall(model, call)
    leaves, tree = jax.tree.flatten(split.state)
    inputs = [*jax.tree.leaves(split.state, is_leaf=is_low_bit_cache), *split.arrays]
    # A cache in low bits is one input of the program as the model was written, and several arrays.
    each = [flow for flow, held in zip(flows, inputs, strict=True) for _ in jax.tree.leaves(held)]

    def run(leaves: list[Any], arrays: list[Any]) -> Any:
        copy, copied = split.merged(jax.tree.unflatten(tree, leaves), arrays)
        return jax.tree.leaves(copied(copy))

    body = Body.of(jax.make_jaxpr(run)(leaves, split.arrays))
    found: dict[str, frozenset[str]] = {}
    for one in WeightFlow(body, each).found:
        for name in one.sources if one.kind != "none" else ():
            found[name] = found.get(name, frozenset()) | {one.kind}
    return found


def used_weight(
    one: TracedContraction, name: str, weights: ModelWeights, call: TracedCall
) -> ContractedWeight:
    """The entry of a contraction with a weight, or of a look-up."""
    use = call.uses.get((one.equation, name))
    number = weights.format_of(name) if _is_reached(one, name, use, weights) else None
    beside = weights.input_format(name) if use is None else weights.format_at(use.beside)
    if use is None and name in weights.at_sites:
        beside = weights.format_at(other_operand(weights.at_sites[name]))
    kinds = call.kinds.get(name, frozenset())
    contraction = "none" if one.operation == "take" else " and ".join(sorted(kinds)) or "float"
    low = number is not None and number.is_low
    if one.operation != "take":
        low = low and ((kinds <= {"int", "fp8"} and bool(kinds)) or (beside is not None and beside.is_low))
    notes = []
    if one.operation != "take":
        site = "" if use is None else use.beside
        notes = [weights.transform_of_input(name, site), weights.range_of_loop(site, one.steps)]
    return ContractedWeight(
        name,
        use.name if use is not None else one.path or one.operation,
        use.operation if use is not None else one.operation,
        _text(number),
        "" if one.operation == "take" else _text(beside),
        contraction,
        one.operations,
        low,
        "; ".join(filter(None, notes)),
    )


def other_operand(site: str) -> str:
    """The name of the site of the other operand of a contraction."""
    name, _, side = site.rpartition("_")
    return f"{name}_{'lhs' if side == 'rhs' else 'rhs'}"


def _is_reached(one: TracedContraction, name: str, use: WeightUse | None, weights: ModelWeights) -> bool:
    """Whether a weight that is quantized is so in this place: by its layer, by the program, or because it is frozen."""
    if use is not None or weights.is_frozen(name) or name in weights.at_sites:
        return True
    layer = name.rpartition(".")[0]
    return name not in weights.sites and f"{one.path}.".startswith(f"{layer}." if layer else "")


def activation_entry(
    one: TracedContraction, weights: ModelWeights, products: Mapping[Equation, ActivationProduct]
) -> ActivationContraction:
    """The entry of a contraction of two activations."""
    product = products.get(one.equation)
    lhs = rhs = None
    notes: tuple[str, ...] = ()
    if product is not None:
        lhs, rhs = weights.format_at(product.lhs), weights.format_at(product.rhs)
        notes = tuple(weights.transform_of_input("", site) for site in (product.lhs, product.rhs) if site)
    return ActivationContraction(
        product.name if product is not None else one.path or one.operation,
        product.operation if product is not None else one.operation,
        _text(lhs),
        _text(rhs),
        one.operations,
        lhs is not None and rhs is not None and lhs.is_low and rhs.is_low,
        "; ".join(dict.fromkeys(filter(None, notes))),
    )


def rule_for(name: str) -> str:
    """The rule that takes a parameter, as text.

    Example:
        >>> rule_for("blocks.0.w"), rule_for("head[1]")
        ("Rule('blocks.0.w', ...)", "Rule('head\\\\\\\\[1\\\\\\\\]', ...)")
    """
    plain = re.fullmatch(r"[\w.]*", name)
    return f"Rule({(name if plain else re.escape(name))!r}, ...)"


def _text(found: QuantizedFormat | None) -> str:
    return "" if found is None else found.name


@dataclass(frozen=True)
class WeightSize:
    """The bytes of a matrix.

    Attributes:
        parameter: its path.
        float_bytes: in floats.
        low_bytes: of its numbers as they are quantized, scales aside; as `float_bytes` if they are not.
    """

    parameter: str
    float_bytes: int
    low_bytes: int


class Covered(Protocol):
    """The data of a coverage: see `Coverage`."""

    @property
    def activations(self) -> tuple[ActivationContraction, ...]: ...
    @property
    def matrices(self) -> int: ...
    @property
    def quantized_matrices(self) -> int: ...
    @property
    def sizes(self) -> tuple[WeightSize, ...]: ...
    @property
    def share_of_bytes(self) -> float: ...
    @property
    def share_of_operations(self) -> float | None: ...
    @property
    def summary(self) -> tuple[str, ...]: ...
    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]: ...
