"""One quantized contraction, without a derivative: quantize both operands, contract, multiply by the scales."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.dot.geometry.dimensions import Dimensions, scale_in_other, scale_in_output
from jqinject.dot.geometry.parts import Block, in_parts, part
from jqinject.dot.geometry.tiles import LocalAqt, split_contraction
from jqinject.dot.kernels.accumulate import (
    checked_accumulator,
    integer_accumulator,
    largest_magnitude,
    longest_sum,
)
from jqinject.dot.kernels.kernel_table import integer_contraction
from jqinject.dot.schemes.numerics import IntNumerics, is_float8, is_integer
from jqinject.dot.schemes.operand import OperandQuantizer, QuantizedOperand, ScaledOperand
from jqinject.ops.devices.explicit_axes import sharded_beside

Unscaled = jax.Array | QuantizedOperand
Operand = Unscaled | ScaledOperand


@dataclass(frozen=True)
class Contraction:
    """One of the three contractions of a quantized `dot_general`.

    Args:
        lhs_quantizer, rhs_quantizer: of the operands. In the backward contractions the left one is the gradient.
        accumulator_dtype: in which products of two integer operands are summed; None means int32. Longer sums than
            int32 holds are cut into parts, which are added exactly. Products of floats
            are summed as the backend does it, those of 8-bit floats in float32.
        local_aqt: cut a summed axis into pieces with scales of their own, which are summed after they are multiplied
            by them; None for one piece.

    Raises:
        TypeError: `accumulator_dtype` is not a signed integer dtype; an argument of another kind.

    Source: AQT's `DotGeneralRaw`.
    """

    lhs_quantizer: OperandQuantizer = OperandQuantizer()
    rhs_quantizer: OperandQuantizer = OperandQuantizer()
    accumulator_dtype: Any = None
    local_aqt: LocalAqt | None = None

    def __post_init__(self) -> None:
        for name in ("lhs_quantizer", "rhs_quantizer"):
            _check_kind(name, getattr(self, name), OperandQuantizer)
        checked_accumulator(self.accumulator_dtype)
        if self.local_aqt is not None:
            _check_kind("local_aqt", self.local_aqt, LocalAqt)

    @property
    def needs_key(self) -> bool:
        """Whether it draws random numbers."""
        return self.lhs_quantizer.needs_key or self.rhs_quantizer.needs_key

    def operands(
        self, lhs: Operand, rhs: Operand, dims: Dimensions, key: jax.Array | None = None
    ) -> tuple[QuantizedOperand, QuantizedOperand]:
        """Both operands in their formats; one that is quantized already stays as it is."""
        keys = (None, None) if key is None else tuple(jax.random.split(key))
        left = _quantized(self.lhs_quantizer, lhs, _axes(self.lhs_quantizer, lhs, dims, "lhs"), keys[0])
        right = _quantized(self.rhs_quantizer, rhs, _axes(self.rhs_quantizer, rhs, dims, "rhs"), keys[1])
        return left, right

    def contract(
        self,
        lhs: QuantizedOperand,
        rhs: QuantizedOperand,
        dims: Dimensions,
        dtype: Any,
        out_sharding: Any = None,
        permutation: tuple[int, ...] | None = None,
    ) -> jax.Array:
        """The contraction of operands in their formats, in `dtype`.

        Args:
            lhs, rhs, dims, dtype, out_sharding: as for `lax.dot_general`.
            permutation: of the output's axes, as for `lax.transpose`. Integers are contracted in the other order where
                that saves the transposition; their sums are the same.
        """
        left, right = self._before(lhs, rhs, dims)
        integers = is_integer(left.payload) and is_integer(right.payload)
        if integers and permutation == dims.rhs_first and out_sharding is None:
            return self._mirrored()._scaled(right, left, dims.swapped(), dtype, None, lhs_scale_first=False)
        y = self._scaled(left, right, dims, dtype, out_sharding)
        return y if permutation is None else y.transpose(permutation)

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dims: Dimensions,
        dtype: Any,
        key: jax.Array | None = None,
        out_sharding: Any = None,
        permutation: tuple[int, ...] | None = None,
    ) -> jax.Array:
        """Quantize and contract, in tiles where `local_aqt` says so; `permutation` as for `contract`."""
        if self.local_aqt is None or not dims.lhs_contract:
            left, right = self.operands(lhs, rhs, dims, key)
            return self.contract(left, right, dims, dtype, out_sharding, permutation)
        lhs, rhs, tiled = split_contraction(lhs, rhs, dims, self.local_aqt)
        left, right = self.operands(lhs, rhs, tiled, key)
        y = jnp.sum(self.contract(left, right, tiled, jnp.float32), axis=0).astype(dtype)
        return y if permutation is None else y.transpose(permutation)

    def passes_gradient(
        self, lhs: jax.Array, rhs: jax.Array, dims: Dimensions
    ) -> tuple[jax.Array | None, jax.Array | None]:
        """Where the gradients of two arrays that are cut into tiles pass through rounding; None for everywhere."""
        assert self.local_aqt is not None, "else the scales of the forward pass say it"
        cuts = bool(dims.lhs_contract)
        left, right, tiled = split_contraction(lhs, rhs, dims, self.local_aqt) if cuts else (lhs, rhs, dims)
        found = []
        for side, x, whole in (("lhs", left, lhs), ("rhs", right, rhs)):
            quantizer: OperandQuantizer = getattr(self, f"{side}_quantizer")
            passes = None
            if quantizer.numerics is not None:
                scale = quantizer.calibration.scale(x, _axes(quantizer, x, tiled, side), quantizer.numerics)
                passes = quantizer.passes_gradient(x, scale)
            found.append(None if passes is None else passes.reshape(whole.shape))
        return found[0], found[1]

    def _mirrored(self) -> Contraction:
        """With the operands in the other order."""
        return replace(self, lhs_quantizer=self.rhs_quantizer, rhs_quantizer=self.lhs_quantizer)

    def _scaled(
        self,
        left: QuantizedOperand,
        right: QuantizedOperand,
        dims: Dimensions,
        dtype: Any,
        out_sharding: Any,
        *,
        lhs_scale_first: bool = True,
    ) -> jax.Array:
        """The contraction of payloads, with the scales that are left multiplied in, one after the other."""
        y = self._accumulated(left.payload, right.payload, dims, out_sharding)
        scales = [
            _at_output(left.scale, dims.lhs_ndim, dims.lhs_places, dims),
            _at_output(right.scale, dims.rhs_ndim, dims.rhs_places, dims),
        ]
        for scale in scales if lhs_scale_first else reversed(scales):
            if scale is not None:
                y = y.astype(jnp.float32) * sharded_beside(scale, y)
        return y.astype(dtype)

    def _before(
        self, lhs: QuantizedOperand, rhs: QuantizedOperand, dims: Dimensions
    ) -> tuple[QuantizedOperand, QuantizedOperand]:
        """Scales multiplied in before the contraction, where the modes say so."""
        left, right = _this_input(self.lhs_quantizer, lhs), _this_input(self.rhs_quantizer, rhs)
        if self.lhs_quantizer.dequant_mode == "other_input" and left.scale is not None:
            right = _multiplied(right, scale_in_other(left.scale, dims))
            left = QuantizedOperand(left.payload, None)
        if self.rhs_quantizer.dequant_mode == "other_input" and right.scale is not None:
            left = _multiplied(left, scale_in_other(right.scale, dims.swapped()))
            right = QuantizedOperand(right.payload, None)
        return left, right

    def _accumulated(self, lhs: jax.Array, rhs: jax.Array, dims: Dimensions, out_sharding: Any) -> jax.Array:
        if is_integer(lhs) and is_integer(rhs):
            lengths = [lhs.shape[axis] for axis in dims.lhs_contract]
            largest = _largest(self.lhs_quantizer, lhs), _largest(self.rhs_quantizer, rhs)
            accumulator = integer_accumulator(self.accumulator_dtype, math.prod(lengths), *largest)

            def contract(block: Block) -> jax.Array:
                left, right = part(lhs, dims.lhs_contract, block), part(rhs, dims.rhs_contract, block)
                return integer_contraction(left, right, dims, accumulator, out_sharding)

            return in_parts(lengths, longest_sum(accumulator, *largest), contract)
        if is_float8(lhs) and is_float8(rhs):
            return jax.lax.dot_general(
                lhs, rhs, dims.numbers, preferred_element_type=jnp.float32, out_sharding=out_sharding
            )
        lhs, rhs = _common_floats(lhs, rhs)
        return jax.lax.dot_general(lhs, rhs, dims.numbers, out_sharding=out_sharding)


def _check_kind(name: str, given: Any, kind: type) -> None:
    if not isinstance(given, kind):
        raise TypeError(f"Contraction: {name} must be of type {kind.__name__}, got {given!r:.80}")


def _quantized(
    quantizer: OperandQuantizer, x: Operand, axes: tuple[int, ...], key: jax.Array | None
) -> QuantizedOperand:
    if isinstance(x, QuantizedOperand):
        return x
    if isinstance(x, ScaledOperand) and quantizer.numerics is not None:
        return QuantizedOperand(quantizer.encode(x.value, x.scale, key), x.scale)
    return quantizer.quantize(x.value if isinstance(x, ScaledOperand) else x, axes, key)


def _axes(quantizer: OperandQuantizer, x: Operand, dims: Dimensions, side: str) -> tuple[int, ...]:
    """The axes that share a scale."""
    if not isinstance(quantizer.calibration_axes, str):
        return quantizer.calibration_axes
    contract, free, ndim = (
        (dims.lhs_contract, dims.lhs_free, dims.lhs_ndim)
        if side == "lhs"
        else (dims.rhs_contract, dims.rhs_free, dims.rhs_ndim)
    )
    return {"contracting": contract, "remaining": free, "tensor": tuple(range(ndim))}[
        quantizer.calibration_axes
    ]


def _this_input(quantizer: OperandQuantizer, x: QuantizedOperand) -> QuantizedOperand:
    if quantizer.dequant_mode != "this_input" or x.scale is None:
        return x
    return QuantizedOperand(x.dequantize(), None)


def _multiplied(x: QuantizedOperand, scale: jax.Array) -> QuantizedOperand:
    return QuantizedOperand(x.payload.astype(jnp.float32) * scale, x.scale)


def _at_output(
    scale: jax.Array | None, ndim: int, places: dict[int, int], dims: Dimensions
) -> jax.Array | None:
    if scale is None:
        return None
    expanded = scale_in_output(scale, ndim, places, dims.out_ndim)
    if expanded is None:
        raise ValueError(
            f"a scale of shape {scale.shape} varies along an axis that is summed over, so no multiplication after the "
            f"sum can undo it (dimension numbers {dims.numbers}).\n  cure: calibration_axes='contracting' or 'tensor'; "
            "or, with 'remaining', dequant_mode='other_input'; or tiles (local_aqt=)"
        )
    return expanded


def _largest(quantizer: OperandQuantizer, payload: jax.Array) -> int:
    numerics = quantizer.numerics
    if isinstance(numerics, IntNumerics) and numerics.dtype == payload.dtype:
        return int(numerics.edge - 0.5)
    return largest_magnitude(payload.dtype)


def _common_floats(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both in the wider of their float dtypes; integers and 8-bit floats take that of the other operand."""
    kept = [x.dtype for x in (lhs, rhs) if not is_integer(x) and not is_float8(x)]
    dtype = jnp.promote_types(*kept) if len(kept) == 2 else (kept or [jnp.dtype(jnp.float32)])[0]
    return lhs.astype(dtype), rhs.astype(dtype)
