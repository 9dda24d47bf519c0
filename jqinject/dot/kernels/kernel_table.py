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

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from jqinject.dot.geometry.dimensions import Dimensions, OutSharding
from jqinject.dot.kernels.stored_rows import TABLES, as_rows, packed_rows, rows_of
from jqinject.native import int8_matmul, stored_matmul, takes
from jqinject.ops import processes, sharding

Kernel = Callable[..., jax.Array]
Convolve = Callable[[jax.Array, jax.Array], jax.Array]
# From 0.12 on XLA's own convolution of bytes is faster than a product of patches (3 x 3, 64 to 256 channels).
XLA_CONVOLVES = jax.__version_info__ >= (0, 12)
BYTE = 8
GPUS = ("cuda", "rocm")
MATRICES = Dimensions.of(2, 2, (((1,), (1,)), ((), ())))


@dataclass(frozen=True)
class Alone:
    """The product by the kernel of the platform."""

    dims: Dimensions
    accumulator: np.dtype

    def __call__(self, lhs: jax.Array, rhs: jax.Array, *packed: jax.Array) -> jax.Array:
        def bound(kernel: Kernel) -> Callable[..., jax.Array]:
            return lambda a, b, *packed: kernel(a, b, self.dims, self.accumulator, *packed)

        narrow = any(jnp.iinfo(x.dtype).bits < BYTE for x in (lhs, rhs))
        kernels = KERNELS | (dict.fromkeys(GPUS, _in_bytes) if narrow else {})
        tables = {platform: bound(kernel) for platform, kernel in kernels.items()}
        return jax.lax.platform_dependent(lhs, rhs, *packed, default=bound(_as_it_is), **tables)


@dataclass(frozen=True)
class Divisible:
    """The product as XLA partitions it over devices."""

    dims: Dimensions
    accumulator: np.dtype
    out_sharding: OutSharding = None

    def __call__(self, lhs: jax.Array, rhs: jax.Array, *packed: jax.Array) -> jax.Array:
        def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return _as_it_is(lhs, rhs, self.dims, self.accumulator, out_sharding=self.out_sharding)

        if all(jnp.iinfo(x.dtype).bits >= BYTE for x in (lhs, rhs)):
            return product(lhs, rhs)

        def in_bytes(a: jax.Array, b: jax.Array) -> jax.Array:
            return product(_at_least_a_byte(a), _at_least_a_byte(b))

        return jax.lax.platform_dependent(
            lhs, rhs, default=product, cpu=in_bytes, **dict.fromkeys(GPUS, in_bytes)
        )


