"""The one contraction: `y = x w`, and backward `dx = g w^T` and `dw = x^T g`, each with its own operands.

`product` contracts any two of them in the numbers that they have in common. By default, backward products use the
forward product's operands: the payload if it fits, else the dequantized value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot.geometry.labels import Label, Labelling, Labels, summed_labels, tile_of
from jqinject.dot.geometry.sharding import sharding_before
from jqinject.dot.geometry.tiles import LocalAqt
from jqinject.dot.tensors.labelled_tensor import LabelledTensor, cut, joined, quantized_by
from jqinject.dot.tensors.packed_tensor import (
    is_packed,
    is_tensor,
    packed_tensor,
    shaped_like,
    unpacked_tensor,
)
from jqinject.dot.tensors.product import PLAIN, Sums, product
from jqinject.ops.derivatives import backward_only, first_order
from jqinject.ops.minifloats.float8_cast import to_float8_again
from jqinject.ops.minifloats.low_bits import LowBits, as_bits
from jqinject.ops.observe import mapped_with, summed_like
from jqinject.quant_tensor import FloatQuantTensor, IntQuantTensor, as_array

NO_SECOND_DERIVATIVE = (
    "a quantized contraction has no second derivative: rounding has none.\n"
    "  cure: contraction='float' on the layers that are differentiated twice, jax.lax.dot_general for operations"
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
    """

    labels: Labelling
    dtype: np.dtype
    fprop: Sums = PLAIN
    dgrad: Sums = PLAIN
    wgrad: Sums = PLAIN
    out_sharding: Any = None
    grad_dtype: np.dtype | None = None


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


class _Kept(NamedTuple):
    """Arguments without gradient: both operands, then each backward product's other operand, quantizer and factor."""

    lhs: Any
    rhs: Any
    others: tuple[Any, ...]
    quantizers: tuple[Any, Any]
    folded: tuple[Any, Any]


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
    others = dgrad.other, wgrad.other
    labels = tuple(None if x is None else x.labels for x in others)
    tensors = tuple(None if x is None else x.tensor for x in others)
    kept = _Kept(
        lhs.tensor, rhs.tensor, tensors, (dgrad.quantizer, wgrad.quantizer), (dgrad.folded, wgrad.folded)
    )
    packed = jax.tree.map(packed_tensor, kept, is_leaf=is_tensor)
    stored = isinstance(rhs.tensor, FloatQuantTensor | IntQuantTensor) and rhs.tensor.is_stored
    with backward_only("a quantized contraction"):
        return _contract(
            _Static(plan, lhs.labels, rhs.labels, (labels[0], labels[1]), stored),
            as_array(lhs.tensor),
            None if stored else as_array(rhs.tensor),
            (dgrad.slot, wgrad.slot),
            packed,
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _contract(static: _Static, lhs: jax.Array, rhs: jax.Array | None, slots: Any, kept: _Kept) -> Any:
    return _forward(static, kept)


def _forward(static: _Static, kept: _Kept) -> tuple[jax.Array, jax.Array | None]:
    plan = static.plan
    left, right = (unpacked_tensor(x) for x in (kept.lhs, kept.rhs))
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


def _fwd(static: _Static, lhs: jax.Array, rhs: jax.Array | None, slots: Any, kept: _Kept) -> Any:
    # This forward pass is only differentiated by a second derivative.
    *_, kept = first_order((lhs, rhs, kept), NO_SECOND_DERIVATIVE)
    return _forward(static, kept), (slots, as_bits(kept))


def _bwd(static: _Static, residuals: tuple[Any, LowBits], cotangents: Any) -> Any:
    slots = residuals[0]
    kept: _Kept = jax.tree.map(unpacked_tensor, residuals[1].floats(), is_leaf=is_packed)
    plan, g = static.plan, first_order(cotangents[0], NO_SECOND_DERIVATIVE)
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
    return FloatQuantTensor.stored(to_float8_again(g, scale, dtype), scale, g.dtype)


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
    g, other, summed = in_tiles(sums, g, other, whole.labels)
    seen = None
    taken, slot = by
    if taken is not None:
        g, seen = taken(g.tensor, slot, partial(quantized_gradient, g.labels, summed))
    dtype = like.tensor.dtype
    made = product(
        g,
        other,
        whole.labels,
        jnp.float32 if sums.in_float32 else dtype,
        sums,
        sharding_of=lambda permutation: sharding_before(permutation, whole.tensor),
    )
    return summed_like(made.reshape(array.shape), array).astype(dtype), seen


def in_tiles(
    sums: Sums, a: LabelledTensor, b: LabelledTensor, out: Labels
) -> tuple[LabelledTensor, LabelledTensor, Labels]:
    """Both operands with one summed axis in tiles, and the axes that quantizers see as summed."""
    summed = summed_labels(a.labels, b.labels, out)
    if sums.tiles is None or not summed:
        return a, b, summed
    cut = tiled_label(sums.tiles, a, summed)
    return in_tiles_of(sums.tiles, a, cut), in_tiles_of(sums.tiles, b, cut), summed


def tiled_label(tiles: LocalAqt, x: LabelledTensor, summed: Labels) -> Label:
    """Which summed axis is cut."""
    ordered = sorted(summed)
    return ordered[tiles.pair([_length(x, label) for label in ordered])]


def in_tiles_of(tiles: LocalAqt, x: LabelledTensor, label: Label) -> LabelledTensor:
    """An operand with an axis in tiles, unless it already is."""
    if tile_of(label) in x.labels:
        return x
    size = tiles.contraction_axis_shard_size
    if size is None:
        length = _length(x, label)
        size = length // tiles.count(length)
    return cut(x, label, size)


def _length(x: LabelledTensor, label: Label) -> int:
    return x.tensor.shape[x.axis(label)]


def quantized_gradient(labels: Labels, summed: Labels, proxy: Any, g: jax.Array) -> LabelledTensor:
    """A gradient quantized for a product that sums over some of its axes."""
    return quantized_by(proxy, LabelledTensor(g, labels), summed)
