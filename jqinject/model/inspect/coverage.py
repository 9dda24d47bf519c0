"""`coverage`: which weights of a model are quantized, how each is contracted, and why the others are not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from jqinject.model.inspect.coverage_reasons import Reasons, is_rule_of_use
from jqinject.model.inspect.coverage_rows import (
    BIG,
    ActivationContraction,
    ContractedWeight,
    MissedWeight,
    TracedCall,
    WeightSize,
    activation_entry,
    rule_for,
    traced,
    used_weight,
)
from jqinject.model.inspect.weight_numbers import ModelWeight, ModelWeights
from jqinject.model.quantizing.rule_policy import RulePolicy
from jqinject.model.quantizing.rules import Rule
from jqinject.program import CALL, HELD, Call, Method, checked_method
from jqinject.terminal import blocks, wrapped

COLUMNS = ("parameter", "operation", "weight", "input", "contracts", "multiply-adds")


@dataclass(frozen=True)
class Coverage:
    """Which weights of a model are quantized. `str()` shows it as a table.

    A matrix is a parameter that is contracted or looked up, or one of at least two axes that no traced call reads; one
    that is only added or multiplied is none. Bytes are those of the float parameters.

    Attributes:
        weights: the contractions with a weight and the look-ups, in the program's order; empty without inputs.
        activations: the contractions of two activations.
        missed: the matrices that are not quantized, with why, largest first.
        matrices, quantized_matrices: how many there are, and how many are quantized wherever they are read.
        weight_bytes, quantized_bytes: of these.
        operations, low_bit_operations: multiply-adds with a weight, and those of them whose operands both have at most
            8 bits. Whether they are contracted as such or dequantized, `ContractedWeight.contraction` says.
        sizes: the bytes of every matrix, before and after.
    """

    weights: tuple[ContractedWeight, ...]
    activations: tuple[ActivationContraction, ...]
    missed: tuple[MissedWeight, ...]
    matrices: int
    quantized_matrices: int
    weight_bytes: int
    quantized_bytes: int
    operations: int
    low_bit_operations: int
    sizes: tuple[WeightSize, ...] = ()

    @property
    def share_of_bytes(self) -> float:
        """Of the weights that are quantized; 1 without weights."""
        return self.quantized_bytes / self.weight_bytes if self.weight_bytes else 1.0

    @property
    def share_of_operations(self) -> float | None:
        """Of the multiply-adds with a weight that are in low bits; None if none is known."""
        return self.low_bit_operations / self.operations if self.operations else None

    @property
    def line(self) -> str:
        """The shares in one line."""
        if not self.matrices:
            return "coverage: no matrix is contracted or looked up"
        share = self.share_of_operations
        known = "multiply-adds unknown" if share is None else f"{share:.1%} of the multiply-adds in low bits"
        return (
            f"coverage: {self.quantized_matrices} of {self.matrices} matrices quantized, "
            f"{self.share_of_bytes:.1%} of the weight bytes, {known}"
        )

    @property
    def summary(self) -> tuple[str, ...]:
        """The line, and below it every weight of more than 1,024 numbers that is not quantized."""
        big = [one for one in self.missed if one.size > BIG]
        lines = [
            f"not quantized: {one.parameter} ({one.size:,} numbers): {one.why}"
            + (f"; {one.rule}" if one.rule else "")
            for one in big
        ]
        small = len(self.missed) - len(big)
        rest = [f"not quantized: {small} more, of at most {BIG:,} numbers each"] if small else []
        return (self.line, *lines, *rest)

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """The contractions as a table: the names of its columns, and its rows."""
        found: list[tuple[str, ...]] = []
        for one in self.weights:
            numbers = (one.weight or "float", "-" if one.operation == "take" else one.input or "float")
            found.append((one.parameter, one.operation, *numbers, one.contraction, f"{one.operations:,}"))
        for one in self.activations:
            numbers = (one.lhs or "float", one.rhs or "float")
            found.append((f"(activations) {one.name}", one.operation, *numbers, "", f"{one.operations:,}"))
        return COLUMNS, found

    def __str__(self) -> str:
        names, rows = self.table()
        lines = blocks(names, rows, right=COLUMNS[-1:]) if rows else []
        return "\n".join([*lines, *(wrapped(line, hang="  ") for line in self.summary)])

    def _repr_html_(self) -> str:
        from jqinject.model.inspect.page import coverage_fragment

        return coverage_fragment(self)


def coverage(model: nnx.Module, *inputs: Any, method: Method = CALL, **keywords: Any) -> Coverage:
    """Which weights of a model are quantized, how each is contracted, and why the others are not.

    The model is traced in evaluation mode and not run. Works on float, quantized, frozen and abstract models; without
    inputs only the model's own structure is looked at. In a loop multiply-adds count as often as it runs, or once if
    the length is unknown; of several branches, those of the one with the most.

    Args:
        model: an NNX module; it is not changed.
        inputs, keywords: its arguments, arrays or `jax.ShapeDtypeStruct`s, or anything else that it takes.
        method: the method that they are arguments of, as for `report`.

    Raises:
        TypeError: `model` is not an NNX module.
        ValueError: the model has no such method.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject import Rule, quantize
        >>> from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat
        >>> model = nnx.Sequential(nnx.Linear(32, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 8, rngs=nnx.Rngs(1)))
        >>> rule = Rule("layers.1", weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorFloat)
        >>> x = jnp.ones((3, 32))
        >>> print(coverage(quantize(model, rule, inputs=x), x))
        parameter        operation    weight  input  contracts  multiply-adds
        layers.0.kernel  dot_general  float   float  float              6,144
        layers.1.kernel  dot_general  int8    int8   int                1,536
        coverage: 1 of 2 matrices quantized, 20.0% of the weight bytes, 20.0% of the multiply-adds in low bits
        not quantized: layers.0.kernel (2,048 numbers): no rule took it; Rule('layers.0.kernel', ...)
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"coverage takes an NNX module, got {type(model).__name__}")
    found = checked_method(model, method, "coverage")
    return coverage_of(model, [Call(inputs, keywords, found)] if inputs or keywords else [])


