"""JAX's equations, which no other file reads: the operations of a traced function, and how values go through them.

A `Body` is a jaxpr with its constants, and an `Equation` is one of its operations. `Body.run` is the only evaluator:
it hands values from equation to equation by a rule `(equation, inputs) -> outputs`. Values are whatever the rule works
on: arrays, tracked tensors of the interpreter, slots of a flat program, or facts such as "depends on an argument".
A rule decides itself what becomes of bodies within: it runs `Equation.call`, `.scan`, `.loop` or `.branches` with the
same rule. Next: `interpreter`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend import core, source_info_util
from jax.extend.core import Primitive as Primitive

V = TypeVar("V")
Atom = core.Var | core.Literal
#: Steps of a computation: primitive, inputs, parameters.
Skeleton = list[tuple[str, Sequence[object], Mapping[str, object]]]

# Primitives that run their only body once, on their operands as they are.
CALLS = frozenset(
    {
        *("jit", "closed_call", "core_call", "remat2", "composite"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vmap_call"),
    }
)
# Primitives that run bodies several times, or one of them -> the parameters that hold them.
LOOPS: Mapping[str, tuple[str, ...]] = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
}
# Primitives whose name depends on the version of JAX, or on how they are bound.
SYNONYMS: Mapping[str, str] = {"pjit": "jit", "checkpoint": "remat2", "copy_p": "copy"}
# Primitives that leave the numbers of their first operand, and change its shape or the order of its axes.
LAYOUT = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose"})
SPECIFICATION = re.compile(r"[A-Za-z.]*(?:,[A-Za-z.]*)+->[A-Za-z.]*")  # of an einsum of several operands
LONGEST = 1000  # steps of a while loop that are counted ahead
#: What `jax.named_scope` adds to a name stack; transformations of a function add another type.
Scope = type(source_info_util.new_name_stack("scope").stack[0])


class Equation:
    """One operation of a body. Two views of the same operation are equal.

    Attributes:
        name: of its primitive.
        params: of its primitive.
        is_read: for each output, whether an equation of the body or the body's output reads it.
    """

    __slots__ = ("_equation", "_inputs", "_outputs", "_steps", "is_read", "name", "params")

    def __init__(self, equation: core.JaxprEqn, is_read: tuple[bool, ...] = ()) -> None:
        name = equation.primitive.name
        self._steps: int | None = None
        self._equation, self._inputs, self._outputs = equation, equation.invars, equation.outvars
        self.name: str = SYNONYMS.get(name, name)
        self.params: Mapping[str, Any] = equation.params
        self.is_read = is_read

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Equation) and value._equation is self._equation

    def __hash__(self) -> int:
        return id(self._equation)

    @property
    def inputs(self) -> list[Any]:
        """The types of its inputs, with shape and dtype."""
        return [atom.aval for atom in self._inputs]

    @property
    def outputs(self) -> list[Any]:
        """The types of its outputs, with shape and dtype."""
        return [var.aval for var in self._outputs]

    @property
    def has_effects(self) -> bool:
        """Whether it does more than compute its outputs: it prints, or calls Python."""
        return bool(self._equation.effects)

    @property
    def variables(self) -> list[int]:
        """The places of those inputs that are no literals."""
        return [place for place, atom in enumerate(self._inputs) if not isinstance(atom, core.Literal)]

    def bind(self, values: Sequence[Any]) -> list[Any]:
        """Run it on arrays, under its own name stack."""
        # Newer versions of JAX have functions among the parameters.
        primitive = self._equation.primitive
        parts = primitive.get_bind_params(self.params)
        functions, parameters = parts if isinstance(parts, tuple) else ((), parts)
        name_stack = source_info_util.current_name_stack() + self._equation.source_info.name_stack
        with source_info_util.user_context(None, name_stack=name_stack):
            results = primitive.bind(*functions, *values, **parameters)
        return list(results) if primitive.multiple_results else [results]

    def replaced(self, **params: object) -> Equation:
        """The same operation with other parameters."""
        return Equation(self._equation.replace(params={**self.params, **params}), self.is_read)

    # --- where it comes from

    @property
    def scopes(self) -> list[str]:
        """The names of the scopes around it in its body, the innermost last."""
        parts = self._equation.source_info.name_stack.stack
        return [part.name for part in parts if isinstance(part, Scope)]

    @property
    def label(self) -> str:
        """The name that `checkpoint_name` gives a value; empty for any other operation."""
        return self.params["name"] if self.name == "name" else ""

    @property
    def function(self) -> str | None:
        """The name of the compiled function that it calls, also under a custom derivative; None if it calls none."""
        if self.name == "jit":
            return self.params["name"]
        inside = self.bodies[0].equations if self.name == "custom_jvp_call" else []
        return inside[0].function if len(inside) == 1 else None

    @property
    def is_mapped(self) -> bool:
        """Whether it comes from under a `vmap` in its body."""
        parts = self._equation.source_info.name_stack.stack
        return any(part.name == "vmap" and not isinstance(part, Scope) for part in parts)

    @property
    def is_einsum(self) -> bool:
        """Whether it is a `dot_general` of `jnp.einsum`, whose scope is its specification."""
        return self.name == "dot_general" and SPECIFICATION.fullmatch("".join(self.scopes[-1:])) is not None

    # --- bodies within

    @property
    def bodies(self) -> list[Body]:
        """All bodies within: of calls, loops, branches, kernels, rules of reductions."""
        leaves = jax.tree.leaves(list(self.params.values()), is_leaf=_is_body)
        return [Body.of(leaf) for leaf in leaves if _is_body(leaf)]

    @property
    def call(self) -> Body | None:
        """The body that it runs once, on its operands as they are, if it is one of `CALLS`."""
        return self.bodies[0] if self.name in CALLS else None

    @property
    def body(self) -> Body | None:
        """The first body with as many inputs as it has: that of a call, a scan or a part for each device."""
        count = len(self._inputs)
        return next((body for body in self.bodies if len(body.inputs) == count), None)

    @property
    def scan(self) -> Scan | None:
        """It as a loop of known length: a `lax.scan`, or a while loop that counts from a literal; None for others."""
        loop = self.loop
        if loop is not None:
            if self._steps is None:
                starts = [np.asarray(x.val) if isinstance(x, core.Literal) else None for x in self._inputs]
                self._steps = loop.steps(starts)
            return loop.as_scan(self._steps) if self._steps >= 0 else None
        if self.name != "scan":
            return None
        params = self.params
        if "num_consts" in params:
            counts = params["num_consts"], params["num_carry"]
        else:
            constants, carry, _ = params["ft_in"].unpack()
            counts = len(constants.vals), len(carry.vals)
        options = {name: params[name] for name in ("reverse", "length", "unroll")}
        return Scan(Body.of(params["jaxpr"]), *counts, options)

    @property
    def loop(self) -> While | None:
        """It as a `lax.while_loop`, of whatever length; None for any other operation."""
        if self.name != "while":
            return None
        condition, body = (Body.of(self.params[name]) for name in LOOPS["while"])
        return While(condition, body, self.params["cond_nconsts"], self.params["body_nconsts"])

    @property
    def branches(self) -> list[Body]:
        """The bodies of which a `lax.cond` runs one: the first operand is its number; none for any other operation."""
        return [Body.of(branch) for branch in self.params["branches"]] if self.name == "cond" else []

    @property
    def manual_axes(self) -> tuple[str, ...]:
        """The axes of the mesh over which a `shard_map` maps its body, in the mesh's order."""
        axes = self.params.get("newly_manual_axes", self.params.get("manual_axes", ()))
        return tuple(axis for axis in self.params["mesh"].axis_names if axis in axes)

    @property
    def times(self) -> int:
        """How often it runs its bodies.

        A scan's body runs once per iteration, a kernel once per block, a part for each device once on each device that
        inputs are split over; others count once.
        """
        if self.scan is not None:
            return self.scan.options["length"]
        if self.name == "pallas_call":
            return math.prod(size for size in self.params["grid_mapping"].grid if isinstance(size, int))
        if self.name == "shard_map":
            axes = {axis for spec in self.params["in_specs"] for axis in jax.tree.leaves(tuple(spec))}
            return math.prod(self.params["mesh"].shape[axis] for axis in axes)
        return 1

    def with_bodies(self, function: Callable[[Body, Sequence[Any]], list[Any]]) -> Equation:
        """The same operation; if it is a loop or a branch, with its bodies traced anew.

        Args:
            function: runs a body on arrays.
        """

        def traced(part: object) -> object:
            if isinstance(part, tuple):
                return tuple(map(traced, part))
            body = Body.of(part)
            types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in body.inputs]
            return jax.make_jaxpr(lambda *values: function(body, values))(*types)

        return self.replaced(**{name: traced(self.params[name]) for name in LOOPS.get(self.name, ())})


