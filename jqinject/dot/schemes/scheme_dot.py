"""Contractions by a scheme: `dot_general` and `conv_general_dilated` of six operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.geometry.labels import Label, Labelling, Labels, summed_labels
from jqinject.dot.geometry.tiles import LocalAqt
from jqinject.dot.schemes.product_transforms import (
    beside,
    multiplied,
    transform_of,
    transformed,
    transformed_label,
)
from jqinject.dot.schemes.random_numbers import SIGNS, Misfit, NoRandomNumbers
from jqinject.dot.schemes.scheme import Kept, payload_does_not_fit
from jqinject.dot.schemes.scheme_quantizers import SchemeQuantizers
from jqinject.dot.tensors.decision import decide, described, varies
from jqinject.dot.tensors.labelled_tensor import (
    LabelledTensor,
    in_large_groups,
    in_tiles,
    in_tiles_of,
    joined,
    scale_beside,
    tiled_label,
)
from jqinject.dot.tensors.product import Sums
from jqinject.dot.tensors.scaled_product import ON_CUDA, takes_scaled
from jqinject.dot.tensors.six_operands import (
    BackwardProduct,
    Plan,
    contract_operands,
    quantized_gradient,
)
from jqinject.quant_tensor import (
    IntQuantTensor,
    QuantTensor,
    as_array,
    is_quantized,
    on_integers,
    on_minifloats,
)


def scheme_dot_general(
    quantizers: SchemeQuantizers,
    lhs: jax.Array | QuantTensor,
    rhs: jax.Array | QuantTensor,
    dims: Dimensions,
    dtype: Any,
    out_sharding: Any = None,
    found_in: Any = None,
    unrounded: jax.Array | None = None,
) -> jax.Array:
    """The contraction of two float arrays by a scheme, forward and backward.

    Args:
        quantizers: of the scheme.
        lhs, rhs: float arrays, or tensors that are already quantized.
        dims, dtype, out_sharding: as for `lax.dot_general`.
        found_in: finds the range of `lhs` instead of its quantizer's `calibration`, if given.
        unrounded: what a quantized `rhs` was made from, for `dgrad_rhs`; None for its dequantized value.
    """
    operands = _Operands.of(quantizers, lhs, rhs, dims, np.dtype(dtype), out_sharding, found_in, unrounded)
    return contract_operands(operands.plan, operands.lhs, operands.rhs, operands.dgrad, operands.wgrad)[0]


@dataclass(frozen=True)
class _Operands:
    """The operands of the three products."""

    plan: Plan
    lhs: LabelledTensor
    rhs: LabelledTensor
    dgrad: BackwardProduct
    wgrad: BackwardProduct

    @classmethod
    def of(
        cls,
        quantizers: SchemeQuantizers,
        lhs: Any,
        rhs: Any,
        dims: Dimensions,
        dtype: np.dtype,
        out_sharding: Any = None,
        found_in: Any = None,
        unrounded: jax.Array | None = None,
    ) -> _Operands:
        """The forward pass's part of quantization."""
        scheme, labels = quantizers.scheme, Labelling.of(dims)
        plan = Plan(labels, dtype, scheme.fprop, scheme.dgrad, scheme.wgrad, out_sharding)
        x, w = LabelledTensor(lhs, labels.lhs), LabelledTensor(rhs, labels.rhs)
        left, right, summed = in_tiles(scheme.fprop.tiles, x, w, labels.out)
        if not is_quantized(lhs):
            left = quantizers.operand("fprop_lhs", left, summed, found_in=found_in)
        if not is_quantized(rhs):
            right = quantizers.operand("fprop_rhs", right, summed, beside=left.tensor)
        g = LabelledTensor(jax.ShapeDtypeStruct(_out_shape(lhs, rhs, labels), dtype), labels.out)
        w = w if unrounded is None else LabelledTensor(unrounded, labels.rhs)
        # The results of backward products are gradients of transformed operands, so the originals are transformed too.
        x, w = (
            _as_in_forward(quantizers, name, operand, labels)
            for name, operand in (("fprop_lhs", x), ("fprop_rhs", w))
        )
        dgrad = _backward(quantizers, ("dgrad_grad", "dgrad_rhs"), g, w, right, labels.lhs)
        wgrad = _backward(quantizers, ("wgrad_grad", "wgrad_lhs"), g, x, left, labels.rhs)
        return cls(plan, left, right, dgrad, wgrad)


def _as_in_forward(
    quantizers: SchemeQuantizers, name: str, x: LabelledTensor, labels: Labelling
) -> LabelledTensor:
    """An original operand, through the transform of the forward product; unchanged without one."""
    scheme, again = quantizers.scheme, "wgrad_lhs" if name == "fprop_lhs" else "dgrad_rhs"
    if is_quantized(x.tensor) or scheme[again] is Kept.FPROP:
        return x
    return transformed(scheme[name], x, summed_labels(labels.lhs, labels.rhs, labels.out))


