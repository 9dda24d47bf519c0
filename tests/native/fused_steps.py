"""Products with steps around them, and the same in NumPy, operation by operation."""

import jax.numpy as jnp
import numpy as np

from jqinject.native.fused_matmul import StepKind

F32 = np.float32
OPERATIONS = {
    StepKind.ADD: np.add,
    StepKind.SUBTRACT: np.subtract,
    StepKind.SUBTRACT_INTEGER: np.subtract,
    StepKind.MULTIPLY: np.multiply,
    StepKind.DIVIDE: np.divide,
    StepKind.MAXIMUM: np.maximum,
    StepKind.MINIMUM: np.minimum,
    StepKind.ROUND: np.rint,
    StepKind.MULTIPLY_BY_RECIPROCAL: lambda x, y: x * (F32(1) / y),
    StepKind.REPLACE_EQUAL: lambda x, y, other: np.where(x == y, other, x),
    StepKind.REPLACE_BELOW: lambda x, y, other: np.where(x < y, other, x),
    StepKind.TO_BFLOAT16: lambda x: x.astype(jnp.bfloat16).astype(F32),
}


def applied(x, steps):
    """Each operation rounds to float32; a multiplication and an addition after it round once."""
    steps = [*steps]
    while steps:
        kind, operands = steps.pop(0)
        if kind == StepKind.MULTIPLY_BY_PRODUCT:
            kind, operands = StepKind.MULTIPLY, (operands[0] * operands[1],)
        following = steps[0] if steps else (None, ())
        if kind == StepKind.MULTIPLY and following[0] in (StepKind.ADD, StepKind.SUBTRACT):
            wide = [y.astype(np.longdouble) for y in (x, *operands, *following[1])]
            x = OPERATIONS[following[0]](wide[0] * wide[1], wide[2]).astype(F32)
            steps.pop(0)
        else:
            x = OPERATIONS[kind](x, *operands)
            x = x if x.dtype == np.int32 and kind == StepKind.SUBTRACT_INTEGER else x.astype(F32)
    return x


def result(lhs, rhs, before, after, dtype):
    """What `fused_matmul` computes."""
    given = lhs if lhs.dtype == np.int8 else applied(lhs.astype(F32), before)
    sums = (given.astype(np.int64) @ rhs.T.astype(np.int64)).astype(np.int32)
    if after and after[0][0] == StepKind.SUBTRACT_INTEGER:
        sums, after = applied(sums, after[:1]), after[1:]
    return applied(sums.astype(F32), after).astype(dtype)


def rounding(scale):
    """To int8, of numbers with a scale."""
    limits = (np.full((1, 1), limit, F32) for limit in (-128, 127))
    kinds = StepKind.MAXIMUM, StepKind.MINIMUM
    return [
        (StepKind.DIVIDE, (scale,)),
        (StepKind.ROUND, ()),
        *((kind, (limit,)) for kind, limit in zip(kinds, limits, strict=True)),
    ]


def scales():
    """Of the largest magnitudes of rows: 1 for empty ones, and not too small."""
    tiny, one, steps = (np.full((1, 1), number, F32) for number in (0.6, 1, 127))
    return [
        (StepKind.REPLACE_EQUAL, (one - 1, one)),
        (StepKind.REPLACE_BELOW, (tiny, steps)),
        (StepKind.DIVIDE, (steps,)),
    ]


def cases(draw, m, n, k):
    """Layers of an m x k input and an n x k weight: (lhs, rhs, before, after, dtype of the result)."""
    x = draw.normal(size=(m, k)).astype(F32)
    w = draw.integers(-128, 128, (n, k), np.int8)
    one, of_rows, of_columns = (
        draw.uniform(0.01, 0.05, shape).astype(F32) for shape in ((1, 1), (m, 1), (1, n))
    )
    bias, residual, zero = (
        draw.normal(size=(1, n)).astype(F32),
        draw.normal(size=(m, n)).astype(F32),
        F32([[0]]),
    )
    sums = draw.integers(-1000, 1000, (1, n), np.int32)
    relu6 = [(StepKind.MAXIMUM, (zero,)), (StepKind.MINIMUM, (zero + 6,))]
    narrow = (StepKind.TO_BFLOAT16, ())
    yield x, w, rounding(one), [(StepKind.MULTIPLY, (of_columns,)), (StepKind.ADD, (bias,)), *relu6], F32
    scaled = StepKind.MULTIPLY_BY_PRODUCT, (of_rows, of_columns)
    yield x, w, rounding(of_rows), [scaled, (StepKind.ADD, (residual,))], F32
    yield x, w, rounding(of_rows), [scaled], F32
    shifted = (StepKind.SUBTRACT_INTEGER, (sums,)), (StepKind.MULTIPLY, (one,)), (StepKind.SUBTRACT, (bias,))
    yield x, w, rounding(one), [*shifted, *rounding(one)], np.int8
    payload = draw.integers(-128, 128, (m, k), np.int8)
    yield (
        payload,
        w,
        [],
        [(StepKind.MULTIPLY, (of_columns,)), narrow, (StepKind.ADD, (bias,)), narrow],
        jnp.bfloat16,
    )
    quotient = [(StepKind.MULTIPLY, (1 / of_rows,)), (StepKind.ADD, (one,)), *rounding(one)[1:]]
    yield x.astype(jnp.bfloat16), w, quotient, [(StepKind.DIVIDE, (of_columns,))], F32
    yield x, w, [(StepKind.MULTIPLY_BY_RECIPROCAL, (of_rows,)), *rounding(one)[1:]], [scaled], F32
