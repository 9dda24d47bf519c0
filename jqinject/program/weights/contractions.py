"""Contractions of a program: which operand is a weight, and which of its axes may have several scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jqinject.program.operations import Operation
from jqinject.program.policy import ActivationProduct, Choice, Site, other_axes
from jqinject.program.tracing.scopes import weight_scope
from jqinject.program.tracked_value import Origin, Tracked, shape_of
from jqinject.program.weights.contract import Contracted, contract, contract_float8, contracts_payloads
from jqinject.program.weights.parameters import (
    as_activation,
    dotted,
    name_of_quantizer,
    note_use,
    weight_among,
)
from jqinject.quant_tensor import as_array

Axes = tuple[int, ...]
BY_SCHEME = ("dot_general", "conv_general_dilated")


def contraction(
    run: Any,
    operation: Operation,
    path: str,
    inputs: Sequence[Tracked],
    evaluate: Callable[[list[Any]], list[Any]],
    eqn: Any,
) -> list[Tracked]:
    """Run a contraction on quantized operands."""
    lhs, rhs = inputs[:2]
    weight = weight_among(lhs, rhs) if run.policy.follows_parameters else None
    read = next((x.weight_path for x in (lhs, rhs) if x.weight_path), ())
    choice, name = run.choose(path, operation, () if weight is None else inputs[weight].weight_path, read)
    if run.policy.flattens_weights and _is_flattened(run, operation, eqn, rhs):
        rhs = rhs.with_value(run.constant(lambda: rhs.value.reshape(rhs.value.shape[0], -1)))
        evaluate = _flattened(eqn, inputs[1].value.shape[1:])
    if lhs.origin is Origin.CONSTANT and lhs.is_float:
        run.policy.not_an_activation(path, f"the left operand of {name}")
    swapped = operation.name == "einsum" and lhs.is_weight and rhs.is_activation
    labels = ("_rhs", "_lhs") if swapped else ("_lhs", "_rhs")
    summed = summed_axes(eqn)
    taken: list[Tracked] = []
    for place, (x, other) in enumerate(((lhs, rhs), (rhs, lhs))):
        if place != weight:
            x = as_activation(x) if run.policy.follows_parameters else x
            x = _operand(run, x, other, choice, name + labels[place], summed[place], place)
        taken.append(x)
    if weight is not None:
        used, beside = inputs[weight], taken[1 - weight]
        free = free_axes(eqn, weight, len(shape_of(used)))
        note_use(
            run, choice, name, operation.name, used, summed[weight], eqn, beside, free, mapped=run.maps(eqn)
        )
    elif lhs.is_activation and rhs.is_activation:
        by = (name_of_quantizer(run, choice, name, x) for x in taken)
        run.products.append(ActivationProduct(run.names.full(name), operation.name, *by, equation=eqn))
    rest = [x.array for x in inputs[2:]]
    with weight_scope(() if weight is None else inputs[weight].weight_path):
        if choice is not None and choice.scheme is not None:
            found = _by_scheme(run, choice, name, operation, eqn, (lhs, rhs), weight)
        else:
            found = _contracted(run, choice, eqn, name, taken, rest, evaluate)
    value = _with_gradient(run, choice, name, found)
    if weight is not None and inputs[weight].low_rank is not None:
        value = value + _update(run, name, eqn, inputs, weight, evaluate).astype(value.dtype)
    if not (lhs.is_activation or rhs.is_activation):
        return [Tracked(value)]
    out = run.output(value, choice, name)
    out.fusible = True
    return [out]


def _contracted(
    run: Any,
    choice: Choice | None,
    eqn: Any,
    name: str,
    taken: Sequence[Tracked],
    rest: list[Any],
    evaluate: Callable[[list[Any]], list[Any]],
) -> Contracted:
    """The contraction, by the operands' payloads or by their floats."""
    left, right = (x.value for x in taken)
    if contracts_payloads(choice, left, right):
        grad_dtype = run.quantizers.grad_dtype(run.names.full(f"{name}_grad"))
        found = contract_float8(eqn, choice, left, right, grad_dtype)
        return found or Contracted(contract(eqn, choice, left, right, rest, evaluate))
    (value,) = evaluate([*(x.array for x in taken), *rest])
    return Contracted(value)


