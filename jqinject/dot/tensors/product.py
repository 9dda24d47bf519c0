"""One product of two operands, in the numbers that the table of `choice` has for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.lax import platform_dependent
from jax.typing import DTypeLike

from jqinject.dot.geometry.dimensions import Dimensions, OutSharding, scale_in_output
from jqinject.dot.geometry.labels import Labels, dimensions_of, summed_labels
from jqinject.dot.geometry.tiles import LocalAqt
from jqinject.dot.kernels.block_scales import block_product, levels_of
from jqinject.dot.kernels.integer import affine_dot_general, affine_of, has_integers
from jqinject.dot.tensors.choice import ChosenKernel, choose, varies_along
from jqinject.dot.tensors.labelled_tensor import LabelledTensor, scale_beside, value_of
from jqinject.dot.tensors.residuals import first_level, float32_of
from jqinject.ops.sharding import sharded_as
from jqinject.quant_tensor import FloatQuantTensor, is_quantized, on_minifloats


@dataclass(frozen=True)
class Sums:
    """How a product sums.

    Attributes:
        accumulator_dtype: of integers; None means int32.
        tiles: how a summed axis is cut into pieces with their own scales; None does not cut.
        floats: how operands without a common payload are contracted: "promoted" in their common dtype, a single payload
            scaled after the sum; "float32" dequantized to float32; "first" dequantized to the dtype of the first one,
            which is the gradient in a backward product.
        scaled: whether payloads with block scales go to the backend where it takes them: the table's row "blocks".
    """

    accumulator_dtype: DTypeLike | None = None
    tiles: LocalAqt | None = None
    floats: Literal["promoted", "float32", "first"] = "promoted"
    scaled: bool = False


PLAIN = Sums()


def product(
    a: LabelledTensor,
    b: LabelledTensor,
    out: Labels,
    dtype: DTypeLike,
    sums: Sums,
    out_sharding: OutSharding = None,
    like: jax.Array | None = None,
) -> jax.Array:
    """The contraction of two operands, its axes in the order of `out`. No gradient is defined for payloads.

    Args:
        a, b: the operands.
        out: labels of the result.
        dtype: of the result.
        sums: how it sums; tiles are already cut.
        out_sharding: as for `lax.dot_general`.
        like: an array with the sharding of the result on meshes with explicit axes, instead of `out_sharding`.
    """
    choice, permutation = _in_better_order(a, b, out, sums.scaled and out_sharding is None)
    dims = choice.dims
    if choice.kernel == "blocks":

        def by_blocks() -> jax.Array:
            return _in_order(block_product(a.tensor, b.tensor, dims).astype(dtype), permutation)

        plain = partial(product, a, b, out, dtype, replace(sums, scaled=False), None, like)
        return platform_dependent(default=plain, cuda=by_blocks)
    sharding = out_sharding if like is None else _sharding_before(permutation, like)
    if choice.integers is not None:
        by = dtype, sums.accumulator_dtype, sharding
        y = affine_dot_general(*choice.integers, choice.integer_dimensions, *by)
    elif choice.kernel == "float8":
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


def chosen(
    a: LabelledTensor, b: LabelledTensor, out: Labels, blocks: bool = False
) -> tuple[ChosenKernel, tuple[int, ...]]:
    """The row of the table for the contraction of two operands, and the permutation of its result to `out`.

    Args:
        a, b: the operands.
        out: labels of the result.
        blocks: as for `choose`.
    """
    dims, permutation = dimensions_of(a.labels, b.labels, out)
    summed = summed_labels(a.labels, b.labels, out)
    tiles = [pair for pair, label in enumerate(summed) if label[0] == "tile"]
    return choose(a.tensor, b.tensor, dims, apart=tiles, blocks=blocks), permutation


def _in_better_order(
    a: LabelledTensor, b: LabelledTensor, out: Labels, blocks: bool
) -> tuple[ChosenKernel, tuple[int, ...]]:
    """As `chosen`; integers have the same sums in the other order, which is taken if it needs no transposition."""
    dims, permutation = dimensions_of(a.labels, b.labels, out)
    if permutation != tuple(range(len(out))) and permutation == dims.rhs_first:
        choice, swapped_order = chosen(b, a, out)
        if choice.integers is not None:
            return choice, swapped_order
    return chosen(a, b, out, blocks)


def float8_product(
    lhs: FloatQuantTensor,
    rhs: FloatQuantTensor,
    dims: Dimensions,
    dtype: DTypeLike,
    out_sharding: OutSharding = None,
) -> jax.Array:
    """`dot(payload_l, payload_r) * scale_l * scale_r`, summed in float32. It defines no gradient.

    Args:
        lhs, rhs: in hardware's 8-bit formats, with scales that do not vary along sums.
        dims, out_sharding: as for `lax.dot_general`.
        dtype: of the output.
    """
    of_left = scale_in_output(lhs.scale, dims.lhs_ndim, dims.lhs_places, dims.out_ndim)
    of_right = scale_in_output(rhs.scale, dims.rhs_ndim, dims.rhs_places, dims.out_ndim)
    assert of_left is not None and of_right is not None, "checked by the table"
    y = jax.lax.dot_general(
        lhs.payload(),
        rhs.payload(),
        dims.numbers,
        preferred_element_type=jnp.float32,
        out_sharding=out_sharding,
    )
    return (y * (sharded_as(of_left, y) * sharded_as(of_right, y))).astype(dtype)


def _of_levels(
    a: LabelledTensor, b: LabelledTensor, dims: Dimensions, dtype: DTypeLike, sharding: OutSharding
) -> jax.Array:
    """The contraction of the first levels, at least one operand's; the level that a tensor shares comes after."""
    numbers, factor = [], jnp.ones((), jnp.float32)
    for x in (a, b):
        levels = levels_of(x.tensor)
        array, shared = (value_of(x), None) if levels is None else first_level(x.tensor, levels)
        numbers.append(array)
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
    dtype: DTypeLike,
    where: tuple[Dimensions, tuple[int, ...]],
    sharding: OutSharding,
) -> jax.Array:
    """The contraction of values, or of a single operand's payload, scaled after the sum."""
    dims, permutation = where
    summed = summed_labels(a.labels, b.labels, out)
    payload = next((x for x, partner in ((a, b), (b, a)) if _scales_after(x, partner, summed)), None)
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
        result = tuple(out[permutation.index(axis)] for axis in range(len(out)))
        scale = scale_beside(payload, result)
        assert scale is not None, "it does not vary along what is summed over"
        y = (y * sharded_as(scale, y)).astype(dtype)
    return _in_order(y, permutation)


def _scales_after(x: LabelledTensor, partner: LabelledTensor, summed: Labels) -> bool:
    """Whether only one operand has a payload, with scales that can be multiplied in after the sum."""
    tensor = x.tensor
    if is_quantized(partner.tensor):
        return False
    payload = (
        not tensor.has_zero_point
        if has_integers(tensor)
        else on_minifloats(tensor) and tensor.is_contractible
    )
    return payload and not varies_along(tensor, [x.axis(label) for label in summed])


def _payload(x: LabelledTensor) -> jax.Array:
    return x.tensor.payload() if on_minifloats(x.tensor) else affine_of(x.tensor).payload


def _in_order(y: jax.Array, permutation: tuple[int, ...]) -> jax.Array:
    return y if permutation == tuple(range(y.ndim)) else y.transpose(permutation)


def _sharding_before(permutation: tuple[int, ...], like: jax.Array) -> Any:
    """The sharding of an array whose transposition is like `like`; None on meshes that leave it to XLA."""
    sharding = jax.typeof(like).sharding
    if sharding.mesh.empty or not sharding.mesh.explicit_axes:
        return None
    axes: list[Any] = [None] * like.ndim
    for axis, place in enumerate(permutation):
        axes[place] = sharding.spec[axis]
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*axes))
