"""A traced call as one flat list of steps, and its contractions as products of matrices."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.program import operation_of, path_in
from jqinject.program.jaxpr import Body, Equation, Scan

CONTRACTIONS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
Slot = int


@dataclass(frozen=True)
class FlatStep:
    """One operation.

    Attributes:
        run: from the values of its inputs to those of its outputs.
        inputs: the slots that it reads.
        outputs: the slots that it writes.
        name: of the operation.
        path: of the module that it belongs to.
        equation: of the program; None for a slice or a stack that a loop made necessary.
        turn: which turn of the loops around it this is.
        kind: of a contraction, the operation by which the quantized program names it; empty for others.
        number: of a contraction, how many of its kind stand before it in its module's program; the same in every turn.
    """

    run: Callable[..., list[Any]]
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    name: str
    path: str
    equation: Equation | None = None
    turn: tuple[int, ...] = ()
    kind: str = ""
    number: int = 0

    @property
    def contraction(self) -> Equation:
        """The equation of a contraction."""
        assert self.equation is not None, "slices and stacks are no contractions"
        return self.equation

    @property
    def where(self) -> str:
        """The module that it belongs to, for messages; empty for the model itself."""
        return f" in {self.path}" if self.path else ""

    @property
    def params(self) -> Mapping[str, Any]:
        """Those of its equation; none for a slice or a stack."""
        return {} if self.equation is None else self.equation.params


@dataclass
class FlatProgram:
    """A program without programs inside.

    Attributes:
        inputs: slots of the inputs.
        outputs: slots of the outputs.
        constants: values of slots that are known.
        steps: the operations, in order.
    """

    inputs: tuple[Slot, ...] = ()
    outputs: tuple[Slot, ...] = ()
    constants: dict[Slot, Any] = field(default_factory=dict)
    steps: list[FlatStep] = field(default_factory=list)
    count: int = 0
    contractions: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)

    def new_slot(self) -> Slot:
        """A slot that nothing has written."""
        self.count += 1
        return self.count - 1

    def constant(self, value: Any) -> Slot:
        """The slot of a known value."""
        slot = self.new_slot()
        self.constants[slot] = value
        return slot

    def add(
        self, run: Callable[..., list[Any]], inputs: Sequence[Slot], count: int, **said: Any
    ) -> list[Slot]:
        """Append a step with `count` outputs, and return their slots."""
        outputs = [self.new_slot() for _ in range(count)]
        self.steps.append(FlatStep(run, tuple(inputs), tuple(outputs), **said))
        return outputs

    def last_uses(self) -> dict[Slot, int]:
        """The index of the last step that reads each slot; the number of steps for outputs."""
        found = {slot: index for index, step in enumerate(self.steps) for slot in step.inputs}
        return found | dict.fromkeys(self.outputs, len(self.steps))


def flatten(body: Body) -> FlatProgram:
    """The body of a traced call as a flat program."""
    flat = FlatProgram()
    flat.inputs = tuple(flat.new_slot() for _ in body.inputs)
    flat.outputs = tuple(_inline(flat, body, flat.inputs, ""))
    return flat


def _inline(
    flat: FlatProgram, body: Body, inputs: Sequence[Slot], path: str, turn: tuple[int, ...] = ()
) -> list[Slot]:
    def steps(eqn: Equation, inputs: list[Slot]) -> list[Slot]:
        where = path_in(eqn.scopes) or path
        if eqn.call:
            return _inline(flat, eqn.call, inputs, where, turn)
        if eqn.scan and contracts(eqn.scan.body):
            return _unroll(flat, eqn.scan, inputs, where, turn)
        return _step(flat, eqn, inputs, where, turn)

    return body.run(inputs, steps, flat.constant)


def _step(
    flat: FlatProgram, eqn: Equation, inputs: list[Slot], path: str, turn: tuple[int, ...]
) -> list[Slot]:
    def run(*values: Any) -> list[Any]:
        return eqn.bind(values)

    kind, number = "", 0
    if eqn.name in CONTRACTIONS:
        kind = operation_of("einsum" if eqn.is_einsum else eqn.name).name
        number = flat.contractions[path, kind]
        flat.contractions[path, kind] += 1
    said = {"path": path, "equation": eqn, "turn": turn, "kind": kind, "number": number}
    return flat.add(run, inputs, len(eqn.outputs), name=eqn.name, **said)


def contracts(body: Body) -> bool:
    """Whether a program, or one that it runs on its operands, contracts anything."""
    return any(
        eqn.name in CONTRACTIONS or (eqn.body is not None and contracts(eqn.body)) for eqn in body.equations
    )


def _unroll(
    flat: FlatProgram, scan: Scan, inputs: list[Slot], path: str, turn: tuple[int, ...]
) -> list[Slot]:
    """Every step of a loop: each has its own weights, cut from those of the stack."""
    fixed, carry, stacked = scan.split(inputs)
    steps = range(scan.options["length"])
    made: dict[int, list[Slot]] = {}
    before = flat.contractions
    for index in reversed(steps) if scan.options["reverse"] else steps:
        flat.contractions = before.copy()
        each = [
            flat.add(_slice_at(index), [slot], 1, name="slice_of_stack", path=path)[0] for slot in stacked
        ]
        outputs = _inline(flat, scan.body, [*fixed, *carry, *each], path, (*turn, index))
        carry, made[index] = outputs[: scan.carries], outputs[scan.carries :]
    count = len(scan.body.outputs) - scan.carries
    columns = [[made[index][place] for index in steps] for place in range(count)]
    return [*carry, *(flat.add(_stack, column, 1, name="stack", path=path)[0] for column in columns)]


def _slice_at(index: int) -> Callable[[Any], list[Any]]:
    return lambda stack: [jax.lax.index_in_dim(stack, index, 0, keepdims=False)]


def _stack(*values: Any) -> list[Any]:
    return [jnp.stack(values)]


Axes = tuple[int, ...]


@dataclass(frozen=True)
class Moved:
    """An array whose axes are those of a stack of matrices: `(stack..., rows..., columns...)`.

    Attributes:
        axes: of the array, in that order.
        shape: of the array, its axes in that order.
        split: how many axes belong to the stack, and how many to the rows.
    """

    axes: Axes
    shape: Axes
    split: tuple[int, int]

    @classmethod
    def of(cls, shape: Axes, stack: Axes, columns: Axes) -> Moved:
        """The rows are the axes that belong neither to the stack nor to the columns."""
        rows = tuple(axis for axis in range(len(shape)) if axis not in (*stack, *columns))
        axes = (*stack, *rows, *columns)
        return cls(axes, tuple(shape[axis] for axis in axes), (len(stack), len(rows)))

    def matrices(self, x: Any) -> Any:
        """The array as matrices `(stack, rows, columns)`."""
        stack, rows = self.split
        cut = (self.shape[:stack], self.shape[stack : stack + rows], self.shape[stack + rows :])
        return x.transpose(self.axes).reshape(tuple(map(math.prod, cut)))

    def array(self, x: Any) -> Any:
        """Matrices as the array."""
        back = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        return x.reshape(self.shape).transpose(back)


@dataclass(frozen=True)
class DotMatrices:
    """Of `dot_general`: the batch axes are the stack.

    Attributes:
        weight, other: the layouts of both operands.
    """

    weight: Moved
    other: Moved

    def samples(self, x: jax.Array, *rest: Any) -> tuple[jax.Array, None]:
        """The other operand as `(stack, samples, columns)`."""
        return self.other.matrices(x), None


@dataclass(frozen=True)
class ConvolutionMatrices:
    """Of `conv_general_dilated`: the groups of channels are the stack, patches are the samples.

    Columns are ordered by channel, then by place in the window.

    Attributes:
        weight: the layout of the kernel.
        groups: of channels.
        window: the arguments for `jax.lax.conv_general_dilated_patches`.
    """

    weight: Moved
    groups: int
    window: tuple[tuple[str, Any], ...]

    def samples(self, x: jax.Array, *rest: Any) -> tuple[jax.Array, None]:
        """The images as patches `(groups, patches, columns)`."""
        made = dict(self.window)
        spec = made["dimension_numbers"]
        patches = jax.lax.conv_general_dilated_patches(x, **made)
        patches = jnp.moveaxis(patches, spec.out_spec[1], -1)
        patches = patches.reshape(-1, self.groups, patches.shape[-1] // self.groups)
        return patches.transpose(1, 0, 2), None


@dataclass(frozen=True)
class RaggedMatrices:
    """Of `ragged_dot`: the groups of rows are the stack; every group sees all rows, weighted 1 or 0.

    Attributes:
        weight: the layout of the weights.
    """

    weight: Moved

    def samples(self, x: jax.Array, group_sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The rows `(groups, rows, columns)`, and which of them belong to a group, `(groups, rows)`."""
        ends = jnp.cumsum(group_sizes)[:, None]
        place = jnp.arange(x.shape[0])[None]
        own = ((place < ends) & (place >= ends - group_sizes[:, None])).astype(jnp.float32)
        return own[:, :, None] * x[None], own