def _backward(
    quantizers: SchemeQuantizers,
    names: tuple[str, str],
    g: LabelledTensor,
    x: LabelledTensor,
    made: LabelledTensor,
    out: Labels,
) -> BackwardProduct:
    """The operands of a backward product.

    Args:
        quantizers: of the scheme.
        names: of the operands.
        g: stand-in for the gradient.
        x: the other operand.
        made: the forward product's version of it.
        out: labels of the result.
    """
    scheme, product, of_gradient = quantizers.scheme, names[0].partition("_")[0], g
    summed, tiles = summed_labels(g.labels, x.labels, out), getattr(scheme, product).tiles
    in_pieces = _pieces(tiles, g, summed)
    g = in_pieces(g)
    # Of a stored operand the original is gone: the next best is what was made of it.
    gone = is_quantized(x.tensor) and scheme[names[1]] is None
    folds = f"{product}_use_fwd_quant" in scheme.flags
    if f"{product}_payload" in scheme.flags:
        _check_fits(quantizers, names[1], joined(made), summed)
    if scheme[names[1]] is Kept.FPROP or (gone and not folds):
        return BackwardProduct(*quantizers.gradient(names[0], g, summed))
    x = LabelledTensor(as_array(x.tensor), x.labels)
    if f"{product}_dequantized" in scheme.flags:
        saw = joined(made)
        x = LabelledTensor(as_array(saw.tensor), saw.labels)
    misfit = _misfit(quantizers, names[1], x, summed)
    if misfit is not None:
        if quantizers.trains:
            misfit()
        return BackwardProduct(misfit)
    folded = None
    if folds:
        x, folded = _payload_and_scale(
            joined(made), x, of_gradient.labels, as_integers=scheme[names[1]] is None
        )
    if f"{product}_random_signs" in scheme.flags:
        x, folded = _with_signs(quantizers, product, x, (of_gradient, folded), transformed_label(summed))
    array = isinstance(x.tensor, jax.Array)
    other = LabelledTensor(jax.lax.stop_gradient(x.tensor), x.labels) if array else x
    other = in_pieces(other)
    where = f"{quantizers.where}: {scheme.name}.{names[1]}"
    if quantizers.lacks_signs(product):
        return BackwardProduct(NoRandomNumbers(where, SIGNS))
    if quantizers.draws_in_vain(names[1], other, summed):
        return BackwardProduct(NoRandomNumbers(where))
    other = quantizers.operand(names[1], other, summed)
    return BackwardProduct(*quantizers.gradient(names[0], g, summed), other, folded)


def _with_signs(
    quantizers: SchemeQuantizers, product: str, x: LabelledTensor, gradient: tuple[Any, Any], label: Label
) -> tuple[LabelledTensor, jax.Array]:
    """An operand multiplied by random signs, and the factors of the gradient that it is contracted with.

    Args:
        quantizers: of the scheme.
        product: "dgrad" or "wgrad".
        x: the operand.
        gradient: stand-in for the gradient, and other factors of it; None for none.
        label: the axis that the signs are for.
    """
    signs = quantizers.signs(product, x.tensor.shape[x.axis(label)])
    assert signs is not None, "the scheme draws them"
    g, folded = gradient
    factors = beside(g, signs, label)
    return multiplied(x, signs, label), factors if folded is None else factors * folded


def _check_fits(quantizers: SchemeQuantizers, name: str, made: LabelledTensor, summed: Labels) -> None:
    """Refuse a payload whose scales vary along what a backward product sums over."""
    if varies(made, summed, tiles=True):
        where, what = f"{quantizers.where}: {quantizers.scheme.name}.{name}", described(made.tensor)
        raise payload_does_not_fit(where, what)


def _misfit(quantizers: SchemeQuantizers, name: str, x: LabelledTensor, summed: Labels) -> Misfit | None:
    """Why the transform of an operand cannot be done: its blocks do not fill the axis; None if they do."""
    transform: Any = transform_of(quantizers.scheme[name])
    if transform is None or transform.block_size is None or not summed:
        return None
    length = x.tensor.shape[x.axis(transformed_label(summed))]
    size = transform.block_size
    return (
        Misfit(f"{quantizers.where}: {quantizers.scheme.name}.{name}", size, length)
        if length % size
        else None
    )


def _pieces(
    tiles: LocalAqt | None, x: LabelledTensor, summed: Labels
) -> Callable[[LabelledTensor], LabelledTensor]:
    """Cuts an operand into its product's tiles, along an axis found in either operand."""
    if tiles is None or not summed:
        return lambda operand: operand
    label = tiled_label(tiles, x, summed)
    return lambda operand: in_tiles_of(tiles, operand, label)


