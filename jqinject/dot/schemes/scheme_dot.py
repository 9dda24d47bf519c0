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
from jqinject.dot.schemes.contraction import AxesRecorder, Contraction
from jqinject.dot.schemes.product_transforms import (
    beside,
    multiplied,
    transform_of,
    transformed,
    transformed_label,
)
from jqinject.dot.schemes.random_numbers import RefusedQuantizer, misfit, refused_backward
from jqinject.dot.schemes.scheme import Kept, payload_does_not_fit
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


@dataclass(frozen=True)
class DotProduct:
    """The static part of a `dot_general`.

    Attributes:
        dims, out_sharding: as for `lax.dot_general`.
        dtype: of the output.
    """

    dims: Dimensions
    dtype: np.dtype
    out_sharding: Any = None


def scheme_dot_general(
    contraction: Contraction,
    dot: DotProduct,
    lhs: jax.Array | QuantTensor,
    rhs: jax.Array | QuantTensor,
    unrounded: jax.Array | None = None,
) -> jax.Array:
    """The contraction of two float arrays by a scheme, forward and backward.

    Args:
        contraction: by the scheme.
        dot: which axes meet, and what comes out.
        lhs, rhs: float arrays, or tensors that are already quantized.
        unrounded: what a quantized `rhs` was made from, for `dgrad_rhs`; None for its dequantized value.
    """
    operands = _Operands.of(contraction, dot, lhs, rhs, unrounded)
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
        contraction: Contraction,
        dot: DotProduct,
        lhs: Any,
        rhs: Any,
        unrounded: jax.Array | None = None,
    ) -> _Operands:
        """The forward pass's part of quantization."""
        scheme, labels = contraction.scheme, Labelling.of(dot.dims)
        plan = Plan(labels, dot.dtype, scheme.fprop, scheme.dgrad, scheme.wgrad, dot.out_sharding)
        x, w = LabelledTensor(lhs, labels.lhs), LabelledTensor(rhs, labels.rhs)
        left, right, summed = in_tiles(scheme.fprop.tiles, x, w, labels.out)
        if not is_quantized(lhs):
            left = contraction.operand("fprop_lhs", left, summed)
        if not is_quantized(rhs):
            right = contraction.operand("fprop_rhs", right, summed, beside=left.tensor)
        g = LabelledTensor(jax.ShapeDtypeStruct(_out_shape(lhs, rhs, labels), dot.dtype), labels.out)
        w = w if unrounded is None else LabelledTensor(unrounded, labels.rhs)
        # The results of backward products are gradients of transformed operands, so the originals are transformed too.
        x, w = (
            _as_in_forward(contraction, name, operand, labels)
            for name, operand in (("fprop_lhs", x), ("fprop_rhs", w))
        )
        of_dgrad = ("dgrad_grad", "dgrad_rhs"), g, w, right, labels.lhs
        of_wgrad = ("wgrad_grad", "wgrad_lhs"), g, x, left, labels.rhs
        dgrad, wgrad = (
            refused_backward(partial(_backward, contraction, *given)) for given in (of_dgrad, of_wgrad)
        )
        return cls(plan, left, right, dgrad, wgrad)


def _as_in_forward(
    contraction: Contraction, name: str, x: LabelledTensor, labels: Labelling
) -> LabelledTensor:
    """An original operand, through the transform of the forward product; unchanged without one."""
    scheme, again = contraction.scheme, "wgrad_lhs" if name == "fprop_lhs" else "dgrad_rhs"
    if is_quantized(x.tensor) or scheme[again] is Kept.FPROP:
        return x
    return transformed(scheme[name], x, summed_labels(labels.lhs, labels.rhs, labels.out))


