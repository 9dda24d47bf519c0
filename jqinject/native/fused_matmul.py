"""A product of int8 matrices with an elementwise prologue and epilogue, in one call of the compiled kernels."""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jqinject.native.library import library

#: The most steps on a side.
MOST_STEPS = 32
#: What the left operand may be made of, and what the result may be.
DTYPES = tuple(map(np.dtype, (jnp.float32, jnp.bfloat16, jnp.int8)))


class StepKind(IntEnum):
    """An elementwise operation of the kernels, in float32: `x = x + operand`, and so on."""

    ADD = 0
    SUBTRACT = 1
    MULTIPLY = 2
    DIVIDE = 3
    MAXIMUM = 4
    MINIMUM = 5
    #: To the nearest integer, ties to even.
    ROUND = 6
    #: To the nearest number of bfloat16.
    TO_BFLOAT16 = 7
    #: Of the integer sums: the first step after the product.
    SUBTRACT_INTEGER = 8
    #: By the product of two operands: `x * (first * second)`.
    MULTIPLY_BY_PRODUCT = 9
    #: `x * (1 / operand)`.
    MULTIPLY_BY_RECIPROCAL = 10
    #: By the second operand where it equals the first one.
    REPLACE_EQUAL = 11
    #: By the second operand where it is less than the first one.
    REPLACE_BELOW = 12


class FusedStep(NamedTuple):
    """One elementwise operation.

    Attributes:
        kind: which.
        operands: one, none or two: `(rows or 1, columns or 1)`, float32, int32 for `SUBTRACT_INTEGER`.
    """

    kind: StepKind
    operands: tuple[jax.Array, ...] = ()


def fused_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    prologue: Sequence[FusedStep],
    epilogue: Sequence[FusedStep],
    dtype: DTypeLike,
) -> jax.Array:
    """`epilogue(prologue(lhs) @ rhs.T)`, where the prologue ends with integers that int8 holds.

    Every operation is rounded to float32, but a multiplication and an addition that follows it are rounded once, as XLA
    does on CPUs.

    Args:
        lhs: float32 or bfloat16 `(m, k)`; or int8, without a prologue.
        rhs: int8 `(n, k)`.
        prologue: steps on `lhs`.
        epilogue: steps on the int32 sums.
        dtype: of the result: float32, bfloat16, or int8 if the epilogue ends with integers that int8 holds.

    Returns:
        `(m, n)`.

    Raises:
        JaxRuntimeError: dtypes or shapes that do not fit, or more than `MOST_STEPS` steps on a side; when it runs.
    """
    out = jax.ShapeDtypeStruct((lhs.shape[0], rhs.shape[0]), dtype)
    return _call("fused_matmul", out, (lhs, rhs), (len(prologue),), (*prologue, *epilogue))


def row_amax(x: jax.Array, steps: Sequence[FusedStep] = ()) -> jax.Array:
    """Steps on the largest magnitude of each row; nan where a row has one.

    Args:
        x: float32 `(m, k)`.
        steps: on numbers `(m, 1)`.

    Returns:
        `(m, 1)`.
    """
    return _call("row_amax", jax.ShapeDtypeStruct((x.shape[0], 1), x.dtype), (x,), (), steps)


def _call(
    name: str,
    out: jax.ShapeDtypeStruct,
    arrays: tuple[jax.Array, ...],
    counts: tuple[int, ...],
    steps: Sequence[FusedStep],
) -> jax.Array:
    codes = jnp.asarray(np.asarray([*counts, *(step.kind for step in steps)], np.int32))
    operands = [operand for step in steps for operand in step.operands]
    y = jax.ffi.ffi_call(library().function(name), out, vmap_method="sequential")(*arrays, codes, *operands)
    assert isinstance(y, jax.Array)
    return y