class Function(Equation):
    """Several equations as one operation, which is a known function of one value. See `Body.matched`.

    Attributes:
        length: how many equations it is.

    Args:
        name: of the function.
        body: these equations.
    """

    __slots__ = ("_body", "length")

    def __init__(self, name: str, body: Body) -> None:
        super().__init__(body.equations[0]._equation, (True,) * len(body.outputs))
        self.name, self.length, self._body = name, len(body.equations), body
        self._inputs, self._outputs = body._inputs, body._outputs

    def bind(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """See `Equation`."""
        return self._body.run(values, Equation.bind, lambda value: value)


class Body:
    """A jaxpr with the values of its constants.

    Args:
        inputs: its variables.
        outputs: variables or literals.
        equations: in order.
        constants: variable -> value.
    """

    def __init__(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Atom],
        equations: Sequence[Equation],
        constants: Mapping[core.Var, Any],
    ) -> None:
        self.equations = equations
        self._inputs, self._outputs, self._constants = inputs, outputs, constants

    @classmethod
    def of(cls, jaxpr: Any) -> Body:
        """A jaxpr of JAX, closed or open: newer versions have one class for both."""
        constants: Sequence[Any] = getattr(jaxpr, "consts", ())
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        read = {atom for eqn in jaxpr.eqns for atom in eqn.invars if not isinstance(atom, core.Literal)}
        read |= {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
        equations = [Equation(eqn, tuple(var in read for var in eqn.outvars)) for eqn in jaxpr.eqns]
        values = dict.fromkeys(jaxpr.constvars) | dict(zip(jaxpr.constvars, constants, strict=False))
        return cls(jaxpr.invars, jaxpr.outvars, equations, values)

    @property
    def inputs(self) -> list[Any]:
        """The types of its inputs, with shape and dtype."""
        return [var.aval for var in self._inputs]

    @property
    def outputs(self) -> list[Any]:
        """The types of its outputs, with shape and dtype."""
        return [atom.aval for atom in self._outputs]

    @property
    def returned_inputs(self) -> list[int | None]:
        """For each output, which input it is as it came; None if it is computed."""
        places = {var: place for place, var in enumerate(self._inputs)}
        return [None if isinstance(atom, core.Literal) else places.get(atom) for atom in self._outputs]

    def run(
        self,
        inputs: Sequence[V],
        rule: Callable[[Equation, list[V]], Sequence[V]],
        constant: Callable[[Any], V],
    ) -> list[V]:
        """Hand values from equation to equation.

        Args:
            inputs: their values.
            rule: an equation and the values of its inputs -> the values of its outputs.
            constant: an array, or a number as an array of NumPy -> its value.

        Returns:
            The values of the outputs.
        """
        values: dict[core.Var, V] = dict(zip(self._inputs, inputs, strict=True))
        values |= {var: constant(array) for var, array in self._constants.items()}

        def read(atom: Atom) -> V:
            if isinstance(atom, core.Literal):
                # Of NumPy: each array of JAX would be placed on a device, to become a constant of a new program.
                return constant(np.asarray(atom.val, atom.aval.dtype))  # pyright: ignore
            return values[atom]

        for equation in self.equations:
            outputs = rule(equation, [read(atom) for atom in equation._inputs])
            values.update(zip(equation._outputs, outputs, strict=True))
        return [read(atom) for atom in self._outputs]

    def used(self) -> Body:
        """It without the equations that no output depends on."""
        needed, used = set(self._variables(self._outputs)), []
        for equation in reversed(self.equations):
            if not needed.isdisjoint(equation._outputs):
                used.append(equation)
                needed.update(self._variables(equation._inputs))
        return Body(self._inputs, self._outputs, used[::-1], self._constants)

    def everywhere(self) -> Iterator[Equation]:
        """Its equations, and those of all bodies within."""
        for equation in self.equations:
            yield equation
            for body in equation.bodies:
                yield from body.everywhere()

    def with_equations(self, equations: Sequence[Equation]) -> Body:
        """It with some of its equations joined: see `matched`."""
        return Body(self._inputs, self._outputs, equations, self._constants)

    def skeleton(self) -> Skeleton:
        """What it computes of its only input, comparable: the names, inputs and plain parameters of its equations.

        Those that only change a layout are left out.
        """
        values: dict[object, object] = {self._inputs[0]: "operand"}
        steps: Skeleton = []
        for eqn in self.equations:
            inputs = [
                np.asarray(atom.val).tolist() if isinstance(atom, core.Literal) else values.get(atom)
                for atom in eqn._inputs
            ]
            if eqn.name in LAYOUT:
                values[eqn._outputs[0]] = inputs[0]
                continue
            values |= {var: (len(steps), place) for place, var in enumerate(eqn._outputs)}
            plain = {
                name: value
                for name, value in eqn.params.items()
                if isinstance(value, int | float | str | np.dtype)
            }
            steps.append((eqn.name, inputs, plain))
        return steps

    def matched(self, start: int, place: int, name: str, pattern: Skeleton) -> Function | None:
        """The equations from one on as a function, if they compute what it computes.

        Args:
            start: index of the first equation.
            place: which of its inputs is the function's.
            name: of the function.
            pattern: the function, traced for one value.
        """
        steps = (at for at in range(start, len(self.equations)) if self.equations[at].name not in LAYOUT)
        end = next(itertools.islice(steps, len(pattern) - 1, None), -1)
        own = self.equations[start : end + 1]
        if not own or own[-1].name != pattern[-1][0]:
            return None
        part = Body([own[0]._inputs[place]], own[-1]._outputs, own, {})
        inner = {var for eqn in own[:-1] for var in eqn._outputs}
        later = [*self._outputs, *(atom for eqn in self.equations[end + 1 :] for atom in eqn._inputs)]
        is_pattern = part.skeleton() == pattern and inner.isdisjoint(self._variables(later))
        return Function(name, part) if is_pattern else None

    @staticmethod
    def _variables(atoms: Sequence[Atom]) -> list[core.Var]:
        return [atom for atom in atoms if not isinstance(atom, core.Literal)]


@dataclass(frozen=True)
class Scan:
    """A loop over slices: its operands are constants, carried values, arrays to slice.

    Attributes:
        body: from constants, carried values and slices to carried values and slices.
        constants, carries: how many of the operands are these.
        options: the arguments `reverse`, `length` and `unroll`.
    """

    body: Body
    constants: int
    carries: int
    options: Mapping[str, Any]

    def split(self, operands: Sequence[V]) -> tuple[list[V], list[V], list[V]]:
        """Constants, carried values and arrays to slice."""
        first, last = self.constants, self.constants + self.carries
        return list(operands[:first]), list(operands[first:last]), list(operands[last:])


@dataclass(frozen=True)
class While:
    """A loop with a condition: its operands are constants of the condition, of the body, and carried values.

    Attributes:
        condition, body: from their constants and the carried values.
        condition_constants, constants: how many of the operands are constants of each.
    """

    condition: Body
    body: Body
    condition_constants: int
    constants: int

    def split(self, operands: Sequence[V]) -> tuple[list[V], list[V], list[V]]:
        """Constants of the condition, constants of the body, carried values."""
        first, last = self.condition_constants, self.condition_constants + self.constants
        return list(operands[:first]), list(operands[first:last]), list(operands[last:])

    def steps(self, operands: Sequence[np.ndarray | None]) -> int:
        """Count its steps, given the operands that are known; -1 if they do not decide it, or beyond `LONGEST`."""
        of_condition, of_body, carry = self.split(operands)
        with jax.ensure_compile_time_eval():
            for step in range(LONGEST):
                (goes_on,) = _scalars(self.condition, [*of_condition, *carry])
                if goes_on is None or not goes_on:
                    return -1 if goes_on is None else step
                carry = _scalars(self.body, [*of_body, *carry])
        return -1

    def as_scan(self, steps: int) -> Scan:
        """It as a scan without slices; constants of the condition are constants of the scan that nothing reads."""
        inputs = [*self.condition._inputs[: self.condition_constants], *self.body._inputs]
        body = Body(inputs, self.body._outputs, self.body.equations, self.body._constants)
        constants, options = len(inputs) - len(body.outputs), {"reverse": False, "length": steps, "unroll": 1}
        return Scan(body, constants, len(body.outputs), options)


def _scalars(body: Body, inputs: Sequence[np.ndarray | None]) -> list[Any]:
    """The outputs of a body that are scalars and depend on known scalars alone; None in the place of others."""

    def rule(equation: Equation, values: list[Any]) -> list[Any]:
        if any(x is None for x in values) or any(x.shape for x in equation.outputs):
            return [None] * len(equation.outputs)
        return equation.bind(values)

    return body.run(
        inputs, rule, lambda value: value if isinstance(value, np.ndarray) and not value.shape else None
    )


def settled(
    step: Callable[[list[V]], Sequence[V]], carry: Sequence[V], joined: Callable[[V, V], V]
) -> list[V]:
    """Facts about the carried values of a loop that hold in every iteration.

    Args:
        step: facts before an iteration -> facts after it.
        carry: before the first one.
        joined: the fact that holds where one of two does.
    """
    before = list(carry)
    while True:
        after = [joined(old, new) for old, new in zip(before, step(before), strict=True)]
        if after == before:
            return after
        before = after


def _is_body(part: object) -> bool:
    return hasattr(part, "eqns")