def _by_scheme(
    run: Any,
    choice: Choice,
    name: str,
    operation: Operation,
    eqn: Any,
    operands: Sequence[Tracked],
    weight: int | None,
) -> Contracted:
    """The contraction by a scheme, which quantizes its operands itself; a parameter comes quantized.

    Raises:
        ValueError: a scheme does not say how such a contraction is done.
    """
    kind = eqn.primitive.name
    if kind not in BY_SCHEME or (weight == 0 and kind != "dot_general"):
        path = dotted(operands[weight].weight_path) if weight is not None else name
        what = (
            f"a {operation.name}" if kind not in BY_SCHEME else "a convolution with a parameter for its image"
        )
        raise ValueError(
            f"{path}: a scheme does not say how {what} is contracted ({name}).\n  cure: Rule({path!r}), which keeps it "
            "float, or a rule with weight_quant and input_quant, before the rule with the scheme"
        )
    apart = weight is not None and choice.parameter is not None
    path = () if weight is None else operands[weight].weight_path
    site = Site(run.names.full(name), choice.scheme, is_weight=apart, weight_path=path, contraction=kind)
    run.sites[site.name] = site
    values = [x.value if apart and place == weight else x.array for place, x in enumerate(operands)]
    unrounded = operands[weight].unrounded if apart and weight is not None else None
    return Contracted(run.quantizers.contract(site, eqn, *values, weight, unrounded))


def _with_gradient(run: Any, choice: Choice | None, name: str, found: Contracted) -> Any:
    """The output, with its gradient's quantizer if it has one."""
    if choice is None or choice.grad is None:
        return found.value
    site = Site(run.names.full(f"{name}_grad"), choice.grad, shape=tuple(found.value.shape))
    run.sites[site.name] = site
    return as_array(run.quantizers.quantize(site, found.value, found.token))


def _update(
    run: Any, name: str, eqn: Any, inputs: Sequence[Tracked], weight: int, evaluate: Callable[..., Any]
) -> Any:
    """The contraction of the other operand, not quantized, with the weight's low-rank update."""
    low_rank = inputs[weight].low_rank
    assert low_rank is not None, "asked for where there is one"
    own = run.names.full(name)
    names = (own, low_rank.lookup) if low_rank.lookup else (own,)
    run.adapted.update((inputs[weight].weight_path, one) for one in names)
    x = inputs[1 - weight].array
    if low_rank.dropout:
        site = Site(low_rank.dropout, None)
        run.sites[site.name] = site
        x = run.quantizers.quantize(site, x)
    rest = [operand.array for operand in inputs[2:]]
    return low_rank.contracted(eqn, x, weight, rest, shape_of(inputs[weight]), evaluate)


def _operand(
    run: Any, x: Tracked, other: Tracked, choice: Choice | None, name: str, summed: Axes, place: int
) -> Tracked:
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
    own = (choice.lhs, choice.rhs)[place] if other.is_activation else None
    wanted = own or (None if choice.inputs is None else x.pending or choice.inputs)
    return x if wanted is None else run.quantized(x, wanted, name)


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


def free_axes(eqn: Any, place: int, ndim: int) -> Axes:
    """The axes of a contraction's operand that its output has, and the other operand does not."""
    name, params = eqn.primitive.name, eqn.params
    if name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        return ((numbers.lhs_spec, numbers.rhs_spec)[place][0],)
    if name == "ragged_dot_general":
        ragged = params["ragged_dot_dimension_numbers"]
        contracted, batch = ragged.dot_dimension_numbers
        groups = ragged.rhs_group_dimensions if place == 1 else ()
        return other_axes((*contracted[place], *batch[place], *groups), ndim)
    contracted, batch = params["dimension_numbers"]
    return other_axes((*contracted[place], *batch[place]), ndim)


def summed_axes(eqn: Any) -> tuple[Axes, Axes]:
    """The axes of both operands of a contraction that share a scale because they are summed over."""
    if eqn.primitive.name == "ragged_dot_general":
        (left, right), _ = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        return tuple(left), tuple(right)
    numbers = eqn.params["dimension_numbers"]
    if eqn.primitive.name == "dot_general":
        (left, right), _ = numbers
        return tuple(left), tuple(right)
    # Windows run over the spatial axes, so an image has a scale per example, a kernel per filter.
    left, right = numbers.lhs_spec, numbers.rhs_spec
    return tuple(left[1:]), other_axes((right[0],), len(right))
