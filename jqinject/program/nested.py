"""Programs within a program: functions, rematerialized parts, loops."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.dot import is_low_bit_cache
from jqinject.program.cache_writes import check_caches_carried
from jqinject.program.carrying import carried
from jqinject.program.jaxpr import Body, Equation, Scan, settled
from jqinject.program.loop_ranges import largest, restarted
from jqinject.program.passing import closed_over, in_slices
from jqinject.program.tracked_value import Origin, Tracked, plain, shape_of
from jqinject.program.weights.parameters import parameter


def _inlined(run: Any, eqn: Equation, inputs: list[Tracked], path: str) -> list[Tracked]:
    (body,) = eqn.bodies
    return run.run(body, inputs, path)


def _rematerialized(run: Any, eqn: Equation, inputs: list[Tracked], path: str) -> list[Tracked]:
    (part,) = eqn.bodies
    options = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
    passed = closed_over(inputs)

    def body(run: Any, inside: list[Tracked]) -> list[Tracked]:
        return run.run(part, passed.inside(inside), path)

    return carried(run, body, passed.arrays, lambda step: jax.checkpoint(step, **options))


def _scanned(run: Any, eqn: Equation, inputs: list[Tracked], path: str) -> list[Tracked]:
    scan = eqn.scan
    assert scan is not None, "the table has it for loops of known length"
    constants, carry, xs = scan.split([parameter(run, x) for x in inputs])
    carries = scan.carries
    depends = _depending_carries(scan, constants, carry, xs)
    layers = scan.options["length"] if _steps_through_layers(scan, constants, depends, xs) else 0
    held, slices = closed_over(constants), in_slices(xs)
    fixed, xs, consts = held.arrays, slices.arrays, len(held.arrays)
    inputs = [*fixed, *carry, *xs]

    def body(run: Any, inside: list[Tracked]) -> list[Tracked]:
        now, each = inside[consts : consts + carries], inside[consts + carries :]
        entered = [*held.inside(inside[:consts]), *now, *slices.inside(each)]
        outputs = run.run(scan.body, entered, path)
        return [_settled(run, out, f"{path}.scan_output{i}".lstrip(".")) for i, out in enumerate(outputs)]

    def loop(step: Callable[[Any, list[Any]], tuple[list[Any], Any]]) -> Any:
        def steps(state: Any, values: list[Any]) -> tuple[list[Any], Any]:
            held, start, slices = (
                values[:consts],
                values[consts : consts + carries],
                values[consts + carries :],
            )

            (shared, of_steps), left = state

            def one(carried: Any, x: Any) -> Any:
                (shared, is_first, left, now), (of_step, x) = carried, x
                entering = restarted(before, shared)
                out, ((after, of_step), left) = step(((entering, of_step), left), [*held, *now, *x])
                check_caches_carried(carry, now, out)
                shared = largest(is_first, shared, after)
                return (shared, jnp.bool_(False), left, out[:carries]), (of_step, out[carries:])

            before = shared
            (shared, _, left, end), (of_steps, stacked) = jax.lax.scan(
                one, (shared, jnp.bool_(True), left, start), (of_steps, slices), **scan.options
            )
            return [*end, *stacked], ((shared, of_steps), left)

        return steps

    inside = [
        *(_as_it_is(x) for x in fixed),
        *(_unknown_in_loop(x, grown) for x, grown in zip(carry, depends, strict=True)),
        *(_slice(x) for x in xs),
    ]
    return carried(run, body, inputs, loop, inside, consts, layers)


def _as_it_is(x: Tracked) -> Tracked:
    return replace(x.with_value(x.value), state=x.state)


def _depending_carries(
    scan: Scan, constants: list[Tracked], carry: list[Tracked], xs: list[Tracked]
) -> list[bool]:
    """Which carried values depend on the model's inputs in some iteration: a cell's state may start as zeros.

    Args:
        scan: the loop.
        constants, carry, xs: its operands.
    """
    before, slices = ([x.is_activation for x in part] for part in (constants, xs))

    def step(carry: list[bool]) -> list[bool]:
        inputs = [*before, *carry, *slices]
        return scan.body.run(inputs, _depends, lambda value: False)[: scan.carries]

    return settled(step, [x.is_activation for x in carry], operator.or_)


def _depends(eqn: Equation, inputs: list[bool]) -> list[bool]:
    return [any(inputs)] * len(eqn.outputs)


def _steps_through_layers(
    scan: Scan, constants: list[Tracked], depends: list[bool], xs: list[Tracked]
) -> bool:
    """Whether each step of a scan has matrices of its own: it slices a parameter, or looks it up by its number.

    Args:
        scan: the loop.
        constants: its operands that are the same in every step.
        depends: which carried values depend on the model's inputs in some step.
        xs: its operands that are sliced.
    """
    if any(x.is_weight and len(shape_of(x)) > 2 for x in xs):
        return True
    varies = [*depends, *(x.is_activation or x.is_weight for x in xs)]
    kinds = [
        *(_WEIGHT if x.is_weight else _INPUT if x.is_activation else frozenset() for x in constants),
        *(_INPUT if depending else _COUNTER for depending in varies),
    ]
    return _LayerLookUps(scan.options["length"]).within(scan.body, kinds)


Kinds = frozenset[str]
_WEIGHT, _COUNTER, _INPUT = (frozenset({kind}) for kind in ("weight", "counter", "input"))


class _LayerLookUps:
    """Looks for matrices of a parameter that a loop's body looks up by a counter of its steps.

    Values are what they are made from: "weight", "counter" (differs from step to step, whatever the model's inputs
    are), "input".

    Args:
        length: the number of steps.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._has_look_up = False

    def within(self, body: Body, kinds: list[Kinds]) -> bool:
        """Whether a body with such inputs has one."""
        self._run(body, kinds)
        return self._has_look_up

    def _run(self, body: Body, kinds: list[Kinds]) -> list[Kinds]:
        return body.run(kinds, self._step, lambda value: frozenset())

    def _step(self, eqn: Equation, inputs: list[Kinds]) -> list[Kinds]:
        if eqn.name in ("dynamic_slice", "gather") and inputs[0] == _WEIGHT:
            shape, sizes = eqn.inputs[0].shape, eqn.params["slice_sizes"]
            of_layers = len(shape) > 2 and shape[0] >= self._length and sizes[0] == 1
            self._has_look_up |= of_layers and frozenset[str]().union(*inputs[1:]) == _COUNTER
        body = eqn.body
        inside = [] if body is None else self._run(body, inputs)
        count = len(eqn.outputs)
        return inside if len(inside) == count else [frozenset[str]().union(*inputs)] * count


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


