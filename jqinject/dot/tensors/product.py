"""One product of two operands, in the numbers that `decision` finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.geometry.labels import Labels, dimensions_of, summed_labels
from jqinject.dot.geometry.tiles import LocalAqt
from jqinject.dot.kernels.float8_dot import float8_product
from jqinject.dot.kernels.integer import affine_dot_general, affine_of, has_integers
from jqinject.dot.tensors.decision import decide, varies
from jqinject.dot.tensors.labelled_tensor import LabelledTensor, in_large_groups, scale_beside, value_of
from jqinject.dot.tensors.packed_tensor import float32_of
from jqinject.dot.tensors.scaled_product import scaled_product
from jqinject.dot.tensors.two_levels import first_level, levels_of
from jqinject.ops.sharding import sharded_as
from jqinject.quant_tensor import is_quantized, on_minifloats


@dataclass(frozen=True)
class Sums:
    """How a product sums.

    Attributes:
        accumulator_dtype: of integers; None means int32.
        tiles: how a summed axis is cut into pieces with their own scales; None does not cut.
        floats: how operands without a common payload are contracted: "promoted" in their common dtype, a single payload
            scaled after the sum; "float32" dequantized to float32; "first" dequantized to the dtype of the first one,
            which is the gradient in a backward product.
        scaled: whether payloads with block scales go to the backend where it takes them; see `scaled_product`.
    """

    accumulator_dtype: Any = None
    tiles: LocalAqt | None = None
    floats: Literal["promoted", "float32", "first"] = "promoted"
    scaled: bool = False


PLAIN = Sums()


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
    if sums.scaled and out_sharding is None:
        plain = partial(product, a, b, out, dtype, replace(sums, scaled=False), None, sharding_of)
        return scaled_product(a, b, out, dtype, plain)
    a, b = in_large_groups(a, b, summed_labels(a.labels, b.labels, out))
    kind = decide(a, b, out).kind
    dims, permutation = dimensions_of(a.labels, b.labels, out)
    if kind == "int" and permutation != tuple(range(len(out))) and permutation == dims.rhs_first:
        # The other order needs no transposition, and integers have the same sums.
        a, b = b, a
        dims, permutation = dimensions_of(a.labels, b.labels, out)
    sharding = out_sharding if sharding_of is None else sharding_of(permutation)
    if kind == "int":
        left, right = affine_of(a.tensor), affine_of(b.tensor)
        y = affine_dot_general(left, right, dims, dtype, sums.accumulator_dtype, sharding)
    elif kind == "fp8":
        y = float8_product(a.tensor, b.tensor, dims, dtype, sharding)
    elif levels_of(a.tensor) is not None or levels_of(b.tensor) is not None:
        y = _of_levels(a, b, dims, dtype, sharding)
    elif sums.floats == "float32":
        left, right = float32_of(a.tensor), float32_of(b.tensor)
        y = jax.lax.dot_general(
            left, right, dims.numbers, preferred_element_type=jnp.float32, out_sharding=sharding
        ).astype(dtype)
    elif sums.floats == "first":
        left, right = value_of(a), value_of(b)
        right = right.astype(left.dtype)
        y = jax.lax.dot_general(
            left, right, dims.numbers, preferred_element_type=dtype, out_sharding=sharding
        )
    else:
        return _of_floats(a, b, out, dtype, (dims, permutation), sharding)
    return _in_order(y, permutation)


def _of_levels(
    a: LabelledTensor, b: LabelledTensor, dims: Dimensions, dtype: Any, sharding: Any
) -> jax.Array:
    """The contraction of the first levels, at least one operand's; the level that a tensor shares comes after."""
    numbers, factor = [], jnp.ones((), jnp.float32)
    for x in (a, b):
        levels = levels_of(x.tensor)
        found, shared = (value_of(x), None) if levels is None else first_level(x.tensor, levels)
        numbers.append(found)
        factor = factor if shared is None else factor * shared
    common = jnp.promote_types(*(x.dtype for x in numbers))
    left, right = (x.astype(common) for x in numbers)
    y = jax.lax.dot_general(
        left, right, dims.numbers, preferred_element_type=jnp.float32, out_sharding=sharding
    )
    return (y * factor).astype(dtype)


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
        y = (y * sharded_as(scale, y)).astype(dtype)
    return _in_order(y, permutation)


def _scales_after(x: LabelledTensor, other: LabelledTensor, summed: Labels) -> bool:
    """Whether only one operand has a payload, with scales that can be multiplied in after the sum."""
    tensor = x.tensor
    if is_quantized(other.tensor) or varies(x, summed, tiles=True):
        return False
    if has_integers(tensor):
        return not tensor.has_zero_point
    return on_minifloats(tensor) and tensor.is_contractible


def _payload(x: LabelledTensor) -> jax.Array:
    return x.tensor.payload() if on_minifloats(x.tensor) else affine_of(x.tensor).payload


def _in_order(y: jax.Array, permutation: tuple[int, ...]) -> jax.Array:
    return y if permutation == tuple(range(y.ndim)) else y.transpose(permutation)
