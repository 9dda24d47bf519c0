"""One product of two operands, in the numbers that the table of `choice` has for them."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.lax import platform_dependent
from jax.typing import DTypeLike

from jqinject.dot.geometry.dimensions import Dimensions, Labels, OutSharding, scale_in_output
from jqinject.dot.geometry.tiles import LocalAqt
from jqinject.dot.kernels import block_scales, integer
from jqinject.dot.tensors.choice import ChosenKernel, choose, varies_along
from jqinject.dot.tensors.labelled_tensor import LabelledTensor
from jqinject.dot.tensors.residuals import first_level, float32_of, floats_of
from jqinject.ops.sharding import asked, before_transpose, sharded_as
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
    choice = chosen(a, b, out, sums.scaled and out_sharding is None)
    dims, integers = choice.dims, choice.integers
    if integers is not None and not dims.is_ordered and dims.swapped().is_ordered:
        # Integers have the same sums in the other order, which needs no transposition.
        dims, integers = dims.swapped(), (integers[1], integers[0])
    if choice.kernel == "blocks":

        def by_blocks(kernel: block_scales.Kernel) -> jax.Array:
            return block_scales.block_product(a.tensor, b.tensor, dims, kernel).astype(dtype)

        plain = partial(product, a, b, out, dtype, replace(sums, scaled=False), None, like)
        kernels = {on: partial(by_blocks, kernel) for on, kernel in block_scales.KERNELS.items()}
        return platform_dependent(default=plain, **kernels)
    if like is not None:
        out_sharding = before_transpose(asked(jax.typeof(like).sharding, like), dims.order)
    if integers is not None:
        return integer.affine_dot_general(*integers, dims, dtype, sums.accumulator_dtype, out_sharding)
    left, right, scales = _operands(choice.kernel, a, b, dims, sums.floats)
    wide = scales or sums.floats == "float32"
    y = jax.lax.dot_general(
        left,
        right,
        dims.numbers,
        preferred_element_type=jnp.float32 if wide else dtype,
        out_sharding=out_sharding,
    )
    if scales:
        y = y * math.prod((sharded_as(scale, y) for scale in scales[1:]), start=sharded_as(scales[0], y))
    return dims.ordered(y.astype(dtype))


def chosen(a: LabelledTensor, b: LabelledTensor, out: Labels, blocks: bool = False) -> ChosenKernel:
    """The row of the table for the contraction of two operands.

    Args:
        a, b: the operands.
        out: labels of the result.
        blocks: as for `choose`.
    """
    dims = Dimensions(a.labels, b.labels, out)
    tiles = [pair for pair, label in enumerate(dims.summed) if label[0] == "tile"]
    return choose(a.tensor, b.tensor, dims, apart=tiles, blocks=blocks)


def _operands(
    kernel: str, a: LabelledTensor, b: LabelledTensor, dims: Dimensions, floats: str
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Two arrays to be contracted, and the scales that their sums are multiplied by, laid out for these.

    Args:
        kernel: the row of the table.
        a, b: the operands.
        dims: of their contraction.
        floats: as for `Sums`.
    """
    scales: list[Any] = []
    pair = a.tensor, b.tensor
    if kernel == "float8":
        scales = [scale_in_output(x.tensor.scale, x.labels, dims.result) for x in (a, b)]
        return a.tensor.payload(), b.tensor.payload(), scales
    levels = [block_scales.levels_of(x) for x in pair]
    if levels != [None, None]:
        # The level that a tensor shares comes after the sum.
        split = [
            (floats_of(x), None) if two is None else first_level(x, two)
            for x, two in zip(pair, levels, strict=True)
        ]
        left, right = (array for array, _ in split)
        scales = [shared for _, shared in split if shared is not None]
    elif floats == "float32":
        left, right = map(float32_of, pair)
    else:
        payload = next(
            (x for x, y in ((a, b), (b, a)) if floats == "promoted" and _scales_after(x, y, dims)), None
        )
        left, right = (floats_of(x.tensor) if x is not payload else _payload(x.tensor) for x in (a, b))
        if payload is not None:
            scales = [scale_in_output(payload.tensor.scale, payload.labels, dims.result)]
        if floats == "first" or payload is b:
            return left, right.astype(left.dtype), scales
        if payload is a:
            return left.astype(right.dtype), right, scales
    common = jnp.promote_types(left.dtype, right.dtype)
    return left.astype(common), right.astype(common), scales


def _scales_after(x: LabelledTensor, partner: LabelledTensor, dims: Dimensions) -> bool:
    """Whether only one operand has a payload, with scales that can be multiplied in after the sum."""
    tensor = x.tensor
    if is_quantized(partner.tensor):
        return False
    payload = (
        not tensor.has_zero_point
        if integer.has_integers(tensor)
        else on_minifloats(tensor) and tensor.is_contractible
    )
    return payload and not varies_along(tensor, [x.axis(label) for label in dims.summed])


def _payload(x: Any) -> jax.Array:
    return x.payload() if on_minifloats(x) else integer.affine_of(x).payload
