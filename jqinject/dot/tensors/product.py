"""One product of two operands: which numbers are contracted, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.geometry.labels import Labels, dimensions_of, summed_labels
from jqinject.dot.geometry.tiles import LocalAqt
from jqinject.dot.kernels.float8_dot import float8_product
from jqinject.dot.kernels.integer import affine_dot_general, affine_of, has_integers, known_zero_point
from jqinject.dot.tensors.labelled_tensor import LabelledTensor, in_large_groups, scale_beside, value_of
from jqinject.dot.tensors.packed_tensor import float32_of
from jqinject.dot.tensors.tensor_dot import describe
from jqinject.ops.devices.explicit_axes import sharded_beside
from jqinject.quant_tensor import FloatQuantTensor, GroupwiseQuantTensor, IntQuantTensor, QuantTensor


@dataclass(frozen=True)
class Sums:
    """How a product sums.

    Attributes:
        accumulator_dtype: of integers; None means int32.
        tiles: how a summed axis is cut into pieces with their own scales; None does not cut.
        in_float32: whether operands without a common payload are dequantized to float32 before the sum; else they keep
            their dtype, and a single payload is scaled after it.
    """

    accumulator_dtype: Any = None
    tiles: LocalAqt | None = None
    in_float32: bool = False


PLAIN = Sums()


@dataclass(frozen=True)
class Decision:
    """The numbers in which two operands are contracted.

    Attributes:
        kind: "int", "fp8" or "float".
        why: why an operand with a payload is contracted as dequantized floats; else empty.
    """

    kind: str
    why: str = ""


def decide(a: LabelledTensor, b: LabelledTensor, out: Labels) -> Decision:
    """The numbers in which two operands are contracted: payloads if both have them and their scales fit.

    A scale fits if it does not vary along a summed axis, except for tiles.
    """
    both = a.tensor, b.tensor
    summed = summed_labels(a.labels, b.labels, out)
    varying = [_varies(x, summed) for x in (a, b)]
    if all(isinstance(x, IntQuantTensor) and has_integers(x) for x in both):
        kind = "int"
    elif all(isinstance(x, FloatQuantTensor) and x.is_contractible for x in both):
        kind = "fp8"
        varying = [found or _varies(x, summed, tiles=True) for found, x in zip(varying, (a, b), strict=True)]
    else:
        return Decision("float", _why_not(*both))
    for x, varies in zip(both, varying, strict=True):
        if varies:
            return Decision(
                "float",
                f"of {described(x)} the scales of shape {x.scale.shape} vary along what is summed over",
            )
    return Decision(kind)


def _why_not(a: Any, b: Any) -> str:
    """Why quantized operands are contracted as floats; empty if neither is quantized."""
    quantized = [isinstance(x, QuantTensor) for x in (a, b)]
    if not all(quantized):
        return "the other operand is float" if any(quantized) else ""
    return "they have no payload in common that backends contract"


def described(x: Any) -> str:
    """An operand in words."""
    if isinstance(x, GroupwiseQuantTensor):
        return f"{described(x.grouped)} in groups of {x.groups.size}"
    return describe(x)


def _varies(x: LabelledTensor, summed: Labels, tiles: bool = False) -> bool:
    """Whether a scale or zero point varies along a summed axis."""
    tensor = x.tensor
    if not isinstance(tensor, IntQuantTensor | FloatQuantTensor):
        return False
    for found in (tensor.scale, tensor.zero_point):
        sizes = (*(1,) * (tensor.ndim - found.ndim), *found.shape)
        for label, size in zip(x.labels, sizes, strict=True):
            if size != 1 and label in summed and (tiles or label[0] != "tile"):
                return True
    return False


def product(
    a: LabelledTensor,
    b: LabelledTensor,
    out: Labels,
    dtype: Any,
    sums: Sums,
    out_sharding: Any = None,
    sharding_of: Callable[[tuple[int, ...]], Any] | None = None,
) -> jax.Array:
    """The contraction of two operands, its axes in the order of `out`. No gradient is defined for payloads.

    Args:
        a, b: the operands.
        out: labels of the result.
        dtype: of the result.
        sums: how it sums; tiles are already cut.
        out_sharding: as for `lax.dot_general`.
        sharding_of: gives `out_sharding`, from the permutation that follows; None if that is given.
    """
    a, b = in_large_groups(a, b, summed_labels(a.labels, b.labels, out))
    kind = decide(a, b, out).kind
    dims, permutation = dimensions_of(a.labels, b.labels, out)
    if kind == "int" and permutation == dims.rhs_first and permutation != tuple(range(len(out))):
        # The other order needs no transposition, and integers have the same sums.
        a, b = b, a
        dims, permutation = dimensions_of(a.labels, b.labels, out)
    sharding = out_sharding if sharding_of is None else sharding_of(permutation)
    if kind == "int":
        y = affine_dot_general(
            affine_of(a.tensor), affine_of(b.tensor), dims, dtype, sums.accumulator_dtype, sharding
        )
    elif kind == "fp8":
        y = float8_product(a.tensor, b.tensor, dims, dtype, sharding)
    elif sums.in_float32:
        left, right = float32_of(a.tensor), float32_of(b.tensor)
        y = jax.lax.dot_general(
            left, right, dims.numbers, preferred_element_type=jnp.float32, out_sharding=sharding
        ).astype(dtype)
    else:
        return _of_floats(a, b, out, dtype, (dims, permutation), sharding)
    return _in_order(y, permutation)


def _of_floats(
    a: LabelledTensor,
    b: LabelledTensor,
    out: Labels,
    dtype: Any,
    where: tuple[Dimensions, tuple[int, ...]],
    sharding: Any,
) -> jax.Array:
    """The contraction of values, or of a single operand's payload, scaled after the sum."""
    dims, permutation = where
    summed = summed_labels(a.labels, b.labels, out)
    payload = next((x for x, other in ((a, b), (b, a)) if _scales_after(x, other, summed)), None)
    left, right = (value_of(x) if x is not payload else _payload(x) for x in (a, b))
    common = (
        right.dtype
        if payload is a
        else left.dtype
        if payload is b
        else jnp.promote_types(left.dtype, right.dtype)
    )
    y = jax.lax.dot_general(
        left.astype(common),
        right.astype(common),
        dims.numbers,
        preferred_element_type=dtype if payload is None else jnp.float32,
        out_sharding=sharding,
    )
    if payload is not None:
        made = tuple(out[permutation.index(axis)] for axis in range(len(out)))
        scale = scale_beside(payload, made)
        assert scale is not None, "it does not vary along what is summed over"
        y = (y * sharded_beside(scale, y)).astype(dtype)
    return _in_order(y, permutation)


def _scales_after(x: LabelledTensor, other: LabelledTensor, summed: Labels) -> bool:
    """Whether only one operand has a payload, with scales that can be multiplied in after the sum."""
    tensor = x.tensor
    if isinstance(other.tensor, QuantTensor) or _varies(x, summed, tiles=True):
        return False
    if isinstance(tensor, IntQuantTensor):
        return has_integers(tensor) and known_zero_point(tensor)
    return isinstance(tensor, FloatQuantTensor) and tensor.is_contractible


def _payload(x: LabelledTensor) -> jax.Array:
    return x.tensor.payload() if isinstance(x.tensor, FloatQuantTensor) else affine_of(x.tensor).payload


def _in_order(y: jax.Array, permutation: tuple[int, ...]) -> jax.Array:
    return y if permutation == tuple(range(y.ndim)) else y.transpose(permutation)