def coverage_of(model: nnx.Module, calls: Sequence[Call], rules: Sequence[Rule] | None = None) -> Coverage:
    """See `coverage`.

    Args:
        model: an NNX module; it is not changed.
        calls: of it, of several methods; none for a look at its structure alone.
        rules: that it was quantized by, if it does not keep them itself.
    """
    copy = nnx.clone(model, graph=True)
    copy.eval()
    weights = ModelWeights(copy)
    held = vars(copy).get(HELD)
    policy = RulePolicy(()) if held is None else held.policy
    return _Gathered(weights, [traced(copy, call, policy, weights) for call in calls], rules).coverage()


class _Gathered:
    """What is known of the weights of a model, from all its calls."""

    def __init__(
        self, weights: ModelWeights, calls: Sequence[TracedCall], rules: Sequence[Rule] | None
    ) -> None:
        self.weights, self.calls = weights, calls
        self.reasons = Reasons(weights, rules)
        self.rows: list[ContractedWeight] = []
        self.activations: list[ActivationContraction] = []
        self.whys: dict[str, str] = {}
        for call in calls:
            self._add(call)

    def _add(self, call: TracedCall) -> None:
        for one in call.flow.found:
            if not one.sources:
                self.activations.append(activation_entry(one, self.weights, call.products))
            for number, name in enumerate(sorted(_matrices(one.sources, self.weights.all))):
                # The multiply-adds of an operation that takes several weights count once.
                row = used_weight(replace(one, times=0) if number else one, name, self.weights, call)
                self.rows.append(row)
                if not row.weight and name not in self.whys:
                    use = call.uses.get((one.equation, name))
                    known = self.weights.all.get(name)
                    self.whys[name] = (
                        "it is not one of the arrays of the model: hold it in an nnx.Param"
                        if known is None
                        else self.reasons.of_contracted(known, one, use)
                    )

    def coverage(self) -> Coverage:
        """All of it."""
        known = self.weights.all
        used = {row.parameter for row in self.rows if row.parameter in known}
        read = set[str]().union(*(call.flow.read for call in self.calls))
        unread = [
            name
            for name, weight in known.items()
            if weight.is_parameter and len(weight.shape) > 1 and name not in used and name not in read
        ]
        for name in unread:
            if self.weights.format_of(name) is None:
                why = self.reasons.of_unread if self.calls else self.reasons.of_unknown
                self.whys[name] = why(known[name])
        matrices = {name: known[name] for name in (*used, *unread)}
        quantized = [weight for name, weight in matrices.items() if name not in self.whys]
        return Coverage(
            tuple(self.rows),
            tuple(self.activations),
            tuple(sorted(map(self._missed, self.whys), key=lambda one: (-one.size, one.parameter))),
            len(matrices),
            len(quantized),
            sum(weight.nbytes for weight in matrices.values()),
            sum(weight.nbytes for weight in quantized),
            sum(row.operations for row in self.rows),
            sum(row.operations for row in self.rows if row.is_low_bit),
            tuple(self._size(name, weight) for name, weight in matrices.items()),
        )

    def _size(self, name: str, weight: ModelWeight) -> WeightSize:
        form = None if name in self.whys else self.weights.format_of(name)
        bits = None if form is None else form.bits
        return WeightSize(
            name, weight.nbytes, weight.nbytes if bits is None else math.ceil(weight.size * bits / 8)
        )

    def _missed(self, name: str) -> MissedWeight:
        weight, why = self.weights.all.get(name), self.whys[name]
        if weight is None:
            return MissedWeight(name, BIG + 1, 0, why, "")
        rule = rule_for(name) if is_rule_of_use(why) else ""
        return MissedWeight(name, weight.size, weight.nbytes, why, rule)


def _matrices(sources: frozenset[str], known: Mapping[str, ModelWeight]) -> frozenset[str]:
    """The weights that an operand is made of, without the vectors that scale them."""
    if len(sources) < 2:
        return sources
    matrices = frozenset(name for name in sources if name not in known or len(known[name].shape) > 1)
    return matrices or sources
