"""Which outputs of a program are inputs of it that nothing changed, also through loops and rematerialized blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jqinject.program.jaxpr import Body, Equation, Scan, While

Number = int | None
"""That of the input which a value is; None if it is computed."""


def unchanged_inputs(body: Body) -> list[Number]:
    """For each output of a program, the number of the input that it is; None if it is computed.

    Args:
        body: a program.

    Example:
        >>> import jax
        >>> looped = jax.make_jaxpr(lambda w, x: jax.lax.scan(lambda c, _: ((c[0], c[1] + 1), None), (w, x), length=2))
        >>> unchanged_inputs(Body.of(looped(1.0, 2.0)))
        [0, None]
    """
    return _run(body, range(len(body.inputs)))


def _run(body: Body, inputs: Sequence[Number]) -> list[Number]:
    return body.run(inputs, _passed, _constant)


def _constant(value: Any) -> None:
    """A constant is no input."""


def _passed(equation: Equation, inputs: list[Number]) -> list[Number]:
    """What an operation makes of values: those that it only passes on stay."""
    if equation.scan:
        return _of_scan(equation.scan, inputs)
    if equation.loop:
        return _of_while(equation.loop, inputs)
    if equation.branches:
        outputs = zip(*(_run(branch, inputs[1:]) for branch in equation.branches), strict=True)
        return [each[0] if len(set(each)) == 1 else None for each in outputs]
    body, count = equation.body, len(equation.outputs)
    return [None] * count if body is None or len(body.outputs) != count else _run(body, inputs)


def _of_while(loop: While, inputs: list[Number]) -> list[Number]:
    _, constants, carry = loop.split(inputs)
    inside = enumerate(unchanged_inputs(loop.body), len(constants))
    return [x if place == source else None for x, (place, source) in zip(carry, inside, strict=True)]


def _of_scan(scan: Scan, inputs: list[Number]) -> list[Number]:
    """Of a carry that stays, and of slices that are put together again as they were taken apart."""
    slices = scan.constants + scan.carries
    outputs: list[Number] = []
    for place, source in enumerate(unchanged_inputs(scan.body)):
        is_carry = place < scan.carries
        same = source is not None and (source == scan.constants + place if is_carry else source >= slices)
        outputs.append(inputs[source] if same and source is not None else None)
    return outputs
