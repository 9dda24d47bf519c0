"""Contractions of a program: which operand is a weight, and which of its axes may have several scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jqinject.program.jaxpr import Equation
from jqinject.program.operations import Operation
from jqinject.program.policy import ActivationProduct, Choice, Site
from jqinject.program.tracing.scopes import weight_scope
from jqinject.program.tracked_value import Origin, Tracked, shape_of
from jqinject.program.weights.equation_contraction import Contracted, contracted
from jqinject.program.weights.operand_quantizer import Wanted, check_turned, free_axes, summed_axes, wanted
from jqinject.program.weights.parameters import (
    as_activation,
    dotted,
    name_of_quantizer,
    note_use,
    weight_among,
)
from jqinject.program.weights.weight_call import Heard, WeightCall
from jqinject.quant_tensor import as_array

Axes = tuple[int, ...]
Evaluate = Callable[[list[Any]], list[Any]]
BY_SCHEME = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def contraction(
    run: Any,
    operation: Operation,
    path: str,
    inputs: Sequence[Tracked],
    eqn: Equation,
) -> list[Tracked]:
    """Run a contraction on quantized operands."""
    evaluate: Evaluate = eqn.bind
    lhs, rhs = inputs[:2]
    among = weight_among(lhs, rhs)
    weight = among if run.policy.follows_parameters else None
    read = next((x.weight_path for x in (lhs, rhs) if x.weight_path), ())
    choice, name = run.choose(path, operation, () if weight is None else inputs[weight].weight_path, read)
    if run.policy.flattens_weights and _is_flattened(run, operation, eqn, rhs):
        rhs = rhs.with_value(run.constant(lambda: rhs.value.reshape(rhs.value.shape[0], -1)))
        evaluate = _flattened(eqn, inputs[1].value.shape[1:])
    if lhs.origin is Origin.CONSTANT and lhs.is_float:
        run.policy.not_an_activation(path, f"the left operand of {name}")
    if run.policy.follows_parameters:
        lhs, rhs = (x if place == weight else as_activation(x) for place, x in enumerate((lhs, rhs)))
    rest = [x.array for x in inputs[2:]]
    parameter = () if among is None else inputs[among].weight_path
    one = _Contraction(run, operation, eqn, choice, name, (lhs, rhs), rest, weight, parameter, evaluate)
    if not (lhs.is_activation or rhs.is_activation):
        return [Tracked(one.value())]
    called = dotted(parameter) or run.names.full(name)
    call = WeightCall(called, path, one.quantized, one.floating, one.heard)
    return [run.quantizers.run(call)]


@dataclass
class _Contraction:
    """One contraction: with its quantizers, and in floats.

    Attributes:
        operands: two, of which no looked-up one is an activation.
        rest: further operands.
        weight: which operand is a parameter that is quantized in its own shape, or None.
        read: path of the operand that is a parameter, however it is quantized; empty if neither is.
        evaluate: contracts arrays.
        heard: what its quantizers did.
    """

    run: Any
    operation: Operation
    eqn: Equation
    choice: Choice | None
    name: str
    operands: tuple[Tracked, Tracked]
    rest: list[Any]
    weight: int | None
    read: tuple[Any, ...]
    evaluate: Evaluate
    heard: list[Heard] = field(default_factory=list)

    def quantized(self) -> Tracked:
        """The output with its quantizers."""
        value = self.value()
        out = self.run.output(value, self.choice, self.name)
        out.fusible = True
        if out.site:
            self.heard.append(Heard("output", out.site, value, out.value))
        return out

    def floating(self) -> Any:
        """The output without any quantizer, of the operands that it has."""
        given = [
            x.floats if place == self.weight else self._floats(place) for place, x in enumerate(self.operands)
        ]
        with weight_scope(self.read or (self.run.names.full(self.name),)):
            (value,) = self.evaluate([*given, *self.rest])
        return self._updated(value)

    def value(self) -> Any:
        """The output before its own quantizer."""
        run, choice, taken = self.run, self.choice, self._taken()
        self._note(taken)
        with weight_scope(self.read or (run.names.full(self.name),)):
            if choice is not None and choice.scheme is not None:
                pairs = zip(self.operands, taken, strict=True)
                given = [t if place == self.weight else x for place, (x, t) in enumerate(pairs)]
                found = _by_scheme(
                    run, choice, self.name, self.operation, self.eqn, given, self.weight, self.rest
                )
            else:
                numbers: Any = "auto" if choice is None else choice.contraction
                y = self.eqn.outputs[0]
                out = jax.ShapeDtypeStruct(y.shape, y.dtype)
                gradient = run.quantizers.gradient_format(run.names.full(f"{self.name}_grad"), out)
                found = contracted(self.eqn, numbers, taken, self.rest, self.evaluate, gradient)
        return self._updated(_with_gradient(run, choice, self.name, found))

    def _floats(self, place: int) -> Any:
        """An operand without its quantizer, but with the transform before it."""
        own = self._wanted(place)
        if own is None:
            return self.operands[place].array
        return self.run.transformed(self.operands[place], own.quantizer, self._names[place], own.axes)

    def _wanted(self, place: int) -> Wanted | None:
        x, other = self.operands[place], self.operands[1 - place]
        return wanted(self.run, x, other, self.choice, self.eqn, place)

    @property
    def _names(self) -> tuple[str, str]:
        """The names of the operands."""
        lhs, rhs = self.operands
        swapped = self.operation.name == "einsum" and lhs.is_weight and rhs.is_activation
        left, right = f"{self.name}_lhs", f"{self.name}_rhs"
        return (right, left) if swapped else (left, right)

    def _taken(self) -> list[Tracked]:
        """The operands, quantized."""
        check_turned(self.run, self.operands, self.choice, self.name)
        taken: list[Tracked] = []
        for place, x in enumerate(self.operands):
            if place == self.weight:
                taken.append(replace(x, chosen=None, twins={}))
                continue
            made = _operand(self.run, x, self._wanted(place), self._names[place])
            if made is not x:
                part = "weight" if x.is_weight else "input"
                self.heard.append(Heard(part, made.site, x.array, made.value))
            taken.append(made)
        return taken

    def _note(self, taken: Sequence[Tracked]) -> None:
        """Note the use of a parameter, or a contraction of two activations."""
        run, (lhs, rhs) = self.run, self.operands
        if self.weight is not None:
            used, beside = self.operands[self.weight], taken[1 - self.weight]
            free = free_axes(self.eqn, self.weight, len(shape_of(used)))
            summed = summed_axes(self.eqn)[self.weight]
            kind, mapped = self.operation.name, run.maps(self.eqn)
            note_use(run, self.choice, self.name, kind, used, summed, self.eqn, beside, free, mapped=mapped)
        elif lhs.is_activation and rhs.is_activation:
            by = (name_of_quantizer(run, self.choice, self.name, x) for x in taken)
            product = ActivationProduct(
                run.names.full(self.name), self.operation.name, *by, equation=self.eqn
            )
            run.products.append(product)

    def _updated(self, value: Any) -> Any:
        """The output with the update of an adapter, if the parameter has one."""
        weight = self.weight
        if weight is None or self.operands[weight].low_rank is None:
            return value
        x = self._floats(1 - weight)
        update = _update(self.run, self.name, self.eqn, x, self.operands, self.rest, weight, self.evaluate)
        return value + update.astype(value.dtype)


def _by_scheme(
    run: Any,
    choice: Choice,
    name: str,
    operation: Operation,
    eqn: Equation,
    operands: Sequence[Tracked],
    weight: int | None,
    rest: Sequence[Any],
) -> Contracted:
    """The contraction by a scheme, which quantizes its operands itself; a parameter comes quantized.

    Raises:
        ValueError: a scheme does not say how such a contraction is done.
    """
    kind = eqn.name
    if kind not in BY_SCHEME or (weight == 0 and kind != "dot_general"):
        path = dotted(operands[weight].weight_path) if weight is not None else name
        what = (
            f"a {operation.name}" if kind not in BY_SCHEME else "a convolution with a parameter for its image"
        )
        raise ValueError(
            f"{path}: a scheme does not say how {what} is contracted ({name}).\n  cure: Rule({path!r}), which keeps it "
            "float, or a rule with weight_quant and input_quant, before the rule with the scheme"
        )
    apart = weight is not None and choice.parameter is not None
    path = () if weight is None else operands[weight].weight_path
    facts = {"is_weight": apart, "weight_path": path, "contraction": kind, "stack": run.stack}
    site = Site(run.names.full(name), choice.scheme, equation=eqn, weight=weight, **facts)
    run.sites[site.name] = site
    values = [x.value if apart and place == weight else x.array for place, x in enumerate(operands)]
    unrounded = operands[weight].unrounded if apart and weight is not None else None
    return Contracted(run.quantizers.contract(site, *values, unrounded, rest))


def _with_gradient(run: Any, choice: Choice | None, name: str, found: Contracted) -> Any:
    """The output, with its gradient's quantizer if it has one."""
    if choice is None or choice.grad is None:
        return found.value
    shape = tuple(found.value.shape)
    site = Site(run.names.full(f"{name}_grad"), choice.grad, shape=shape, stack=run.stack)
    run.sites[site.name] = site
    return as_array(run.quantizers.quantize(site, found.value, found.token))


