"""A ragged contraction by a scheme: each row with the expert of its group, six operands."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jqinject.dot.geometry.labels import Labels
from jqinject.dot.kernels.ragged import Ragged
from jqinject.dot.schemes.contraction import Contraction
from jqinject.dot.schemes.product_transforms import transform_of
from jqinject.dot.schemes.quantized_op import QuantizedOp
from jqinject.dot.schemes.scheme import SchemeSpec
from jqinject.dot.tensors.labelled_tensor import LabelledTensor, joined
from jqinject.dot.tensors.ragged_operands import contract_ragged
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
        return self._by_scheme(scheme_ragged, ragged, lhs, rhs, unrounded, group_sizes)

    @staticmethod
    def _arguments(lhs: jax.Array, rhs: jax.Array, numbers: Any) -> tuple[Any, ...]:
        experts = rhs.shape[numbers.rhs_group_dimensions[0]]
        return lhs, rhs, jnp.zeros(experts, jnp.int32), numbers


def scheme_ragged(
    contraction: Contraction,
    ragged: Ragged,
    lhs: Any,
    rhs: Any,
    unrounded: jax.Array | None,
    group_sizes: jax.Array,
) -> jax.Array:
    """The contraction of two operands by a scheme.

    Args:
        contraction: by the scheme.
        ragged: the contraction.
        lhs, rhs: float arrays, or operands that are already quantized.
        unrounded: what a quantized `rhs` was made from, for `dgrad_rhs`; None for its dequantized value.
        group_sizes: how many rows each expert gets.
    """
    of_lhs, of_rhs, of_out = labels = _labels(ragged)
    summed = tuple(of_lhs[axis] for axis in ragged.lhs_contract)
    x, w = LabelledTensor(lhs, of_lhs), LabelledTensor(rhs, of_rhs)
    left = x if is_quantized(lhs) else contraction.operand("fprop_lhs", x, summed)
    right = w if is_quantized(rhs) else contraction.operand("fprop_rhs", w, summed, beside=left.tensor)
    outputs = tuple(of_rhs[axis] for axis in ragged.rhs_free)
    rows = tuple(of_lhs[axis] for axis in ragged.lhs_free)
    sizes = dict(zip(of_lhs, lhs.shape, strict=True)) | dict(zip(of_rhs, rhs.shape, strict=True))
    g = LabelledTensor(jax.ShapeDtypeStruct(tuple(sizes[label] for label in of_out), ragged.dtype), of_out)
    w = w if unrounded is None else LabelledTensor(unrounded, of_rhs)
    flags = contraction.scheme.flags
    w = _dequantized(right) if "dgrad_dequantized" in flags else w
    x = _dequantized(left) if "wgrad_dequantized" in flags else x
    backward = (
        contraction.backward_product(("dgrad_grad", "dgrad_rhs"), (g, outputs), (w, outputs)),
        contraction.backward_product(("wgrad_grad", "wgrad_lhs"), (g, rows), (x, rows)),
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
