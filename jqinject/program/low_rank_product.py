"""Low-rank updates of weights: they follow a weight through its moves, and are contracted beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jqinject.ops.ste import custom_jvp
from jqinject.program import moves, operations
from jqinject.program.jaxpr import Equation

Arrays = tuple[jax.Array, ...]


@partial(jax.tree_util.register_dataclass, data_fields=["a", "b"], meta_fields=["scale", "dropout", "lookup"])
@dataclass(frozen=True)
class LowRankProduct:
    """A weight's update, the sum over r of `scale * a[..., r] * b[..., r]`.

    Attributes:
        a, b: the weight's axes, of size 1 where the factor does not vary, and the rank as the last axis.
        scale: static.
        dropout: the name of the dropout of the input; empty for none.
        lookup: the name of the look-up that chose these of the weight's rows; empty for none.
    """

    a: jax.Array
    b: jax.Array
    scale: float
    dropout: str = ""
    lookup: str = ""

    def moved(self, move: moves.Move, lookup: str = "") -> LowRankProduct:
        """The update of the weight after a move.

        Args:
            move: of the weight.
            lookup: the name of the move if it is a look-up.
        """
        along = jax.vmap(move.partial, in_axes=-1, out_axes=-1)
        return replace(self, a=along(self.a), b=along(self.b), lookup=lookup or self.lookup)

    def dense(self) -> jax.Array:
        """The update as an array; axes along which neither factor varies have size 1."""
        return self.scale * (self.a * self.b).sum(-1)

    def contracted(
        self, eqn: Equation, x: jax.Array, place: int, rest: Sequence[jax.Array]
    ) -> jax.Array | None:
        """The contraction of an array with the factors one after the other; None if it is not two products.

        Args:
            eqn: the equation that contracts the array with the weight.
            x: the array.
            place: which operand the weight is.
            rest: further operands.
        """
        # An equation says the sharding of its own output alone.
        if eqn.name not in FACTORED or eqn.params.get("out_sharding") is not None:
            return None
        product = FACTORED[eqn.name](self, eqn, x, place, rest)
        return None if product is None else self.scale * product


def _varies(factor: jax.Array, axis: int) -> bool:
    return factor.shape[axis] > 1


def _dot(low: LowRankProduct, eqn: Equation, x: jax.Array, place: int, rest: Sequence[object]) -> jax.Array:
    """First with the factor that varies along the summed axes, then with the other one."""
    sides = operations.operand_axes(eqn)
    axes, other = sides[place], sides[1 - place]
    ndim, rank = low.a.ndim - 1, x.ndim + low.a.ndim
    of_x = [other.partners.get(axis, ndim + axis) for axis in range(x.ndim)]
    free = [axes.free, [ndim + axis for axis in other.free]]
    out = [*axes.batch, *free[place], *free[1 - place]]
    a_is_first = any(_varies(low.a, axis) for axis in axes.summed)
    first, second = (low.a, low.b) if a_is_first else (low.b, low.a)
    (first, of_first), (second, of_second) = _labelled(first, rank), _labelled(second, rank)
    between = [label for label in dict.fromkeys((*of_x, *of_first)) if label in {*of_second, *out}]
    inner = jnp.einsum(x, of_x, first, of_first, between, precision=eqn.params["precision"])
    present = [label for label in out if label in {*between, *of_second}]
    y = jnp.einsum(inner, between, second, of_second, present, precision=eqn.params["precision"])
    shape = eqn.outputs[0].shape
    sizes = [n if label in present else 1 for n, label in zip(shape, out, strict=True)]
    return jnp.broadcast_to(y.reshape(sizes), shape)


def _labelled(factor: jax.Array, rank: int) -> tuple[jax.Array, list[int]]:
    """A factor without the axes along which it does not vary, and the labels of the others."""
    axes = [axis for axis in range(factor.ndim - 1) if _varies(factor, axis)]
    return factor.reshape([factor.shape[axis] for axis in axes] + [factor.shape[-1]]), [*axes, rank]


def _ragged(
    low: LowRankProduct, eqn: Equation, x: jax.Array, place: int, rest: Sequence[jax.Array]
) -> jax.Array | None:
    """Rows in groups, each group with its own matrices."""
    if not operations.multiplies_matrices(eqn) or place == 0 or _varies(low.a, 2) or _varies(low.b, 1):
        return None
    groups, rank = math.prod(rest[0].shape), low.a.shape[-1]
    a = jnp.broadcast_to(low.a[:, :, 0], (groups, low.a.shape[1], rank))
    b = jnp.broadcast_to(low.b[:, 0], (groups, low.b.shape[2], rank))
    inner = lax.ragged_dot(x, a, rest[0])
    return lax.ragged_dot(inner, jnp.swapaxes(b, 1, 2), rest[0])


FACTORED: dict[str, Callable[..., jax.Array | None]] = {"dot_general": _dot, "ragged_dot_general": _ragged}


LOW_BITS = np.uint32(0xFFF)
SIGN_AND_EXPONENT = np.uint32(0xFF800000)
UNROLLED = 8


@custom_jvp(3)
def low_rank_sum(weight: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """`weight + scale * sum(a * b, -1)`, rounded to the weight's dtype.

    A compiler may contract a product and a sum into one operation that rounds once, or sum in another order, and a
    number on the border of two integers of the quantizer then flips. So the factors are cut into halves of 12 bits,
    whose products are exact, and these are summed one after the other: the same bits in eager, jit, vjp and remat. Of
    each product the part below 2**-22 of it is left out.

    Args:
        weight: of any floating-point dtype.
        a, b: in the weight's axes, of size 1 where a factor does not vary, and the rank as the last axis.
        scale: of the update.

    Returns:
        The sum, in the weight's shape and dtype.

    Example:
        >>> w, a, b = jnp.ones((2, 2)), jnp.array([[[0.5]], [[1.0]]]), jnp.array([[[2.0], [4.0]]])
        >>> low_rank_sum(w, a, b, 0.5)
        Array([[1.5, 2. ],
               [2. , 3. ]], dtype=float32)
    """
    (a_high, a_low), (b_high, b_low) = (
        _halves(x) for x in (a.astype(jnp.float32) * scale, b.astype(jnp.float32))
    )

    def add(total: jax.Array, factors: Arrays) -> tuple[jax.Array, None]:
        one_high, one_low, other_high, other_low = factors
        total = total + one_high * other_high
        return total + one_high * other_low + one_low * other_high, None

    ranks = tuple(jnp.moveaxis(x, -1, 0) for x in (a_high, a_low, b_high, b_low))
    shape = jnp.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    update, _ = jax.lax.scan(add, jnp.zeros(shape, jnp.float32), ranks, unroll=UNROLLED)
    total = weight.astype(jnp.float32) + update
    form = jnp.finfo(weight.dtype)
    # A conversion alone may be left out between two that widen again.
    rounded = total if form.bits >= 32 else jax.lax.reduce_precision(total, form.nexp, form.nmant)
    return rounded.astype(weight.dtype)


@low_rank_sum.defjvp
def _tangent(scale: float, primals: Arrays, tangents: Arrays) -> tuple[jax.Array, jax.Array]:
    (weight, a, b), (d_weight, d_a, d_b) = primals, tangents
    update = _product(d_a, b) + _product(a, d_b)
    return low_rank_sum(weight, a, b, scale), d_weight + (scale * update).astype(weight.dtype)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """`sum(a * b, -1)` in float32, as one contraction."""
    shape = jnp.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    out = [axis for axis, size in enumerate(shape) if size > 1]
    (a, of_a), (b, of_b) = (_labelled(x.astype(jnp.float32), x.ndim - 1) for x in (a, b))
    return jnp.einsum(a, of_a, b, of_b, out, precision="highest").reshape(shape)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 numbers as the sum of two with 12 bits each, by integer operations, which no compiler contracts."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)

    def as_float(bits: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    # The low half: a number of the same exponent with the low bits alone, less that exponent's power of two.
    power = bits & SIGN_AND_EXPONENT
    return as_float(bits & ~LOW_BITS), as_float(power | (bits & LOW_BITS)) - as_float(power)
