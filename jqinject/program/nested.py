"""Programs within a program: rematerialized parts and loops, and how state crosses them. Next: `parts`."""

import collections
import operator
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import UnionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core import QuantParam, QuantStat
from jqinject.program.cache_writes import check_caches_carried
from jqinject.program.jaxpr import Equation, Scan, settled
from jqinject.program.moves import arrays_of, with_arrays
from jqinject.program.parameters import parameter
from jqinject.program.policy import Site
from jqinject.program.run import Run
from jqinject.program.tracked_value import Origin, StatePlace, Tracked, joined, shape_of
from jqinject.quant_tensor import is_grouped, is_quantized, shaping


def rematerialized(run: Run, eqn: Equation, inputs: list[Tracked], path: str) -> list[Tracked]:
    """Run what `jax.checkpoint` computes again backward."""
    (part,) = eqn.bodies
    options = {name: eqn.params[name] for name in ("policy", "prevent_cse")}

    def body(run: Run, entered: list[Tracked]) -> list[Tracked]:
        return run.run(part, list(map(from_outside, inputs)), path)

    return carried(run, [body], inputs, lambda steps: jax.checkpoint(*steps, **options), Inside())


def scanned(run: Run, eqn: Equation, inputs: list[Tracked], path: str) -> list[Tracked]:
    """Run a loop of known length."""
    scan = eqn.scan
    assert scan is not None, "or it runs unchanged"
    inputs = [parameter(run, x) for x in inputs]
    constants, carry, xs = scan.split(inputs)
    carries = scan.carries
    depends, through_layers = _facts_of_steps(scan, constants, carry, xs)
    # State may come in twice, but not by slices, of which a mark does not say which it was.
    times = collections.Counter(x.state.label for x in inputs if x.state is not None)
    sliced = {x.state.label: x.state for x in xs if x.state is not None and times[x.state.label] == 1}
    slices = [in_slices(x, sliced) for x in xs]

    def entered(values: list[Any]) -> list[Tracked]:
        now = map(_unknown_in_loop, carry, depends, values[:carries])
        return [*now, *(x.inside(value) for x, value in zip(slices, values[carries:], strict=True))]

    def body(run: Run, entered: list[Tracked]) -> list[Tracked]:
        outputs = run.run(scan.body, [*map(from_outside, constants), *entered], path)
        return [
            settled_output(run, out, run.placed(path, f"scan_output{i}")) for i, out in enumerate(outputs)
        ]

    def loop(step: Step) -> Step:
        def steps(state: Any, values: list[Any]) -> tuple[list[Any], Any]:
            (shared, of_steps), left = state

            def one(carried: Any, x: Any) -> Any:
                (shared, is_first, left, now), (of_step, x) = carried, x
                entering = with_ranges(lambda _, start, last: start, before, shared)
                out, ((after, of_step), left) = step(((entering, of_step), left), [*now, *x])
                check_caches_carried(carry, now, out)
                shared = with_ranges(partial(larger, is_first), shared, after)
                return (shared, jnp.bool_(False), left, out[:carries]), (of_step, out[carries:])

            before, start = shared, (shared, jnp.bool_(True), left, values[:carries])
            (shared, _, left, end), (of_steps, stacked) = jax.lax.scan(
                one, start, (of_steps, values[carries:]), **scan.options
            )
            return [*end, *stacked], ((shared, of_steps), left)

        return steps

    first, others = [x.passed for x in carry], [x.parts for x in slices]
    of_step = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), others)
    layers = scan.options["length"] if through_layers else 0
    inside = Inside([*first, *others], [*first, *of_step], entered, True, carries, layers, sliced)
    return carried(run, [body], inputs, lambda steps: loop(*steps), inside)


Kinds = frozenset[str]
NONE: Kinds = frozenset()
_WEIGHT, _SLICE, _COUNTER, _INPUT = (frozenset({kind}) for kind in ("weight", "slice", "counter", "input"))


