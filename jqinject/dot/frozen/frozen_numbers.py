"""The low-bit numbers of a weight: a dict of arrays, made from a QuantTensor and read as one, with a `FrozenForm`.

| name           | array                                                                     |
|----------------|---------------------------------------------------------------------------|
| `value`        | the payload, as its `StoredForm` says                                     |
| `scale`        | float32, or a byte each for groups; of the payload's rank before storing  |
| `zero_point`   | likewise, if it may be another than 0                                     |
| `sums`         | int32 sums of the payload, where a contraction of integers needs them     |
| `scale_factor` | float32, of scales in bytes                                               |

A `FrozenParam` in the place of the weight keeps them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jqinject.dot.frozen.frozen_form import FrozenForm, StoredForm
from jqinject.ops import Grid
from jqinject.ops.cut import Cut
from jqinject.quant_tensor import (
    Groups,
    GroupwiseQuantTensor,
    QuantTensor,
    in_groups,
    is_concrete,
    is_grouped,
    is_quantized,
    on_integers,
    public_tensors,
    shaping,
)
from jqinject.quant_tensor.group_layout import with_two_axes


@dataclass(frozen=True)
class ScaleForms:
    """What a quantizer promises of its scales and zero points, so that those of groups can be stored in a byte.

    Attributes:
        scale_dtype: an 8-bit float dtype that holds every scale, up to one factor for all unless it is
            `float8_e8m0fnu`; None if absent.
        whole_zero_point: every zero point is one of the integers.
        scale_factor: this factor, if it is constant; None if it is found from the scales, of which the largest is the
            largest number of the dtype.
    """

    scale_dtype: np.dtype | None = None
    whole_zero_point: bool = False
    scale_factor: jax.Array | None = None

    def of_scale(self, scale: jax.Array, groups: Groups | None) -> tuple[jax.Array, jax.Array | None]:
        """The scales as stored, those of groups in a byte; and their common factor."""
        if groups is None or self.scale_dtype is None:
            return scale, None
        if self.scale_dtype == np.dtype(jnp.float8_e8m0fnu):
            return scale.astype(jnp.float8_e8m0fnu), None
        return in_two_levels(scale, self.scale_dtype, self.scale_factor)

    def of_zero_point(self, zero_point: jax.Array, dtype: DTypeLike, groups: Groups | None) -> jax.Array:
        """The zero points as stored: integer ones of groups as bytes, if the integers have at most 8 bits."""
        if groups is None or not self.whole_zero_point or jnp.iinfo(dtype).bits > 8:
            return zero_point
        signed = jnp.issubdtype(dtype, jnp.signedinteger)
        return zero_point.astype(jnp.int8 if signed else jnp.uint8)


def in_two_levels(
    scale: jax.Array, dtype: np.dtype, factor: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Scales that are minifloats times one float32 number, taken apart.

    If it is not known, it is searched among the neighbours of a quotient for the one whose products are the scales.

    Args:
        scale: float32, above 0.
        dtype: of the minifloats.
        factor: the number; None if the largest scale is the largest number of the dtype.

    Returns:
        The minifloats, and the factor.

    Example:
        >>> codes, factor = in_two_levels(jnp.array([896.0, 3.0]), np.dtype(jnp.float8_e4m3fn))
        >>> codes, float(factor)
        (Array([448, 1.5], dtype=float8_e4m3fn), 2.0)
    """
    if scale.size == 0 or factor is not None:
        constant = jnp.ones((), jnp.float32) if factor is None else factor
        return (scale / constant).astype(dtype), constant
    guess = jnp.max(scale) / float(jnp.finfo(dtype).max)
    bits = jax.lax.bitcast_convert_type(guess, jnp.int32) + jnp.arange(-4, 5, dtype=jnp.int32)
    factors = jax.lax.bitcast_convert_type(bits, jnp.float32)

    def codes(factor: jax.Array) -> jax.Array:
        return (scale / factor).astype(dtype)

    def wrong(factor: jax.Array) -> jax.Array:
        return jnp.sum(codes(factor).astype(jnp.float32) * factor != scale)

    best = factors[
        jnp.argmin(jax.lax.map(wrong, factors))
    ]  # one by one: they need no memory beside each other
    return codes(best), best