def _update(
    run: Any,
    name: str,
    eqn: Equation,
    x: Any,
    operands: Sequence[Tracked],
    rest: list[Any],
    weight: int,
    evaluate: Evaluate,
) -> Any:
    """The contraction of the other operand, not quantized, with the weight's low-rank update."""
    low_rank = operands[weight].low_rank
    assert low_rank is not None, "asked for where there is one"
    own = run.names.full(name)
    names = (own, low_rank.lookup) if low_rank.lookup else (own,)
    run.adapted.update((operands[weight].weight_path, one) for one in names)
    if low_rank.dropout:
        site = Site(low_rank.dropout, None)
        run.sites[site.name] = site
        x = run.quantizers.quantize(site, x)
    return low_rank.contracted(eqn, x, weight, rest, shape_of(operands[weight]), evaluate)


def _operand(run: Any, x: Tracked, own: Wanted | None, name: str) -> Tracked:
    return x if own is None else run.quantized(x, own.quantizer, name, own.axes, **own.overrides)


def _is_flattened(run: Any, operation: Operation, eqn: Equation, rhs: Tracked) -> bool:
    """Whether the weight has several output axes, which devices expect as one."""
    if eqn.name != "dot_general" or not rhs.is_weight or len(shape_of(rhs)) <= 2:
        return False
    (_, summed), (_, batch) = eqn.params["dimension_numbers"]
    several = (
        operation.name != "einsum" or len(run.policy.channel_axes(tuple(summed), rhs.value.ndim, True)) > 1
    )
    return tuple(summed) == (0,) and not batch and several


def _flattened(eqn: Equation, outputs: Axes) -> Callable[[list[Any]], list[Any]]:
    """The contraction with a two-axis weight, its output reshaped to the original shape."""

    def evaluate(values: list[Any]) -> list[Any]:
        (out,) = eqn.bind(values)
        return [out.reshape(*out.shape[:-1], *outputs)]

    return evaluate
