"""Programs within a program: functions, rematerialized parts, loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend import core

from jqinject.dot import is_low_bit_cache
from jqinject.program.cache_writes import check_caches_carried
from jqinject.program.carrying import carried
from jqinject.program.passing import closed_over, in_slices
from jqinject.program.tracked_value import Origin, Tracked, plain, shape_of
from jqinject.program.weights.parameters import parameter


def name_of_function(eqn: Any) -> str | None:
    """The name of the function that an equation calls, if it has one."""
    if eqn.primitive.name in ("jit", "pjit"):
        return eqn.params["name"]
    if eqn.primitive.name == "custom_jvp_call":
        inner = eqn.params["call_jaxpr"].jaxpr.eqns
        if len(inner) == 1:
            return name_of_function(inner[0])
    return None


def _inlined(run: Any, eqn: Any, inputs: list[Tracked], path: str) -> list[Tracked]:
    closed = eqn.params["jaxpr"]
    return run.run(closed.jaxpr, closed.consts, inputs, path)


def _rematerialized(run: Any, eqn: Any, inputs: list[Tracked], path: str) -> list[Tracked]:
    jaxpr = eqn.params["jaxpr"]
    options = {"policy": eqn.params["policy"], "prevent_cse": eqn.params["prevent_cse"]}
    passed = closed_over(inputs)

    def body(run: Any, inside: list[Tracked]) -> list[Tracked]:
        return run.run(jaxpr, (), passed.inside(inside), path)

    return carried(run, body, passed.arrays, lambda step: jax.checkpoint(step, **options))


def _scanned(run: Any, eqn: Any, inputs: list[Tracked], path: str) -> list[Tracked]:
    consts, carries = scan_counts(eqn)
    closed = eqn.params["jaxpr"]
    options = {name: eqn.params[name] for name in ("reverse", "length", "unroll")}
    inputs = [parameter(run, x) for x in inputs]
    entering = [x.is_activation for x in inputs]
    depends = _depending_carries(closed.jaxpr, entering, consts, carries)
    layers = options["length"] if _steps_through_layers(eqn, inputs, depends) else 0
    held, carry, slices = (
        closed_over(inputs[:consts]),
        inputs[consts : consts + carries],
        in_slices(inputs[consts + carries :]),
    )
    fixed, xs, consts = held.arrays, slices.arrays, len(held.arrays)
    inputs = [*fixed, *carry, *xs]

    def body(run: Any, inside: list[Tracked]) -> list[Tracked]:
        now, each = inside[consts : consts + carries], inside[consts + carries :]
        entered = [*held.inside(inside[:consts]), *now, *slices.inside(each)]
        outputs = run.run(closed.jaxpr, closed.consts, entered, path)
        return [_settled(run, out, f"{path}.scan_output{i}".lstrip(".")) for i, out in enumerate(outputs)]

    def loop(step: Callable[[Any, list[Any]], tuple[list[Any], Any]]) -> Any:
        def scan(state: Any, values: list[Any]) -> tuple[list[Any], Any]:
            held, start, slices = (
                values[:consts],
                values[consts : consts + carries],
                values[consts + carries :],
            )

            (shared, of_steps), left = state

            def one(carried: Any, x: Any) -> Any:
                (shared, left, now), (of_step, x) = carried, x
                out, ((shared, of_step), left) = step(((shared, of_step), left), [*held, *now, *x])
                check_caches_carried(carry, now, out)
                return (shared, left, out[:carries]), (of_step, out[carries:])

            (shared, left, end), (of_steps, stacked) = jax.lax.scan(
                one, (shared, left, start), (of_steps, slices), **options
            )
            return [*end, *stacked], ((shared, of_steps), left)

        return scan

    inside = [
        *(_as_it_is(x) for x in fixed),
        *(_unknown_in_loop(x, grown) for x, grown in zip(carry, depends, strict=True)),
        *(_slice(x) for x in xs),
    ]
    return carried(run, body, inputs, loop, inside, consts, layers)


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts.vals), len(carry.vals)


def _as_it_is(x: Tracked) -> Tracked:
    return replace(x.with_value(x.value), state=x.state)


def _depending_carries(jaxpr: Any, entering: list[bool], consts: int, carries: int) -> list[bool]:
    """Which carried values depend on the model's inputs in some iteration: a cell's state may start as zeros.

    Args:
        jaxpr: the body.
        entering: which of its inputs do so in the first iteration.
        consts: the number of inputs before the carried ones.
        carries: the number of carried values.
    """
    known = list(entering)
    while True:
        marked = {var for var, depends in zip(jaxpr.invars, known, strict=True) if depends}
        for eqn in jaxpr.eqns:
            if any(not isinstance(var, core.Literal) and var in marked for var in eqn.invars):
                marked.update(eqn.outvars)
        found = [not isinstance(var, core.Literal) and var in marked for var in jaxpr.outvars[:carries]]
        before = known[consts : consts + carries]
        after = [old or new for old, new in zip(before, found, strict=True)]
        if after == before:
            return after
        known[consts : consts + carries] = after


def _steps_through_layers(eqn: Any, inputs: list[Tracked], depends: list[bool]) -> bool:
    """Whether each step of a scan has matrices of its own: it slices a parameter, or looks it up by its number.

    Args:
        eqn: the scan.
        inputs: its operands: constants, carried values, slices.
        depends: which carried values depend on the model's inputs in some step.
    """
    consts, carries = scan_counts(eqn)
    slices = inputs[consts + carries :]
    if any(x.is_weight and len(shape_of(x)) > 2 for x in slices):
        return True
    varies = [*depends, *(x.is_activation or x.is_weight for x in slices)]
    kinds = [
        *(_WEIGHT if x.is_weight else _INPUT if x.is_activation else frozenset() for x in inputs[:consts]),
        *(_INPUT if depending else _COUNTER for depending in varies),
    ]
    return _looks_up_layers(eqn.params["jaxpr"].jaxpr, kinds, eqn.params["length"])[0]


Kinds = frozenset[str]
_WEIGHT, _COUNTER, _INPUT = (frozenset({kind}) for kind in ("weight", "counter", "input"))


def _looks_up_layers(jaxpr: Any, kinds: list[Kinds], length: int) -> tuple[bool, list[Kinds]]:
    """Whether a body looks up matrices of a parameter by a counter of its steps; and what its outputs are made from.

    Args:
        jaxpr: the body, or a program within it.
        kinds: what its inputs are made from: "weight", "counter" (differs from step to step, whatever the model's
            inputs are), "input".
        length: the number of steps.
    """
    known = dict(zip(jaxpr.invars, kinds, strict=True))

    def kinds_of(variables: Sequence[Any]) -> list[Kinds]:
        return [
            known.get(v, frozenset()) if not isinstance(v, core.Literal) else frozenset() for v in variables
        ]

    for eqn in jaxpr.eqns:
        read = kinds_of(eqn.invars)
        if eqn.primitive.name in ("dynamic_slice", "gather") and read[0] == _WEIGHT:
            shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
            of_layers = len(shape) > 2 and shape[0] >= length and sizes[0] == 1
            if of_layers and frozenset().union(*read[1:]) == _COUNTER:
                return True, []
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        body = getattr(inner, "jaxpr", inner)
        made = [frozenset().union(*read)] * len(eqn.outvars)
        if body is not None and len(body.invars) == len(eqn.invars):
            looks_up, inside = _looks_up_layers(body, read, length)
            if looks_up:
                return True, []
            made = inside if len(inside) == len(made) else made
        known.update(zip(eqn.outvars, made, strict=True))
    return False, kinds_of(jaxpr.outvars)


def _unknown_in_loop(x: Tracked, depends: bool) -> Tracked:
    """A carried value, which differs between iterations, so that only its origin is known."""
    return Tracked(
        x.value,
        Origin.ACTIVATION if depends else x.origin,
        cache=x.cache,
        cache_ndim=x.cache_ndim,
        turned=x.turned,
    )


def _slice(x: Tracked) -> Tracked:
    known = x.value if is_low_bit_cache(x.value) else jax.ShapeDtypeStruct(x.value.shape, x.value.dtype)
    inside = x.with_value(jax.tree.map(lambda held: jax.ShapeDtypeStruct(held.shape[1:], held.dtype), known))
    inside.state = x.state
    return inside if x.axes is None else replace(inside, axes=x.axes.sliced())


def _settled(run: Any, out: Tracked, name: str) -> Tracked:
    """An output of a loop's body: a pending quantizer is applied inside."""
    return run.quantized(out, out.pending, name) if out.pending is not None and not out.quantized else out


