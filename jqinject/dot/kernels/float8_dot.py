"""Contractions whose operands are 8-bit floats, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot.geometry.dimensions import Dimensions, scale_in_output, varies_only_along
from jqinject.dot.geometry.sharding import sharding_before
from jqinject.ops.derivatives import explain_forward_mode, first_order
from jqinject.ops.devices.explicit_axes import sharded_beside
from jqinject.ops.minifloats.float8_cast import from_float8, to_float8_again
from jqinject.ops.minifloats.low_bits import LowBits, as_bits
from jqinject.ops.observe import mapped_with, summed_like
from jqinject.quant_tensor import FloatQuantTensor

NO_SECOND_DERIVATIVE = (
    "a contraction of 8-bit floats has no second derivative: its backward pass holds payloads.\n"
    "  cure: contraction='float' on the layers that are differentiated twice"
)


@dataclass(frozen=True)
class Float8Spec:
    """What is static in an 8-bit float contraction.

    Attributes:
        dims: its dimensions.
        lhs_dtype, rhs_dtype: dtypes of the values.
        grad_dtype: dtype of the gradient's payload in the backward pass; None for a gradient that is not quantized.
        out_dtype: dtype of the output.
        out_sharding: as for `lax.dot_general`.
        stored: whether the right operand is stored, and gets no gradient.
    """

    dims: Dimensions
    lhs_dtype: np.dtype
    rhs_dtype: np.dtype
    grad_dtype: np.dtype | None
    out_dtype: np.dtype
    out_sharding: Any = None
    stored: bool = False


def float8_dot_general(
    lhs: FloatQuantTensor,
    rhs: FloatQuantTensor,
    dimension_numbers: Any,
    *,
    grad_dtype: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Contract the payloads of two 8-bit float tensors: `y = dot(payload_l, payload_r) * scale_l * scale_r`.

    The products are summed in float32. Backward, the operands are the payloads again: with `grad_dtype`, the cotangent
    of `y` counts as a payload of that dtype times the scale that arrives as the cotangent of the token, so that both
    gradients contract 8-bit floats too; without, or where a scale varies along an axis that a gradient sums over, they
    are float. Gradients pass straight through to the values of the operands.

    A GPU with 8-bit float units (Hopper and later) runs these contractions on them. A CPU has none: it computes the
    same, no faster than float.

    Args:
        lhs: the left operand.
        rhs: the right operand; a scale may vary along axes that are not summed over. A stored one gets no gradient.
        dimension_numbers: as for `lax.dot_general`.
        grad_dtype: dtype of the gradient's payload, or None.
        preferred_element_type: dtype of the output; None means that of `lhs`.
        out_sharding: as for `lax.dot_general`.

    Returns:
        (the output, a token: a float32 0 whose cotangent is the gradient's scale).

    Raises:
        TypeError: an operand is no `FloatQuantTensor`.
        ValueError: a scale varies along an axis that is summed over, or a format is none of hardware's.

    Source: Flax's `fp8_scaled_dot_general`.

    Example:
        >>> x = FloatQuantTensor.from_payload(jnp.ones((2, 3), jnp.float8_e4m3fn), 0.5)
        >>> float8_dot_general(x, x, (((1,), (1,)), ((), ())))[0]
        Array([[0.75, 0.75],
               [0.75, 0.75]], dtype=float32)
    """
    for side, operand in (("lhs", lhs), ("rhs", rhs)):
        if not isinstance(operand, FloatQuantTensor):
            raise TypeError(
                f"float8_dot_general: {side} must be a FloatQuantTensor, got {type(operand).__name__}"
            )
        if not operand.is_contractible:
            raise ValueError(
                f"float8_dot_general: {side} is in the format {operand.format}, which no backend contracts.\n"
                "  cure: one of the 8-bit formats of OCP or FNUZ; or contract the values: contraction='float'"
            )
    spec = Float8Spec(
        Dimensions.of(lhs.ndim, rhs.ndim, dimension_numbers),
        np.dtype(lhs.dtype),
        np.dtype(rhs.dtype),
        None if grad_dtype is None else np.dtype(grad_dtype),
        np.dtype(preferred_element_type or lhs.dtype),
        out_sharding,
        rhs.is_stored,
    )
    if not has_output_scales(lhs, rhs, spec.dims):
        raise ValueError(
            "float8_dot_general: a scale varies along an axis that is summed over, so no multiplication after the "
            f"sum can undo it (scales {lhs.scale.shape}, {rhs.scale.shape}; dimension numbers {dimension_numbers})."
            "\n  cure: quantize per tensor, or per output channel; or contract the values: contraction='float'"
        )
    try:
        values = lhs.value, None if rhs.is_stored else rhs.value
        return _dot(spec, *values, lhs.payload(), rhs.payload(), lhs.scale, rhs.scale)
    except TypeError as error:
        explain_forward_mode(error, "a contraction of 8-bit floats")
        raise


