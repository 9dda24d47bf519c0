"""Contracting payloads inside the forward of a Flax layer.

A Flax layer calls what it is given in the place of `lax.dot_general` or `lax.conv_general_dilated`, for one forward
pass. It hands in its operands as plain arrays, promoted to its dtype; scales and formats are known here.
"""

from functools import partial
from typing import Any

import jax
import numpy as np

from jqinject.dot import Affine, affine_of, contract_integers, float8_dot_general, has_integers, integer_conv
from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.kernels.convolution import Convolution
from jqinject.dot.schemes.quantized_einsum import einsum_by
from jqinject.nn.frozen.frozen_weight import FrozenWeight
from jqinject.ops.devices.explicit_axes import asked, with_sharding
from jqinject.quant_tensor import (
    CodebookQuantTensor,
    FloatQuantTensor,
    Groups,
    GroupwiseQuantTensor,
    IntQuantTensor,
)


class Float8Contraction:
    """In the place of `lax.dot_general`: contracts 8-bit floats.

    Args:
        x: the input.
        weight: the kernel.
        grad_dtype: dtype of the gradient's payload, or None.
    """

    def __init__(self, x: FloatQuantTensor, weight: FloatQuantTensor, grad_dtype: Any) -> None:
        self.x = x
        self.weight = weight
        self.grad_dtype = grad_dtype
        self.token: jax.Array | None = None
        self.stored = None

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """The contraction; `precision` is that of the format."""
        y, self.token = float8_dot_general(
            self.x.with_value(lhs),
            self.weight.with_value(rhs),
            dimension_numbers,
            grad_dtype=self.grad_dtype,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )
        return y


class IntegerContraction:
    """In the place of `lax.dot_general`: contracts integers.

    Args:
        x: the input.
        weight: the integers of the kernel.
        stored: the dtype of the values of a frozen kernel, which are not looked at then; None for a kernel whose values
            receive a gradient.
    """

    token = None

    def __init__(self, x: IntQuantTensor, weight: Affine, stored: Any = None) -> None:
        self.x = x
        self.weight = weight
        self.stored = stored

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """The contraction; gradients go to the arrays."""
        return contract_integers(
            lhs,
            rhs if self.stored is None else self.stored,
            affine_of(self.x),
            self.weight,
            Dimensions.of(lhs.ndim, rhs.ndim, dimension_numbers),
            preferred_element_type or lhs.dtype,
            out_sharding=out_sharding,
        )


class PayloadEinsum:
    """In the place of `jnp.einsum`, for a plain contraction: contracts payloads.

    Args:
        contraction: what contracts them in the place of `lax.dot_general`.
    """

    def __init__(self, contraction: IntegerContraction | Float8Contraction) -> None:
        self.contraction = contraction

    def __call__(
        self,
        equation: str,
        lhs: jax.Array,
        rhs: jax.Array,
        *,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """The einsum; gradients go to the arrays."""
        contraction = partial(self.contraction, preferred_element_type=preferred_element_type)
        return einsum_by(contraction, equation, lhs, rhs, out_sharding)


class IntegerConvolution:
    """In the place of `lax.conv_general_dilated`: convolves integers.

    Args:
        x: the input, with one scale and one zero point.
        weight: the integers of the kernel.
    """

    token = None
    stored = None

    def __init__(self, x: IntQuantTensor, weight: Affine) -> None:
        self.x = x
        self.weight = weight

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        window_strides: Any,
        padding: Any,
        *,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
        **options: Any,
    ) -> jax.Array:
        """The convolution; gradients go to the arrays."""
        dtype = preferred_element_type or lhs.dtype
        options["out_sharding"] = asked(out_sharding, lhs, rhs)
        convolution = Convolution.of(lhs.shape, rhs.shape, window_strides, padding, dtype=dtype, **options)
        return with_sharding(
            integer_conv(convolution, lhs, rhs, self._integers(lhs), self.weight), out_sharding
        )

    def _integers(self, lhs: jax.Array) -> Affine:
        """The input's integers, in the shape that the layer gave it: other batch axes, or a border added."""
        scale, zero = self.x.scale.reshape(()), self.x.zero_point.reshape(())
        if lhs.size == self.x.size:
            left = affine_of(self.x)
            no_zero = left.zero_point is None
            return Affine(left.payload.reshape(lhs.shape), scale, None if no_zero else zero)
        return affine_of(self.x.set(value=lhs, scale=scale, zero_point=zero))


def weight_integers(frozen: FrozenWeight | None, proxy: Any, weight: Any) -> Affine | None:
    """The integers of a layer's weight, in groups where it has groups; None where it has none of at most 8 bits.

    Args:
        frozen: the weight, where it is frozen.
        proxy: its quantizer's, or None.
        weight: the quantized weight.
    """
    if frozen is not None:
        return frozen.affine(weight) if frozen.is_contractible else None
    if proxy is not None and not proxy.has_whole_zero_points:
        return None
    whole = weight.grouped if isinstance(weight, GroupwiseQuantTensor) else weight
    return affine_of(whole) if isinstance(whole, IntQuantTensor) and has_integers(whole) else None


def weight_groups(frozen: FrozenWeight | None, weight: Any) -> Groups | None:
    """How an axis of a layer's weight is cut into groups; None where it is not. Arguments as for `weight_integers`."""
    if frozen is not None:
        return frozen.groups
    return weight.groups if isinstance(weight, GroupwiseQuantTensor) else None


def describe(operand: Any) -> str:
    """An operand in an error text: its format, or its dtype."""
    if isinstance(operand, FloatQuantTensor):
        return f"{operand.format} with scales of shape {operand.scale.shape}"
    if isinstance(operand, CodebookQuantTensor):
        return f"indices into a table of {len(operand.codebook.values)} numbers"
    if isinstance(operand, IntQuantTensor):
        zero = np.shape(operand.zero_point)
        return f"{operand.bit_width}-bit integers with scales of shape {operand.scale.shape}, zero points of {zero}"
    return f"{operand.dtype} numbers without a quantizer"
