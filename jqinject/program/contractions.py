"""Contractions of a program: which operand is a weight, and which of its axes may have several scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import jax

from jqinject.dot.tensors.choice import ContractionKind
from jqinject.program.equation_contraction import Contracted, contracted
from jqinject.program.jaxpr import Equation
from jqinject.program.operand_quantizer import OperandQuantizer, check_turned, operand_quantizer
from jqinject.program.operations import CONTRACTIONS, Axes, operand_axes
from jqinject.program.parameters import as_activation, name_of_quantizer, note_use, weight_among
from jqinject.program.policy import ActivationProduct, Choice, Site, dotted
from jqinject.program.run import OperationRun, Run
from jqinject.program.scopes import weight_scope
from jqinject.program.tracked_value import Evaluate, Heard, Origin, Path, Tracked, WeightCall, shape_of
from jqinject.quant_tensor import as_array


def contraction(step: OperationRun) -> list[Tracked]:
    """Run a contraction on quantized operands."""
    run, eqn = step.run, step.eqn
    evaluate: Evaluate = eqn.bind
    lhs, rhs = step.inputs[:2]
    among = weight_among(lhs, rhs)
    weight = among if run.policy.follows_parameters else None
    read = next((x.weight_path for x in (lhs, rhs) if x.weight_path), ())
    choice, name = step.choose(() if weight is None else step.inputs[weight].weight_path, read)
    if run.policy.flattens_weights and _is_flattened(step, rhs):
        evaluate = _flattened(eqn, rhs.value.shape[1:])
        rhs = rhs.with_value(run.constant(lambda: rhs.value.reshape(rhs.value.shape[0], -1)))
    if lhs.origin is Origin.CONSTANT and lhs.is_float:
        run.policy.not_an_activation(step.path, f"the left operand of {name}")
    if run.policy.follows_parameters:
        lhs, rhs = (x if place == weight else as_activation(x) for place, x in enumerate((lhs, rhs)))
    rest = [x.array for x in step.inputs[2:]]
    parameter = () if among is None else step.inputs[among].weight_path
    own = _Contraction(step, choice, name, (lhs, rhs), rest, weight, parameter, evaluate)
    if not (lhs.is_activation or rhs.is_activation):
        return [Tracked(own.value())]
    called = dotted(parameter) or run.names.full(name)
    return [run.quantizers.run(WeightCall(called, step.path, own.quantized, own.floating, own.heard))]


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

    step: OperationRun
    choice: Choice | None
    name: str
    operands: tuple[Tracked, Tracked]
    rest: list[jax.Array]
    weight: int | None
    read: Path
    evaluate: Evaluate
    heard: list[Heard] = field(default_factory=list)

    @property
    def run(self) -> Run:
        """The run that it belongs to."""
        return self.step.run

    def quantized(self) -> Tracked:
        """The output with its quantizers."""
        value = self.value()
        out = self.run.output(value, self.choice, self.name)
        out.fusible = True
        if out.site:
            self.heard.append(Heard("output", out.site, value, out.value))
        return out

    def floating(self) -> jax.Array:
        """The output without any quantizer, of the operands that it has."""
        floats = [
            x.floats if place == self.weight else self._floats(place) for place, x in enumerate(self.operands)
        ]
        with weight_scope(self.read or (self.run.names.full(self.name),)):
            (value,) = self.evaluate([*floats, *self.rest])
        return self._updated(value)

    def value(self) -> jax.Array:
        """The output before its own quantizer."""
        run, choice, operands = self.run, self.choice, self._quantized_operands()
        self._note(operands)
        with weight_scope(self.read or (run.names.full(self.name),)):
            if choice is not None and choice.scheme is not None:
                output = self._by_scheme(choice, operands)
            else:
                numbers: ContractionKind = "auto" if choice is None else choice.contraction
                y = self.step.eqn.outputs[0]
                abstract = jax.ShapeDtypeStruct(y.shape, y.dtype)
                gradient = run.quantizers.gradient_format(run.names.full(f"{self.name}_grad"), abstract)
                output = contracted(self.step.eqn, numbers, operands, self.rest, self.evaluate, gradient)
        if choice is None or choice.grad is None:
            return self._updated(output.value)
        shape = tuple(output.value.shape)
        site = run.add(Site(run.names.full(f"{self.name}_grad"), choice.grad, shape=shape, stack=run.stack))
        return self._updated(as_array(run.quantizers.quantize(site, output.value, output.token)))

    def _floats(self, place: int) -> jax.Array:
        """An operand without its quantizer, but with the transform before it."""
        own = self._quantizer(place)
        if own is None:
            return self.operands[place].array
        return self.run.transformed(self.operands[place], own.quantizer, self._names[place], own.axes)

    def _quantizer(self, place: int) -> OperandQuantizer | None:
        x, operand = self.operands[place], self.operands[1 - place]
        return operand_quantizer(self.run, x, operand, self.choice, self.step.eqn, place)

    @property
    def _names(self) -> tuple[str, str]:
        """The names of the operands."""
        lhs, rhs = self.operands
        swapped = self.step.operation.name == "einsum" and lhs.is_weight and rhs.is_activation
        left, right = f"{self.name}_lhs", f"{self.name}_rhs"
        return (right, left) if swapped else (left, right)

    def _quantized_operands(self) -> list[Tracked]:
        check_turned(self.run, self.operands, self.choice, self.name)
        operands: list[Tracked] = []
        for place, x in enumerate(self.operands):
            if place == self.weight:
                operands.append(replace(x, chosen=None, twins={}))
                continue
            own, quantized = self._quantizer(place), x
            if own is not None:
                name = self._names[place]
                quantized = self.run.quantized(x, own.quantizer, name, own.axes, **own.overrides)
                part = "weight" if x.is_weight else "input"
                self.heard.append(Heard(part, quantized.site, x.array, quantized.value))
            operands.append(quantized)
        return operands

    def _note(self, operands: Sequence[Tracked]) -> None:
        """Note the use of a parameter, or a contraction of two activations."""
        run, eqn, kind, (lhs, rhs) = self.run, self.step.eqn, self.step.operation.name, self.operands
        if self.weight is not None:
            used, operand = self.operands[self.weight], operands[1 - self.weight]
            axes, mapped = operand_axes(eqn)[self.weight], run.maps(eqn)
            summed, free = axes.reduced, axes.free
            note_use(run, self.choice, self.name, kind, used, summed, eqn, operand, free, mapped=mapped)
        elif lhs.is_activation and rhs.is_activation:
            by = (name_of_quantizer(run, self.choice, self.name, x) for x in operands)
            run.recorded.products.append(
                ActivationProduct(run.names.full(self.name), kind, *by, equation=eqn)
            )

    def _by_scheme(self, choice: Choice, operands: Sequence[Tracked]) -> Contracted:
        """The contraction by a scheme, which quantizes its operands itself; a parameter comes quantized.

        Raises:
            ValueError: a scheme does not say how such a contraction is done.
        """
        run, eqn, weight = self.run, self.step.eqn, self.weight
        operands = [x if place == weight else self.operands[place] for place, x in enumerate(operands)]
        kind, operation = eqn.name, self.step.operation.name
        path: Path = () if weight is None else operands[weight].weight_path
        if kind not in CONTRACTIONS or (weight == 0 and kind != "dot_general"):
            where = dotted(path) or self.name
            what = (
                f"a {operation}"
                if kind not in CONTRACTIONS
                else "a convolution with a parameter for its image"
            )
            raise ValueError(
                f"{where}: a scheme does not say how {what} is contracted ({self.name}).\n  cure: Rule({where!r}), "
                "which keeps it float, or a rule with weight_quant and input_quant, before the rule with the scheme"
            )
        own = weight if choice.parameter is not None else None
        site = run.add(
            Site(
                run.names.full(self.name),
                choice.scheme,
                is_weight=own is not None,
                weight_path=path,
                contraction=kind,
                stack=run.stack,
                equation=eqn,
                weight=weight,
            )
        )
        lhs, rhs = (x.value if place == own else x.array for place, x in enumerate(operands))
        unrounded = None if own is None else operands[own].unrounded
        return Contracted(run.quantizers.contract(site, lhs, rhs, unrounded, self.rest))

    def _updated(self, value: jax.Array) -> jax.Array:
        """The output with the update of an adapter, if the parameter has one."""
        weight, run = self.weight, self.run
        used = None if weight is None else self.operands[weight]
        if weight is None or used is None or used.low_rank is None:
            return value
        x, low_rank = self._floats(1 - weight), used.low_rank
        name = run.names.full(self.name)
        names = (name, low_rank.lookup) if low_rank.lookup else (name,)
        run.recorded.adapted.update((used.weight_path, place) for place in names)
        if low_rank.dropout:
            x = run.quantizers.quantize(run.add(Site(low_rank.dropout, None)), x)
        update = low_rank.contracted(self.step.eqn, x, weight, self.rest, shape_of(used), self.evaluate)
        return value + update.astype(value.dtype)


def _is_flattened(step: OperationRun, rhs: Tracked) -> bool:
    """Whether the weight has several output axes, which devices expect as one."""
    if step.eqn.name != "dot_general" or not rhs.is_weight or len(shape_of(rhs)) <= 2:
        return False
    axes = operand_axes(step.eqn)[1]
    channels = step.run.policy.channel_axes(axes.summed, rhs.value.ndim, True)
    return axes.summed == (0,) and not axes.batch and (step.operation.name != "einsum" or len(channels) > 1)


def _flattened(eqn: Equation, outputs: Axes) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """The contraction with a two-axis weight, its output reshaped to the original shape."""

    def evaluate(values: list[jax.Array]) -> list[jax.Array]:
        (out,) = eqn.bind(values)
        return [out.reshape(*out.shape[:-1], *outputs)]

    return evaluate
