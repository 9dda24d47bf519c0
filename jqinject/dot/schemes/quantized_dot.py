"""A quantized `dot_general` with quantized gradients: three contractions, each with its own pair of quantizers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot.geometry.dimensions import Dimensions, checked_dimensions, scale_in_output
from jqinject.dot.geometry.sharding import sharding_before
from jqinject.dot.schemes.contraction import Contraction, Operand
from jqinject.dot.schemes.operand import QuantizedOperand, ScaledOperand, missing_key
from jqinject.ops.derivatives import backward_only, first_order
from jqinject.ops.minifloats.low_bits import LowBits, as_bits

NO_SECOND_DERIVATIVE = (
    "a quantized contraction has no second derivative: rounding has none.\n"
    "  cure: differentiate it once, or use jax.lax.dot_general where it is differentiated twice"
)


@dataclass(frozen=True)
class QuantizedDotGeneral:
    """`lax.dot_general` in low bits, forward and backward. Called like it.

    `y = fwd(lhs, rhs)`, `d lhs = dlhs(g, rhs)`, `d rhs = drhs(g, lhs)`: each contraction quantizes its two operands by
    itself, along the axes that *it* sums over. The gradient passes straight through rounding; scales have none.

    Args:
        fwd: the forward contraction.
        dlhs: the gradient of the left operand: of the cotangent and the right operand.
        drhs: the gradient of the right operand: of the cotangent and the left operand.

    Source: AQT's `DotGeneral`.

    Example:
        >>> from jqinject.dot import IntNumerics, OperandQuantizer
        >>> int8 = OperandQuantizer(IntNumerics(8))
        >>> dot_general = QuantizedDotGeneral(fwd=Contraction(int8, int8))
        >>> x = jnp.array([[1.0, -0.5]])
        >>> dot_general(x, x, (((1,), (1,)), ((), ())))
        Array([[1.244...]], dtype=float32)
    """

    fwd: Contraction = Contraction()
    dlhs: Contraction = Contraction()
    drhs: Contraction = Contraction()

    def __post_init__(self) -> None:
        for name in ("fwd", "dlhs", "drhs"):
            if not isinstance(found := getattr(self, name), Contraction):
                raise TypeError(f"QuantizedDotGeneral: {name} must be a Contraction, got {found!r:.80}")

    @property
    def needs_key(self) -> bool:
        """Whether a training step draws random numbers."""
        return self.fwd.needs_key or self.dlhs.needs_key or self.drhs.needs_key

    def __call__(
        self,
        lhs: Operand,
        rhs: Operand,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        key: jax.Array | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """The contraction.

        Args:
            lhs, rhs: float arrays; `ScaledOperand`s, whose scale is known; or `QuantizedOperand`s, which are contracted
                as they are and have no gradient.
            dimension_numbers: as for `lax.dot_general`.
            precision: taken for the signature's sake; the formats decide.
            preferred_element_type: dtype of the output; None promotes those of the operands.
            key: for stochastic rounding.
            out_sharding: as for `lax.dot_general`.

        Raises:
            ValueError: dimension numbers that do not fit the operands; stochastic rounding without a key.
        """
        shapes = _payload(lhs).shape, _payload(rhs).shape
        dims = checked_dimensions(*shapes, dimension_numbers)
        dtype = np.dtype(preferred_element_type or _promoted(lhs, rhs))
        with backward_only("a quantized contraction"):
            return _dot(_Call(self, dims, dtype, out_sharding), lhs, rhs, key)

    def forward_operands(
        self, lhs: Operand, rhs: Operand, dimension_numbers: Any
    ) -> tuple[QuantizedOperand, QuantizedOperand]:
        """Both operands as the forward contraction takes them; what is frozen for serving.

        Raises:
            ValueError: the forward contraction is cut into pieces, whose scales are not those of the whole operand.
        """
        self.check_freezes()
        dims = checked_dimensions(_payload(lhs).shape, _payload(rhs).shape, dimension_numbers)
        return self.fwd.operands(lhs, rhs, dims)

    def check_freezes(self) -> None:
        """Raise where an operand cannot be stored for serving.

        Raises:
            ValueError: the forward contraction is cut into pieces.
        """
        if self.fwd.local_aqt is not None:
            raise ValueError(
                "an operand of a forward contraction that is cut into pieces (local_aqt=) can't be stored for serving: "
                "its pieces have scales of their own.\n  cure: a forward contraction without local_aqt, or a weight "
                "laid out in groups, (groups, group, out), with jqinject.dot.dot_general"
            )


@dataclass(frozen=True)
class _Call:
    """What is static in one call."""

    general: QuantizedDotGeneral
    dims: Dimensions
    dtype: np.dtype
    out_sharding: Any


def _payload(x: Operand) -> jax.Array:
    if isinstance(x, ScaledOperand):
        return x.value
    return x.payload if isinstance(x, QuantizedOperand) else x


def _promoted(lhs: Operand, rhs: Operand) -> Any:
    floats = [_payload(x).dtype for x in (lhs, rhs) if not isinstance(x, QuantizedOperand)]
    return jnp.promote_types(floats[0], floats[-1]) if floats else jnp.float32


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(call: _Call, lhs: Operand, rhs: Operand, key: jax.Array | None) -> jax.Array:
    fwd = call.general.fwd
    if fwd.local_aqt is not None:
        return fwd(_floats(lhs), _floats(rhs), call.dims, call.dtype, _part(key, 0), call.out_sharding)
    left, right = fwd.operands(lhs, rhs, call.dims, _part(key, 0))
    return fwd.contract(left, right, call.dims, call.dtype, call.out_sharding)


def _fwd(call: _Call, lhs: Operand, rhs: Operand, key: jax.Array | None) -> Any:
    if call.general.needs_key and key is None:
        raise missing_key()
    lhs, rhs = _once(lhs), _once(rhs)
    fwd = call.general.fwd
    if fwd.local_aqt is not None:
        y = fwd(_floats(lhs), _floats(rhs), call.dims, call.dtype, _part(key, 0), call.out_sharding)
        return y, as_bits((lhs, rhs, None, None, key))
    left, right = fwd.operands(lhs, rhs, call.dims, _part(key, 0))
    y = fwd.contract(left, right, call.dims, call.dtype, call.out_sharding)
    return y, as_bits((lhs, rhs, left, right, key))


def _bwd(call: _Call, kept: LowBits, g: jax.Array) -> Any:
    lhs, rhs, left, right, key = kept.floats()
    g = first_order(g, NO_SECOND_DERIVATIVE)
    general, dims = call.general, call.dims
    of_lhs = of_rhs = None
    lhs_passes, rhs_passes = _passing(call, (lhs, rhs), (left, right))
    if not isinstance(lhs, QuantizedOperand):
        expanded = _scale_beside_output(right, dims.rhs_ndim, dims.rhs_places, dims)
        of_lhs = _gradient(
            general.dlhs, g, (rhs, right, expanded), dims.gradient_of_lhs(), _payload(lhs), _part(key, 1)
        )
        of_lhs = _like(lhs, _masked(of_lhs, lhs_passes))
    if not isinstance(rhs, QuantizedOperand):
        expanded = _scale_beside_output(left, dims.lhs_ndim, dims.lhs_places, dims)
        of_rhs = _gradient(
            general.drhs, g, (lhs, left, expanded), dims.gradient_of_rhs(), _payload(rhs), _part(key, 2)
        )
        of_rhs = _like(rhs, _masked(of_rhs, rhs_passes))
    return of_lhs, of_rhs, None


def _gradient(
    contraction: Contraction,
    g: jax.Array,
    other: tuple[Operand, QuantizedOperand | None, jax.Array | None],
    where: tuple[Dimensions, tuple[int, ...]],
    like: jax.Array,
    key: jax.Array | None,
) -> jax.Array:
    """One of the two backward contractions.

    Args:
        contraction: its quantizers.
        g: the cotangent of the output.
        other: the other operand, its numbers of the forward pass, and their scale laid out like the output.
        where: dimensions and permutation.
        like: the operand whose gradient this is.
        key: for the noise.
    """
    dims, permutation = where
    operand, forward, expanded = other
    if contraction.rhs_quantizer.use_fwd_quant and forward is not None:
        operand = forward.payload.astype(g.dtype)
        g = g if expanded is None else (g * expanded).astype(g.dtype)
    sharding = sharding_before(permutation, like)
    return contraction(g, _floats(operand), dims, like.dtype, key, sharding, permutation)


def _scale_beside_output(
    operand: QuantizedOperand | None, ndim: int, places: dict[int, int], dims: Dimensions
) -> jax.Array | None:
    if operand is None or operand.scale is None:
        return None
    return scale_in_output(operand.scale, ndim, places, dims.out_ndim)


def _passing(
    call: _Call,
    operands: tuple[Operand, Operand],
    forward: tuple[QuantizedOperand | None, QuantizedOperand | None],
) -> tuple[jax.Array | None, jax.Array | None]:
    """Where the gradient of each operand passes through the rounding of the forward pass; None for everywhere."""
    fwd = call.general.fwd
    if fwd.local_aqt is not None:
        return fwd.passes_gradient(_floats(operands[0]), _floats(operands[1]), call.dims)
    (lhs, rhs), (left, right) = operands, forward
    return (
        None if left is None else fwd.lhs_quantizer.passes_gradient(_payload(lhs), left.scale),
        None if right is None else fwd.rhs_quantizer.passes_gradient(_payload(rhs), right.scale),
    )


def _masked(gradient: jax.Array, passes: jax.Array | None) -> jax.Array:
    return gradient if passes is None else jnp.where(passes, gradient, 0)


def _like(x: Operand, gradient: jax.Array) -> Any:
    """A gradient in the form of its operand."""
    return ScaledOperand(gradient, jnp.zeros_like(x.scale)) if isinstance(x, ScaledOperand) else gradient


def _floats(x: Operand) -> jax.Array:
    return x.dequantize() if isinstance(x, QuantizedOperand) else _payload(x)


def _once(x: Operand) -> Operand:
    if isinstance(x, ScaledOperand):
        return ScaledOperand(first_order(x.value, NO_SECOND_DERIVATIVE), x.scale)
    return x if isinstance(x, QuantizedOperand) else first_order(x, NO_SECOND_DERIVATIVE)


def _part(key: jax.Array | None, number: int) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, number)


_dot.defvjp(_fwd, _bwd)
