"""Programs within a program: functions, rematerialized parts, loops."""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core import QuantParam, QuantStat
from jqinject.dot import is_low_bit_cache
from jqinject.program.cache_writes import check_caches_carried
from jqinject.program.jaxpr import Body, Equation, Scan, settled
from jqinject.program.kept_state import strong
from jqinject.program.parameters import parameter
from jqinject.program.passing import closed_over, in_slices
from jqinject.program.quantizers import Finder
from jqinject.program.run import Run
from jqinject.program.tracked_value import Origin, StatePlace, Tracked, plain, shape_of


def _inlined(run: Run, eqn: Equation, inputs: list[Tracked], path: str) -> list[Tracked]:
    (body,) = eqn.bodies
    return run.run(body, inputs, path)


def _rematerialized(run: Run, eqn: Equation, inputs: list[Tracked], path: str) -> list[Tracked]:
    (part,) = eqn.bodies
    options = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
    passed = closed_over(inputs)

    def body(run: Run, inside: list[Tracked]) -> list[Tracked]:
        return run.run(part, passed.inside(inside), path)

    return carried(run, body, passed.arrays, lambda step: jax.checkpoint(step, **options))


def _scanned(run: Run, eqn: Equation, inputs: list[Tracked], path: str) -> list[Tracked]:
    scan = eqn.scan
    assert scan is not None, "the table has it for loops of known length"
    constants, carry, xs = scan.split([parameter(run, x) for x in inputs])
    carries = scan.carries
    depends = _depending_carries(scan, constants, carry, xs)
    layers = scan.options["length"] if _steps_through_layers(scan, constants, depends, xs) else 0
    closed, slices = closed_over(constants), in_slices(xs)
    fixed, xs, consts = closed.arrays, slices.arrays, len(closed.arrays)
    inputs = [*fixed, *carry, *xs]

    def body(run: Run, inside: list[Tracked]) -> list[Tracked]:
        now, sliced = inside[consts : consts + carries], inside[consts + carries :]
        entered = [*closed.inside(inside[:consts]), *now, *slices.inside(sliced)]
        outputs = run.run(scan.body, entered, path)
        return [_settled(run, out, f"{path}.scan_output{i}".lstrip(".")) for i, out in enumerate(outputs)]

    def loop(step: Callable[[Any, list[Any]], tuple[list[Any], Any]]) -> Any:
        def steps(state: Any, values: list[Any]) -> tuple[list[Any], Any]:
            closed, start, slices = (
                values[:consts],
                values[consts : consts + carries],
                values[consts + carries :],
            )

            (shared, of_steps), left = state

            def one(carried: Any, x: Any) -> Any:
                (shared, is_first, left, now), (of_step, x) = carried, x
                entering = restarted(before, shared)
                out, ((after, of_step), left) = step(((entering, of_step), left), [*closed, *now, *x])
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
        *(x.with_value(x.value) for x in fixed),
        *(_unknown_in_loop(x, grown) for x, grown in zip(carry, depends, strict=True)),
        *(_slice(x) for x in xs),
    ]
    return carried(run, body, inputs, loop, Loop(inputs, inside, consts, carries, layers))


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
    abstract = x.value if is_low_bit_cache(x.value) else jax.ShapeDtypeStruct(x.value.shape, x.value.dtype)
    inside = x.with_value(
        jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape[1:], array.dtype), abstract)
    )
    return inside if x.axes is None else replace(inside, axes=x.axes.sliced())


def _settled(run: Run, out: Tracked, name: str) -> Tracked:
    """An output of a loop's body: a pending quantizer is applied inside."""
    return run.quantized(out, out.pending, name) if out.pending is not None and not out.quantized else out


def _while(run: Run, eqn: Equation, inputs: list[Tracked], path: str) -> list[Tracked]:
    return (_scanned if eqn.scan else _unchanged_part)(run, eqn, inputs, path)


def _unchanged_part(run: Run, eqn: Equation, inputs: list[Tracked], path: str) -> list[Tracked]:
    """A part that runs unchanged: branches, loops of unknown length, functions with custom derivatives."""
    run.kept.check_unchanged_part(eqn)
    inputs = [parameter(run, x) for x in inputs]
    outputs = [plain(value, inputs) for value in eqn.bind([x.array for x in inputs])]
    if any(x.is_float and x.is_activation for x in inputs) and any(out.is_float for out in outputs):
        run.policy.unknown(path, eqn.name)
    return outputs