def _unchanged_part(run: Any, eqn: Any, inputs: list[Tracked], path: str) -> list[Tracked]:
    """A part that runs unchanged: branches, loops of unknown length, functions with custom derivatives."""
    run.kept.check_unchanged_part(eqn)
    inputs = [parameter(run, x) for x in inputs]
    outputs = [plain(value, inputs) for value in run.bind(eqn, [x.array for x in inputs])]
    if any(x.is_float and x.is_activation for x in inputs) and any(out.is_float for out in outputs):
        run.policy.unknown(path, eqn.primitive.name)
    return outputs


CALLS: dict[str, Callable[[Any, Any, list[Tracked], str], list[Tracked]]] = {
    "jit": _inlined,
    "pjit": _inlined,
    "remat2": _rematerialized,
    "checkpoint": _rematerialized,
    "scan": _scanned,
    "while": _unchanged_part,
    "cond": _unchanged_part,
    "one_device": _unchanged_part,
    "custom_jvp_call": _unchanged_part,
    "custom_vjp_call": _unchanged_part,
    "custom_vjp_call_jaxpr": _unchanged_part,
}


def runs_inside(name: str) -> bool:
    """Whether quantizers reach the operations in a part of a program, given the name of the part's operation."""
    return CALLS.get(name, _unchanged_part) is not _unchanged_part
