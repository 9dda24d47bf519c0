"""Contractions of a program: which operand is a weight, and which of its axes may have several scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jqinject.program.operations import Operation
from jqinject.program.policy import Choice, other_axes
from jqinject.program.tracked_value import Origin, Tracked, shape_of

Axes = tuple[int, ...]


def contraction(
    run: Any,
    operation: Operation,
    path: str,
    inputs: Sequence[Tracked],
    evaluate: Callable[[list[Any]], list[Any]],
    eqn: Any,
) -> list[Tracked]:
    """Run a contraction on quantized operands."""
    choice, name = run.choose(path, operation)
    lhs, rhs = inputs[:2]
    if run.policy.flattens_weights and _is_flattened(run, operation, eqn, rhs):
        rhs = rhs.with_value(run.constant(lambda: rhs.value.reshape(rhs.value.shape[0], -1)))
        evaluate = _flattened(eqn, inputs[1].value.shape[1:])
    if lhs.origin is Origin.CONSTANT and lhs.is_float:
        run.policy.not_an_activation(path, f"the left operand of {name}")
    swapped = operation.name == "einsum" and lhs.is_weight and rhs.is_activation
    labels = ("_rhs", "_lhs") if swapped else ("_lhs", "_rhs")
    taken = [
        _operand(run, x, other, choice, name + label, axes)
        for x, other, label, axes in zip((lhs, rhs), (rhs, lhs), labels, summed_axes(eqn), strict=True)
    ]
    (value,) = evaluate([*(x.value for x in taken), *(x.value for x in inputs[2:])])
    if not (lhs.is_activation or rhs.is_activation):
        return [Tracked(value)]
    out = run.output(value, choice, name)
    out.fusible = True
    return [out]


def _operand(run: Any, x: Tracked, other: Tracked, choice: Choice | None, name: str, summed: Axes) -> Tracked:
    if choice is None or x.quantized or not x.is_float:
        return x
    ndim = len(shape_of(x))
    if x.is_weight:
        if choice.weight is None:
            return x
        axes = run.policy.channel_axes(summed, ndim, is_weight=True)
        return run.quantized(x, choice.weight, name, channelwise_axes=axes)
    if not x.is_activation:
        return x
    if choice.dynamic:
        if choice.inputs is None or not other.is_weight:
            return x
        axes = run.policy.channel_axes(summed, ndim, is_weight=False)
        return run.quantized(x, choice.inputs, name, channelwise_axes=axes)
    wanted = x.pending or choice.inputs
    return x if choice.inputs is None or wanted is None else run.quantized(x, wanted, name)


def _is_flattened(run: Any, operation: Operation, eqn: Any, rhs: Tracked) -> bool:
    """Whether the weight has several output axes, which devices expect as one."""
    if eqn.primitive.name != "dot_general" or not rhs.is_weight or len(shape_of(rhs)) <= 2:
        return False
    (_, summed), (_, batch) = eqn.params["dimension_numbers"]
    several = (
        operation.name != "einsum" or len(run.policy.channel_axes(tuple(summed), rhs.value.ndim, True)) > 1
    )
    return tuple(summed) == (0,) and not batch and several


def _flattened(eqn: Any, outputs: Axes) -> Callable[[list[Any]], list[Any]]:
    """The contraction with a two-axis weight, its output reshaped to the original shape."""

    def evaluate(values: list[Any]) -> list[Any]:
        out = eqn.primitive.bind(*values, **eqn.params)
        return [out.reshape(*out.shape[:-1], *outputs)]

    return evaluate


def summed_axes(eqn: Any) -> tuple[Axes, Axes]:
    """The axes of both operands of a contraction that share a scale because they are summed over."""
    numbers = eqn.params["dimension_numbers"]
    if eqn.primitive.name == "dot_general":
        (left, right), _ = numbers
        return tuple(left), tuple(right)
    # Windows run over the spatial axes, so an image has a scale per example, a kernel per filter.
    left, right = numbers.lhs_spec, numbers.rhs_spec
    return tuple(left[1:]), other_axes((right[0],), len(right))