@dataclass(frozen=True)
class Window:
    """The window of a convolution without groups and input dilation.

    Attributes:
        specs: of the left operand, the right operand and the output: (batch, feature, *space) in their axes.
        padding: before and after each spatial axis.
        strides, dilation: of the window along each spatial axis.
    """

    specs: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    padding: tuple[tuple[int, int], ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]

    def matrices(self, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The patches `(batch, *places, k)` and the kernel `(out features, k)`, `k` window size times features.

        Example:
            >>> window = Window(((0, 2, 1), (2, 1, 0), (0, 2, 1)), ((1, 1),), (1,), (1,))
            >>> patches, kernel = window.matrices(jnp.arange(3.0).reshape(1, 3, 1), jnp.ones((3, 1, 2)))
            >>> patches.shape, kernel.shape, patches[0, :, 1].tolist()
            ((1, 3, 3), (2, 3), [0.0, 1.0, 2.0])
        """
        lhs_spec, rhs_spec, _ = self.specs
        lhs = lhs.transpose((lhs_spec[0], *lhs_spec[2:], lhs_spec[1]))
        rhs = rhs.transpose((rhs_spec[0], *rhs_spec[2:], rhs_spec[1]))
        lhs = jnp.pad(lhs, ((0, 0), *self.padding, (0, 0)))
        window = rhs.shape[1:-1]
        places = [
            max((size - (patches - 1) * dilation - 1) // stride + 1, 0)
            for size, patches, stride, dilation in zip(
                lhs.shape[1:-1], window, self.strides, self.dilation, strict=True
            )
        ]
        kernel = rhs.reshape(rhs.shape[0], math.prod(rhs.shape[1:]))
        kernel = with_layout_constraint(kernel, Layout(major_to_minor=(0, 1)))
        if 0 in places:
            return jnp.zeros((len(lhs), *places, kernel.shape[1]), lhs.dtype), kernel
        patches = [self._seen(lhs, at, places) for at in itertools.product(*map(range, window))]
        return jnp.concatenate(patches, axis=-1), kernel

    def image(self, y: jax.Array) -> jax.Array:
        """`(batch, *places, out features)` in the order of the output's axes."""
        out_spec = self.specs[2]
        order = (out_spec[0], *out_spec[2:], out_spec[1])
        return y.transpose([order.index(axis) for axis in range(y.ndim)])

    def _seen(self, lhs: jax.Array, at: tuple[int, ...], places: list[int]) -> jax.Array:
        """The input at one place of the window, for all window positions."""
        start = [step * dilation for step, dilation in zip(at, self.dilation, strict=True)]
        end = [
            first + (count - 1) * stride + 1
            for first, count, stride in zip(start, places, self.strides, strict=True)
        ]
        limits = (lhs.shape[0], *end, lhs.shape[-1])
        return jax.lax.slice(lhs, (0, *start, 0), limits, (1, *self.strides, 1))


def integer_convolution(
    lhs: jax.Array, rhs: jax.Array, accumulator: np.dtype, plain: Convolve, window: Window | None
) -> jax.Array:
    """A convolution of integers summed in `accumulator`.

    Args:
        lhs, rhs: int8 arrays.
        accumulator: a signed integer dtype that holds the sums.
        plain: the convolution by XLA, compared by value.
        window: of the same convolution, if a product of patches can replace it.
    """
    if window is None or XLA_CONVOLVES:
        return plain(lhs, rhs)
    return processes.on_one_device(_AsMatrices(accumulator, plain, window), plain, lhs, rhs)


@dataclass(frozen=True)
class _AsMatrices:
    """A convolution as a matrix product, if the platform has a kernel for it."""

    accumulator: np.dtype
    plain: Convolve
    window: Window

    def __call__(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        sized = all(isinstance(size, int) for size in (*lhs.shape, *rhs.shape))
        if not sized or not takes(lhs, rhs, self.accumulator, rows=1):
            return self.plain(lhs, rhs)
        return jax.lax.platform_dependent(lhs, rhs, cpu=self._product, default=self.plain)

    def _product(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        patches, kernel = self.window.matrices(lhs, rhs)
        if not takes(patches, kernel, self.accumulator, math.prod(patches.shape[:-1])):
            return self.plain(lhs, rhs)
        y = _by_kernel(patches.reshape(-1, patches.shape[-1]), kernel)
        return self.window.image(y.reshape(*patches.shape[:-1], len(kernel)))


def settled(payload: jax.Array) -> jax.Array:
    """Integers just computed, in their own memory layout: a following transposition is a separate operation.

    Otherwise, on a CPU, the rounding writes them one by one into other rows. Not for stored integers, whose
    transpositions cancel.
    """
    if not jnp.issubdtype(payload.dtype, jnp.integer) or payload.ndim < 2:
        return payload
    return processes.on_one_device(_laid_out_on_cpu, _identity, payload)


def _identity(x: jax.Array) -> jax.Array:
    return x


def _laid_out_on_cpu(x: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(x, cpu=_row_major, default=_identity)


def _row_major(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def _as_it_is(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: Dimensions,
    accumulator: np.dtype,
    packed: jax.Array | None = None,
    out_sharding: OutSharding = None,
) -> jax.Array:
    return jax.lax.dot_general(
        lhs, rhs, dims.numbers, preferred_element_type=accumulator, out_sharding=out_sharding
    )


def _on_cpu(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: Dimensions,
    accumulator: np.dtype,
    packed: jax.Array | None = None,
) -> jax.Array:
    if packed is not None:
        y = _packed_on_cpu(lhs, rhs, dims, accumulator, packed)
        if y is not None:
            return y
    # XLA has no product of two 4-bit arrays on CPUs (its verifier refuses the program).
    lhs, rhs = _at_least_a_byte(lhs), _at_least_a_byte(rhs)
    sized = all(
        isinstance(size, int) for size in (*lhs.shape, *rhs.shape)
    )  # not in an export for any platform
    if not sized or not dims.lhs_contract or 0 in (lhs.size, rhs.size):
        return _as_it_is(lhs, rhs, dims, accumulator)
    batch = [lhs.shape[axis] for axis in dims.lhs_batch]
    free = [lhs.shape[axis] for axis in dims.lhs_free], [rhs.shape[axis] for axis in dims.rhs_free]
    if takes(lhs, rhs, accumulator, math.prod(free[0])):
        left = _matrices(lhs, dims.lhs_batch, dims.lhs_free, dims.lhs_contract)
        right = _matrices(rhs, dims.rhs_batch, dims.rhs_free, dims.rhs_contract)
        return _by_kernel(left, right).reshape(*batch, *free[0], *free[1])
    if batch:
        return _as_it_is(lhs, rhs, dims, accumulator)
    left = _matrices(lhs, (), dims.lhs_free, dims.lhs_contract)
    right = _matrices(rhs, (), dims.rhs_free, dims.rhs_contract)
    rows = len(left)
    left = jnp.pad(left, ((0, 1), (0, 0))) if rows == 1 else left
    return _as_it_is(left, right, MATRICES, accumulator)[:rows].reshape(*free[0], *free[1])


def _packed_on_cpu(
    lhs: jax.Array, rhs: jax.Array, dims: Dimensions, accumulator: np.dtype, packed: jax.Array
) -> jax.Array | None:
    """The product with numbers in 4 bits as they are stored; None if the kernel does not take it."""
    rows = rows_of(lhs.shape, rhs.shape, dims)
    table = TABLES.get(rhs.dtype.name)
    signed = jnp.issubdtype(lhs.dtype, jnp.signedinteger) and jnp.iinfo(lhs.dtype).bits <= 8
    if rows is None or table is None or not signed:
        return None
    right = packed_rows(packed, rhs.shape, rows, len(dims.rhs_free))
    left = as_rows(lhs.astype(jnp.int8), rows.lhs, len(dims.lhs_free))
    if right is None or not takes(left, left, accumulator, len(left)):
        return None
    y = sharding.varying_with(stored_matmul.int4_matmul(left, right, table), left, right)
    shape = [lhs.shape[axis] for axis in dims.lhs_free] + [rhs.shape[axis] for axis in dims.rhs_free]
    return y.reshape(shape)


def _by_kernel(left: jax.Array, right: jax.Array) -> jax.Array:
    return sharding.varying_with(int8_matmul(left, right), left, right)


def _at_least_a_byte(x: jax.Array) -> jax.Array:
    """Bytes stay what they are; integers of fewer bits, signed or not, all fit in int8."""
    return x if jnp.iinfo(x.dtype).bits >= BYTE else x.astype(jnp.int8)


def _matrices(
    x: jax.Array, batch: tuple[int, ...], free: tuple[int, ...], summed: tuple[int, ...]
) -> jax.Array:
    """The operand as `(*batch, rows, k)`, laid out so in memory."""
    order = (*batch, *free, *summed)
    rows = math.prod(x.shape[axis] for axis in free)
    depth = math.prod(x.shape[axis] for axis in summed)
    matrices = x.transpose(order).reshape(*(x.shape[axis] for axis in batch), rows, depth)
    if order == tuple(range(x.ndim)):
        return matrices
    return _row_major(matrices)


def _in_bytes(
    lhs: jax.Array, rhs: jax.Array, dims: Dimensions, accumulator: np.dtype, *_packed: jax.Array
) -> jax.Array:
    return _as_it_is(_at_least_a_byte(lhs), _at_least_a_byte(rhs), dims, accumulator)


KERNELS: dict[str, Kernel] = {"cpu": _on_cpu}