def _facts_of_steps(
    scan: Scan, constants: list[Tracked], carry: list[Tracked], xs: list[Tracked]
) -> tuple[list[bool], bool]:
    """Follow what values of a loop's body are made from: "weight", "slice" of one, "input" of the model, "counter".

    A counter differs from step to step, whatever the model's inputs are.

    Args:
        scan: the loop.
        constants, carry, xs: its operands.

    Returns:
        For each carried value, whether it depends on the model's inputs in some step: a cell's state may start as
        zeros. And whether each step has matrices of its own: it slices a parameter, or looks it up by its number.
    """
    fixed = [_WEIGHT if x.is_weight else _INPUT if x.is_activation else NONE for x in constants]
    slices = [_SLICE if x.is_weight else _INPUT if x.is_activation else _COUNTER for x in xs]
    through_layers = slices_layers = any(x.is_weight and len(shape_of(x)) > 2 for x in xs)

    def made_from(eqn: Equation, inputs: list[Kinds]) -> list[Kinds]:
        nonlocal through_layers
        if eqn.name in ("dynamic_slice", "gather") and inputs[0] == _WEIGHT:
            shape, sizes = eqn.inputs[0].shape, eqn.params["slice_sizes"]
            of_layers = len(shape) > 2 and shape[0] >= scan.options["length"] and sizes[0] == 1
            through_layers |= of_layers and NONE.union(*inputs[1:]) == _COUNTER
        count = len(eqn.outputs)
        inside = [] if eqn.body is None else eqn.body.run(inputs, made_from, lambda value: NONE)
        return inside if eqn.call is not None and len(inside) == count else [NONE.union(*inputs)] * count

    def step(carry: list[Kinds]) -> list[Kinds]:
        nonlocal through_layers
        through_layers = slices_layers
        return scan.body.run([*fixed, *carry, *slices], made_from, lambda value: NONE)[: scan.carries]

    start = [_INPUT if x.is_activation else _COUNTER for x in carry]
    depends = ["input" in kinds for kinds in settled(step, start, operator.or_)]
    return depends, through_layers


def _unknown_in_loop(x: Tracked, depends: bool, value: Any) -> Tracked:
    """A carried value, which differs between iterations, so that only its origin is known."""
    origin = Origin.ACTIVATION if depends else x.origin
    return Tracked(value, origin, cache=x.cache, cache_ndim=x.cache_ndim, transform=x.transform)


def from_outside(x: Tracked) -> Tracked:
    """A value that a part of the program reads from outside; a quantized weight with its payload and scales."""
    if x.is_weight and (is_quantized(x.value) or x.chosen is not None):
        return replace(x, state=None, twins={})
    return replace(x.with_value(x.passed), state=x.state)


def settled_output(run: Run, out: Tracked, name: str) -> Tracked:
    """An output of a part: a pending quantizer is applied inside."""
    return (
        run.quantized(out, Site(name, out.pending)) if out.pending is not None and not out.quantized else out
    )


Step = Callable[[Any, list[Any]], tuple[list[Any], Any]]
Part = Callable[[Run, list[Tracked]], list[Tracked]]
Values = list[jax.Array]


@dataclass(frozen=True)
class Inside:
    """What is passed into a part of the program, or into a loop; the part reads its other inputs from outside.

    Attributes:
        passed: the values.
        per_step: the same, of a loop as a step reads them: only their shapes and dtypes are read.
        entered: from the values to inputs of the part.
        is_loop: whether it is a loop.
        carries: how many values a loop carries.
        layers: the length of a loop over stacked layers, whose steps have state of their own; else 0.
        sliced: label -> state of the model's layers of which each step has a slice.
        look: runs a function of the values on abstract ones, as the part runs its body.
    """

    passed: Sequence[Any] = ()
    per_step: Sequence[Any] = ()
    entered: Callable[[list[Any]], list[Tracked]] = list
    is_loop: bool = False
    carries: int = 0
    layers: int = 0
    sliced: Mapping[str, StatePlace] = field(default_factory=dict)
    look: Callable[[Callable[[Values], Values], Values], object] = jax.eval_shape

    def left(self, place: int, state: StatePlace | None) -> StatePlace | None:
        """The state that an output is around the part, given its number and the state that it is inside."""
        if state is None or not self.is_loop:
            return state
        return None if place < self.carries else self.sliced.get(state.label)


