"""Fuse products of integers with the elementwise operations around them, in a jaxpr for one CPU.

Between two products of a quantized model are scales, zero points, biases, an activation and the next rounding. XLA
runs them as a loop of its own, which reads int32 sums from memory and writes int8 codes to it. Here they become the
prologue and the epilogue of the compiled kernel: the same operations in the same order, so the same bits. If the next
layer has a static scale, the epilogue rounds for it, and the layers exchange int8.

`_Program` flattens a jaxpr into operations on numbered slots. The prologue of a product reaches back to the quotient
that is rounded; the epilogue goes on until a value is returned or has several readers.
"""

import collections
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot.kernels import kernel_table
from jqinject.native import takes
from jqinject.native.fused_matmul import DTYPES, MOST_STEPS, FusedStep, StepKind, fused_matmul, row_amax
from jqinject.program.jaxpr import LOOPS, Body, Equation

R = TypeVar("R")
Slot = int
BINARY = {
    "add": StepKind.ADD,
    "sub": StepKind.SUBTRACT,
    "mul": StepKind.MULTIPLY,
    "div": StepKind.DIVIDE,
    "max": StepKind.MAXIMUM,
    "min": StepKind.MINIMUM,
}
#: Operations that change a dtype or a layout, and `x ^ 128`, with which unsigned bytes become signed ones.
CASTS = ("one_device", "xor", "bitcast_convert_type", "convert_element_type")
ROUNDS = ("add", "sub", "mul", "div")
#: What `where(x == a, b, x)` compares.
REPLACES = {"eq": StepKind.REPLACE_EQUAL, "lt": StepKind.REPLACE_BELOW}
COMMUTES = ("add", "mul", "max", "min")
#: Operations whose output is their input.
PASSES = ("stop_gradient", "copy", "name")
TO_EVEN = int(jax.lax.RoundingMethod.TO_NEAREST_EVEN)
F32, BF16, INT8, UINT8, INT32 = (
    np.dtype(x) for x in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.uint8, jnp.int32)
)

TO_FLOAT32 = ((INT32, F32), (BF16, F32), (F32, F32))


def with_fused_products(function: Callable[..., R]) -> Callable[..., R]:
    """Wrap a function so that its products of integers are fused with the elementwise operations around them.

    Args:
        function: of arrays, pytrees of them and constants; for one CPU, without derivatives.

    Example:
        >>> with_fused_products(lambda x: x + 1)(jnp.ones(()))
        Array(2., dtype=float32)
    """

    def run(*args: object) -> R:
        leaves, tree = jax.tree.flatten(args)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

        def of_arrays(*arrays: jax.Array) -> R:
            filled = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
            return function(*jax.tree.unflatten(tree, filled.values()))

        arrays = [leaves[place] for place in places]
        program, out = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
        return jax.tree.unflatten(jax.tree.structure(out), _run(Body.of(program), arrays))

    return run


