"""`FrozenWeight`: the low-bit numbers of a layer's weight, in the place of the weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import Frozen
from jqinject.dot import Affine, Freezer, QuantizedOperand
from jqinject.nn.frozen.frozen_groups import ScaleForms, wide_axes, wide_metadata
from jqinject.ops import Codebook, FloatFormat
from jqinject.ops.choose import known_zero
from jqinject.ops.packing import container_bits
from jqinject.quant_tensor import (
    CodebookQuantTensor,
    FloatQuantTensor,
    Groups,
    GroupwiseQuantTensor,
    IntQuantTensor,
    in_groups,
    is_concrete,
)

PACKED = {
    # (bits in memory, signed): dtype
    (2, True): jnp.int2,
    (2, False): jnp.uint2,
    (4, True): jnp.int4,
    (4, False): jnp.uint4,
    (8, True): jnp.int8,
    (8, False): jnp.uint8,
}


class FrozenWeight(nnx.Module):
    """Payload, scale and zero point of a quantized weight, and what else a QuantTensor knows.

    Args:
        weight: the quantized weight.
        summed: its axes that a contraction sums over; stored last. Empty for a convolution.
        metadata: of the weight's Variable, for the sharding of the payload.
        has_zero_point: whether the zero point may be another than 0.
        axes_of_sums: its axes along which a contraction of integers needs their sums; None for no sums.
        forms: what is known of its scales and zero points.

    Raises:
        TypeError: `weight` is no QuantTensor.
        ValueError: its bit width is not known, as the model is abstract and it is learned.
    """

    zero_point: Frozen | None
    sums: Frozen | None
    scale_factor: Frozen | None
    groups: Groups | None = None
    format: FloatFormat | Codebook | None = None

    def __init__(
        self,
        weight: Any,
        summed: tuple[int, ...],
        metadata: Mapping[str, Any],
        has_zero_point: bool,
        axes_of_sums: tuple[int, ...] | None,
        forms: ScaleForms,
    ) -> None:
        self.value_dtype = np.dtype(weight.dtype)
        self.whole_zero_point = forms.whole_zero_point
        self.zero_point = nnx.data(None)
        self.sums = nnx.data(None)
        self.scale_factor = nnx.data(None)
        if isinstance(weight, GroupwiseQuantTensor):
            self.groups = weight.groups
            metadata = wide_metadata(metadata, weight.groups, weight.ndim)
            summed, axes_of_sums = wide_axes(summed, weight.groups, weight.ndim), None
            weight = weight.grouped
        scale, factor = forms.of_scale(_full_rank(weight.scale, weight.ndim), self.groups)
        if factor is not None:
            self.scale_factor = Frozen(factor)
        if isinstance(weight, IntQuantTensor):
            if not is_concrete(weight.bit_width):
                raise ValueError(
                    "a learned bit width is not known in an abstract model, so the payload's dtype is not either.\n"
                    "  cure: freeze the model itself"
                )
            self.bit_width = int(weight.bit_width)
            self.signed = weight.signed
            payload = _narrow(weight)
            if has_zero_point:
                zero = _full_rank(weight.zero_point, weight.ndim)
                self.zero_point = Frozen(forms.of_zero_point(zero, payload.dtype, self.groups))
            if payload.dtype.itemsize == 1 and axes_of_sums is not None:
                self.sums = Frozen(jnp.sum(payload, axis=axes_of_sums, dtype=jnp.int32, keepdims=True))
        elif isinstance(weight, FloatQuantTensor):
            self.format = weight.known_format("a frozen weight")
            payload = _float_payload(weight)
        elif isinstance(weight, CodebookQuantTensor):
            self.format = weight.codebook
            payload = weight.codes().astype(PACKED[container_bits(weight.bit_width), False])
        else:
            raise TypeError(f"a weight that is frozen must be a QuantTensor, got {type(weight).__name__}")
        self.freezer = Freezer(metadata=metadata)
        self.freezer.set(QuantizedOperand(payload, scale), summed)

    def affine(self, weight: Any) -> Affine:
        """The integers, for a contraction; with two axes for one where there are groups.

        Args:
            weight: what `quant_tensor` returned.
        """
        whole = weight if self.groups is None else weight.grouped
        sums = None if self.sums is None else self.sums[...]
        return Affine(whole.payload, whole.scale, None if self.zero_point is None else whole.zero_point, sums)

    def _stored(self) -> tuple[jax.Array, jax.Array]:
        operand = self.freezer.get()
        assert operand.scale is not None, "a frozen weight has a scale"
        scale = operand.scale.astype(jnp.float32)
        return operand.payload, scale if self.scale_factor is None else scale * self.scale_factor[...]

    def quant_tensor(self) -> Any:
        """The weight as a QuantTensor; of integers, dequantized when its value is read."""
        payload, scale = self._stored()
        if isinstance(self.format, Codebook):
            return self._seen(
                CodebookQuantTensor.from_codes(payload, scale, self.format, dtype=self.value_dtype)
            )
        if self.format is not None:
            return self._seen(
                FloatQuantTensor.from_payload(payload, scale, format=self.format, dtype=self.value_dtype)
            )
        zero = known_zero() if self.zero_point is None else self.zero_point[...].astype(jnp.float32)
        weight = IntQuantTensor.stored(payload, scale, zero, self.bit_width, self.signed, self.value_dtype)
        return weight if self.groups is None else self._seen(weight)

    def _seen(self, weight: Any) -> Any:
        groups = self.groups
        return weight if groups is None else in_groups(weight, groups.size, groups.dim, groups.length)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight, with the axes in front that layers are stacked along."""
        stored, shape = self.freezer.value, self.freezer.shape
        stack = () if stored is None else stored.shape[: stored.ndim - len(shape)]
        return (*stack, *(shape if self.groups is None else self.groups.shape_of(shape)))

    @property
    def has_integers(self) -> bool:
        """Whether its payload is integers, not minifloats or codes."""
        return self.format is None

    @property
    def is_contractible(self) -> bool:
        """Whether it has integers that backends contract."""
        return self.format is None and self.bit_width <= 8 and self.whole_zero_point


def _narrow(weight: IntQuantTensor) -> jax.Array:
    """The integers in the narrowest dtype that holds them in memory."""
    bits = int(weight.bit_width)
    if bits > 8:
        return weight.int().astype(jnp.int16 if bits <= 16 and weight.signed else jnp.int32)
    return weight.int().astype(PACKED[container_bits(bits), weight.signed])


def _float_payload(weight: FloatQuantTensor) -> jax.Array:
    """The minifloats in their own dtype where it is one of 8 bits, else their codes in the narrowest."""
    bits = weight.known_format("a frozen weight").bit_width
    if bits == 8 and jnp.issubdtype(weight.q_dtype, jnp.floating):
        return weight.payload()
    codes = weight.codes()
    return codes.astype(PACKED[container_bits(bits), False]) if bits <= 8 else codes


def _full_rank(x: jax.Array, ndim: int) -> jax.Array:
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)
