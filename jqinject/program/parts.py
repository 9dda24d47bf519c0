"""The parts of a program that quantizers reach into: the table of all, branches, and functions with rules of their own.

A function with `jax.custom_vjp` or `jax.custom_jvp` keeps its rule: forward its body runs with quantizers, and
backward the rule sees the numbers that the body contracts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jqinject.program.cache_writes import check_caches_of_branches
from jqinject.program.jaxpr import Body, Equation
from jqinject.program.nested import (
    Inside,
    Part,
    Step,
    Values,
    carried,
    from_outside,
    rematerialized,
    scanned,
    settled_output,
)
from jqinject.program.operations import contracts
from jqinject.program.parameters import parameter
from jqinject.program.run import Run
from jqinject.program.sharded_parts import mapped_over_devices
from jqinject.program.tracked_value import Origin, Tracked, shape_of


def _branched(run: Run, eqn: Equation, inputs: list[Tracked], path: str) -> list[Tracked]:
    """Run one of several branches: each names its sites, and what either records leaves the branch."""
    (number, *operands), part = inputs, run.numbered_part(path, "cond")
    first: list[Tracked] = []

    def branch(index: int, body: Body) -> Part:
        def taken(run: Run, entered: list[Tracked]) -> list[Tracked]:
            run.part = f"{part}.branch{index}"
            outputs = run.run(body, list(map(from_outside, operands)), path)
            first[:] = first or outputs
            check_caches_of_branches(first, outputs)
            return [settled_output(run, out, run.placed(path, f"output{i}")) for i, out in enumerate(outputs)]

        return taken

    def switched(steps: Sequence[Step]) -> Step:
        def step(state: object, values: list[object]) -> tuple[list[object], object]:
            return jax.lax.switch(number.array, steps, state, values)

        return step

    bodies = [branch(index, body) for index, body in enumerate(eqn.branches)]
    ran = carried(run, bodies, inputs, switched, Inside())
    return [replace(x, origin=Origin.ACTIVATION) for x in ran] if number.is_activation else ran


# --- functions with a derivative rule of their own


def _with_own_rule(run: Run, eqn: Equation, inputs: list[Tracked], path: str) -> list[Tracked] | None:
    """Quantize inside a function with a derivative rule of its own; None if it contracts no parameter with quantizers.

    The rule is differentiated at parameters as they are quantized, and at each input as the only quantizer of the body
    that takes it rounds it: through these gradients go straight. What quantizers further inside do has no part in it.
    """
    body = eqn.bodies[0]
    if not _is_quantized(run, body, inputs, path):
        return None
    entered = [parameter(run, x) if x.is_weight else replace(x, twins={}) for x in inputs]
    before, run.has_rule = run.has_rule, True
    outputs = run.run(body, entered, path)
    run.has_rule = before
    values = [jax.lax.stop_gradient(out.passed) for out in outputs]
    differentiated = _of_jvp if eqn.name == "custom_jvp_call" else _of_vjp
    results = differentiated(eqn, values, [_contracted_number(run, x) for x in entered])
    return [out.with_value(value) for out, value in zip(outputs, results, strict=True)]


def _is_quantized(run: Run, body: Body, inputs: Sequence[Tracked], path: str) -> bool:
    """Whether a body reads a parameter where quantizers are; the uses of others are noted."""
    reads = contracts(body) or any(eqn.name == "gather" for eqn in body.everywhere())
    if not (reads and any(x.weight_path for x in inputs)):
        return False
    finder, stored = run.finder(0), {x.weight_path for x in inputs if x.quantized or x.form is not None}
    jax.eval_shape(lambda: [x.passed for x in finder.run(body, list(map(from_outside, inputs)), path)])
    sites = finder.recorded
    uses = any(use.quantizer is not None or use.weight_path in stored for use in sites.uses)
    if any(place.read for place in sites.occurrences) and (uses or sites.sites or sites.adapted):
        return True
    run.recorded.uses += sites.uses
    return False


def _contracted_number(run: Run, x: Tracked) -> jax.Array:
    """What the body of a function contracts of an input, through which gradients go straight to it."""
    if x.low_rank is not None:
        return x.array + jnp.broadcast_to(x.low_rank.dense(), shape_of(x)).astype(x.array.dtype)
    rounded = [twin for twin in x.twins.values() if not run.recorded.sites[twin.site].transform_axes]
    return rounded[0].array if len(x.twins) == len(rounded) == 1 else x.array


def _of_vjp(eqn: Equation, values: Values, arrays: Values) -> Values:
    """The values, with the derivative of a `custom_vjp_call` of some arrays."""

    @jax.custom_vjp
    def function(values: Values, arrays: Values) -> Values:
        return values

    def forward(values: Values, arrays: Values) -> tuple[Values, object]:
        return values, jax.vjp(lambda *arrays: eqn.bind(arrays), *arrays)[1]

    function.defvjp(forward, lambda pull, cotangents: (None, list(pull(cotangents))))
    return function(values, arrays)


def _of_jvp(eqn: Equation, values: Values, arrays: Values) -> Values:
    """The values, with the derivative of a `custom_jvp_call` of some arrays."""

    @jax.custom_jvp
    def function(values: Values, arrays: Values) -> Values:
        return values

    @function.defjvp
    def _(primals: Sequence[Values], tangents: Sequence[Values]) -> tuple[Values, Values]:
        (values, arrays), (_, changes) = primals, tangents
        changed = jax.jvp(lambda *arrays: eqn.bind(arrays), arrays, changes)[1]
        return function(values, arrays), changed

    return function(values, arrays)


CALLS: dict[str, Callable[[Run, Equation, list[Tracked], str], list[Tracked] | None]] = {
    "jit": lambda run, eqn, inputs, path: run.run(eqn.bodies[0], inputs, path),
    "remat2": rematerialized,
    "scan": scanned,
    "while": scanned,
    "cond": _branched,
    "custom_jvp_call": _with_own_rule,
    "custom_vjp_call": _with_own_rule,
    "shard_map": mapped_over_devices,
}
#: All parts of a program. Those that are no calls, and those of which a call returns None, run unchanged.
PARTS = frozenset({*CALLS, "one_device"})


def runs_inside(eqn: Equation) -> bool:
    """Whether quantizers reach the operations in a part of a program, given the part's equation."""
    return eqn.name in CALLS and (eqn.loop is None or eqn.scan is not None)
