"""The product of two int8 matrices by the compiled kernel."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.native.library import library


def status() -> str:
    """Whether contractions use the kernel, and if not, why.

    Programs that XLA partitions over several devices do not contain the kernel, because XLA cannot partition it;
    neither do exported programs.

    Example:
        >>> from jqinject.native import status, use
        >>> with use(False):
        ...     status()
        'switched off'
    """
    return library().reason


def takes(lhs: jax.Array, rhs: jax.Array, accumulator: Any, rows: int) -> bool:
    """Whether contractions leave a product to `int8_matmul`: int8 operands, int32 sums, and not empty.

    Args:
        lhs, rhs: the operands, in any layout.
        accumulator: the dtype of the sums.
        rows: of each matrix of the left operand.
    """
    if not (lhs.dtype == rhs.dtype == np.dtype(np.int8)) or np.dtype(accumulator) != np.dtype(np.int32):
        return False
    kernels = library()
    if kernels.target is None or 0 in (lhs.size, rhs.size):
        return False
    return kernels.rows is None or rows <= kernels.rows


def int8_matmul(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """`y[..., i, j] = sum_t lhs[..., i, t] * rhs[..., j, t]`, exact except that sums beyond int32 wrap around.

    Requires the compiled kernel and a processor with its instructions. Both operands have the contracting axis last, as
    frozen weights do. Leading axes are equal, or have size 1 in one operand.

    Args:
        lhs: int8 `(..., m, k)`.
        rhs: int8 `(..., n, k)`.

    Returns:
        int32 `(..., m, n)`.

    Raises:
        TypeError: an operand is not int8.
        ValueError: the shapes do not match.
        RuntimeError: there is no kernel here.
    """
    if lhs.dtype != np.int8 or rhs.dtype != np.int8:
        raise TypeError(
            f"int8_matmul takes int8, got {lhs.dtype} and {rhs.dtype}.\n  cure: jax.lax.dot_general"
        )
    if not lhs.ndim == rhs.ndim >= 2 or lhs.shape[-1] != rhs.shape[-1] or not lhs.shape[-1]:
        raise ValueError(
            f"int8_matmul takes (..., m, k) and (..., n, k), k at least 1, got {lhs.shape} and {rhs.shape}.\n"
            "  cure: as many axes in both, the summed one last"
        )
    lead = jnp.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])
    kernels = library()
    if kernels.target is None:
        raise RuntimeError(f"int8_matmul: {kernels.reason}.\n  cure: jax.lax.dot_general, as contractions do")
    out = jax.ShapeDtypeStruct((*lead, lhs.shape[-2], rhs.shape[-2]), jnp.int32)
    y = jax.ffi.ffi_call(kernels.target, out, vmap_method="expand_dims")(lhs, rhs)
    assert isinstance(y, jax.Array)
    return y
