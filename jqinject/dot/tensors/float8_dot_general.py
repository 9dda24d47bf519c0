"""`dot_general` of two tensors of 8-bit floats; the derivative is `six_operands`'."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.geometry.labels import Labelling
from jqinject.dot.kernels.float8_dot import has_output_scales
from jqinject.dot.tensors.labelled_tensor import LabelledTensor
from jqinject.dot.tensors.product import Sums
from jqinject.dot.tensors.six_operands import Plan, contract_operands
from jqinject.quant_tensor import FloatQuantTensor, on_minifloats

_IN_FLOAT32 = Sums(floats="float32")


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

    The products are summed in float32. The backward pass contracts payloads again: with `grad_dtype`, the cotangent of
    `y` is a payload of that dtype times the cotangent of the token, so that both gradients also contract 8-bit floats;
    without it, or if a scale varies along an axis that a gradient sums over, they are float. Gradients pass straight
    through to the values of the operands.

    GPUs with 8-bit float units (Hopper and later) use them; CPUs compute the same, no faster than float.

    Args:
        lhs: the left operand.
        rhs: the right operand; its scale may vary along axes that are not summed. A stored one gets no gradient.
        dimension_numbers: as for `lax.dot_general`.
        grad_dtype: dtype of the gradient's payload, or None.
        preferred_element_type: dtype of the output; None means that of `lhs`.
        out_sharding: as for `lax.dot_general`.

    Returns:
        (the output, a token: a float32 0 whose cotangent is the gradient's scale).

    Raises:
        TypeError: an operand is not a `FloatQuantTensor`.
        ValueError: a scale varies along a summed axis, or hardware lacks a format.

    Source: Flax's `fp8_scaled_dot_general`.

    Example:
        >>> x = FloatQuantTensor.from_payload(jnp.ones((2, 3), jnp.float8_e4m3fn), 0.5)
        >>> float8_dot_general(x, x, (((1,), (1,)), ((), ())))[0]
        Array([[0.75, 0.75],
               [0.75, 0.75]], dtype=float32)
    """
    for side, operand in (("lhs", lhs), ("rhs", rhs)):
        if not on_minifloats(operand):
            raise TypeError(
                f"float8_dot_general: {side} must be a FloatQuantTensor, got {type(operand).__name__}"
            )
        if not operand.is_contractible:
            raise ValueError(
                f"float8_dot_general: {side} is in the format {operand.format}, which no backend contracts.\n"
                "  cure: one of the 8-bit formats of OCP or FNUZ; or contract the values: contraction='float'"
            )
    dims = Dimensions.of(lhs.ndim, rhs.ndim, dimension_numbers)
    if not has_output_scales(lhs, rhs, dims):
        raise ValueError(
            "float8_dot_general: a scale varies along an axis that is summed over, so no multiplication after the "
            f"sum can undo it (scales {lhs.scale.shape}, {rhs.scale.shape}; dimension numbers {dimension_numbers})."
            "\n  cure: quantize per tensor, or per output channel; or contract the values: contraction='float'"
        )
    labels = Labelling.of(dims)
    plan = Plan(
        labels,
        np.dtype(preferred_element_type or lhs.dtype),
        dgrad=_IN_FLOAT32,
        wgrad=_IN_FLOAT32,
        out_sharding=out_sharding,
        grad_dtype=None if grad_dtype is None else np.dtype(grad_dtype),
        what="a contraction of 8-bit floats",
    )
    left, right = LabelledTensor(lhs, labels.lhs), LabelledTensor(rhs, labels.rhs)
    y, token = contract_operands(plan, left, right)
    return y, jnp.zeros((), jnp.float32) if token is None else token