@dataclass
class Crossing:
    """What crosses the border of a part of the program, which is known before it runs.

    Attributes:
        sites: names of the sites.
        stacked: those of them whose quantizers have a state for each step.
        changed: labels of the model's state that the part writes.
        returned: label -> the output that is its newest value.
    """

    sites: Collection[str] = ()
    stacked: Collection[str] = ()
    changed: Collection[str] = ()
    returned: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run, bodies: Sequence[Part], inside: Inside) -> "Crossing":
        """Run the bodies, of which each is run or one, on abstract values."""
        sites, changed, returned = dict[str, Site](), dict[str, None](), list[dict[str, int]]()
        for body in bodies:
            finder, places = run.finder(inside.layers), dict[str, int]()
            inside.look(partial(_looked_at, finder, body, inside, places), list(inside.per_step))
            sites |= finder.recorded.sites
            changed |= dict.fromkeys(finder.kept.changed)
            returned.append(places)
        stacked = {name for name, site in sites.items() if inside.layers and len(site.stack) > len(run.stack)}
        same = {
            text: place
            for text, place in returned[0].items()
            if all((text, place) in x.items() for x in returned)
        }
        return cls(sites, stacked, changed, same)


def _looked_at(finder: Run, body: Part, inside: Inside, places: dict[str, int], values: Values) -> Values:
    """Run a body on abstract values, and note the place of the outputs that are the newest values of state."""
    outputs = body(finder, finder.kept.begin(inside.entered(values)))
    for place, x in enumerate(outputs):
        state = inside.left(place, x.state)
        if state is not None and finder.kept.is_newest(x):
            places[state.label] = place
    return [out.passed for out in outputs]


def carried(
    run: Run,
    bodies: Sequence[Part],
    inputs: list[Tracked],
    wrap: Callable[[Sequence[Step]], Step],
    inside: Inside,
) -> list[Tracked]:
    """Run a part of the program under a transformation that carries the quantizers' state.

    State of the model's layers that the part writes and does not return leaves it by further outputs; a step of a loop
    leaves it to the next one, unless each has a slice of it.

    Args:
        run: the interpreter of what surrounds the part.
        bodies: run the part, given an interpreter and the inputs that are passed into it: one, or the branches.
        inputs: all inputs.
        wrap: transforms a function of state and values for each body.
        inside: what is passed into it.
    """
    has_state = run.quantizers.has_state() or any(x.state is not None for x in inputs)
    # Without state, which sites there are need not be found out first.
    crossing = Crossing.of(run, bodies, inside) if has_state else Crossing()
    thrown = [text for text in crossing.changed if text not in crossing.returned]
    looped = [text for text in thrown if inside.is_loop and text not in inside.sliced]
    single = [text for text in thrown if text not in looped]
    ran: dict[int, tuple[Run, list[Tracked]]] = {}

    def step(number: int, state: Any, values: list[Any]) -> tuple[list[Any], Any]:
        quantizers = run.quantizers.restored(state[0]) if has_state else run.quantizers
        part = run.within(quantizers, inside.layers)
        entered = part.kept.begin(inside.entered(values))
        for text, value in state[1].items():
            part.kept.put(StatePlace(text), value)
        outputs = bodies[number](part, entered)
        ran[number] = part, outputs
        passed = [*(out.passed for out in outputs), *map(part.kept.leaving, single)]
        after = quantizers.state(crossing.sites, crossing.stacked) if has_state else state[0]
        return passed, (after, {text: part.kept.leaving(text) for text in looped})

    start = run.quantizers.state(crossing.sites, crossing.stacked) if has_state else ((), ())
    entering = {text: run.kept.within().leaving(text) for text in looped}
    steps = [partial(step, number) for number in range(len(bodies))]
    values, (state, left) = wrap(steps)((start, entering), list(inside.passed))
    for part, _ in ran.values():
        run.adopt(part)
    if has_state:
        run.quantizers.update(state)
    outputs = [_either(list(cases)) for cases in zip(*(outputs for _, outputs in ran.values()), strict=True)]
    left |= {text: values[place] for text, place in crossing.returned.items() if text in crossing.changed}
    left |= dict(zip(single, values[len(outputs) :], strict=True))
    for text, value in left.items():
        run.kept.put(inside.sliced.get(text, StatePlace(text)), value)
    # Updates do not leave the part: `lora` refuses a model whose weights leave one before they are contracted.
    facts: dict[str, Any] = dict.fromkeys(("low_rank", "unrounded", "chosen"))
    return [
        replace(x.with_value(values[place]), **facts, state=inside.left(place, x.state))
        for place, x in enumerate(outputs)
    ]


