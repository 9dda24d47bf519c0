"""How the state of quantizers crosses a transformation in a program: rematerialized parts, loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from jqinject.program.quantizers import Finder
from jqinject.program.tracing.kept_state import strong
from jqinject.program.tracked_value import Tracked

Step = Callable[[Any, list[Any]], tuple[list[Any], Any]]
Body = Callable[[Any, list[Tracked]], list[Tracked]]


def carried(
    run: Any,
    body: Body,
    inputs: list[Tracked],
    wrap: Callable[[Step], Step],
    inside: list[Tracked] | None = None,
    constants: int = 0,
    layers: int = 0,
) -> list[Tracked]:
    """Run a part of the program under a transformation that carries the quantizers' state.

    State of the model's layers that the part throws away leaves it by further outputs. If a loop reads it as a
    constant, every iteration leaves it to the next one.

    Args:
        run: the interpreter of what surrounds the part.
        body: runs the part, given an interpreter and inputs.
        inputs: the inputs.
        wrap: transforms a function of state and values.
        inside: the inputs as the part sees them, if they differ: the slices of a loop.
        constants: how many inputs, from the first, are the same in every iteration of a loop.
        layers: the length of a loop over stacked layers, which has a part of the quantizers' state for each step.
    """
    seen = [_at_home(x) for x in (inputs if inside is None else inside)]
    if not run.quantizers.has_state() and all(x.state is None for x in inputs):
        return _without_state(run, body, inputs, seen, wrap, layers)
    finder = run.within(Finder(run.quantizers), layers=layers)
    crossing: dict[str, int] = {}

    def look(values: list[Any]) -> list[Any]:
        here = _with_values(seen, values)
        finder.kept.begin(here)
        found = body(finder, here)
        crossing.update(finder.kept.crossing(inputs, seen, found))
        return [out.passed for out in found]

    jax.eval_shape(look, [x.passed for x in seen])
    stacked = {name for name, site in finder.sites.items() if layers and len(site.stack) > len(run.stack)}
    looped = {text: place for text, place in crossing.items() if place < constants}
    single = [text for text in crossing if text not in looped]
    before, outputs = run.counts.copy(), []

    def step(state: Any, values: list[Any]) -> tuple[list[Any], Any]:
        quantizers = run.quantizers.restored(state[0])
        part = run.within(quantizers, before, layers)
        here = _with_values(seen, values)
        part.kept.begin(here)
        for text, value in state[1].items():
            part.kept.put(text, value)
        outputs[:] = body(part, here)
        left = {text: part.kept.value(text, seen[place]) for text, place in crossing.items()}
        found = [*(out.passed for out in outputs), *(left[text] for text in single)]
        return found, (quantizers.state(finder.sites, stacked), {text: left[text] for text in looped})

    entering = {text: strong(inputs[place].array) for text, place in looped.items()}
    start = (run.quantizers.state(finder.sites, stacked), entering)
    values, (state, left) = wrap(step)(start, [x.passed for x in inputs])
    run.quantizers.update(state)
    _adopt(run, finder)
    places = {x.state.label: x.state.places for x in inputs if x.state is not None}
    for text, value in (*left.items(), *zip(single, values[len(outputs) :], strict=True)):
        run.kept.put(text, value, places[text])
    # Updates do not leave the part: `lora` refuses a model whose weights leave one before they are contracted.
    found = [
        replace(x, low_rank=None, unrounded=None, chosen=None)
        for x in _with_values(outputs, values[: len(outputs)])
    ]
    for x in found:
        if x.state is not None and x.state.places is None:
            x.state = x.state._replace(places=places.get(x.state.label))
    return found


def _without_state(
    run: Any,
    body: Body,
    inputs: list[Tracked],
    seen: list[Tracked],
    wrap: Callable[[Step], Step],
    layers: int,
) -> list[Tracked]:
    """As `carried`, where nothing has state: which sites there are need not be found out first."""
    before, ran = run.counts.copy(), []

    def step(state: Any, values: list[Any]) -> tuple[list[Any], Any]:
        part = run.within(run.quantizers, before, layers)
        here = _with_values(seen, values)
        part.kept.begin(here)
        outputs = body(part, here)
        ran[:] = [(part, outputs)]
        return [out.passed for out in outputs], state

    values, _ = wrap(step)((((), ()), ()), [x.passed for x in inputs])
    ((part, outputs),) = ran
    part.kept.crossing(inputs, seen, outputs)  # notes what is lost
    _adopt(run, part)
    return [replace(x, low_rank=None) for x in _with_values(outputs, values)]


def _adopt(run: Any, part: Any) -> None:
    """Let an interpreter know what that of a part of its program has found."""
    run.counts = part.counts
    run.sites |= part.sites
    run.uses += part.uses
    run.products += part.products
    run.occurrences += part.occurrences
    run.adapted |= part.adapted


def _at_home(x: Tracked) -> Tracked:
    """An input of a part of the program, where it is the whole of its state."""
    if x.state is None or x.state.places is None:
        return x
    return replace(x, state=x.state._replace(places=None), twins=x.twins)


def _with_values(tracked: Sequence[Tracked], values: Sequence[Any]) -> list[Tracked]:
    return [replace(x.with_value(value), state=x.state) for x, value in zip(tracked, values, strict=True)]