def without_groups(weight: GroupwiseQuantTensor, cut: Cut) -> Any:
    """A weight in groups as a tensor of its shape, each of whose elements has the scale of its group.

    Args:
        weight: the weight.
        cut: how its groups lie.
    """
    if weight.as_it_lies is not None:
        return weight.as_it_lies
    grouped, value = weight.grouped, weight.value
    changes = {"value": value, "scale": cut.spread(grouped.scale, value)}
    if on_integers(grouped):
        changes["zero_point"] = cut.spread(grouped.zero_point, value)
    tensor, payload = grouped.set(**changes), grouped.kept_payload
    return tensor if payload is None else tensor.keeping(weight.groups.join(payload))


Numbers = Mapping[str, jax.Array]


def frozen_numbers(
    weight: Any,
    summed: tuple[int, ...],
    has_zero_point: bool,
    axes_of_sums: tuple[int, ...] | None,
    forms: ScaleForms,
    cut: Cut | None = None,
) -> tuple[dict[str, jax.Array], FrozenForm]:
    """What is stored of a quantized weight.

    Args:
        weight: the quantized weight.
        summed: its axes that a contraction sums over; stored last. Empty for a convolution.
        has_zero_point: whether the zero point may be another than 0.
        axes_of_sums: its axes along which a contraction of integers needs their sums; None for no sums.
        forms: what is known of its scales and zero points.
        cut: groups that cross shards, whose payload is stored in the weight's shape; None for any others.

    Raises:
        TypeError: `weight` is not a QuantTensor.
        ValueError: its bit width is unknown because the model is abstract and the bit width is learned.

    Example:
        >>> from jqinject.quant_tensor import IntQuantTensor
        >>> weight = IntQuantTensor.from_int(jnp.array([[2, -1]], jnp.int8), jnp.array([[0.5]]))
        >>> numbers, form = frozen_numbers(weight, (1,), False, None, ScaleForms())
        >>> numbers["value"], quant_tensor_of(numbers, form).value
        (Array([[ 2, -1]], dtype=int8), Array([[ 1. , -0.5]], dtype=float32))
    """
    grid, value_dtype, groups = _known_grid(weight), np.dtype(weight.dtype), None
    summed = tuple(axis % weight.ndim for axis in summed)
    if is_grouped(weight):
        groups, axes_of_sums, scale, zero = weight.groups, None, weight.scale_, weight.zero_point_
        if cut is None:
            summed = with_two_axes(summed, groups.dim % weight.ndim)
        weight = weight.grouped if cut is None else without_groups(weight, cut)
    else:
        scale, zero = weight.scale, weight.zero_point
    ndim = weight.ndim + (cut is not None)
    payload = weight.narrow_numbers()
    stored = StoredForm(tuple(payload.shape), np.dtype(payload.dtype), summed, grid.packed_bits)
    scale, factor = forms.of_scale(shaping.full_rank(scale, ndim), groups)
    numbers = {"value": stored.stored(payload), "scale": scale}
    if factor is not None:
        numbers["scale_factor"] = factor
    if grid.is_integer:
        if has_zero_point:
            zero = shaping.full_rank(zero, ndim)
            numbers["zero_point"] = forms.of_zero_point(zero, payload.dtype, groups)
        if payload.dtype.itemsize == 1 and axes_of_sums is not None:
            numbers["sums"] = jnp.sum(payload, axis=axes_of_sums, dtype=jnp.int32, keepdims=True)
    names = tuple(sorted(numbers))
    form = FrozenForm(stored, value_dtype, forms.whole_zero_point, grid, groups, cut, names)
    return numbers, form


def numbers_of_leaves(leaves: Sequence[object], form: FrozenForm) -> dict[str, Any]:
    """Numbers by name from their arrays, in the order of their sorted names.

    Args:
        leaves: those of `form.names`, or the same without the sums, which an index along a summed axis drops.
        form: their form.

    Raises:
        ValueError: there are not as many.
    """
    names = form.names
    if len(leaves) == len(names) - 1:
        names = tuple(name for name in names if name != "sums")
    if len(leaves) != len(names):
        raise ValueError(f"frozen numbers {', '.join(form.names)} are needed, got {len(leaves)} arrays")
    return dict(zip(names, leaves, strict=True))