def _either(cases: list[Tracked]) -> Tracked:
    """An output that is one of several values, without its value."""
    first = cases[0]
    if len(cases) == 1:
        return first
    out = joined(first.value, cases)
    if all((x.cache, x.transform) == (first.cache, first.transform) for x in cases):
        out = replace(out, cache=first.cache, cache_ndim=first.cache_ndim, transform=first.transform)
    labels = {None if x.state is None or x.state.places is not None else x.state.label for x in cases}
    return replace(out, state=first.state if len(labels) == 1 and None not in labels else None)


#: A pytree of Variables of quantizers.
State = Any
LOWER_ENDS = ("sum_of_min", "low")


def with_ranges(
    of_range: Callable[[str, Any, Any], Any],
    old: State,
    new: State,
    kinds: type | UnionType = QuantStat | QuantParam,
) -> State:
    """Return a state of quantizers whose ranges are made from those of two; its random streams go on.

    Args:
        of_range: the name of a range, its old value and its new one -> its value.
        old: the state that the other ranges are of.
        new: the state that the random streams are of.
        kinds: of the Variables that hold the ranges.
    """

    def joined(path: Any, before: Any, after: Any) -> object:
        if not isinstance(after, kinds):
            return after
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return after.replace(of_range(name, before.get_raw_value(), after.get_raw_value()))

    return jax.tree.map_with_path(joined, old, new, is_leaf=lambda x: isinstance(x, nnx.Variable))


def larger(is_first: jax.Array, name: str, widest: Any, range_: Any) -> Any:
    """Return the larger of two values of a range.

    Args:
        is_first: whether there was no step before, so that the range is the larger one.
        name: of the range.
        widest: the largest of the steps before.
        range_: that of a step.
    """

    def chosen(path: Any, old: jax.Array, new: jax.Array) -> jax.Array:
        if any(key.key in LOWER_ENDS for key in path):
            wider = new < old
        else:
            wider = jnp.abs(new) > jnp.abs(old) if "zero_point" in name else new > old
        return jnp.where(is_first | wider, new, old)

    return jax.tree.map_with_path(chosen, widest, range_)


# Quantized weights enter a part with their payloads and scales: one that is the same in every iteration is closed over;
# one of a stack that a loop runs over is taken apart into its arrays, which the loop slices, and put together inside.


class Slices(NamedTuple):
    """One input along whose first axis a loop runs.

    Attributes:
        parts: what the loop slices, a pytree.
        inside: from one slice of it to the input as a step sees it.
    """

    parts: Any
    inside: Callable[[Any], Tracked]


def in_slices(x: Tracked, states: Container[str]) -> Slices:
    """An input along whose first axis a loop runs, with what is behind its value.

    Args:
        x: the input.
        states: labels of the state of which each step has a slice.
    """
    arrays, of_arrays = _layers_of(replace(x, chosen=None, twins={}))
    layers = None if x.stored is None else x.stored.layers
    state = None if x.state is None or x.state.label not in states else StatePlace(x.state.label)
    axes = None if x.axes is None else x.axes.sliced()

    def inside(parts: Any) -> Tracked:
        own, numbers, unrounded, low_rank = parts
        stored = None if x.stored is None or numbers is None else x.stored.layer(numbers)
        facts = {"unrounded": unrounded, "chosen": x.chosen, "low_rank": low_rank, "stored": stored}
        return replace(x.with_value(of_arrays(own)), **facts, state=state, axes=axes)

    return Slices((arrays, layers, x.unrounded, x.low_rank), inside)


def _layers_of(x: Tracked) -> tuple[Any, Callable[[Any], Any]]:
    """The arrays of a value that a loop slices, and what makes a step's value of their slices."""
    tensor = x.value
    inner = tensor
    if is_grouped(tensor):
        along = tensor.groups.dim % tensor.ndim
        inner = None if along == 0 else tensor.grouped if tensor.as_it_lies is None else tensor.as_it_lies
    if not (x.is_weight and is_quantized(inner) and shape_of(x)):
        return x.passed, lambda array: array
    full = {
        name: array if array.ndim == 0 else shaping.full_rank(array, inner.ndim)
        for name, array in arrays_of(inner).items()
    }
    sliced = {name: array for name, array in full.items() if array.ndim and array.shape[0] == shape_of(x)[0]}
    same = {name: array[0] if array.ndim else array for name, array in full.items() if name not in sliced}

    def layer(own: dict[str, jax.Array]) -> Any:
        layer = with_arrays(inner, {**same, **own})
        return tensor.moved(layer, tensor.groups) if is_grouped(tensor) else layer

    return sliced, layer