Matrices = DotMatrices | ConvolutionMatrices | RaggedMatrices


def matrices_of(eqn: Equation, place: int) -> Matrices | str:
    """How a contraction is a product of matrices, or a sentence that says why it is none.

    Args:
        eqn: its equation.
        place: which operand is the weight.
    """
    weight, other = (tuple(eqn.inputs[which].shape) for which in (place, 1 - place))
    name, params = eqn.name, eqn.params
    if name == "dot_general":
        contracted, batch = params["dimension_numbers"]
        layouts = (
            Moved.of(shape, tuple(batch[which]), tuple(contracted[which]))
            for shape, which in ((weight, place), (other, 1 - place))
        )
        return DotMatrices(*layouts)
    if name == "conv_general_dilated":
        return _of_convolution(eqn, place, weight)
    numbers = params["ragged_dot_dimension_numbers"]
    (left, right), (rows_batch, _) = numbers.dot_dimension_numbers
    plain = tuple(left) == (1,) and not rows_batch and tuple(numbers.lhs_ragged_dimensions) == (0,)
    if place != 1 or not plain:
        return "it is a ragged product of another kind than rows in groups, each with a matrix of its own"
    return RaggedMatrices(Moved.of(weight, tuple(numbers.rhs_group_dimensions), tuple(right)))