def _backward(
    contraction: Contraction,
    names: tuple[str, str],
    g: LabelledTensor,
    x: LabelledTensor,
    made: LabelledTensor,
    out: Labels,
) -> BackwardProduct:
    """The operands of a backward product.

    Args:
        contraction: by the scheme.
        names: of the operands.
        g: stand-in for the gradient.
        x: the other operand.
        made: the forward product's version of it.
        out: labels of the result.
    """
    scheme, product, of_gradient = contraction.scheme, names[0].partition("_")[0], g
    summed, tiles = summed_labels(g.labels, x.labels, out), getattr(scheme, product).tiles
    in_pieces = _pieces(tiles, g, summed)
    g = in_pieces(g)
    # Of a stored operand the original is gone: the next best is what was made of it.
    gone = is_quantized(x.tensor) and scheme[names[1]] is None
    folds = f"{product}_use_fwd_quant" in scheme.flags
    if f"{product}_payload" in scheme.flags:
        _check_fits(contraction, names[1], joined(made), summed)
    if scheme[names[1]] is Kept.FPROP or (gone and not folds):
        return BackwardProduct(*contraction.gradient(names[0], g, summed))
    x = LabelledTensor(as_array(x.tensor), x.labels)
    if f"{product}_dequantized" in scheme.flags:
        saw = joined(made)
        x = LabelledTensor(as_array(saw.tensor), saw.labels)
    refused = _misfit(contraction, names[1], x, summed)
    if refused is not None:
        if contraction.trains:
            refused()
        contraction.gradient(names[0], g, summed)  # which an abstract call notes
        return BackwardProduct(refused)
    folded = None
    if folds:
        x, folded = _payload_and_scale(
            joined(made), x, of_gradient.labels, as_integers=scheme[names[1]] is None
        )
    if f"{product}_random_signs" in scheme.flags:
        x, folded = _with_signs(contraction, names[1], x, (of_gradient, folded), transformed_label(summed))
    array = isinstance(x.tensor, jax.Array)
    other = LabelledTensor(jax.lax.stop_gradient(x.tensor), x.labels) if array else x
    other = contraction.operand(names[1], in_pieces(other), summed)
    return BackwardProduct(*contraction.gradient(names[0], g, summed), other, folded)


def _with_signs(
    contraction: Contraction, name: str, x: LabelledTensor, gradient: tuple[Any, Any], label: Label
) -> tuple[LabelledTensor, jax.Array]:
    """An operand multiplied by random signs, and the factors of the gradient that it is contracted with.

    Args:
        contraction: by the scheme.
        name: of the operand.
        x: the operand.
        gradient: stand-in for the gradient, and other factors of it; None for none.
        label: the axis that the signs are for.
    """
    signs = contraction.signs(name, x.tensor.shape[x.axis(label)])
    g, folded = gradient
    factors = beside(g, signs, label)
    return multiplied(x, signs, label), factors if folded is None else factors * folded


def _check_fits(contraction: Contraction, name: str, made: LabelledTensor, summed: Labels) -> None:
    """Refuse a payload whose scales vary along what a backward product sums over."""
    if varies(made, summed, tiles=True):
        where, what = f"{contraction.where}: {contraction.scheme.name}.{name}", described(made.tensor)
        raise payload_does_not_fit(where, what)


def _misfit(
    contraction: Contraction, name: str, x: LabelledTensor, summed: Labels
) -> RefusedQuantizer | None:
    """Why the transform of an operand cannot be done: its blocks do not fill the axis; None if they do."""
    transform: Any = transform_of(contraction.scheme[name])
    if transform is None or transform.block_size is None or not summed:
        return None
    length = x.tensor.shape[x.axis(transformed_label(summed))]
    size = transform.block_size
    where = f"{contraction.where}: {contraction.scheme.name}.{name}"
    return misfit(where, size, length) if length % size else None


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

    def __str__(self) -> str:
        here = "\n".join(map(str, self))
        if self.first is None:
            return here
        return f"the first {self.delay} calls in training:\n{self.first}\nthen:\n{here}"


def explain_scheme(contraction: Contraction, dot: DotProduct, lhs: Any, rhs: Any) -> ExplainedScheme:
    """What the three products of a scheme contract, for operands of these shapes; nothing is computed.

    Args:
        contraction: by the scheme; unchanged.
        dot: as for `scheme_dot_general`.
        lhs, rhs: what has a shape and a dtype.
    """
    found: list[ExplainedProduct] = []

    def look(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        twin = nnx.clone(contraction, graph=True)
        twin.recorder = AxesRecorder()
        twin.set_view(deterministic=True)  # no random numbers are needed to see which formats meet
        operands = _Operands.of(twin, dot, lhs, rhs)
        labels = operands.plan.labels
        found.append(_explained("fprop", operands.lhs, operands.rhs, labels.out, operands.plan.fprop))
        g = LabelledTensor(jnp.zeros(_out_shape(lhs, rhs, labels), dot.dtype), labels.out)
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