def _payload_and_scale(
    made: LabelledTensor, x: LabelledTensor, beside: Labels, as_integers: bool
) -> tuple[LabelledTensor, jax.Array | None]:
    """The payload of the forward product's operand, with scale 1, and its scale laid out for the gradient.

    Without a payload, or if the scale varies along an axis that the gradient lacks: the original, and None.

    Args:
        made: the forward product's operand.
        x: the original.
        beside: labels of the gradient.
        as_integers: whether integers are contracted; else the payload is a float array, to be quantized again.
    """
    tensor = made.tensor
    scale = scale_beside(made, beside) if (on_integers(tensor) or on_minifloats(tensor)) else None
    if scale is None:
        return x, None
    if on_minifloats(tensor):
        payload = tensor.payload() if tensor.is_contractible else None
        return (
            (x, None)
            if payload is None
            else (LabelledTensor(payload.astype(tensor.dtype), made.labels), scale)
        )
    if not on_integers(tensor) or tensor.has_zero_point or not isinstance(tensor.bit_width, int):
        return x, None
    integers = tensor.int() if tensor.payload is None else tensor.payload
    if not as_integers:
        return LabelledTensor(integers.astype(tensor.dtype), made.labels), scale
    one = (jnp.ones((), jnp.float32), None, tensor.grid, tensor.dtype)
    return LabelledTensor(IntQuantTensor.stored(integers, *one), made.labels), scale


def _out_shape(lhs: Any, rhs: Any, labels: Labelling) -> tuple[int, ...]:
    sizes = dict(zip(labels.lhs, lhs.shape, strict=True)) | dict(zip(labels.rhs, rhs.shape, strict=True))
    return tuple(sizes[label] for label in labels.out)


@dataclass(frozen=True)
class ExplainedProduct:
    """One of the three products of a scheme.

    Attributes:
        name: "fprop", "dgrad" or "wgrad".
        operands: what is contracted, in words.
        kind: "int", "fp8" or "float".
        why: why existing payloads are not contracted; else empty.
    """

    name: str
    operands: tuple[str, str]
    kind: str
    why: str

    def __str__(self) -> str:
        because = f"  ({self.why})" if self.why else ""
        return f"{self.name}: {' x '.join(self.operands)} -> {self.kind}{because}"


class ExplainedScheme(tuple[ExplainedProduct, ...]):
    """The three products, printed one per line.

    Attributes:
        first: those of the first calls in training, if the scheme is switched.
        delay: how many calls that are.
    """

    first: ExplainedScheme | None = None
    delay: int = 0

    def switched(self, first: ExplainedScheme, delay: int) -> ExplainedScheme:
        """With what the first calls contract.

        Args:
            first: their products.
            delay: how many calls that are.
        """
        made = ExplainedScheme(self)
        made.first, made.delay = first, delay
        return made

    def __str__(self) -> str:
        here = "\n".join(map(str, self))
        if self.first is None:
            return here
        return f"the first {self.delay} calls in training:\n{self.first}\nthen:\n{here}"


def explain_scheme(
    quantizers: SchemeQuantizers, lhs: Any, rhs: Any, dims: Dimensions, dtype: Any
) -> ExplainedScheme:
    """What the three products of a scheme contract, for operands of these shapes; nothing is computed.

    Args:
        quantizers: of the scheme; unchanged.
        lhs, rhs: what has a shape and a dtype.
        dims, dtype: as for `scheme_dot_general`.
    """
    found: list[ExplainedProduct] = []

    def look(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        twin = nnx.clone(quantizers, graph=True)
        twin.set_view(deterministic=True)  # no random numbers are needed to see which formats meet
        operands = _Operands.of(twin, lhs, rhs, dims, np.dtype(dtype))
        labels = operands.plan.labels
        found.append(_explained("fprop", operands.lhs, operands.rhs, labels.out, operands.plan.fprop))
        g = LabelledTensor(jnp.zeros(_out_shape(lhs, rhs, labels), dtype), labels.out)
        for name, taken, kept, out, sums in (
            ("dgrad", operands.dgrad, operands.rhs, labels.lhs, operands.plan.dgrad),
            ("wgrad", operands.wgrad, operands.lhs, labels.rhs, operands.plan.wgrad),
        ):
            other = joined(kept) if taken.other is None else taken.other
            gradient, beside, summed = in_tiles(sums.tiles, g, other, out)
            if taken.quantizer is not None:
                quantize = partial(quantized_gradient, gradient.labels, summed)
                gradient = taken.quantizer(gradient.tensor, None, quantize)[0]  # reports nothing
            found.append(_explained(name, gradient, beside, out, sums))
        return jnp.zeros(())

    jax.eval_shape(look, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (lhs, rhs)))
    return ExplainedScheme(found)


def _explained(name: str, a: LabelledTensor, b: LabelledTensor, out: Labels, sums: Sums) -> ExplainedProduct:
    a, b = in_large_groups(a, b, summed_labels(a.labels, b.labels, out))
    decision = decide(a, b, out)
    why = f"{decision.why}; {ON_CUDA}" if sums.scaled and takes_scaled(a, b, out) else decision.why
    return ExplainedProduct(name, (described(a.tensor), described(b.tensor)), decision.kind, why)
