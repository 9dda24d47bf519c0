"""A ragged contraction by a scheme: each row with the expert of its group, six operands."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jqinject.dot.geometry.labels import Labels
from jqinject.dot.kernels.ragged import Ragged
from jqinject.dot.schemes.product_transforms import transform_of
from jqinject.dot.schemes.quantized_op import QuantizedOp
from jqinject.dot.schemes.random_numbers import NoRandomNumbers
from jqinject.dot.schemes.scheme import Kept, SchemeSpec
from jqinject.dot.schemes.scheme_quantizers import SchemeQuantizers
from jqinject.dot.tensors.labelled_tensor import LabelledTensor, joined
from jqinject.dot.tensors.ragged_operands import contract_ragged
from jqinject.dot.tensors.six_operands import BackwardProduct
from jqinject.quant_tensor import as_array, is_quantized


class QRaggedDot(QuantizedOp):
    """Replaces `lax.ragged_dot_general`, quantized by a scheme, forward and backward; see `QDotGeneral`.

    All three products contract dequantized values. Blocks along rows may hold rows of several experts, so a scheme that
    transforms operands along rows (`pre_transform` of `wgrad_lhs` and `wgrad_grad`) is refused.
    """

    @classmethod
    def _check_scheme(cls, scheme: SchemeSpec) -> None:
        if any(sums.tiles is not None for sums in (scheme.fprop, scheme.dgrad, scheme.wgrad)):
            raise ValueError(
                f"the scheme {scheme.name} cuts sums into pieces (tile_size=), and a ragged contraction is not cut.\n"
                "  cure: a rule before it that names the parameter, with a scheme without tile_size"
            )
        if transform_of(scheme["wgrad_lhs"]) is not None:
            raise TypeError(
                f"{scheme.name}.wgrad_lhs declares a pre_transform, which would mix rows of several experts, and each "
                "has a sum of its own.\n  cure: the scheme without it (hadamard=None), or a rule before it that names "
                "the parameter"
            )

    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        group_sizes: jax.Array,
        ragged_dot_dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        unrounded: jax.Array | None = None,
    ) -> jax.Array:
        """The contraction; arguments as for `lax.ragged_dot_general`.

        Raises:
            ValueError: it has batch axes, or cuts a summed axis into groups.
        """
        dtype = preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)
        ragged = Ragged.of(lhs, rhs, ragged_dot_dimension_numbers, dtype, precision)
        if ragged is None:
            raise ValueError(
                "a scheme quantizes ragged contractions of rows cut into groups, without batch axes.\n"
                "  cure: a rule before it that names the parameter and keeps it float, or one with weight_quant"
            )
        return self._switched(lambda scheme: scheme_ragged(scheme, ragged, lhs, rhs, group_sizes, unrounded))


def scheme_ragged(
    quantizers: SchemeQuantizers,
    ragged: Ragged,
    lhs: Any,
    rhs: Any,
    group_sizes: jax.Array,
    unrounded: jax.Array | None = None,
) -> jax.Array:
    """The contraction of two operands by a scheme.

    Args:
        quantizers: of the scheme.
        ragged: the contraction.
        lhs, rhs: float arrays, or operands that are already quantized.
        group_sizes: how many rows each expert gets.
        unrounded: what a quantized `rhs` was made from, for `dgrad_rhs`; None for its dequantized value.
    """
    of_lhs, of_rhs, of_out = labels = _labels(ragged)
    summed = tuple(of_lhs[axis] for axis in ragged.lhs_contract)
    x, w = LabelledTensor(lhs, of_lhs), LabelledTensor(rhs, of_rhs)
    left = x if is_quantized(lhs) else quantizers.operand("fprop_lhs", x, summed)
    right = w if is_quantized(rhs) else quantizers.operand("fprop_rhs", w, summed, beside=left.tensor)
    outputs = tuple(of_rhs[axis] for axis in ragged.rhs_free)
    rows = tuple(of_lhs[axis] for axis in ragged.lhs_free)
    sizes = dict(zip(of_lhs, lhs.shape, strict=True)) | dict(zip(of_rhs, rhs.shape, strict=True))
    g = LabelledTensor(jax.ShapeDtypeStruct(tuple(sizes[label] for label in of_out), ragged.dtype), of_out)
    w = w if unrounded is None else LabelledTensor(unrounded, of_rhs)
    flags = quantizers.scheme.flags
    w = _dequantized(right) if "dgrad_dequantized" in flags else w
    x = _dequantized(left) if "wgrad_dequantized" in flags else x
    backward = (
        _backward(quantizers, ("dgrad_grad", "dgrad_rhs"), g, w, outputs),
        _backward(quantizers, ("wgrad_grad", "wgrad_lhs"), g, x, rows),
    )
    return contract_ragged(ragged, (left, right), group_sizes, backward, labels, (outputs, rows))


def _labels(ragged: Ragged) -> tuple[Labels, Labels, Labels]:
    """Labels of the operands and the output: those of summed axes are shared."""
    lhs: list[Any] = [("lhs", axis) for axis in range(ragged.lhs_ndim)]
    rhs: list[Any] = [("rhs", axis) for axis in range(ragged.rhs_ndim)]
    for left, right in zip(ragged.lhs_contract, ragged.rhs_contract, strict=True):
        lhs[left] = rhs[right] = ("sum", left)
    out = [*(lhs[axis] for axis in ragged.lhs_free), *(rhs[axis] for axis in ragged.rhs_free)]
    return tuple(lhs), tuple(rhs), tuple(out)


def _dequantized(operand: LabelledTensor) -> LabelledTensor:
    saw = joined(operand)
    return LabelledTensor(as_array(saw.tensor), saw.labels)


def _backward(
    quantizers: SchemeQuantizers, names: tuple[str, str], g: LabelledTensor, x: LabelledTensor, summed: Labels
) -> BackwardProduct:
    """The operands of a backward product."""
    scheme = quantizers.scheme
    by = quantizers.gradient(names[0], g, summed)
    gone = is_quantized(x.tensor) and scheme[names[1]] is None
    if scheme[names[1]] is Kept.FPROP or gone:
        return BackwardProduct(*by)
    other = LabelledTensor(jax.lax.stop_gradient(as_array(x.tensor)), x.labels)
    if quantizers.draws_in_vain(names[1], other, summed):
        return BackwardProduct(NoRandomNumbers(f"{quantizers.where}: {scheme.name}.{names[1]}"))
    return BackwardProduct(*by, quantizers.operand(names[1], other, summed))
