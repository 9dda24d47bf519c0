"""`FrozenWeight`: the low-bit numbers of a layer's weight, replacing the weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import Frozen
from jqinject.dot import Affine
from jqinject.dot.tensors.freezer import StoredForm
from jqinject.nn.frozen.frozen_groups import ScaleForms, wide_axes, wide_metadata, without_groups
from jqinject.ops import Codebook, FloatFormat
from jqinject.ops.devices.cut import Cut
from jqinject.ops.fake_quant import known_zero
from jqinject.ops.groups import split_groups
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


@dataclass(frozen=True)
class FrozenForm:
    """What is static in a frozen weight.

    Attributes:
        stored: how the payload is stored.
        value_dtype: of the dequantized weight.
        whole_zero_point: whether every zero point is one of the integers.
        groups: how an axis of the weight is cut into groups; None without groups.
        cut: the same for groups that cross shards, whose payload is stored in the weight's shape.
        format: of minifloats, or the table of codes; None for integers.
        bit_width: of integers.
        signed: whether integers have a sign.
    """

    stored: StoredForm
    value_dtype: np.dtype
    whole_zero_point: bool
    groups: Groups | None = None
    cut: Cut | None = None
    format: FloatFormat | Codebook | None = None
    bit_width: int = 8
    signed: bool = True


class FrozenWeight(nnx.Module):
    """Payload, scale and zero point of a quantized weight, and what else a QuantTensor knows.

    State: `value`, the payload in its `StoredForm`; `scale`, float32, or a byte each for groups; and if
    there are any, `zero_point`, `sums` of the payload, and the `scale_factor` of scales in bytes.

    Args:
        weight: the quantized weight.
        summed: its axes that a contraction sums over; stored last. Empty for a convolution.
        metadata: of the weight's Variable, for the sharding of the payload.
        has_zero_point: whether the zero point may be another than 0.
        axes_of_sums: its axes along which a contraction of integers needs their sums; None for no sums.
        forms: what is known of its scales and zero points.
        cut: groups that cross shards, whose payload is stored in the weight's shape; None for any others.

    Raises:
        TypeError: `weight` is not a QuantTensor.
        ValueError: its bit width is unknown because the model is abstract and the bit width is learned.
    """

    value: Frozen
    scale: Frozen
    zero_point: Frozen | None = None
    sums: Frozen | None = None
    scale_factor: Frozen | None = None
    form: FrozenForm

    def __init__(
        self,
        weight: Any,
        summed: tuple[int, ...],
        metadata: Mapping[str, Any],
        has_zero_point: bool,
        axes_of_sums: tuple[int, ...] | None,
        forms: ScaleForms,
        cut: Cut | None = None,
    ) -> None:
        value_dtype, groups, numbers = np.dtype(weight.dtype), None, (weight.scale, weight.zero_point)
        if isinstance(weight, GroupwiseQuantTensor):
            groups, axes_of_sums = weight.groups, None
            numbers = weight.scale_, weight.zero_point_
            if cut is None:
                metadata = wide_metadata(metadata, groups, weight.ndim)
                summed = wide_axes(summed, groups, weight.ndim)
            weight = weight.grouped if cut is None else without_groups(weight, cut)
        ndim = weight.ndim + (cut is not None)
        scale, factor = forms.of_scale(_full_rank(numbers[0], ndim), groups)
        if factor is not None:
            self.scale_factor = Frozen(factor)
        payload, kind = _payload(weight)
        stored = StoredForm.of(payload, summed)
        self.form = FrozenForm(stored, value_dtype, forms.whole_zero_point, groups, cut, **kind)
        if isinstance(weight, IntQuantTensor):
            if has_zero_point:
                zero = _full_rank(numbers[1], ndim)
                self.zero_point = Frozen(forms.of_zero_point(zero, payload.dtype, groups))
            if payload.dtype.itemsize == 1 and axes_of_sums is not None:
                self.sums = Frozen(jnp.sum(payload, axis=axes_of_sums, dtype=jnp.int32, keepdims=True))
        # The payload has its sharding from the weight, with or without a mesh.
        self.value, self.scale = stored.variables(payload, scale, {**metadata, "eager_sharding": False})

    def integers(self, weight: Any, summed: tuple[int, ...] | None = None) -> Affine | None:
        """The integers of at most 8 bits, for a contraction, with two axes for one if there are groups; None otherwise.

        Args:
            weight: what `quant_tensor` returned.
            summed: the axes that the contraction sums over; None for those of the stored sums.
        """
        form = self.form
        if form.format is not None or form.bit_width > 8 or not form.whole_zero_point:
            return None
        if form.cut is not None:
            return self._in_pieces(form.cut)
        whole = weight if form.groups is None else weight.grouped
        known = self.sums is not None and (summed is None or {*summed} == {*form.stored.summed})
        sums = self.sums[...] if known and self.sums is not None else None
        return Affine(whole.payload, whole.scale, None if self.zero_point is None else whole.zero_point, sums)

    @property
    def contracted_groups(self) -> Groups | None:
        """How `integers` cut an axis: into groups, or into pieces of groups that cross shards."""
        groups, cut = self.form.groups, self.form.cut
        return groups if groups is None or cut is None else Groups(cut.piece, groups.dim, groups.length)

    def quant_tensor(self) -> Any:
        """The weight as a QuantTensor, dequantized when its value is read."""
        groups, cut = self.form.groups, self.form.cut
        payload, scale, zero = self._read()
        if groups is None:
            return self._tensor(payload, scale, zero)
        if cut is not None:
            scale, zero = cut.spread(scale, payload), cut.spread(zero, payload)
        piece = None if cut is None else cut.piece
        return in_groups(self._tensor(payload, scale, zero), groups.size, groups.dim, groups.length, piece)

    def _read(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Payload, scale and zero point as stored, except for packing and the order of axes."""
        stored, payload, scale = self.form.stored, self.value[...], self.scale[...].astype(jnp.float32)
        whole_bytes = stored.packed_bits is None
        payload = jax.lax.transpose(payload, stored.back) if whole_bytes else stored.payload(payload)
        if self.scale_factor is not None:
            scale = scale * self.scale_factor[...]
        zero = known_zero() if self.zero_point is None else self.zero_point[...].astype(jnp.float32)
        return payload, scale, zero

    def _tensor(self, payload: jax.Array, scale: jax.Array, zero_point: jax.Array) -> Any:
        form = self.form
        if isinstance(form.format, Codebook):
            return CodebookQuantTensor.from_codes(payload, scale, form.format, dtype=form.value_dtype)
        if form.format is not None and payload.dtype == form.format.dtype:
            return FloatQuantTensor.stored(payload, scale, form.value_dtype)
        if form.format is not None:
            return FloatQuantTensor.from_payload(payload, scale, format=form.format, dtype=form.value_dtype)
        return IntQuantTensor.stored(
            payload, scale, zero_point, form.bit_width, form.signed, form.value_dtype
        )

    def _in_pieces(self, cut: Cut) -> Affine:
        """The integers in pieces of groups that no shard divides, each with the scale of its group."""
        payload, scale, zero = self._read()
        length = payload.shape[cut.axis]
        pieces = split_groups(payload, cut.piece, cut.axis)
        offset = None if self.zero_point is None else cut.of_pieces(zero, length)
        return Affine(pieces, cut.of_pieces(scale, length), offset)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight, with the axes in front that layers are stacked along."""
        shape, groups = self.form.stored.shape, self.form.groups
        stored, in_two = self.value.shape, groups is not None and self.form.cut is None
        return (
            *stored[: len(stored) - len(shape)],
            *(groups.shape_of(shape) if groups and in_two else shape),
        )


def _payload(weight: Any) -> tuple[jax.Array, dict[str, Any]]:
    """What is stored of a quantized weight without groups, and what a `FrozenForm` says of it."""
    if isinstance(weight, IntQuantTensor):
        if not is_concrete(weight.bit_width):
            raise ValueError(
                "a learned bit width is not known in an abstract model, so the payload's dtype is not either.\n"
                "  cure: freeze the model itself"
            )
        return _narrow(weight), {"bit_width": int(weight.bit_width), "signed": weight.signed}
    if isinstance(weight, FloatQuantTensor):
        return _float_payload(weight), {"format": weight.known_format("a frozen weight")}
    if isinstance(weight, CodebookQuantTensor):
        bits = container_bits(weight.bit_width)
        return weight.codes().astype(PACKED[bits, False]), {"format": weight.codebook}
    raise TypeError(f"a weight that is frozen must be a QuantTensor, got {type(weight).__name__}")


def _narrow(weight: IntQuantTensor) -> jax.Array:
    """The integers in the narrowest dtype that holds them in memory."""
    bits = int(weight.bit_width)
    if bits > 8:
        return weight.int().astype(jnp.int16 if bits <= 16 and weight.signed else jnp.int32)
    return weight.int().astype(PACKED[container_bits(bits), weight.signed])


def _float_payload(weight: FloatQuantTensor) -> jax.Array:
    """The minifloats in their own dtype if it has 8 bits, else their codes in the narrowest."""
    bits = weight.known_format("a frozen weight").bit_width
    if bits == 8 and jnp.issubdtype(weight.q_dtype, jnp.floating):
        return weight.payload()
    codes = weight.codes()
    return codes.astype(PACKED[container_bits(bits), False]) if bits <= 8 else codes


def _full_rank(x: jax.Array, ndim: int) -> jax.Array:
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)