def quant_tensor_of(numbers: Numbers, form: FrozenForm) -> Any:
    """The weight as a QuantTensor, dequantized when its value is read.

    Args:
        numbers: as stored. They may have been stacked along new axes in front, or sliced or looked up along axes that
            are stored in front.
        form: of the weight that was frozen.
    """
    form = form.fitted(numbers["value"].shape)
    groups, cut = form.groups, form.cut
    payload, scale, zero = parts_of(numbers, form)
    if cut is not None:
        scale, zero = cut.spread(scale, payload), None if zero is None else cut.spread(zero, payload)
    tensor = QuantTensor.stored(payload, scale, zero, form.grid, form.value_dtype)
    if groups is None:
        return tensor
    piece = None if cut is None else cut.piece
    return in_groups(tensor, groups.size, groups.dim, groups.length, piece)


#: The name of the compiled function that dequantizes a `FrozenParam`, by which a program's equation is known.
DEQUANTIZE = "jqinject_dequantize"


def _value_of(numbers: dict[str, jax.Array], form: FrozenForm) -> jax.Array:
    return quant_tensor_of(numbers, form).value


_value_of.__name__ = _value_of.__qualname__ = DEQUANTIZE
_dequantize = partial(jax.jit, static_argnames="form")(_value_of)


def dequantize(numbers: Mapping[str, jax.Array], form: FrozenForm) -> jax.Array:
    """The dequantized array of frozen numbers: in a program, one equation named `jqinject_dequantize`.

    The inputs of the equation are the numbers in the order of their sorted names; `numbers_of_leaves` names them.

    Args:
        numbers: as stored; see `quant_tensor_of`.
        form: of the weight that was frozen.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.dot import ScaleForms, frozen_numbers
        >>> from jqinject.quant_tensor import IntQuantTensor
        >>> weight = IntQuantTensor.from_int(jnp.array([[2, -1]], jnp.int8), jnp.array([[0.5]]))
        >>> numbers, form = frozen_numbers(weight, (), False, None, ScaleForms())
        >>> "name=jqinject_dequantize" in str(jax.make_jaxpr(lambda numbers: dequantize(numbers, form))(numbers))
        True
    """
    return _dequantize(dict(numbers), form)


def stores_last(form: FrozenForm, summed: tuple[int, ...] | None) -> bool:
    """Whether a contraction sums over the axes of the weight that are stored last, in their own order.

    Args:
        form: of the weight, fitted.
        summed: the axes; None for those that are stored last.
    """
    stored = form.stored.summed
    if summed is not None:
        axes = summed if form.groups is None else with_two_axes(summed, form.groups.dim % len(form.shape))
        if {*axes} != {*stored}:
            return False
    return tuple(sorted(stored)) == stored


def scale_of(numbers: Numbers) -> jax.Array:
    """The scales in float32, with their common factor."""
    scale, factor = numbers["scale"].astype(jnp.float32), numbers.get("scale_factor")
    return (
        scale if factor is None else scale * factor.reshape(factor.shape + (1,) * (scale.ndim - factor.ndim))
    )


def parts_of(numbers: Numbers, form: FrozenForm) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Payload, scale and zero point, the latter two in float32 with their factor, None for 0; `form` is fitted."""
    scale, zero = form.in_full(scale_of(numbers)), numbers.get("zero_point")
    zero = None if zero is None else form.in_full(zero.astype(jnp.float32))
    return form.stored.payload(numbers["value"]), scale, zero


def has_low_bits(x: object) -> bool:
    """Whether it is a quantized tensor whose payload takes at most 8 bits, of constant widths.

    Example:
        >>> from jqinject.quant_tensor import IntQuantTensor
        >>> has_low_bits(IntQuantTensor.from_int(jnp.array([2]), 0.5)), has_low_bits(jnp.ones(1))
        (True, False)
    """
    return is_quantized(x) and isinstance(x.bit_width, int) and x.bit_width <= 8


def _known_grid(weight: object) -> Grid:
    """The number format of a quantized weight; a learned one with its current widths."""
    if not is_quantized(weight):
        raise TypeError(f"a weight that is frozen must be a QuantTensor, got {type(weight).__name__}")
    if not weight.grid.is_integer:
        return weight.known_format("a frozen weight")
    if not is_concrete(weight.bit_width):
        raise ValueError(
            "a learned bit width is not known in an abstract model, so the payload's dtype is not either.\n"
            "  cure: freeze the model itself"
        )
    return public_tensors.int_grid(int(weight.bit_width), weight.signed)
