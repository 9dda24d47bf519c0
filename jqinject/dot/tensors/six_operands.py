"""The one contraction: `y = x w`, and backward `dx = g w^T` and `dw = x^T g`, each with its own operands.

`product` contracts any two of them in the numbers that they have in common. By default, backward products use the
forward product's operands: the payload if it fits, else the dequantized value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.geometry.labels import Labelling, Labels, dimensions_of
from jqinject.dot.geometry.sharding import sharding_before
from jqinject.dot.kernels.integer import IntegerOperand, affine_dot_general
from jqinject.dot.tensors.labelled_tensor import LabelledTensor, in_tiles, joined, quantized_by
from jqinject.dot.tensors.packed_tensor import (
    is_packed,
    packed_tensor,
    shape_alone,
    shaped_like,
    unpacked_tensor,
)
from jqinject.dot.tensors.product import PLAIN, Sums, product
from jqinject.dot.tensors.two_levels import TwoLevels
from jqinject.ops.float8_cast import to_float8_again
from jqinject.ops.float_grid import FloatGrid
from jqinject.ops.observe import mapped_with, summed_like
from jqinject.ops.packing import LowBits, as_bits
from jqinject.ops.ste import explain_forward_mode, first_order
from jqinject.quant_tensor import (
    FloatQuantTensor,
    QuantTensor,
    is_quantized,
    on_integers,
    on_minifloats,
)


@dataclass(frozen=True)
class Plan:
    """The static part of a contraction and its gradients.

    Attributes:
        labels: of the axes of both operands and the output.
        dtype: of the output.
        fprop, dgrad, wgrad: how the products sum.
        out_sharding: of the output, as for `lax.dot_general`.
        grad_dtype: the 8-bit float dtype of an output cotangent that is already quantized, whose scale is the cotangent
            of the token; else None.
        what: the contraction, in words.
    """

    labels: Labelling
    dtype: np.dtype
    fprop: Sums = PLAIN
    dgrad: Sums = PLAIN
    wgrad: Sums = PLAIN
    out_sharding: Any = None
    grad_dtype: np.dtype | None = None
    what: str = "a quantized contraction"

    @property
    def no_second_derivative(self) -> str:
        """The error of differentiating twice."""
        return (
            f"{self.what} has no second derivative: rounding has none.\n  cure: contraction='float' on the layers that "
            "are differentiated twice, jax.lax.dot_general for operations"
        )


@lru_cache(maxsize=1024)
def plan_of_integers(
    dims: Dimensions, dtype: np.dtype, accumulator_dtype: Any = None, out_sharding: Any = None
) -> Plan:
    """The plan of a contraction of integers; backward, the gradient is contracted with floats in its own dtype.

    Args:
        dims, out_sharding: as for `lax.dot_general`.
        dtype: of the output.
        accumulator_dtype: of integers; None means int32.
    """
    backward, forward = Sums(floats="first"), Sums(accumulator_dtype)
    labels, what = Labelling.of(dims), "a contraction of integers"
    return Plan(labels, dtype, forward, backward, backward, out_sharding, what=what)


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


def contract_operands(
    plan: Plan,
    lhs: LabelledTensor,
    rhs: LabelledTensor,
    dgrad: BackwardProduct = UNCHANGED,
    wgrad: BackwardProduct = UNCHANGED,
) -> tuple[jax.Array, jax.Array | None]:
    """The contraction of two operands, with gradients straight through to their values.

    Args:
        plan: the static part.
        lhs, rhs: the forward product's operands: arrays or QuantTensors, axes in any order, in tiles or not. A stored
            right one gets no gradient.
        dgrad, wgrad: the backward products' operands.

    Returns:
        (an array, its axes in the order of `plan.labels.out`; a token, a float32 0 whose cotangent is the scale of the
        quantized gradient, None without `plan.grad_dtype`).
    """
    values, kept = operands_of(lhs.tensor, rhs.tensor, dgrad, wgrad)
    of_dgrad = None if dgrad.other is None else dgrad.other.labels
    of_wgrad = None if wgrad.other is None else wgrad.other.labels
    static = _Static(plan, lhs.labels, rhs.labels, (of_dgrad, of_wgrad), values[1] is None)
    try:
        return _contract(static, *values, (dgrad.slot, wgrad.slot), kept)
    except TypeError as error:
        explain_forward_mode(error, plan.what)
        raise


def contract_integers(
    lhs: IntegerOperand,
    rhs: IntegerOperand,
    dims: Dimensions,
    dtype: Any,
    accumulator_dtype: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """The contraction of integers, with the gradients of the contraction of their floats.

    Args:
        lhs, rhs: the operands; a stored right one gets no gradient.
        dims, out_sharding: as for `lax.dot_general`.
        dtype: of the output.
        accumulator_dtype: of the sums; None means int32.
    """
    plan = plan_of_integers(dims, np.dtype(dtype), accumulator_dtype, out_sharding)
    static = _Static(plan, plan.labels.lhs, plan.labels.rhs, (None, None), rhs.value is None)
    kept = KeptOperands(lhs, rhs, (None, None), (None, None), (None, None))
    try:
        return _contract(static, lhs.value, rhs.value, (None, None), kept)[0]
    except TypeError as error:
        explain_forward_mode(error, plan.what)
        raise


def operands_of(
    lhs: Any, rhs: Any, dgrad: BackwardProduct, wgrad: BackwardProduct
) -> tuple[list[Any], KeptOperands]:
    """What a derivative rule takes: the floats that receive gradients, None for a stored right operand; the rest.

    Args:
        lhs, rhs: arrays, QuantTensors or `IntegerOperand`s.
        dgrad, wgrad: the backward products' operands.
    """
    values, tensors = [lhs, rhs], [lhs, rhs]
    for by in (dgrad, wgrad):
        tensors.append(None if by.other is None else by.other.tensor)
    if (on_minifloats(rhs) or on_integers(rhs)) and rhs.is_stored:
        values[1] = None
    for place, x in enumerate(values):
        if isinstance(x, QuantTensor):
            values[place] = x.carrier
        elif isinstance(x, IntegerOperand):
            values[place] = x.value
    for place, x in enumerate(tensors):
        if is_quantized(x):
            tensors[place] = packed_tensor(x)
    left, right, *others = tensors
    quantizers, folded = (dgrad.quantizer, wgrad.quantizer), (dgrad.folded, wgrad.folded)
    return values, KeptOperands(left, right, tuple(others), quantizers, folded)


def _forward(
    static: _Static, lhs: jax.Array, rhs: jax.Array | None, slots: Any, kept: KeptOperands
) -> tuple[jax.Array, jax.Array | None]:
    plan, left, right = static.plan, kept.lhs, kept.rhs
    if isinstance(right, IntegerOperand):
        dims, _ = dimensions_of(static.lhs, static.rhs, plan.labels.out)
        of_right: Any = right.integers
        by = plan.dtype, plan.fprop.accumulator_dtype, plan.out_sharding
        return affine_dot_general(left.integers, of_right, dims, *by), None
    left, right = unpacked_tensor(left), unpacked_tensor(right)
    y = product(
        LabelledTensor(left, static.lhs),
        LabelledTensor(right, static.rhs),
        plan.labels.out,
        plan.dtype,
        plan.fprop,
        plan.out_sharding,
    )
    if plan.grad_dtype is None:
        return y, None
    return y, mapped_with(jnp.asarray(np.float32(0)), shaped_like(left), shaped_like(right))


_contract = jax.custom_vjp(_forward, nondiff_argnums=(0,))


def _fwd(static: _Static, lhs: jax.Array, rhs: jax.Array | None, slots: Any, kept: KeptOperands) -> Any:
    # This forward pass is only differentiated by a second derivative.
    *_, kept = first_order((lhs, rhs, kept), static.plan.no_second_derivative)
    return _forward(static, lhs, rhs, slots, kept), (
        slots,
        kept.without_unused().for_backward(),
    )


def _bwd(static: _Static, residuals: tuple[Any, LowBits], cotangents: Any) -> Any:
    plan, slots, kept = static.plan, residuals[0], KeptOperands.from_forward(residuals[1])
    g = first_order(cotangents[0], plan.no_second_derivative)
    if plan.grad_dtype is not None:
        g = _requantized(g, cotangents[1], plan.grad_dtype)
    forward = LabelledTensor(kept.lhs, static.lhs), LabelledTensor(kept.rhs, static.rhs)
    found: list[Any] = [None, None]
    seen: list[Any] = [None, None]
    for number, sums in enumerate((plan.dgrad,) if static.stored else (plan.dgrad, plan.wgrad)):
        labels, other = static.others[number], kept.others[number]
        other = joined(forward[1 - number]) if labels is None else LabelledTensor(other, labels)
        folded, by = kept.folded[number], (kept.quantizers[number], slots[number])
        scaled = g if folded is None else (g * folded).astype(g.dtype)
        gradient = LabelledTensor(scaled, plan.labels.out)
        found[number], seen[number] = _gradient(sums, gradient, by, other, forward[number])
    return *found, tuple(seen), None


_contract.defvjp(_fwd, _bwd)


def _requantized(g: jax.Array, scale: jax.Array, dtype: np.dtype) -> FloatQuantTensor:
    """The payload of a gradient that arrives quantized."""
    return FloatQuantTensor.stored(
        to_float8_again(g, scale, dtype), scale, None, FloatGrid.of_dtype(dtype), g.dtype
    )


def _gradient(
    sums: Sums, g: LabelledTensor, by: tuple[Any, Any], other: LabelledTensor, like: LabelledTensor
) -> tuple[jax.Array, Any]:
    """One of the two backward products, and the report of the gradient's quantizer.

    Args:
        sums: how it sums.
        g: the cotangent of the output.
        by: its quantizer and slot.
        other: the other operand.
        like: the operand whose gradient this is.
    """
    array = shaped_like(like.tensor)
    whole = joined(LabelledTensor(array, like.labels))
    g, other, summed = in_tiles(sums.tiles, g, other, whole.labels)
    seen = None
    taken, slot = by
    if taken is not None:
        g, seen = taken(g.tensor, slot, partial(quantized_gradient, g.labels, summed))
    dtype = like.tensor.dtype
    made = product(
        g,
        other,
        whole.labels,
        jnp.float32 if sums.floats == "float32" else dtype,
        sums,
        sharding_of=lambda permutation: sharding_before(permutation, whole.tensor),
    )
    return summed_like(made.reshape(array.shape), array).astype(dtype), seen


def quantized_gradient(labels: Labels, summed: Labels, proxy: Any, g: jax.Array) -> LabelledTensor:
    """A gradient quantized for a product that sums over some of its axes."""
    return quantized_by(proxy, LabelledTensor(g, labels), summed)