def _while(run: Any, eqn: Equation, inputs: list[Tracked], path: str) -> list[Tracked]:
    return (_scanned if eqn.scan else _unchanged_part)(run, eqn, inputs, path)


def _unchanged_part(run: Any, eqn: Equation, inputs: list[Tracked], path: str) -> list[Tracked]:
    """A part that runs unchanged: branches, loops of unknown length, functions with custom derivatives."""
    run.kept.check_unchanged_part(eqn)
    inputs = [parameter(run, x) for x in inputs]
    outputs = [plain(value, inputs) for value in eqn.bind([x.array for x in inputs])]
    if any(x.is_float and x.is_activation for x in inputs) and any(out.is_float for out in outputs):
        run.policy.unknown(path, eqn.name)
    return outputs


CALLS: dict[str, Callable[[Any, Equation, list[Tracked], str], list[Tracked]]] = {
    "jit": _inlined,
    "remat2": _rematerialized,
    "scan": _scanned,
    "while": _while,
    "cond": _unchanged_part,
    "one_device": _unchanged_part,
    "custom_jvp_call": _unchanged_part,
    "custom_vjp_call": _unchanged_part,
}


def runs_inside(eqn: Equation) -> bool:
    """Whether quantizers reach the operations in a part of a program, given the part's equation."""
    return CALLS.get(eqn.name, _unchanged_part) is not _unchanged_part and (
        eqn.loop is None or eqn.scan is not None
    )
