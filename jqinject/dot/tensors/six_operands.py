"""The one contraction: `y = x w`, and backward `dx = g w^T` and `dw = x^T g`, each with its own operands.

One derivative rule for `dot_general` (and so for einsum), convolutions and ragged contractions, which differ in their
`plans`. What a backward product takes is data, a `BackwardProduct`: by default the forward product's operand, its
payload if it fits, else the dequantized value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot.geometry.labels import Labels
from jqinject.dot.kernels.integer import IntegerOperand
from jqinject.dot.tensors.labelled_tensor import LabelledTensor, in_tiles, joined, quantized_by
from jqinject.dot.tensors.packed_tensor import (
    TwoLevels,
    is_packed,
    packed_tensor,
    shape_alone,
    shaped_like,
    unpacked_tensor,
)
from jqinject.dot.tensors.plans import Plan
from jqinject.ops.float8_cast import to_float8_again
from jqinject.ops.float_grid import FloatGrid
from jqinject.ops.observe import mapped_with, summed_like
from jqinject.ops.packing import LowBits, as_bits
from jqinject.ops.ste import backward_only, first_order
from jqinject.quant_tensor import (
    FloatQuantTensor,
    QuantTensor,
    is_quantized,
    on_integers,
    on_minifloats,
)


class BackwardProduct(NamedTuple):
    """The operands of one of the two backward products; by default both unchanged.

    Attributes:
        quantizer: of `g`; None leaves it float.
        slot: where that quantizer reports; None if it does not.
        other: `w` or `x` for this product; None for the forward product's.
        folded: factor of `g`: the scale of the payload behind `other`, laid out for `g`; None for 1.
    """

    quantizer: Any = None
    slot: jax.Array | None = None
    other: LabelledTensor | None = None
    folded: jax.Array | None = None


class KeptOperands(NamedTuple):
    """Arguments without gradient: both operands, then each backward product's other operand, quantizer and factor."""

    lhs: Any
    rhs: Any
    others: tuple[Any, ...]
    quantizers: tuple[Any, Any]
    folded: tuple[Any, Any]

    def without_unused(self) -> KeptOperands:
        """Without the numbers of forward operands in whose place backward products have others."""
        of_dgrad, of_wgrad = self.others
        left = self.lhs if of_wgrad is None else shape_alone(self.lhs)
        return self._replace(lhs=left, rhs=self.rhs if of_dgrad is None else shape_alone(self.rhs))

    def for_backward(self) -> LowBits:
        """What a backward pass keeps; `from_forward` reads it."""
        left, right, *others = (
            x.for_backward() if isinstance(x, IntegerOperand | TwoLevels) else x
            for x in (self.lhs, self.rhs, *self.others)
        )
        return as_bits(self._replace(lhs=left, rhs=right, others=tuple(others)))

    @staticmethod
    def from_forward(kept: LowBits) -> KeptOperands:
        """What `for_backward` kept."""
        return jax.tree.map(unpacked_tensor, kept.floats(), is_leaf=is_packed)


@dataclass(frozen=True)
class _Static:
    plan: Plan
    lhs: Labels
    rhs: Labels
    others: tuple[Labels | None, Labels | None]
    stored: bool


UNCHANGED = BackwardProduct()


