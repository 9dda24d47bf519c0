"""Products of operands with block scales, handed to the backend as payloads and scales where it takes them.

| platform | kernel |
|---|---|
| CUDA | `jax.nn.scaled_matmul`: XLA uses cuDNN's kernel on GPUs with such units (Blackwell), else dequantizes |
| ROCm, TPU | `jax.lax.scaled_dot`: XLA uses the units of devices that have such, else dequantizes to bfloat16, which \
is exact |
| any other | the dequantized numbers |

Which device a program will run on is not known while it is traced or lowered, so XLA decides when it compiles.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.kernels.stored_rows import merged
from jqinject.quant_tensor import GroupwiseFloatQuantTensor, Levels, grouped_minifloats

E8M0, E4M3, E2M1 = (np.dtype(x) for x in (jnp.float8_e8m0fnu, jnp.float8_e4m3fn, jnp.float4_e2m1fn))
MX_BLOCK, NV_BLOCK = 32, 16
MX_PAYLOADS = ("float8_e4m3fn", "float8_e5m2")
Kernel = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def levels_of(x: object) -> Levels | None:
    """Return both levels of an operand in groups, if they are known; else None."""
    if not grouped_minifloats(x) or x.as_it_lies is not None:
        return None
    return x.grouped.levels


def has_blocks(lhs: object, rhs: object, dims: Dimensions) -> bool:
    """Whether both operands have full blocks of one form, along one pair of summed axes.

    The forms are MXFP8 (e4m3 or e5m2 in blocks of 32, scales e8m0) and NVFP4 (e2m1 in blocks of 16, scales e4m3, and
    one float32 for the tensor).

    Args:
        lhs, rhs: the operands.
        dims: of their contraction.
    """
    if not (grouped_minifloats(lhs) and grouped_minifloats(rhs)):
        return False
    form = _form(lhs)
    if form is None or form != _form(rhs) or not (_is_full(lhs) and _is_full(rhs)):
        return False
    return (_axis(lhs), _axis(rhs)) in zip(dims.lhs_contract, dims.rhs_contract, strict=True)


def _by_matmul(lhs: jax.Array, rhs: jax.Array, of_lhs: jax.Array, of_rhs: jax.Array) -> jax.Array:
    return jax.nn.scaled_matmul(lhs, rhs, of_lhs, of_rhs, preferred_element_type=jnp.float32)


def _by_dot(lhs: jax.Array, rhs: jax.Array, of_lhs: jax.Array, of_rhs: jax.Array) -> jax.Array:
    return jax.lax.scaled_dot(
        lhs,
        rhs,
        lhs_scale=of_lhs,
        rhs_scale=of_rhs,
        dimension_numbers=(((2,), (2,)), ((0,), (0,))),
        preferred_element_type=jnp.float32,
    )


#: The kernel of each platform that takes payloads and block scales: `(batch, rows, k)` by `(batch, columns, k)`.
KERNELS: Mapping[str, Kernel] = {"cuda": _by_matmul, "rocm": _by_dot, "tpu": _by_dot}


def block_product(
    lhs: GroupwiseFloatQuantTensor, rhs: GroupwiseFloatQuantTensor, dims: Dimensions, kernel: Kernel
) -> jax.Array:
    """The contraction of operands that `has_blocks` accepts, summed in float32.

    The scale that a tensor in NVFP4 shares is multiplied in after the sum.

    Args:
        lhs, rhs: the operands.
        dims: as for `lax.dot_general`.
        kernel: of `KERNELS`.
    """
    pairs = list(zip(dims.lhs_contract, dims.rhs_contract, strict=True))
    blocked = (_axis(lhs), _axis(rhs))
    pairs = [*(pair for pair in pairs if pair != blocked), blocked]
    of_lhs = dims.lhs_batch, dims.lhs_free, tuple(left for left, _ in pairs)
    of_rhs = dims.rhs_batch, dims.rhs_free, tuple(right for _, right in pairs)
    left, of_left, *factors = _blocks(lhs)
    right, of_right, *more = _blocks(rhs)
    y = kernel(
        merged(left, *of_lhs),
        merged(right, *of_rhs),
        merged(of_left, *of_lhs),
        merged(of_right, *of_rhs),
    )
    for factor in (*factors, *more):
        y = y if factor is None else y * factor
    return dims.ordered(y.reshape(dims.plain.out_shape(lhs.shape, rhs.shape)))


def _axis(x: GroupwiseFloatQuantTensor) -> int:
    return x.groups.dim % x.ndim


def _form(x: GroupwiseFloatQuantTensor) -> Literal["mx", "nv"] | None:
    if x.as_it_lies is not None:
        return None
    levels, size, grouped = levels_of(x), x.groups.size, x.grouped
    if levels is not None:
        one_factor = levels.shared.ndim == 0 and size == NV_BLOCK
        return "nv" if one_factor and grouped.known_format("an operand").dtype == E2M1 else None
    has_payload = grouped.is_contractible and grouped.q_dtype.name in MX_PAYLOADS
    return "mx" if has_payload and size == MX_BLOCK and grouped.scale_dtype == E8M0 else None


def _is_full(x: GroupwiseFloatQuantTensor) -> bool:
    """Whether blocks fill the axis, of known lengths and not sharded explicitly."""
    groups, mesh = x.groups, jax.typeof(x.grouped.scale).sharding.mesh
    full = groups.length % groups.size == 0 and x.piece is None
    return full and all(isinstance(size, int) for size in x.shape) and (mesh.empty or not mesh.explicit_axes)


def _blocks(x: GroupwiseFloatQuantTensor) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The payload, its scales with blocks in the place of their elements, and the factor of all scales."""
    levels, axis = levels_of(x), _axis(x)
    if levels is None:
        payload, scale, factor = x.grouped.payload(), x.grouped.scale.astype(E8M0), None
    else:
        payload, scale, factor = levels.minifloats.astype(E2M1), levels.block.astype(E4M3), levels.shared
    one_per_block = (*payload.shape[: axis + 1], 1, *payload.shape[axis + 2 :])
    scale = jnp.broadcast_to(scale, one_per_block).squeeze(axis + 1)
    return payload.reshape(x.shape), scale, factor