def _run(body: Body, arrays: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr with its products of integers fused.

    The operations of a prologue or an epilogue are bound as well: nothing reads them, and XLA drops them.
    """
    if not _has_products(body):
        return body.run(arrays, Equation.bind, lambda constant: constant)
    program = _Program(body)
    values = program.constants | dict(zip(program.inputs, arrays, strict=True))
    for index, operation in enumerate(program.operations):
        fused = program.fused.get(index)
        if fused is not None:
            values[fused.epilogue.slot] = fused.run(values, program.types[fused.epilogue.slot].shape)
        else:
            equation = operation.equation
            if equation.name in LOOPS and any(map(_has_products, equation.bodies)):
                equation = equation.with_bodies(_run)
            results = equation.bind([values[slot] for slot in operation.inputs])
            values.update(zip(operation.outputs, results, strict=True))
    return [values[slot] for slot in program.outputs]


def _has_products(body: Body) -> bool:
    """Whether a jaxpr, or one within it, has products of integers."""
    return any(_product(equation) is not None for equation in body.everywhere())


def _product(equation: Equation) -> kernel_table.Product | None:
    """The product of integers that an equation is; None for any other."""
    product = equation.params.get("alone")
    return product if isinstance(product, kernel_table.Product) else None


class _Operation(NamedTuple):
    """An equation with the slots that it reads and writes.

    Attributes:
        equation: the equation.
        inputs, outputs: slots.
        parts: what it computes from; `inputs`, but without what only guards a quotient, see `_Program._divisor`, and
            of `where(x < a, b, x)`, or `==`, these three numbers.
    """

    equation: Equation
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    parts: tuple[Slot, ...]


class _Operand(NamedTuple):
    """A step's operand: a slot, and its shape as a matrix."""

    slot: Slot
    shape: tuple[int, int]


PlannedStep = tuple[StepKind, tuple[_Operand, ...]]
SlotStep = tuple[StepKind, Sequence[Slot]]


class _Chain(NamedTuple):
    """Steps that follow each other, and their result.

    Attributes:
        steps: kind and operands of each.
        slot, dtype: of the result.
    """

    steps: tuple[PlannedStep, ...]
    slot: Slot
    dtype: np.dtype


class _FusedProduct(NamedTuple):
    """A product of integers with its prologue and epilogue.

    Attributes:
        product: the product alone.
        source, rhs: slots of the prologue's input, and of the right operand.
        prologue: steps that make the left operand.
        epilogue: steps on the sums, and the result.
    """

    product: kernel_table.Product
    source: Slot
    rhs: Slot
    prologue: tuple[PlannedStep, ...]
    epilogue: _Chain

    def run(self, values: dict[Slot, Any], shape: tuple[int, ...]) -> jax.Array:
        """Return its result.

        Args:
            values: by slot.
            shape: of the result.
        """
        dims = self.product.dims
        right = kernel_table.right_matrix(values[self.rhs], dims)
        left = values[self.source].reshape(math.prod(shape[: len(dims.lhs_free)]), right.shape[1])
        prologue, epilogue = (_with_operands(steps, values) for steps in (self.prologue, self.epilogue.steps))
        return fused_matmul(left, right, prologue, epilogue, self.epilogue.dtype).reshape(shape)


class _RowAmax(NamedTuple):
    """The largest magnitude of each row of an array, with its epilogue, which makes a scale of it.

    Attributes:
        source: slot of the array.
        epilogue: steps, and the result.
    """

    source: Slot
    epilogue: _Chain

    def run(self, values: dict[Slot, Any], shape: tuple[int, ...]) -> jax.Array:
        """See `_FusedProduct`."""
        x = values[self.source]
        return row_amax(x.reshape(-1, x.shape[-1]), _with_operands(self.epilogue.steps, values)).reshape(
            shape
        )


def _with_operands(steps: Sequence[PlannedStep], values: dict[Slot, Any]) -> list[FusedStep]:
    return [
        FusedStep(kind, tuple(_matrix(values[x.slot], x.shape) for x in operands)) for kind, operands in steps
    ]


def _matrix(x: Any, shape: tuple[int, int]) -> jax.Array:
    x = jnp.asarray(x).reshape(shape)
    return x if x.dtype == INT32 else x.astype(jnp.float32)


class _Program:
    """A flattened jaxpr, and its fused products.

    Args:
        body: the jaxpr.

    Attributes:
        operations: in order.
        constants: values of slots.
        inputs, outputs: slots.
        fused: index of the last operation of an epilogue -> the product, or the row maxima, that has it.
    """

    def __init__(self, body: Body) -> None:
        self.operations: list[_Operation] = []
        self.constants: dict[Slot, Any] = {}
        self.types: list[Any] = list(body.inputs)
        self.inputs = tuple(range(len(self.types)))
        self.made_by: dict[Slot, int] = {}
        self.outputs = body.run(self.inputs, self._appended, self._constant)
        self.readers = collections.defaultdict[Slot, list[int]](list)
        live = {*self.outputs}
        for index, operation in reversed([*enumerate(self.operations)]):
            if live & {*operation.outputs} or operation.equation.has_effects:
                live.update(operation.parts)
                for slot in {*operation.parts}:
                    self.readers[slot].append(index)
        self.fused: dict[int, _FusedProduct | _RowAmax] = {}
        self._fused_operations: set[int] = set()  # indices, of all epilogues
        used = [operation for operation in self.operations if live & {*operation.outputs}]
        for find in (self._fused_product, self._row_amax):
            for fused in filter(None, map(find, used)):
                self.fused[self.made_by[fused.epilogue.slot]] = fused

    def _row_amax(self, operation: _Operation) -> _RowAmax | None:
        """An operation as row maxima with their epilogue; None if it is none, or without fused products."""
        if not self.fused or operation.equation.name != "reduce_max":
            return None
        name, inputs = self._maker(operation.inputs[0])
        x = self.types[inputs[0]] if name == "abs" else None
        if x is None or x.dtype != F32 or not x.size or operation.equation.params["axes"] != (x.ndim - 1,):
            return None
        slot = operation.outputs[0]
        following = self.operations[self.readers[slot][0]] if len(self.readers[slot]) == 1 else None
        row_shape = (*x.shape[:-1], 1)
        if following is not None and following.equation.name in ("broadcast_in_dim", "reshape"):
            slot = following.outputs[0] if self.types[following.outputs[0]].shape == row_shape else slot
        chains = [_Chain((), slot, F32)]
        if self.types[slot].shape == row_shape:
            chains += self._chains(chains[0], x.ndim - 1)
        while chains[-1].dtype != F32:
            chains.pop()
        self._fused_operations.update(self.made_by[chain.slot] for chain in chains)
        return _RowAmax(inputs[0], chains[-1])

    def _appended(self, equation: Equation, inputs: list[Slot]) -> Sequence[Slot]:
        """Append an operation, and return the slots of its outputs."""
        if equation.call is not None:
            return equation.call.run(inputs, self._appended, self._constant)
        if equation.name in PASSES:
            return inputs
        outputs = tuple(range(len(self.types), len(self.types) + len(equation.outputs)))
        self.types += equation.outputs
        self.made_by |= dict.fromkeys(outputs, len(self.operations))
        parts = tuple(inputs)
        if equation.name == "div":
            parts = inputs[0], self._divisor(*inputs)
        elif equation.name == "select_n" and len(inputs) == 3:
            condition, sides = self._maker(inputs[0])
            if condition in REPLACES and sides[0] == inputs[1]:
                parts = *sides, inputs[2]
        self.operations.append(_Operation(equation, tuple(inputs), outputs, parts))
        return outputs

    def _constant(self, value: Any) -> Slot:
        self.types.append(jax.ShapeDtypeStruct(np.shape(value), value.dtype))
        self.constants[len(self.types) - 1] = value
        return len(self.types) - 1

    def _maker(self, slot: Slot) -> tuple[str, tuple[Slot, ...]]:
        """The name and parts of what makes a slot."""
        if slot not in self.made_by:
            return "", ()
        operation = self.operations[self.made_by[slot]]
        return operation.equation.name, operation.parts

    def _divisor(self, x: Slot, by: Slot) -> Slot:
        """What a number is divided by: x / clamp(s, x, s) is x / s, which keeps XLA from multiplying by 1 / s."""
        name, inputs = self._maker(by)
        if name == "clamp" and inputs[0] == inputs[2] and inputs[1] == x:
            return inputs[0]
        if name == "max":
            inner, least = self._maker(inputs[0])
            same = inner == "min" and (least[0] == x or self._value(x) == self._value(least[0]) is not None)
            if same and least[1] == inputs[1]:
                return inputs[1]
        return by

    def _fused_product(self, operation: _Operation) -> _FusedProduct | None:
        """An operation as a product with its prologue and epilogue; None if it is none, or nothing follows it."""
        product = _product(operation.equation)
        if product is None or len(operation.inputs) != 2:
            return None
        dims, (left, right) = product.dims, operation.inputs
        lhs, rhs = self.types[left], self.types[right]
        in_order = (*dims.lhs_free, *dims.lhs_contract) == tuple(range(lhs.ndim)) and dims.is_ordered
        rows = math.prod(lhs.shape[axis] for axis in dims.lhs_free)
        if not in_order or dims.lhs_batch or not takes(lhs, rhs, product.accumulator, rows):
            return None
        axes = len(dims.lhs_free)
        chains = [*self._chains(_Chain((), operation.outputs[0], INT32), axes)]
        while chains and chains[-1].dtype not in DTYPES:
            chains.pop()
        if not chains:
            return None
        self._fused_operations.update(self.made_by[chain.slot] for chain in chains)
        source, prologue = self._source(left, axes)
        return _FusedProduct(product, source, right, prologue, chains[-1])

    def _source(self, lhs: Slot, axes: int) -> tuple[Slot, tuple[PlannedStep, ...]]:
        """The input of the prologue, and its steps: back to the quotient that is rounded.

        Args:
            lhs: slot of the left operand.
            axes: how many of its leading axes are rows.
        """
        results = {fused.epilogue.slot for fused in self.fused.values()}
        slot, path = lhs, list[_Operation]()
        source: tuple[Slot, tuple[PlannedStep, ...]] = lhs, ()
        while slot in self.made_by and slot not in results and len(self.readers[slot]) == 1:
            path.insert(0, self.operations[self.made_by[slot]])
            slot = self._changed_part(path[0])
            chain: _Chain | None = _Chain((), slot, self.types[slot].dtype)
            for operation in path:
                chain = None if chain is None else self._extended(operation, chain, axes)
            if chain is not None and self.types[slot].dtype in (F32, BF16):
                source = slot, chain.steps
            if path[0].equation.name in ("mul", "div"):
                break
        return source

    def _chains(self, chain: _Chain, axes: int) -> Iterator[_Chain]:
        """Extend a chain by the operations that read its result, while each has one reader; yields every longer chain.

        Args:
            chain: the shortest one.
            axes: how many of the leading axes are rows.
        """
        while len(self.readers[chain.slot]) == 1 and chain.slot not in self.outputs:
            index = self.readers[chain.slot][0]
            longer = (
                None
                if index in self._fused_operations
                else self._extended(self.operations[index], chain, axes)
            )
            if longer is None or len(longer.steps) > MOST_STEPS:
                return
            yield longer
            chain = longer

    def _changed_part(self, operation: _Operation) -> Slot:
        """The part of an operation that a chain goes through; the others are operands."""
        name, parts = operation.equation.name, operation.parts
        if name == "clamp":
            return parts[1]
        is_second = name in COMMUTES and self.types[parts[0]].shape != operation.equation.outputs[0].shape
        return parts[1] if is_second else parts[0]

    def _extended(self, operation: _Operation, chain: _Chain, axes: int) -> _Chain | None:
        """Extend a chain by an operation; None if the kernels have no steps for it."""
        equation, parts = operation.equation, operation.parts
        shape, out = self.types[chain.slot].shape, equation.outputs[0]
        if len(operation.outputs) != 1 or out.shape != shape or parts.count(chain.slot) != 1:
            return None
        find = self._cast_steps if equation.name in CASTS else self._arithmetic_steps
        for steps in find(operation, chain):
            planned = [(kind, [self._operand(x, shape, axes) for x in slots]) for kind, slots in steps]
            if not any(None in operands for _, operands in planned):
                new_steps = [
                    (kind, tuple(x for x in operands if x is not None)) for kind, operands in planned
                ]
                return _Chain((*chain.steps, *new_steps), operation.outputs[0], out.dtype)
        return None

    def _cast_steps(self, operation: _Operation, chain: _Chain) -> Iterator[Sequence[SlotStep]]:
        """The steps of an operation that changes a dtype or a layout, if the kernels have it."""
        name, params, parts = operation.equation.name, operation.equation.params, operation.parts
        dtypes = chain.dtype, operation.equation.outputs[0].dtype
        limits = {INT8: (-128, 127), UINT8: (0, 255)}.get(dtypes[1])
        fits = dtypes in TO_FLOAT32 if limits is None else self._is_rounded_within(chain.steps, *limits)
        if name == "one_device":
            if params["alone"] is kernel_table.laid_out_on_cpu:
                yield ()
        elif name == "xor":
            operand = next(slot for slot in parts if slot != chain.slot)
            if dtypes[0] == UINT8 and self._value(operand) == 128:
                yield [(StepKind.SUBTRACT, (operand,))]
        elif name == "bitcast_convert_type":
            if dtypes == (UINT8, INT8) and [kind for kind, _ in chain.steps[-1:]] == [StepKind.SUBTRACT]:
                yield ()
        elif dtypes == (F32, BF16):
            yield [(StepKind.TO_BFLOAT16, ())]
        elif fits:
            yield ()

    def _arithmetic_steps(self, operation: _Operation, chain: _Chain) -> Iterator[Sequence[SlotStep]]:
        """The steps of any other operation, if the kernels have it: the cheapest first."""
        equation, parts, dtype = operation.equation, operation.parts, chain.dtype
        name, place, shape = equation.name, parts.index(chain.slot), self.types[chain.slot].shape
        if dtype == INT32 and name == "sub" and place == 0 and not chain.steps:
            yield [(StepKind.SUBTRACT_INTEGER, parts[1:])]
        if dtype not in (F32, BF16) or equation.outputs[0].dtype != dtype:
            return
        if name == "select_n":
            condition, _ = self._maker(operation.inputs[0])
            if len(parts) == 3 and place == 0 and condition in REPLACES:
                yield [(REPLACES[condition], parts[1:])]
        elif name == "round":
            if int(equation.params["rounding_method"]) == TO_EVEN:
                yield [(StepKind.ROUND, ())]
        elif name == "clamp":
            if place == 1:
                yield [(StepKind.MAXIMUM, parts[:1]), (StepKind.MINIMUM, parts[2:])]
        elif name in BINARY and (place == 0 or name in COMMUTES):
            rounding = [(StepKind.TO_BFLOAT16, ())] if dtype == BF16 and name in ROUNDS else []
            operand = parts[1 - place]
            maker, factors = self._maker(operand)
            has_full_shape = self.types[operand].shape == shape
            if name in ("add", "sub") and maker == "mul" and has_full_shape:
                return  # XLA rounds that product and this sum once
            if name == "mul" and maker == "div" and not has_full_shape and self._value(factors[0]) == 1:
                yield [(StepKind.MULTIPLY_BY_RECIPROCAL, factors[1:]), *rounding]
            of_scales = maker == "mul" and shape not in (self.types[factor].shape for factor in factors)
            if name == "mul" and has_full_shape and of_scales and dtype == F32:
                yield [(StepKind.MULTIPLY_BY_PRODUCT, factors)]  # without an array of all products of scales
            yield [(BINARY[name], (operand,)), *rounding]

    def _operand(self, slot: Slot, shape: tuple[int, ...], axes: int) -> _Operand | None:
        """An array as a step's operand, broadcast to a shape; None if it is not a matrix that broadcasts."""
        own = self.types[slot].shape or (1,) * len(shape)
        name, inputs = self._maker(slot)
        if name == "broadcast_in_dim":
            params = self.operations[self.made_by[slot]].equation.params
            sizes = dict(zip(params["broadcast_dimensions"], self.types[inputs[0]].shape, strict=True))
            own, slot = tuple(sizes.get(axis, 1) for axis in range(len(own))), inputs[0]
        ends = ((own[:axes], shape[:axes]), (own[axes:], shape[axes:]))
        if len(own) != len(shape) or any(math.prod(part) != 1 and part != whole for part, whole in ends):
            return None
        return _Operand(slot, (math.prod(own[:axes]), math.prod(own[axes:])))

    def _value(self, slot: Slot) -> float | None:
        """The value of a constant with a single number; None of anything else."""
        value = self.constants.get(slot)
        return None if value is None or np.size(value) != 1 else float(np.ravel(value)[0])

    def _is_rounded_within(self, steps: Sequence[PlannedStep], least: float, most: float) -> bool:
        """Whether steps end with a rounding and a clamp to limits within these."""
        if [kind for kind, _ in steps[-3:]] != [StepKind.ROUND, StepKind.MAXIMUM, StepKind.MINIMUM]:
            return False
        low, high = (self._value(operands[0].slot) for _, operands in steps[-2:])
        return low is not None and high is not None and low >= least and high <= most