def contract_by(plan: Plan, lhs: Any, rhs: Any, *rest: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """As `contract_operands`, for operands whose axes have the plan's order, backward as well."""
    labels = plan.labels
    return contract_operands(
        plan, LabelledTensor(lhs, labels.lhs), LabelledTensor(rhs, labels.rhs), rest=rest
    )


def contract_operands(
    plan: Plan,
    lhs: LabelledTensor,
    rhs: LabelledTensor,
    dgrad: BackwardProduct = UNCHANGED,
    wgrad: BackwardProduct = UNCHANGED,
    rest: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, jax.Array | None]:
    """The contraction of two operands, with gradients straight through to their values.

    Args:
        plan: the static part.
        lhs, rhs: the forward product's operands: arrays, QuantTensors or two `IntegerOperand`s, axes in any order, in
            tiles or not. A stored right one gets no gradient.
        dgrad, wgrad: the backward products' operands.
        rest: arguments without gradient, such as the sizes of ragged groups.

    Returns:
        (an array, its axes in the order of `plan.labels.out`; a token, a float32 0 whose cotangent is the scale of the
        quantized gradient, None without `plan.grad_dtype`).
    """
    backward, tensors, values = (dgrad, wgrad), [lhs.tensor, rhs.tensor], [lhs.tensor, rhs.tensor]
    tensors += [None if by.other is None else by.other.tensor for by in backward]
    if (on_minifloats(rhs.tensor) or on_integers(rhs.tensor)) and rhs.tensor.is_stored:
        values[1] = None
    for place, x in enumerate(values):
        if isinstance(x, QuantTensor):
            values[place] = x.carrier
        elif isinstance(x, IntegerOperand):
            values[place] = x.value
    left, right, *others = (packed_tensor(x) if is_quantized(x) else x for x in tensors)
    quantizers, folded = ((dgrad.quantizer, wgrad.quantizer), (dgrad.folded, wgrad.folded))
    kept = KeptOperands(left, right, tuple(others), quantizers, folded)
    of_dgrad, of_wgrad = (None if by.other is None else by.other.labels for by in backward)
    static = _Static(plan, lhs.labels, rhs.labels, (of_dgrad, of_wgrad), values[1] is None)
    with backward_only(plan.what):
        return _contract(static, *values, (dgrad.slot, wgrad.slot), kept, rest)


def _forward(
    static: _Static, lhs: jax.Array, rhs: jax.Array | None, slots: Any, kept: KeptOperands, rest: Any
) -> tuple[jax.Array, jax.Array | None]:
    plan, left, right = static.plan, unpacked_tensor(kept.lhs), unpacked_tensor(kept.rhs)
    y = plan.forward(LabelledTensor(left, static.lhs), LabelledTensor(right, static.rhs), *rest)
    if plan.grad_dtype is None:
        return y, None
    return y, mapped_with(jnp.asarray(np.float32(0)), shaped_like(left), shaped_like(right))


_contract = jax.custom_vjp(_forward, nondiff_argnums=(0,))


def _fwd(
    static: _Static, lhs: jax.Array, rhs: jax.Array | None, slots: Any, kept: KeptOperands, rest: Any
) -> Any:
    # This forward pass is only differentiated by a second derivative.
    *_, kept = first_order((lhs, rhs, kept), static.plan.no_second_derivative)
    return _forward(static, lhs, rhs, slots, kept, rest), (
        slots,
        rest,
        kept.without_unused().for_backward(),
    )


def _bwd(static: _Static, residuals: tuple[Any, Any, LowBits], cotangents: Any) -> Any:
    plan, (slots, rest, bits) = static.plan, residuals
    kept = KeptOperands.from_forward(bits)
    g = first_order(cotangents[0], plan.no_second_derivative)
    if plan.grad_dtype is not None:
        g = _requantized(g, cotangents[1], plan.grad_dtype)
    forward = LabelledTensor(kept.lhs, static.lhs), LabelledTensor(kept.rhs, static.rhs)
    found: list[Any] = [None, None]
    seen: list[Any] = [None, None]
    for number in (0,) if static.stored else (0, 1):
        labels, other = static.others[number], kept.others[number]
        other = joined(forward[1 - number]) if labels is None else LabelledTensor(other, labels)
        folded, by = kept.folded[number], (kept.quantizers[number], slots[number])
        scaled = g if folded is None else (g * folded).astype(g.dtype)
        gradient = LabelledTensor(scaled, plan.labels.out)
        found[number], seen[number] = _gradient(plan, number, gradient, by, other, forward[number], rest)
    return *found, tuple(seen), None, None


_contract.defvjp(_fwd, _bwd)


def _requantized(g: jax.Array, scale: jax.Array, dtype: np.dtype) -> FloatQuantTensor:
    """The payload of a gradient that arrives quantized."""
    return FloatQuantTensor.stored(
        to_float8_again(g, scale, dtype), scale, None, FloatGrid.of_dtype(dtype), g.dtype
    )


def _gradient(
    plan: Plan,
    number: int,
    g: LabelledTensor,
    by: tuple[Any, Any],
    other: LabelledTensor,
    like: LabelledTensor,
    rest: tuple[jax.Array, ...],
) -> tuple[jax.Array, Any]:
    """One of the two backward products, and the report of the gradient's quantizer.

    Args:
        plan: the static part.
        number: 0 for the gradient of the left operand, 1 for that of the right one.
        g: the cotangent of the output.
        by: its quantizer and slot.
        other: the other operand.
        like: the operand whose gradient this is.
        rest: arguments that are no operands.
    """
    array = shaped_like(like.tensor)
    whole = joined(LabelledTensor(array.astype(like.tensor.dtype), like.labels))
    g, other, seen = quantized_gradient(plan, number, g, by, other)
    made = plan.gradient(number, g, other, whole, *rest)
    return summed_like(made.reshape(array.shape), array).astype(like.tensor.dtype), seen


def quantized_gradient(
    plan: Plan, number: int, g: LabelledTensor, by: tuple[Any, Any], other: LabelledTensor
) -> tuple[LabelledTensor, LabelledTensor, Any]:
    """The operands of a backward product in its tiles, the gradient quantized, and the report of its quantizer.

    Args:
        plan: the static part.
        number: 0 for the gradient of the left operand, 1 for that of the right one.
        g: the cotangent of the output.
        by: its quantizer and slot; None leaves it as it is.
        other: the other operand.
    """
    quantizer, slot = by
    sums, result = ((plan.dgrad, plan.labels.lhs), (plan.wgrad, plan.labels.rhs))[number]
    g, other, summed = in_tiles(sums.tiles, g, other, result)
    if quantizer is None:
        return g, other, None
    made, seen = quantizer(g.tensor, slot, partial(_quantized, g.labels, summed, plan.in_rows))
    return made, other, seen


def _quantized(labels: Labels, summed: Labels, in_rows: bool, proxy: Any, g: jax.Array) -> LabelledTensor:
    return quantized_by(proxy, LabelledTensor(g, labels), summed, in_rows=in_rows)