def has_output_scales(lhs: FloatQuantTensor, rhs: FloatQuantTensor, dims: Dimensions) -> bool:
    """Whether the scales of two 8-bit float tensors can be multiplied in after the sum."""
    return varies_only_along(lhs.scale, lhs.ndim, dims.lhs_places) and varies_only_along(
        rhs.scale, rhs.ndim, dims.rhs_places
    )


def contracts_in_float8(lhs: Any, rhs: Any) -> bool:
    """Whether two operands of a dense layer (last axis with first axis) can be contracted as 8-bit floats."""
    if not (isinstance(lhs, FloatQuantTensor) and isinstance(rhs, FloatQuantTensor)) or lhs.ndim == 0:
        return False
    if not (lhs.is_contractible and rhs.is_contractible):
        return False
    dims = Dimensions.of(lhs.ndim, rhs.ndim, (((lhs.ndim - 1,), (0,)), ((), ())))
    return has_output_scales(lhs, rhs, dims)


def _contract(a: jax.Array, b: jax.Array, dims: Dimensions, out_sharding: Any = None) -> jax.Array:
    return jax.lax.dot_general(
        a, b, dims.numbers, preferred_element_type=jnp.float32, out_sharding=out_sharding
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(
    spec: Float8Spec, lhs: jax.Array, rhs: jax.Array | None, *payloads_and_scales: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The payloads contracted; `lhs` and `rhs`, the values, receive the gradients and are not looked at."""
    return _forward(spec, *payloads_and_scales)


def _forward(
    spec: Float8Spec, left: jax.Array, right: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    dims = spec.dims
    of_left = scale_in_output(lhs_scale, dims.lhs_ndim, dims.lhs_places, dims.out_ndim)
    of_right = scale_in_output(rhs_scale, dims.rhs_ndim, dims.rhs_places, dims.out_ndim)
    assert of_left is not None and of_right is not None, "checked by float8_dot_general"
    y = _contract(left, right, dims, spec.out_sharding)
    y = (y * (sharded_beside(of_left, y) * sharded_beside(of_right, y))).astype(spec.out_dtype)
    token = jnp.asarray(np.float32(0))
    return y, token if spec.grad_dtype is None else mapped_with(token, left, right)


def _fwd(spec: Float8Spec, lhs: jax.Array, rhs: jax.Array | None, *payloads_and_scales: jax.Array) -> Any:
    # This forward pass is only differentiated by a second derivative.
    left, right, *scales = payloads_and_scales
    left, right, *_ = first_order((left, right, lhs, rhs), NO_SECOND_DERIVATIVE)
    return _forward(spec, left, right, *scales), as_bits((left, right, *scales))


def _bwd(spec: Float8Spec, kept: LowBits, cotangents: tuple[jax.Array, jax.Array]) -> Any:
    left, right, lhs_scale, rhs_scale = kept.floats()
    g, g_scale = first_order(cotangents[0], NO_SECOND_DERIVATIVE), cotangents[1]
    quantized = spec.grad_dtype is not None
    gradient = (to_float8_again(g, g_scale, spec.grad_dtype), g_scale) if quantized else (g, None)
    of_lhs = _gradient(gradient, (right, rhs_scale), spec.dims.gradient_of_lhs(), left)
    of_lhs = summed_like(of_lhs, left).astype(spec.lhs_dtype)
    if spec.stored:
        return of_lhs, None, None, None, None, None
    of_rhs = _gradient(gradient, (left, lhs_scale), spec.dims.gradient_of_rhs(), right)
    return of_lhs, summed_like(of_rhs, right).astype(spec.rhs_dtype), None, None, None, None


def _gradient(
    gradient: Any, operand: Any, where: tuple[Dimensions, tuple[int, ...]], like: jax.Array
) -> jax.Array:
    """One of the two backward contractions: of payloads where both have one scale, else of floats.

    Args:
        gradient: the cotangent (a payload and its scale, or a float array and None).
        operand: the payload and scale of the other operand.
        where: dimensions and permutation.
        like: the operand whose gradient this is; the result is laid out over devices as it is.
    """
    dims, permutation = where
    sharding = sharding_before(permutation, like)
    (g, g_scale), (payload, scale) = gradient, operand
    if g_scale is not None and scale.size == 1:
        made = _contract(g, payload, dims, sharding) * (
            g_scale * (scale.reshape(()) if scale.ndim else scale)
        )
    else:
        floats = g.astype(jnp.float32) if g_scale is None else from_float8(g, g_scale, jnp.float32)
        made = _contract(floats, from_float8(payload, scale, jnp.float32), dims, sharding)
    return made.transpose(permutation)


_dot.defvjp(_fwd, _bwd)
