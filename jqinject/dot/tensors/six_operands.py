"""The one contraction: `y = x w`, and backward `dx = g w^T` and `dw = x^T g`, each of operands of its own.

`product` contracts any two of them in the numbers that they have in common. What the backward products take by default
is what the forward product took: the payload where it fits, else the dequantized value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jqinject.dot.geometry.labels import Labelling, Labels, summed_labels, tile_of
from jqinject.dot.geometry.sharding import sharding_before
from jqinject.dot.tensors.backward_quantizer import BackwardQuantizer
from jqinject.dot.tensors.labelled_tensor import LabelledTensor, cut, joined, quantized_along
from jqinject.dot.tensors.product import PLAIN, Sums, product
from jqinject.ops.derivatives import backward_only, first_order
from jqinject.ops.minifloats.low_bits import LowBits, as_bits
from jqinject.quant_tensor import FloatQuantTensor, as_array

NO_SECOND_DERIVATIVE = (
    "a quantized contraction has no second derivative: rounding has none.\n"
    "  cure: differentiate it once, or use jax.lax.dot_general where it is differentiated twice"
)


@dataclass(frozen=True)
class Plan:
    """What is static in one contraction and its gradients.

    Attributes:
        labels: of the axes of both operands and the output.
        dtype: of the output.
        fprop, dgrad, wgrad: how the products sum.
        out_sharding: of the output, as for `lax.dot_general`.
    """

    labels: Labelling
    dtype: np.dtype
    fprop: Sums = PLAIN
    dgrad: Sums = PLAIN
    wgrad: Sums = PLAIN
    out_sharding: Any = None


class Backward(NamedTuple):
    """The operands of the backward products.

    Attributes:
        dgrad_grad, wgrad_grad: the quantizer of `g` and its slot; (None, None) leaves it float.
        dgrad_rhs, wgrad_lhs: `w` and `x` as these products take them; None for what the forward product took.
    """

    dgrad_grad: tuple[BackwardQuantizer | None, jax.Array | None] = (None, None)
    dgrad_rhs: LabelledTensor | None = None
    wgrad_lhs: LabelledTensor | None = None
    wgrad_grad: tuple[BackwardQuantizer | None, jax.Array | None] = (None, None)


class _Kept(NamedTuple):
    """What has no gradient."""

    lhs: Any
    rhs: Any
    dgrad_rhs: Any
    wgrad_lhs: Any
    dgrad_grad: BackwardQuantizer | None
    wgrad_grad: BackwardQuantizer | None


@dataclass(frozen=True)
class _Static:
    plan: Plan
    lhs: Labels
    rhs: Labels
    dgrad_rhs: Labels | None
    wgrad_lhs: Labels | None


def contract_operands(plan: Plan, lhs: LabelledTensor, rhs: LabelledTensor, backward: Backward) -> jax.Array:
    """The contraction of two operands, whose gradients go straight to their values.

    Args:
        plan: what is static.
        lhs, rhs: the operands as the forward product takes them: arrays or QuantTensors, their axes in any order, cut
            into tiles or not.
        backward: what the backward products take.

    Returns:
        An array, its axes in the order of `plan.labels.out`.
    """
    (dgrad, dgrad_slot), (wgrad, wgrad_slot) = backward.dgrad_grad, backward.wgrad_grad
    others = backward.dgrad_rhs, backward.wgrad_lhs
    labels = [None if x is None else x.labels for x in others]
    w, x = (None if x is None else x.tensor for x in others)
    kept = _Kept(lhs.tensor, rhs.tensor, w, x, dgrad, wgrad)
    with backward_only("a quantized contraction"):
        return _contract(
            _Static(plan, lhs.labels, rhs.labels, labels[0], labels[1]),
            as_array(lhs.tensor),
            as_array(rhs.tensor),
            (dgrad_slot, wgrad_slot),
            jax.tree.map(jax.lax.stop_gradient, kept),
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _contract(static: _Static, lhs: jax.Array, rhs: jax.Array, slots: Any, kept: _Kept) -> jax.Array:
    plan = static.plan
    left, right = LabelledTensor(kept.lhs, static.lhs), LabelledTensor(kept.rhs, static.rhs)
    return product(left, right, plan.labels.out, plan.dtype, plan.fprop, plan.out_sharding)


def _fwd(static: _Static, lhs: jax.Array, rhs: jax.Array, slots: Any, kept: _Kept) -> Any:
    lhs, rhs = first_order(lhs, NO_SECOND_DERIVATIVE), first_order(rhs, NO_SECOND_DERIVATIVE)
    packed = jax.tree.map(_packed, kept, is_leaf=_is_float8)
    return _contract(static, lhs, rhs, slots, kept), (slots, as_bits(packed))


def _bwd(static: _Static, residuals: tuple[Any, LowBits], g: jax.Array) -> Any:
    slots = residuals[0]
    kept: _Kept = jax.tree.map(_unpacked, residuals[1].floats(), is_leaf=_is_packed)
    plan, g = static.plan, first_order(g, NO_SECOND_DERIVATIVE)
    lhs, rhs = LabelledTensor(kept.lhs, static.lhs), LabelledTensor(kept.rhs, static.rhs)
    w = joined(rhs) if static.dgrad_rhs is None else LabelledTensor(kept.dgrad_rhs, static.dgrad_rhs)
    x = joined(lhs) if static.wgrad_lhs is None else LabelledTensor(kept.wgrad_lhs, static.wgrad_lhs)
    gradient = LabelledTensor(g, plan.labels.out)
    of_lhs, dgrad_seen = _gradient(plan.dgrad, gradient, (kept.dgrad_grad, slots[0]), w, lhs)
    of_rhs, wgrad_seen = _gradient(plan.wgrad, gradient, (kept.wgrad_grad, slots[1]), x, rhs)
    return of_lhs, of_rhs, (dgrad_seen, wgrad_seen), None


_contract.defvjp(_fwd, _bwd)


def _gradient(
    sums: Sums, g: LabelledTensor, by: tuple[Any, Any], other: LabelledTensor, like: LabelledTensor
) -> tuple[jax.Array, Any]:
    """One of the two backward products, and what the gradient's quantizer has seen.

    Args:
        sums: how it sums.
        g: the cotangent of the output.
        by: its quantizer and slot.
        other: the other operand.
        like: the operand whose gradient this is.
    """
    array = as_array(like.tensor)
    whole = joined(LabelledTensor(array, like.labels))
    g, other, summed = in_tiles(sums, g, other, whole.labels)
    seen = None
    taken, slot = by
    if taken is not None:
        g, seen = taken(g.tensor, slot, partial(quantized_gradient, g.labels, summed))
    made = product(
        g,
        other,
        whole.labels,
        array.dtype,
        sums,
        sharding_of=lambda permutation: sharding_before(permutation, whole.tensor),
    )
    return made.reshape(array.shape), seen


def in_tiles(
    sums: Sums, a: LabelledTensor, b: LabelledTensor, out: Labels
) -> tuple[LabelledTensor, LabelledTensor, Labels]:
    """Both operands with the first summed axis in tiles, and the axes that quantizers see as summed."""
    summed = summed_labels(a.labels, b.labels, out)
    if sums.tile_size is None or not summed:
        return a, b, summed
    a, b = (x if tile_of(summed[0]) in x.labels else cut(x, summed[0], sums.tile_size) for x in (a, b))
    return a, b, summed


def quantized_gradient(labels: Labels, summed: Labels, proxy: Any, g: jax.Array) -> LabelledTensor:
    """A gradient quantized for the product that sums over some of its axes."""
    return quantized_along(
        proxy.quantize_gradient,
        LabelledTensor(g, labels),
        summed,
        merges=proxy.quant_metadata.group_size is None,
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Float8:
    """8-bit floats as they are kept for the backward pass: the payload and its scale."""

    payload: jax.Array
    scale: jax.Array
    like: jax.Array


def _is_float8(x: Any) -> bool:
    return isinstance(x, FloatQuantTensor)


def _is_packed(x: Any) -> bool:
    return isinstance(x, _Float8)


def _packed(x: Any) -> Any:
    if not _is_float8(x) or not x.is_contractible:
        return x
    return _Float8(x.payload(), x.scale, jax.numpy.zeros((0,), x.dtype))


def _unpacked(x: Any) -> Any:
    return FloatQuantTensor.from_payload(x.payload, x.scale, dtype=x.like.dtype) if _is_packed(x) else x