def _of_convolution(eqn: Equation, place: int, weight: Axes) -> Matrices | str:
    params = eqn.params
    if place != 1:
        return "the parameter is what is convolved, not the kernel"
    if params["batch_group_count"] != 1:
        return "the convolution groups its batch"
    spec, groups = params["dimension_numbers"], params["feature_group_count"]
    out, ins, *spatial = spec.rhs_spec
    split = (groups, weight[out] // groups)
    # Output channels of one group follow one another, so the stack is the outer part of their axis.
    axes = (out, ins, *spatial)
    layout = _GroupedKernel(axes, tuple(weight[axis] for axis in axes), (1, 1), split)
    window = {
        "filter_shape": tuple(weight[axis] for axis in spatial),
        "window_strides": params["window_strides"],
        "padding": params["padding"],
        "lhs_dilation": params["lhs_dilation"],
        "rhs_dilation": params["rhs_dilation"],
        "dimension_numbers": spec,
    }
    return ConvolutionMatrices(layout, groups, tuple(window.items()))


@dataclass(frozen=True)
class _GroupedKernel(Moved):
    """A kernel `(outputs, inputs, window...)`, whose outputs are cut into groups.

    Attributes:
        outputs: how many groups, and outputs in each.
    """

    outputs: tuple[int, int]

    def matrices(self, x: Any) -> Any:
        """The kernel as matrices `(groups, outputs, columns)`."""
        return x.transpose(self.axes).reshape(*self.outputs, -1)
