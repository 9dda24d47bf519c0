"""Floats contracted with a frozen weight: dequantized in registers by the compiled kernels where they are used."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.dot.frozen.frozen_numbers import quant_tensor_of, scale_of, stores_last
from jqinject.dot.geometry.dimensions import Dimensions, OutSharding
from jqinject.dot.kernels.integer import Affine
from jqinject.dot.kernels.stored_rows import TABLES, StoredOperand, stored_product
from jqinject.ops import processes, ste
from jqinject.ops.groups import split_groups

FLOATS = tuple(map(np.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))
BYTES = (np.dtype(np.int8), np.dtype(np.uint8))


@dataclass(frozen=True)
class StoredDot:
    """What is static in the contraction of floats with a frozen weight.

    Attributes:
        form: of the weight.
        dims: of the contraction.
        dtype: of the output.
        out_sharding, precision: as for `lax.dot_general`; the kernels sum in float32 anyway.
    """

    form: FrozenForm
    dims: Dimensions
    dtype: np.dtype
    out_sharding: OutSharding = None
    precision: jax.lax.PrecisionLike = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the numbers that it reads."""
        return tuple(name for name in self.form.names if name != "sums")


def stored_dot_general(x: jax.Array, numbers: Mapping[str, jax.Array], static: StoredDot) -> jax.Array:
    """`lax.dot_general(x, weight)` of a frozen weight, with its gradients.

    On a CPU with compiled kernels, weights of 8-bit integers, of integers in 3 or 4 bits or of tables of at most 16
    numbers are dequantized in registers, and the sums are those of float32 in another order; bfloat16 and float16
    inputs are exact in float32, the weights are not rounded to their dtype, and the output is. Anything else is
    dequantized, and XLA contracts.

    Args:
        x: floats.
        numbers: of the weight, as stored.
        static: what is static.
    """
    return _dot(static, x, *(numbers[name] for name in static.names))


def reads_stored(form: FrozenForm, dtype: DTypeLike) -> bool:
    """Whether there may be a kernel for floats of a dtype and a weight of this form.

    Args:
        form: of the weight.
        dtype: of the floats.
    """
    four_bits = form.stored.packed_bits in (3, 4) and _table(form) is not None
    bytes_ = form.stored.packed_bits is None and form.stored.dtype in BYTES and form.grid.is_integer
    floats = np.dtype(dtype) in FLOATS and form.value_dtype in FLOATS
    return floats and form.cut is None and (four_bits or bytes_)


@lru_cache(maxsize=256)
def _table(form: FrozenForm) -> tuple[float, ...] | None:
    """What 16 numbers in 4 bits stand for; None of other payloads."""
    if form.grid.is_table:
        values = list(map(float, form.grid.table))
        return tuple(values + values[-1:] * (16 - len(values))) if len(values) <= 16 else None
    if form.grid.is_integer:
        return TABLES.get(form.stored.dtype.name)
    with jax.ensure_compile_time_eval():
        table = form.grid.decode(jnp.arange(16, dtype=jnp.uint8))
        return tuple(np.asarray(table, np.float32).tolist())


def product_of(function: object) -> StoredDot | None:
    """Return what is static in the product that a function of `on_one_device` computes; None of any other function.

    Args:
        function: the parameter `otherwise` of the operation, whose operands are `x` and the numbers of `names`.
    """
    if not isinstance(function, processes.Bound) or function.function is not _plain:
        return None
    return function.static[0]


@ste.custom_jvp(0)
def _dot(static: StoredDot, x: jax.Array, *arrays: jax.Array) -> jax.Array:
    meshes = (jax.typeof(array).sharding.mesh for array in (x, *arrays))
    plain = processes.Bound(_plain, (static,))
    if static.out_sharding is not None or any(not mesh.empty and mesh.explicit_axes for mesh in meshes):
        return plain(x, *arrays)
    return processes.on_one_device(processes.Bound(_by_platform, (static, plain)), plain, x, *arrays)


@partial(_dot.defjvp, symbolic_zeros=True)
def _jvp(static: StoredDot, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    moving = [place for place, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]

    def plain(*changed: jax.Array) -> jax.Array:
        full = list(primals)
        for place, array in zip(moving, changed, strict=True):
            full[place] = array
        return _plain(static, *full)

    at, along = ([arrays[place] for place in moving] for arrays in (primals, tangents))
    return _dot(static, *primals), jax.jvp(plain, at, along)[1]


def _plain(static: StoredDot, x: jax.Array, *arrays: jax.Array) -> jax.Array:
    """Dequantized, contracted by XLA."""
    weight = quant_tensor_of(dict(zip(static.names, arrays, strict=True)), static.form).value
    return jax.lax.dot_general(
        x,
        weight.astype(x.dtype),
        static.dims.numbers,
        precision=static.precision,
        preferred_element_type=static.dtype,
        out_sharding=static.out_sharding,
    )


def _by_platform(static: StoredDot, plain: processes.Bound, x: jax.Array, *arrays: jax.Array) -> jax.Array:
    """By the means of the platform."""

    def on_cpu(x: jax.Array, *arrays: jax.Array) -> jax.Array:
        numbers = dict(zip(static.names, arrays, strict=True))
        y = _product(x, numbers, static.form.fitted(numbers["value"].shape), static.dims)
        return plain(x, *arrays) if y is None else y.astype(static.dtype)

    return jax.lax.platform_dependent(x, *arrays, cpu=on_cpu, default=plain)


def _product(
    x: jax.Array, numbers: Mapping[str, jax.Array], form: FrozenForm, dims: Dimensions
) -> jax.Array | None:
    """The contraction by the kernel; None if it does not take it."""
    groups = form.groups
    if form.in_turn is not None or not stores_last(form, dims.rhs_contract):
        return None
    x = x.astype(jnp.float32)
    grouped: tuple[int, ...] = ()
    if groups is not None:
        axis = groups.dim % len(form.shape)
        if axis not in dims.rhs_contract:
            return None
        grouped = (dims.rhs_contract.index(axis),)
        left = dims.lhs_contract[grouped[0]]
        x = split_groups(x, groups.size, left)
        dims = dims.in_groups(left)
    payload, scale = form.stored.payload(numbers["value"]), numbers["scale"]
    zero, factor = numbers.get("zero_point"), numbers.get("scale_factor")
    if payload.dtype == jnp.uint8:
        signed = Affine(payload, scale, None if zero is None else zero.astype(jnp.float32)).signed()
        payload, zero = signed.payload, signed.zero_point
    if factor is not None and factor.size > 1:  # one for each layer of a stack
        scale, factor = scale_of(numbers), None
    packed = form.stored.in_halves(numbers["value"])
    y = stored_product(x, StoredOperand(payload, packed, _table(form), scale, zero), dims, grouped)
    return y if y is None or factor is None else y * factor.reshape(())
