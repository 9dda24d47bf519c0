"""How integers are contracted on each platform: one table, based on measurements.

CPU with AVX-512 VNNI: the compiled kernels of `jqinject.native`, if present, also of weights in 4 bits as they are
stored; likewise with AVX2; with AMX or NEON for a few rows only. Integers in groups: see `integer`. Otherwise
XLA's own: its fast int8 matrix product needs both operands stored with the summed axis last, `(rows, k)` and `(columns,
k)`, and more than one row; otherwise XLA uses a loop that is 4 to 45 times slower. A transposition before the product
does not help: it becomes a layout of the operand, again the slow case, even with an optimization barrier. A layout
constraint does help, and one before the transposition separates that from the rounding (`settled`). All of this is
for programs on a single device; if XLA partitions a program or `jax.export` exports it, the product is unchanged
(`on_one_device`). Measured at 2048 x 1024 x 2048 with XLA of 0.10, quantization included: 28 ms with a transposed
operand, 38 ms with one constraint, 110 ms with none; 39 ms in float. GPU: XLA's product of bytes; integers of fewer
bits are widened first. JAX would widen operands of two dtypes to the accumulator: 8 bits times 4 were int32 times
int32.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from jqinject.dot.geometry.dimensions import Dimensions, OutSharding
from jqinject.dot.kernels.stored_rows import TABLES, merged, packed_rows, rows_of
from jqinject.native import int8_matmul, stored_matmul, takes
from jqinject.ops import processes, sharding

# From 0.12 on XLA's own convolution of bytes is faster than a product of patches (3 x 3, 64 to 256 channels).
XLA_CONVOLVES = jax.__version_info__ >= (0, 12)
BYTE = 8
GPUS = ("cuda", "rocm")
MATRICES = Dimensions.of(2, 2, (((1,), (1,)), ((), ())))


@dataclass(frozen=True)
class Product:
    """The product of integers by the kernel of the platform, or as XLA partitions it over devices.

    Attributes:
        dims, out_sharding: as for `lax.dot_general`.
        accumulator: a signed integer dtype that holds the sums.
        alone: whether the program is for one device, so that kernels can be called.
    """

    dims: Dimensions
    accumulator: np.dtype
    out_sharding: OutSharding = None
    alone: bool = False

    def __call__(self, lhs: jax.Array, rhs: jax.Array, *packed: jax.Array) -> jax.Array:
        kernels: dict[str, Callable[..., jax.Array]] = {}
        if any(jnp.iinfo(x.dtype).bits < BYTE for x in (lhs, rhs)):
            kernels = dict.fromkeys(("cpu", *GPUS), self._in_bytes)
        if self.alone:
            kernels["cpu"] = self._on_cpu
        if not kernels:
            return self._plain(lhs, rhs)
        return jax.lax.platform_dependent(lhs, rhs, *packed, default=self._plain, **kernels)

    def _plain(self, lhs: jax.Array, rhs: jax.Array, *packed: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            lhs,
            rhs,
            self.dims.numbers,
            preferred_element_type=self.accumulator,
            out_sharding=self.out_sharding,
        )

    def _in_bytes(self, lhs: jax.Array, rhs: jax.Array, *packed: jax.Array) -> jax.Array:
        return self._plain(_at_least_a_byte(lhs), _at_least_a_byte(rhs))

    def _on_cpu(self, lhs: jax.Array, rhs: jax.Array, packed: jax.Array | None = None) -> jax.Array:
        dims, accumulator = self.dims, self.accumulator
        y = None if packed is None else _packed_on_cpu(lhs, rhs, dims, accumulator, packed)
        if y is not None:
            return y
        # XLA has no product of two 4-bit arrays on CPUs (its verifier refuses the program).
        lhs, rhs = _at_least_a_byte(lhs), _at_least_a_byte(rhs)
        if not is_sized(lhs, rhs) or not dims.lhs_contract or 0 in (lhs.size, rhs.size):
            return self._plain(lhs, rhs)
        batch = [lhs.shape[axis] for axis in dims.lhs_batch]
        free = [lhs.shape[axis] for axis in dims.lhs_free], [rhs.shape[axis] for axis in dims.rhs_free]
        has_kernel = takes(lhs, rhs, accumulator, math.prod(free[0]))
        if batch and not has_kernel:
            return self._plain(lhs, rhs)
        left = _matrices(lhs, dims.lhs_batch, dims.lhs_free, dims.lhs_contract)
        right = _matrices(rhs, dims.rhs_batch, dims.rhs_free, dims.rhs_contract)
        if has_kernel:
            return by_kernel(left, right).reshape(*batch, *free[0], *free[1])
        rows = len(left)
        left = jnp.pad(left, ((0, 1), (0, 0))) if rows == 1 else left
        return Product(MATRICES, accumulator)._plain(left, right)[:rows].reshape(*free[0], *free[1])


def is_sized(*arrays: jax.Array) -> bool:
    """Whether all sizes are known, as in any program but an export for any size."""
    return all(isinstance(size, int) for x in arrays for size in x.shape)


def settled(payload: jax.Array) -> jax.Array:
    """Integers just computed, in their own memory layout: a following transposition is a separate operation.

    Otherwise, on a CPU, the rounding writes them one by one into other rows. Not for stored integers, whose
    transpositions cancel.
    """
    if not jnp.issubdtype(payload.dtype, jnp.integer) or payload.ndim < 2:
        return payload
    return processes.on_one_device(laid_out_on_cpu, _identity, payload)


def _identity(x: jax.Array) -> jax.Array:
    return x


def laid_out_on_cpu(x: jax.Array) -> jax.Array:
    """An array in row-major order in the memory of a CPU."""
    return jax.lax.platform_dependent(x, cpu=row_major, default=_identity)


def row_major(x: jax.Array) -> jax.Array:
    """An array in row-major order in memory."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def _packed_on_cpu(
    lhs: jax.Array, rhs: jax.Array, dims: Dimensions, accumulator: np.dtype, packed: jax.Array
) -> jax.Array | None:
    """The product with numbers in 4 bits as they are stored; None if the kernel does not take it."""
    rows = rows_of(lhs.shape, rhs.shape, dims)
    table = TABLES.get(rhs.dtype.name)
    signed = jnp.issubdtype(lhs.dtype, jnp.signedinteger) and jnp.iinfo(lhs.dtype).bits <= 8
    if rows is None or table is None or not signed:
        return None
    right = packed_rows(packed, rhs.shape, rows)
    left = merged(lhs.astype(jnp.int8), *rows.lhs)
    if right is None or not takes(left, left, accumulator, len(left)):
        return None
    y = sharding.varying_with(stored_matmul.int4_matmul(left, right, table), left, right)
    shape = [lhs.shape[axis] for axis in dims.lhs_free] + [rhs.shape[axis] for axis in dims.rhs_free]
    return y.reshape(shape)


def by_kernel(left: jax.Array, right: jax.Array) -> jax.Array:
    """The product of two matrices of bytes, `(rows, k)` and `(columns, k)`, by the compiled kernel."""
    return sharding.varying_with(int8_matmul(left, right), left, right)


def _at_least_a_byte(x: jax.Array) -> jax.Array:
    """Bytes stay what they are; integers of fewer bits, signed or not, all fit in int8."""
    return x if jnp.iinfo(x.dtype).bits >= BYTE else x.astype(jnp.int8)


def right_matrix(rhs: jax.Array, dims: Dimensions) -> jax.Array:
    """The right operand as `(columns, k)`, laid out so in memory: its summed axes in the order of the left one's."""
    return _matrices(rhs, (), dims.rhs_free, dims.rhs_contract)


def _matrices(
    x: jax.Array, batch: tuple[int, ...], free: tuple[int, ...], summed: tuple[int, ...]
) -> jax.Array:
    """The operand as `(*batch, rows, k)`, laid out so in memory."""
    matrices = merged(x, *((axis,) for axis in batch), free, summed)
    return matrices if (*batch, *free, *summed) == tuple(range(x.ndim)) else row_major(matrices)
