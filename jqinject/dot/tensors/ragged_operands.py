"""The derivative of a ragged contraction: integers or values forward, backward the values of six operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.dot.geometry.labels import Labels
from jqinject.dot.kernels.integer import IntegerOperand
from jqinject.dot.kernels.ragged import Ragged
from jqinject.dot.tensors.labelled_tensor import LabelledTensor, value_of
from jqinject.dot.tensors.packed_tensor import array_of, unpacked_tensor
from jqinject.dot.tensors.six_operands import (
    BackwardProduct,
    KeptOperands,
    operands_of,
    quantized_gradient,
)
from jqinject.ops.ste import backward_only, first_order

BY_SCHEME = "a ragged contraction by a scheme"
INTEGERS = "a ragged contraction of integers"


@dataclass(frozen=True)
class _Static:
    """The static part.

    Attributes:
        ragged: the contraction.
        labels: of both operands and of the output, in their own order.
        given: labels of the operands as they come.
        again: the operands that a backward product quantizes for itself; None where it takes the forward product's.
        summed: which axes of the gradient the backward products sum over.
        stored: whether the right operand gets no gradient.
        what: the contraction, for errors.
    """

    ragged: Ragged
    labels: tuple[Labels, Labels, Labels]
    given: tuple[Labels, Labels]
    again: tuple[Labels | None, Labels | None]
    summed: tuple[Labels, Labels]
    stored: bool
    what: str

    @property
    def no_second_derivative(self) -> str:
        """The error of differentiating twice."""
        return (
            f"{self.what} has no second derivative: rounding has none.\n"
            "  cure: differentiate it once, or use jax.lax.ragged_dot where it is differentiated twice"
        )


def contract_ragged_integers(
    ragged: Ragged, lhs: IntegerOperand, rhs: IntegerOperand, group_sizes: jax.Array
) -> jax.Array:
    """The contraction of integers, with gradients straight through to their floats.

    Args:
        ragged: the contraction.
        lhs, rhs: the operands; a stored right one gets no gradient.
        group_sizes: how many rows each expert gets.
    """
    left: Labels = tuple(("lhs", axis) for axis in range(ragged.lhs_ndim))
    right: Labels = tuple(("rhs", axis) for axis in range(ragged.rhs_ndim))
    static = _Static(
        ragged, (left, right, ()), (left, right), (None, None), ((), ()), rhs.value is None, INTEGERS
    )
    kept = KeptOperands(lhs, rhs, (None, None), (None, None), (None, None))
    with backward_only(INTEGERS):
        return _contract(static, lhs.value, rhs.value, (None, None), group_sizes, kept)


def contract_ragged(
    ragged: Ragged,
    operands: tuple[LabelledTensor, LabelledTensor],
    group_sizes: jax.Array,
    backward: tuple[BackwardProduct, BackwardProduct],
    labels: tuple[Labels, Labels, Labels],
    summed: tuple[Labels, Labels],
) -> jax.Array:
    """The contraction of the values of two operands, with gradients straight through to them.

    Args:
        ragged: the contraction.
        operands: of the forward product, their axes in any order.
        group_sizes: how many rows each expert gets.
        backward: the operands of both backward products.
        labels: of both operands and of the output, in the order that `ragged` counts.
        summed: the axes of the gradient that the backward products sum over.
    """
    lhs, rhs = operands
    dgrad, wgrad = backward
    values, kept = operands_of(lhs.tensor, rhs.tensor, dgrad, wgrad)
    of_dgrad, of_wgrad = (None if by.other is None else by.other.labels for by in backward)
    given, again = (lhs.labels, rhs.labels), (of_dgrad, of_wgrad)
    static = _Static(ragged, labels, given, again, summed, values[1] is None, BY_SCHEME)
    with backward_only(BY_SCHEME):
        return _contract(static, *values, (dgrad.slot, wgrad.slot), group_sizes, kept)


def _forward(
    static: _Static,
    lhs: jax.Array,
    rhs: jax.Array | None,
    slots: Any,
    group_sizes: jax.Array,
    kept: KeptOperands,
) -> jax.Array:
    if isinstance(kept.lhs, IntegerOperand) and isinstance(kept.rhs, IntegerOperand):
        assert kept.lhs.integers is not None and kept.rhs.integers is not None, "of a forward pass"
        return static.ragged.integers(kept.lhs.integers, kept.rhs.integers, group_sizes)
    left, right = (
        _value(unpacked_tensor(x), given, labels)
        for x, given, labels in zip((kept.lhs, kept.rhs), static.given, static.labels[:2], strict=True)
    )
    dtype = jnp.promote_types(left.dtype, right.dtype)
    return static.ragged.floats(left.astype(dtype), right.astype(dtype), group_sizes)


_contract = jax.custom_vjp(_forward, nondiff_argnums=(0,))


def _fwd(
    static: _Static,
    lhs: jax.Array,
    rhs: jax.Array | None,
    slots: Any,
    group_sizes: jax.Array,
    kept: KeptOperands,
) -> Any:
    *_, kept = first_order((lhs, rhs, kept), static.no_second_derivative)
    y = _forward(static, lhs, rhs, slots, group_sizes, kept)
    return y, (slots, group_sizes, kept.without_unused().for_backward())


def _bwd(static: _Static, residuals: Any, g: jax.Array) -> Any:
    slots, group_sizes, bits = residuals
    kept, (of_lhs, of_rhs, of_out) = KeptOperands.from_forward(bits), static.labels
    g = first_order(g, static.no_second_derivative)
    found: list[Any] = [None, None]
    seen: list[Any] = [None, None]
    for number in (0,) if static.stored else (0, 1):
        made: Any = g
        if kept.quantizers[number] is not None:

            def quantize(proxy: Any, g: jax.Array, summed: Labels = static.summed[number]) -> LabelledTensor:
                return quantized_gradient(of_out, summed, proxy, g)

            taken, seen[number] = kept.quantizers[number](g, slots[number], quantize)
            made = _value(taken.tensor, taken.labels, of_out).astype(g.dtype)
        again, wanted = static.again[number], (of_rhs, of_lhs)[number]
        if again is None:
            other = _value((kept.rhs, kept.lhs)[number], static.given[1 - number], wanted)
        else:
            other = _value(kept.others[number], again, wanted)
        like = array_of((kept.lhs, kept.rhs)[number])
        found[number] = _gradient(static, number, like, other, group_sizes, made)
    return *found, tuple(seen), None, None


_contract.defvjp(_fwd, _bwd)


def _gradient(
    static: _Static, number: int, like: jax.Array, other: jax.Array, group_sizes: jax.Array, g: jax.Array
) -> jax.Array:
    """The gradient of one operand: the contraction is linear in it."""
    labels = static.labels[number]
    given = static.given[number]
    primal = _value(like, given, labels)
    ragged = static.ragged

    def run(x: jax.Array) -> jax.Array:
        pair = (x, other.astype(x.dtype)) if number == 0 else (other.astype(x.dtype), x)
        return ragged.floats(*pair, group_sizes)

    _, pull = jax.vjp(run, primal)
    (found,) = pull(g.astype(ragged.dtype))
    return found.transpose([labels.index(label) for label in given])


def _value(x: Any, given: Labels, wanted: Labels) -> jax.Array:
    """The numbers of an operand as floats, its axes in the wanted order."""
    value = value_of(LabelledTensor(x, given)) if not isinstance(x, jax.Array) else x
    order = [given.index(label) for label in wanted]
    return value if order == list(range(len(order))) else value.transpose(order)
