"""`dot_general` of two QuantTensors, in the numbers that they have in common: integers, 8-bit floats, or floats."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.geometry.sharding import sharding_before
from jqinject.dot.kernels.float8_dot import float8_dot_general, has_output_scales
from jqinject.dot.kernels.integer import Affine, affine_dot_general
from jqinject.dot.kernels.kernel_table import settled
from jqinject.ops.derivatives import explain_forward_mode, first_order
from jqinject.ops.devices.processes import on_host
from jqinject.ops.fake_quant import is_known_zero
from jqinject.quant_tensor import CodebookQuantTensor, FloatQuantTensor, IntQuantTensor, as_array, is_concrete

ContractionKind = Literal["auto", "float", "int", "fp8"]
KINDS = ("auto", "float", "int", "fp8")
NO_SECOND_DERIVATIVE = (
    "a contraction of integers has no second derivative: its forward pass holds integers.\n"
    "  cure: contraction='float' where it is differentiated twice"
)


@dataclass(frozen=True)
class _Spec:
    """What is static in one contraction; `stored` is the dtype of the values of a right operand without gradient."""

    dims: Dimensions
    dtype: np.dtype
    accumulator_dtype: Any
    out_sharding: Any
    stored: np.dtype | None = None


def contraction_kind(lhs: Any, rhs: Any, dims: Dimensions, asked: str = "auto") -> str:
    """Which numbers are contracted: "int", "fp8" or "float".

    Args:
        lhs, rhs: QuantTensors or arrays.
        dims: of the contraction.
        asked: "auto" takes integers or 8-bit floats if both operands have them.

    Raises:
        ValueError: `asked` is unknown, or the operands do not have those numbers.
    """
    if asked not in KINDS:
        raise ValueError(f"contraction must be one of {', '.join(map(repr, KINDS))}; got {asked!r}")
    if asked == "float":
        return "float"
    found = "float"
    if isinstance(lhs, IntQuantTensor) and isinstance(rhs, IntQuantTensor):
        found = "int" if has_integers(lhs) and has_integers(rhs) else "float"
    elif isinstance(lhs, FloatQuantTensor) and isinstance(rhs, FloatQuantTensor):
        contracted = lhs.is_contractible and rhs.is_contractible
        found = "fp8" if contracted and has_output_scales(lhs, rhs, dims) else "float"
    if asked not in ("auto", found):
        raise ValueError(
            f"contraction={asked!r} needs {_NEEDS[asked]}; got {describe(lhs)} and {describe(rhs)}.\n"
            f"  cure: quantize both so, or contraction={'auto'!r}"
        )
    return found


_NEEDS = {
    "int": "two IntQuantTensors of at most 8 bits, known before the program runs",
    "fp8": "two FloatQuantTensors in 8-bit formats of hardware, whose scales do not vary along what is summed over",
}


def has_integers(x: Any) -> bool:
    """Whether an IntQuantTensor has integers that backends contract: at most 8 bits, not learned."""
    return isinstance(x.bit_width, int) and x.bit_width <= 8


def describe(x: Any) -> str:
    """An operand in an error text."""
    if isinstance(x, IntQuantTensor):
        return f"integers of {x.bit_width if is_concrete(x.bit_width) else 'learned'} bits"
    if isinstance(x, FloatQuantTensor):
        return f"{x.format} with scales of shape {x.scale.shape}"
    if isinstance(x, CodebookQuantTensor):
        return f"indices into a table of {len(x.codebook.values)} numbers"
    return f"an array of {x.dtype.name}"


def affine_of(x: IntQuantTensor) -> Affine:
    """The integers of a tensor of at most 8 bits; a zero point that is known to be 0 is left out."""
    integers = x.int() if x.payload is None else x.payload
    return Affine(settled(integers), x.scale, None if known_zero_point(x) else x.zero_point)


def known_zero_point(x: IntQuantTensor) -> bool:
    """Whether the zero point is known to be 0."""
    zero = x.zero_point
    return is_known_zero(zero) if zero.ndim == 0 else is_concrete(zero) and not np.any(on_host(zero))


def contract_tensors(
    lhs: Any,
    rhs: Any,
    dims: Dimensions,
    dtype: Any,
    contraction: str = "auto",
    accumulator_dtype: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """The contraction, in the numbers that `contraction` names.

    Gradients pass straight through to the values of the operands, whatever was contracted forward.
    """
    kind = contraction_kind(lhs, rhs, dims, contraction)
    if kind == "fp8":
        return float8_dot_general(
            lhs, rhs, dims.numbers, preferred_element_type=dtype, out_sharding=out_sharding
        )[0]
    if kind == "int":
        return contract_integers(
            lhs.value,
            rhs.value,
            affine_of(lhs),
            affine_of(rhs),
            dims,
            dtype,
            accumulator_dtype=accumulator_dtype,
            out_sharding=out_sharding,
        )
    return jax.lax.dot_general(
        as_array(lhs),
        as_array(rhs),
        dims.numbers,
        preferred_element_type=dtype,
        out_sharding=out_sharding,
    )


def contract_integers(
    lhs: jax.Array,
    rhs: Any,
    left: Affine,
    right: Affine,
    dims: Dimensions,
    dtype: Any,
    *,
    accumulator_dtype: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """The contraction of integers, with the gradients of the contraction of the values that they stand for.

    Args:
        lhs, rhs: the values, which receive the gradients and are not looked at forward; in the place of `rhs` the dtype
            of its values, if `right` is stored and has no gradient.
        left, right: their integers.
        dims, dtype, accumulator_dtype, out_sharding: as for `affine_dot_general`.
    """
    values = rhs if isinstance(rhs, jax.Array) else None
    stored = np.dtype(rhs) if values is None else None
    spec = _Spec(dims, np.dtype(dtype), accumulator_dtype, out_sharding, stored)
    try:
        return _integers(spec, lhs, values, left, right)
    except TypeError as error:
        explain_forward_mode(error, "a contraction of integers")
        raise


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _integers(spec: _Spec, lhs: jax.Array, rhs: jax.Array | None, left: Affine, right: Affine) -> jax.Array:
    return affine_dot_general(left, right, spec.dims, spec.dtype, spec.accumulator_dtype, spec.out_sharding)


def _fwd(spec: _Spec, lhs: jax.Array, rhs: jax.Array | None, left: Affine, right: Affine) -> Any:
    lhs, rhs = first_order((lhs, rhs), NO_SECOND_DERIVATIVE)
    return _integers(spec, lhs, rhs, left, right), (lhs, right if rhs is None else rhs)


def _bwd(spec: _Spec, kept: tuple[jax.Array, Any], g: jax.Array) -> Any:
    lhs, rhs = kept
    g = first_order(g, NO_SECOND_DERIVATIVE)
    if isinstance(rhs, Affine):
        floats = rhs.dequantized().astype(spec.stored)
        return _gradient(g, floats, spec.dims.gradient_of_lhs(), lhs), None, None, None
    of_lhs = _gradient(g, rhs, spec.dims.gradient_of_lhs(), lhs)
    of_rhs = _gradient(g, lhs, spec.dims.gradient_of_rhs(), rhs)
    return of_lhs, of_rhs, None, None


def _gradient(
    g: jax.Array, other: jax.Array, where: tuple[Dimensions, tuple[int, ...]], like: jax.Array
) -> jax.Array:
    dims, permutation = where
    made = jax.lax.dot_general(
        g,
        other.astype(g.dtype),
        dims.numbers,
        preferred_element_type=like.dtype,
        out_sharding=sharding_before(permutation, like),
    )
    return made.transpose(permutation)


_integers.defvjp(_fwd, _bwd)


def output_dtype(lhs: Any, rhs: Any, preferred_element_type: Any) -> Any:
    """The dtype of a contraction's output: what is asked for, or that of the operands together."""
    if preferred_element_type is not None:
        return np.dtype(preferred_element_type)
    return jnp.promote_types(lhs.dtype, rhs.dtype)
