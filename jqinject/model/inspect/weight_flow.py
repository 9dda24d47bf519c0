"""Where the weights of a program go: every contraction and look-up of one, also where no quantizer reaches.

The interpreter of `jqinject.program` follows a parameter only through operations that move its numbers. Here it is
followed through every operation, and into branches, loops and functions with custom derivatives, so that what the
interpreter does not reach can be named. Next: `site_table`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from jqinject.dot import DEQUANTIZE
from jqinject.program import jaxpr, only_moves, operation_of, path_in, runs_inside
from jqinject.program.operations import CONTRACTIONS, operand_axes


def operations_of(equation: jaxpr.Equation) -> int:
    """Count the multiply-adds of an operation, or of the programs within it.

    A loop body counts once per iteration, or once if the trip count is unknown; of several branches, the one with the
    most counts; see `Equation.times`.
    """
    if equation.name in CONTRACTIONS:
        # Padding counts; the zeros that a transposed convolution puts between its inputs do not.
        right, zeros = equation.inputs[1], math.prod(equation.params.get("lhs_dilation", ()))
        summed = math.prod(right.shape[axis] for axis in operand_axes(equation)[1].reduced)
        return equation.outputs[0].size * summed // zeros
    within = [sum(map(operations_of, body.equations)) for body in equation.bodies]
    return equation.times * (max(within) if equation.branches else sum(within))


#: Kind of a contraction -> the dtypes of its operands, of JAX or in XLA's notation.
KINDS = {"int": r"[su]\d+|u?int\d+", "fp8": r"f(loat)?8.*", "fp4": r"f(loat)?4.*"}


def kind_of(dtypes: Sequence[str]) -> str:
    """The kind of a contraction by the dtypes of its operands: "int", "fp8", "fp4" or "float"."""
    alike = (kind for kind, names in KINDS.items() if all(re.fullmatch(names, dtype) for dtype in dtypes))
    return next(alike, "float") if dtypes else "float"


@dataclass(frozen=True)
class Flow:
    """Where a value of a program comes from.

    Attributes:
        depends: whether it depends on the arguments of the call.
        sources: the arrays of the model that it is made of; for a value that depends on arguments, the array that its
            rows were looked up in.
        through: the first operation on the way that does more than move numbers; "" for none.
        origins: of a value that depends on arguments, which computed its numbers: arguments, and outputs of operations.
    """

    depends: bool = False
    sources: frozenset[str] = frozenset()
    through: str = ""
    origins: frozenset[object] = frozenset()

    def joined(self, flow: Flow) -> Flow:
        """Return the flow of a value that is either of two."""
        return Flow(
            self.depends or flow.depends,
            self.sources | flow.sources,
            self.through or flow.through,
            self.origins | flow.origins,
        )

    def computed_by(self, origin: object) -> Flow:
        """Return the flow of an output: where it depends on arguments without moving their numbers, from here on."""
        return replace(self, origins=frozenset({origin})) if self.depends and not self.origins else self


ARGUMENT = Flow(depends=True)
OPAQUE = frozenset({"pallas_call", "ffi_call", "pure_callback"})


@dataclass(frozen=True)
class Place:
    """Where in a program an equation is.

    Attributes:
        path: of the module.
        times: how often it runs: a loop's body once per iteration (once if the trip count is unknown); of several
            branches, the one with the most multiply-adds.
        inside: the operation that it is inside of and that quantizers do not reach into; "" for none.
        steps: how many steps the loops around it have, of those whose length is known; 1 outside of loops.
        around: the operations whose programs it is in.
    """

    path: str = ""
    times: int = 1
    inside: str = ""
    steps: int = 1
    around: tuple[jaxpr.Equation, ...] = ()

    def within(self, equation: jaxpr.Equation) -> Place:
        """Inside a part of the program."""
        path = path_in(equation.scopes) or self.path
        steps = self.steps * (equation.times if equation.scan else 1)
        inside = self.inside or ("" if runs_inside(equation) else equation.name)
        return Place(path, self.times * equation.times, inside, steps, (*self.around, equation))


@dataclass(frozen=True, kw_only=True)
class TracedContraction(Place):
    """One contraction, or one look-up.

    Attributes:
        equation: of the program.
        sources: the arrays of the model in the operand that is a weight; empty for two activations.
        through: as in `Flow`, of the weight.
        reads: `Flow.origins` of the other operand; empty for a look-up.
    """

    equation: jaxpr.Equation
    sources: frozenset[str]
    through: str
    reads: frozenset[object] = frozenset()

    @property
    def operation(self) -> str:
        """Its name, as in rules."""
        return operation_of(self.equation.name).name or self.equation.name

    @property
    def operations(self) -> int:
        """Multiply-adds of all its runs; 0 for a look-up."""
        return self.times * operations_of(self.equation)

    @property
    def kind(self) -> str:
        """See `kind_of`; "none" for a look-up."""
        dtypes = [str(x.dtype) for x in self.equation.inputs[:2]]
        return "none" if self.operation == "take" else kind_of(dtypes)


class WeightFlow:
    """Follows the arrays of a model through a program.

    Attributes:
        contractions: the contractions and look-ups, in the program's order.
        read: the arrays that some operation reads.

    Args:
        body: the program.
        inputs: of its inputs.
        constant: the flow of a constant.
    """

    def __init__(
        self, body: jaxpr.Body, inputs: Sequence[Flow], constant: Callable[[Any], Flow] = lambda value: Flow()
    ) -> None:
        self.contractions: list[TracedContraction] = []
        self.read: set[str] = set()
        self._constant = constant
        self._run(body, [x.computed_by(number) for number, x in enumerate(inputs)], Place())

    def _run(self, body: jaxpr.Body, inputs: Sequence[Flow], place: Place) -> list[Flow]:
        def rule(equation: jaxpr.Equation, taken: list[Flow]) -> list[Flow]:
            self.read.update(*(x.sources for x in taken))
            outputs = enumerate(self._outputs(equation, taken, place))
            return [x.computed_by((place.around, equation, number)) for number, x in outputs]

        return body.run(inputs, rule, self._constant)

    def _outputs(self, equation: jaxpr.Equation, inputs: list[Flow], place: Place) -> list[Flow]:
        name, count, loop = equation.name, len(equation.outputs), equation.scan or equation.loop
        if equation.function == DEQUANTIZE:
            return [_all(inputs)] * count
        if equation.branches:
            return self._branches(equation, inputs, place.within(equation))
        if loop is not None:
            return self._loop(loop, inputs, place.within(equation))
        if name in OPAQUE:
            return [self._opaque(equation, inputs, place)] * count
        if equation.body is not None:
            return self._run(equation.body, inputs, place.within(equation))
        if name in CONTRACTIONS:
            return [self._contraction(equation, inputs, place)]
        if only_moves(name) and inputs:
            return [self._moved(equation, inputs, place)] * count
        return [_changed(inputs, name)] * count

    # --- single operations

    def _contraction(self, equation: jaxpr.Equation, inputs: list[Flow], place: Place) -> Flow:
        lhs, rhs = inputs[:2]
        if not (lhs.depends or rhs.depends):
            return _changed(inputs, equation.name)
        weights = [x for x in (lhs, rhs) if x.sources and not x.depends]
        weights = weights or [x for x in (lhs, rhs) if x.sources]
        if len(weights) == 1:
            self._note(equation, weights[0], place, (rhs if weights[0] is lhs else lhs).origins)
        elif lhs.depends and rhs.depends:
            self._note(equation, ARGUMENT, place)
        return ARGUMENT

    def _opaque(self, equation: jaxpr.Equation, inputs: list[Flow], place: Place) -> Flow:
        """An operation that is not looked into: what it does with a weight and with activations is a contraction."""
        weights = _all([x for x in inputs if not x.depends])
        if weights.sources and any(x.depends for x in inputs):
            place = replace(place, inside=place.inside or equation.name)
            self._note(equation, weights, place, _all([x for x in inputs if x.depends]).origins)
        return _changed(inputs, equation.name)

    def _moved(self, equation: jaxpr.Equation, inputs: list[Flow], place: Place) -> Flow:
        x, others = inputs[0], inputs[1:]
        if not any(index.depends for index in others):
            return x if x.sources else _all(inputs)  # indices into a table are a weight's numbers
        if x.sources and not x.depends and equation.name == "gather":
            self._note(equation, x, place)
        return replace(x, depends=True)

    def _note(
        self, equation: jaxpr.Equation, weight: Flow, place: Place, reads: frozenset[object] = frozenset()
    ) -> None:
        own = vars(replace(place, path=path_in(equation.scopes) or place.path))
        sources, through = weight.sources, weight.through
        self.contractions.append(
            TracedContraction(**own, equation=equation, sources=sources, through=through, reads=reads)
        )

    # --- programs within

    def _branches(self, equation: jaxpr.Equation, inputs: list[Flow], place: Place) -> list[Flow]:
        counts = [sum(map(operations_of, branch.equations)) for branch in equation.branches]
        most, uncounted = counts.index(max(counts)), replace(place, times=0)
        outputs = [
            self._run(branch, inputs[1:], place if number == most else uncounted)
            for number, branch in enumerate(equation.branches)
        ]
        joined = [_all(flows) for flows in zip(*outputs, strict=True)]
        return [replace(x, depends=True) for x in joined] if inputs[0].depends else joined

    def _loop(self, loop: jaxpr.Scan | jaxpr.While, inputs: list[Flow], place: Place) -> list[Flow]:
        of_condition: list[Flow] = []
        xs: list[Flow] = []
        if isinstance(loop, jaxpr.Scan):
            constants, carry, xs = loop.split(inputs)
        else:
            of_condition, constants, carry = loop.split(inputs)

        def step(carry: list[Flow]) -> list[Flow]:
            return self._run(loop.body, [*constants, *carry, *xs], place)

        before = len(self.contractions)
        carry = jaxpr.settled(lambda carry: step(carry)[: len(carry)], carry, Flow.joined)
        del self.contractions[before:]
        if isinstance(loop, jaxpr.While):
            self._run(loop.condition, [*of_condition, *carry], place)
        return step(carry)


def _all(inputs: Sequence[Flow]) -> Flow:
    return reduce(Flow.joined, inputs, Flow())


def _changed(inputs: Sequence[Flow], name: str) -> Flow:
    """The output of an operation that does more than move numbers."""
    flow = _all(inputs)
    if flow.depends:
        return ARGUMENT
    return replace(flow, through=flow.through or name) if flow.sources else flow
