"""Products of operands with block scales, handed to the backend as payloads and scales where it takes them.

| platform | what runs |
|---|---|
| CUDA | `jax.nn.scaled_matmul`: XLA uses cuDNN's kernel on GPUs with such units (Blackwell), else dequantizes |
| any other | the dequantized numbers |

Which GPU a program will run on is not known while it is traced or lowered, so XLA decides when it compiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import platform_dependent

from jqinject.dot.geometry.labels import Label, Labels, summed_labels
from jqinject.dot.tensors.labelled_tensor import LabelledTensor
from jqinject.dot.tensors.packed_tensor import levels_of
from jqinject.quant_tensor import grouped_minifloats

E8M0, E4M3, E2M1 = (np.dtype(x) for x in (jnp.float8_e8m0fnu, jnp.float8_e4m3fn, jnp.float4_e2m1fn))
MX_BLOCK, NV_BLOCK = 32, 16
ON_CUDA = "on CUDA by jax.nn.scaled_matmul"
MX_PAYLOADS = ("float8_e4m3fn", "float8_e5m2")


class _Blocks(NamedTuple):
    """An operand in blocks of what is summed over.

    Attributes:
        payload: of the shape of the operand.
        scale: likewise, with blocks in the place of their elements.
        shared: the level that all scales share; None without one.
        label: of the axis that blocks divide.
    """

    payload: jax.Array
    scale: jax.Array
    shared: jax.Array | None
    label: Label


def scaled_product(
    a: LabelledTensor, b: LabelledTensor, out: Labels, dtype: Any, dequantized: Callable[[], jax.Array]
) -> jax.Array:
    """The contraction of two operands by their payloads and block scales where the platform takes these.

    On CUDA `jax.nn.scaled_matmul`, of MXFP8 (e4m3 or e5m2 in blocks of 32, scales e8m0) and of NVFP4 (e2m1 in blocks of
    16, scales e4m3, and one float32 for the tensor, multiplied in after the sum). Sums are float32.

    Args:
        a, b: the operands.
        out: labels of the result.
        dtype: of the result.
        dequantized: the same product of the dequantized numbers, for other platforms, and for operands without such
            blocks, or with blocks of another axis than the other operand's.
    """
    if not takes_scaled(a, b, out):
        return dequantized()

    def scaled() -> jax.Array:
        return _scaled(
            _blocks(a), _blocks(b), (a.labels, b.labels, out), (a.tensor.shape, b.tensor.shape), dtype
        )

    return platform_dependent(default=dequantized, cuda=scaled)


def takes_scaled(a: LabelledTensor, b: LabelledTensor, out: Labels) -> bool:
    """Whether both operands have blocks of one form, along one axis that is summed over.

    Args:
        a, b, out: see `scaled_product`.
    """
    summed = summed_labels(a.labels, b.labels, out)
    if not (_is_scaled(a, summed) and _is_scaled(b, summed)):
        return False
    return _form(a) == _form(b) and _blocked_label(a) == _blocked_label(b)


def _form(x: LabelledTensor) -> str | None:
    """ "mx" or "nv"; None of any other operand."""
    tensor = x.tensor
    if not grouped_minifloats(tensor) or tensor.as_it_lies is not None:
        return None
    levels, size = levels_of(tensor), tensor.groups.size
    if levels is not None:
        whole = levels.shared.ndim == 0 and size == NV_BLOCK
        return "nv" if whole and tensor.grouped.known_format("an operand").dtype == E2M1 else None
    grouped = tensor.grouped
    known = grouped.is_contractible and grouped.q_dtype.name in MX_PAYLOADS
    return "mx" if known and size == MX_BLOCK and grouped.scale_dtype == E8M0 else None


def _blocked_label(x: LabelledTensor) -> Label:
    return x.labels[x.tensor.groups.dim % len(x.labels)]


def _is_scaled(x: LabelledTensor, summed: Labels) -> bool:
    """Whether an operand has full blocks along what is summed over, of a form that backends take."""
    if _form(x) is None or _blocked_label(x) not in summed:
        return False
    groups, known = x.tensor.groups, all(isinstance(size, int) for size in x.tensor.shape)
    whole = groups.length % groups.size == 0 and x.tensor.piece is None
    mesh = jax.typeof(x.tensor.grouped.scale).sharding.mesh
    return known and whole and (mesh.empty or not mesh.explicit_axes)


def _blocks(x: LabelledTensor) -> _Blocks:
    tensor, levels = x.tensor, levels_of(x.tensor)
    if levels is None:
        numbers, scale, shared = tensor.grouped.payload(), tensor.grouped.scale.astype(E8M0), None
    else:
        numbers, scale, shared = levels.minifloats.astype(E2M1), levels.block.astype(E4M3), levels.shared
    axis = tensor.groups.dim % len(x.labels)
    one_each = (*numbers.shape[: axis + 1], 1, *numbers.shape[axis + 2 :])
    scale = jnp.broadcast_to(scale, one_each).squeeze(axis + 1)
    return _Blocks(numbers.reshape(tensor.shape), scale, shared, x.labels[axis])


def _scaled(
    a: _Blocks, b: _Blocks, labels: tuple[Labels, Labels, Labels], shapes: tuple[Any, Any], dtype: Any
) -> jax.Array:
    """The product as matrices `(batch, rows, summed)`, summed along blocks last."""
    of_a, of_b, out = labels
    batch = [label for label in of_a if label in of_b and label in out]
    free = [[label for label in own if label not in batch and label in out] for own in (of_a, of_b)]
    summed = [label for label in of_a if label not in out and label != a.label] + [a.label]
    sizes = dict(zip(of_a, shapes[0], strict=True)) | dict(zip(of_b, shapes[1], strict=True))

    def matrices(x: jax.Array, own: Labels, rows: list[Label]) -> jax.Array:
        moved = x.transpose([own.index(label) for label in (*batch, *rows, *summed)])
        depth = math.prod(moved.shape[len(batch) + len(rows) :])
        return moved.reshape(_size(batch, sizes), _size(rows, sizes), depth)

    y = jax.nn.scaled_matmul(
        matrices(a.payload, of_a, free[0]),
        matrices(b.payload, of_b, free[1]),
        matrices(a.scale, of_a, free[0]),
        matrices(b.scale, of_b, free[1]),
        preferred_element_type=jnp.float32,
    )
    made = (*batch, *free[0], *free[1])
    for shared in (a.shared, b.shared):
        y = y if shared is None else y * shared
    return (
        y.reshape([sizes[label] for label in made])
        .transpose([made.index(label) for label in out])
        .astype(dtype)
    )


def _size(labels: list[Label], sizes: dict[Label, int]) -> int:
    return math.prod(sizes[label] for label in labels)