CALLS: dict[str, Callable[[Run, Equation, list[Tracked], str], list[Tracked]]] = {
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


OperationRun = Callable[[Any, list[Any]], tuple[list[Any], Any]]
Part = Callable[[Run, list[Tracked]], list[Tracked]]


def carried(
    run: Run,
    body: Part,
    inputs: list[Tracked],
    wrap: Callable[[OperationRun], OperationRun],
    loop: Loop | None = None,
) -> list[Tracked]:
    """Run a part of the program under a transformation that carries the quantizers' state.

    State of the model's layers that the part writes and does not return leaves it by further outputs; a step of a loop
    leaves it to the next one.

    Args:
        run: the interpreter of what surrounds the part.
        body: runs the part, given an interpreter and inputs.
        inputs: the inputs.
        wrap: transforms a function of state and values.
        loop: what its steps see of the inputs; None if the part is no loop.
    """
    inner, layers = (inputs, 0) if loop is None else (loop.inside, loop.layers)
    if not run.quantizers.has_state() and all(x.state is None for x in inputs):
        return _without_state(run, body, inputs, inner, wrap, layers)
    finder = run.within(Finder(run.quantizers), layers=layers)
    returned: dict[str, int] = {}

    def look(values: list[Any]) -> list[Any]:
        passed = body(finder, finder.kept.begin(_with_values(inner, values)))
        for place, x in enumerate(passed):
            if (
                x.state is not None
                and finder.kept.is_newest(x)
                and (loop is None or loop.keeps(x.state, place))
            ):
                returned[x.state.label] = place
        return [out.passed for out in passed]

    jax.eval_shape(look, [x.passed for x in inner])
    stacked = {name for name, site in finder.sites.items() if layers and len(site.stack) > len(run.stack)}
    thrown = [text for text in finder.kept.changed if text not in returned]
    looped = [text for text in thrown if loop is not None and not loop.slices(text)]
    single = [text for text in thrown if text not in looped]
    before, outputs = run.counts.copy(), []

    def step(state: Any, values: list[Any]) -> tuple[list[Any], Any]:
        quantizers = run.quantizers.restored(state[0])
        part = run.within(quantizers, before, layers)
        entered = part.kept.begin(_with_values(inner, values))
        for text, value in state[1].items():
            part.kept.put(StatePlace(text), value)
        outputs[:] = body(part, entered)
        passed = [*(out.passed for out in outputs), *map(part.kept.leaving, single)]
        left = {text: part.kept.leaving(text) for text in looped}
        return passed, (quantizers.state(finder.sites, stacked), left)

    entering = {text: strong(run.kept.part(loop.place(text))) for text in looped if loop is not None}
    start = (run.quantizers.state(finder.sites, stacked), entering)
    values, (state, left) = wrap(step)(start, [x.passed for x in inputs])
    run.quantizers.update(state)
    run.adopt(finder)
    left |= {text: values[place] for text, place in returned.items() if text in finder.kept.changed}
    left |= dict(zip(single, values[len(outputs) :], strict=True))
    for text, value in left.items():
        run.kept.put(StatePlace(text) if loop is None else loop.place(text), value)
    # Updates do not leave the part: `lora` refuses a model whose weights leave one before they are contracted.
    passed = [
        replace(x, low_rank=None, unrounded=None, chosen=None)
        for x in _with_values(outputs, values[: len(outputs)])
    ]
    return passed if loop is None else loop.outputs(passed)


class Loop:
    """What the steps of a loop see of its inputs: constants, carried values, arrays to slice.

    Args:
        inputs: its inputs.
        inside: the same, as a step sees them, without their state.
        constants, carries: how many of them are these.
        layers: the length of a loop over stacked layers; 0 for others.

    Attributes:
        inside: with the state that they are to a step: a slice, or what the step before left, is the whole of it.
    """

    def __init__(
        self, inputs: Sequence[Tracked], inside: Sequence[Tracked], constants: int, carries: int, layers: int
    ) -> None:
        self._first_slice, self._constants, self.layers = constants + carries, constants, layers
        states = [x.state for x in inputs]
        # State may come in twice, but not by parts, of which a mark does not say which it was.
        forms = {(x.state.label, shape_of(x), id(x.state.places)) for x in inputs if x.state is not None}
        times = collections.Counter(text for text, *_ in forms)
        entered = [(x.label, place) for place, x in enumerate(states) if x is not None and place >= constants]
        self._entered = {text: place for text, place in entered if times[text] == 1}
        self._places = {text: states[place] for text, place in self._entered.items()}
        self.inside = [
            replace(x, state=self._inner_state(state, place))
            for place, (x, state) in enumerate(zip(inside, states, strict=True))
        ]

    def _inner_state(self, state: StatePlace | None, place: int) -> StatePlace | None:
        if state is None or place < self._constants:
            return state
        return StatePlace(state.label) if state.label in self._entered else None

    def place(self, text: str) -> StatePlace:
        """Where the state that a step has is in that around the loop."""
        return self._places.get(text) or StatePlace(text)

    def slices(self, text: str) -> bool:
        """Whether each step has a slice of the state."""
        return self._entered.get(text, 0) >= self._first_slice

    def keeps(self, state: StatePlace, place: int) -> bool:
        """Whether state leaves by the output number `place` as it came in."""
        entered = self._entered.get(state.label, -1)
        if entered >= self._first_slice:
            return place >= self._first_slice - self._constants
        return place == entered - self._constants

    def outputs(self, outputs: Sequence[Tracked]) -> list[Tracked]:
        """The outputs of the loop, with the state that they are around it."""
        for place, x in enumerate(outputs):
            if x.state is not None:
                x.state = self.place(x.state.label) if self.keeps(x.state, place) else None
        return list(outputs)


def _without_state(
    run: Run,
    body: Part,
    inputs: list[Tracked],
    inner: list[Tracked],
    wrap: Callable[[OperationRun], OperationRun],
    layers: int,
) -> list[Tracked]:
    """As `carried`, where nothing has state: which sites there are need not be found out first."""
    before, ran = run.counts.copy(), []

    def step(state: object, values: list[jax.Array]) -> tuple[list[Any], Any]:
        part = run.within(run.quantizers, before, layers)
        outputs = body(part, _with_values(inner, values))
        ran[:] = [(part, outputs)]
        return [out.passed for out in outputs], state

    values, _ = wrap(step)((((), ()), ()), [x.passed for x in inputs])
    ((part, outputs),) = ran
    run.adopt(part)
    return [replace(x, low_rank=None) for x in _with_values(outputs, values)]


def _with_values(tracked: Sequence[Tracked], values: Sequence[jax.Array]) -> list[Tracked]:
    return [replace(x.with_value(value), state=x.state) for x, value in zip(tracked, values, strict=True)]


LOWER_ENDS = ("sum_of_min", "low")


def restarted(before: Any, state: object) -> Any:
    """Return the state of quantizers that a step begins with.

    Args:
        before: their state before the loop, whose ranges each step begins with.
        state: their state after the step before it, whose random streams go on.
    """

    def begun(old: Any, new: Any) -> object:
        return new.replace(old.get_raw_value()) if _is_range(new) else new

    return jax.tree.map(begun, before, state, is_leaf=_is_variable)


def largest(is_first: jax.Array, widest: Any, state: object) -> Any:
    """Return the state of quantizers with the larger of two ranges each.

    Args:
        is_first: whether `state` is that of the first step, and `widest` that before the loop.
        widest: their state with the largest ranges of the steps before.
        state: their state after a step.
    """

    def joined(path: Any, old: Any, new: Any) -> object:
        if not _is_range(new):
            return new
        names = jax.tree_util.keystr(path, simple=True, separator=".")

        def larger(path: Any, old: jax.Array, new: jax.Array) -> jax.Array:
            if any(key.key in LOWER_ENDS for key in path):
                wider = new < old
            else:
                wider = jnp.abs(new) > jnp.abs(old) if "zero_point" in names else new > old
            return jnp.where(is_first | wider, new, old)

        value = jax.tree.map_with_path(larger, old.get_raw_value(), new.get_raw_value())
        return new.replace(value)

    return jax.tree.map_with_path(joined, widest, state, is_leaf=_is_variable)


def _is_range(x: object) -> bool:
    return isinstance(x, QuantStat | QuantParam)


def _is_variable(x: object) -> bool:
    return isinstance(x, nnx.Variable)
