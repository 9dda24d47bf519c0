"""Contractions whose operands are 8-bit floats."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jqinject.dot.geometry.dimensions import Dimensions, scale_in_output, varies_only_along
from jqinject.ops.sharding import sharded_as
from jqinject.quant_tensor import FloatQuantTensor


def float8_product(
    lhs: FloatQuantTensor, rhs: FloatQuantTensor, dims: Dimensions, dtype: Any, out_sharding: Any = None
) -> jax.Array:
    """`dot(payload_l, payload_r) * scale_l * scale_r`, summed in float32. It defines no gradient.

    Args:
        lhs, rhs: in hardware's 8-bit formats, with scales that satisfy `has_output_scales`.
        dims, out_sharding: as for `lax.dot_general`.
        dtype: of the output.
    """
    of_left = scale_in_output(lhs.scale, dims.lhs_ndim, dims.lhs_places, dims.out_ndim)
    of_right = scale_in_output(rhs.scale, dims.rhs_ndim, dims.rhs_places, dims.out_ndim)
    assert of_left is not None and of_right is not None, "checked by the caller"
    y = jax.lax.dot_general(
        lhs.payload(),
        rhs.payload(),
        dims.numbers,
        preferred_element_type=jnp.float32,
        out_sharding=out_sharding,
    )
    return (y * (sharded_as(of_left, y) * sharded_as(of_right, y))).astype(dtype)


def has_output_scales(lhs: FloatQuantTensor, rhs: FloatQuantTensor, dims: Dimensions) -> bool:
    """Whether the scales of two 8-bit float tensors can be multiplied in after the sum."""
    return varies_only_along(lhs.scale, lhs.ndim, dims.lhs_places) and varies_only_along(
        rhs.scale, rhs.ndim, dims.rhs_places
    )
