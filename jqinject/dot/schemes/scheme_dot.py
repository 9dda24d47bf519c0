"""Contractions by a scheme: `dot_general`, convolutions and ragged contractions of six operands."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.dot.geometry.dimensions import Labels, scale_in_output
from jqinject.dot.schemes.contraction import Contraction
from jqinject.dot.schemes.product_transforms import (
    transform_of,
    transformed,
    transformed_label,
)
from jqinject.dot.schemes.scheme import Kept, payload_does_not_fit
from jqinject.dot.schemes.scheme_fits import RefusedQuantizer, refused_backward
from jqinject.dot.tensors.choice import describe, varies_along
from jqinject.dot.tensors.labelled_tensor import LabelledTensor, in_tiles, joined
from jqinject.dot.tensors.product import Sums, chosen
from jqinject.dot.tensors.six_operands import (
    BackwardProduct,
    Plan,
    ProductName,
    contract_operands,
    quantized_gradient,
)
from jqinject.quant_tensor import (
    IntQuantTensor,
    Operand,
    QuantTensor,
    as_array,
    is_quantized,
    on_integers,
    on_minifloats,
)


def contract_by_scheme(
    contraction: Contraction,
    plan: Plan,
    lhs: jax.Array | QuantTensor,
    rhs: jax.Array | QuantTensor,
    unrounded: jax.Array | None = None,
    *rest: jax.Array,
) -> jax.Array:
    """The contraction of two float arrays by a scheme, forward and backward.

    Each of the three products of a convolution is one of integers if both operands have them, with one scale or one for
    each example (input feature, backward) of the left and each output feature of the right one, and there are no
    groups. Its quantizers of activations and gradients see the operand unchanged: features last, as in Flax.

    Args:
        contraction: by the scheme; for a convolution, of `SchemeSpec.of_convolution`.
        plan: which axes meet, and what comes out; the sums are the scheme's.
        lhs, rhs: float arrays, or tensors that are already quantized.
        unrounded: what a quantized `rhs` was made from, for `dgrad_rhs`; None for its dequantized value.
        rest: how many rows each expert of a ragged contraction gets.
    """
    return contract_operands(*_operands_of(contraction, plan, lhs, rhs, unrounded), rest)[0]


def _operands_of(
    contraction: Contraction, plan: Plan, lhs: Operand, rhs: Operand, unrounded: jax.Array | None = None
) -> tuple[Plan, LabelledTensor, LabelledTensor, BackwardProduct, BackwardProduct]:
    """The forward pass's part of quantization: the arguments of `contract_operands`."""
    plan, labels = replace(plan, **contraction.scheme.sums), plan.axes
    x, w = LabelledTensor(lhs, labels.lhs), LabelledTensor(rhs, labels.rhs)
    of_left, of_right = plan.summed("fprop")
    left, right = in_tiles(plan.fprop.tiles, of_left, x, w)
    if not is_quantized(lhs):
        _, left = contraction.quantized("fprop_lhs", left, of_left, in_rows=plan.in_rows)
    if not is_quantized(rhs):
        how: Any = {"partner": left.tensor, "in_rows": plan.in_rows}
        _, right = contraction.quantized("fprop_rhs", right, of_right, **how)
    g = LabelledTensor(jax.ShapeDtypeStruct(plan.out_shape(lhs, rhs), plan.dtype), labels.out)
    w = w if unrounded is None else LabelledTensor(unrounded, labels.rhs)
    # The results of backward products are gradients of transformed operands, so the originals are transformed too.
    x = _as_in_forward(contraction, "fprop_lhs", x, of_left)
    w = _as_in_forward(contraction, "fprop_rhs", w, of_right)
    dgrad = refused_backward(partial(_backward, contraction, plan, "dgrad", "dgrad_rhs", g, w, right))
    wgrad = refused_backward(partial(_backward, contraction, plan, "wgrad", "wgrad_lhs", g, x, left))
    return plan, left, right, dgrad, wgrad


def _as_in_forward(contraction: Contraction, name: str, x: LabelledTensor, summed: Labels) -> LabelledTensor:
    """An original operand, through the transform of the forward product; unchanged without one."""
    scheme, again = contraction.scheme, "wgrad_lhs" if name == "fprop_lhs" else "dgrad_rhs"
    if is_quantized(x.tensor) or isinstance(scheme[again], Kept):
        return x
    return transformed(scheme[name], x, summed)


def _backward(
    contraction: Contraction,
    plan: Plan,
    product: ProductName,
    name: str,
    g: LabelledTensor,
    x: LabelledTensor,
    from_forward: LabelledTensor,
) -> BackwardProduct:
    """The operands of a backward product: what it takes of the other operand is payload, dequantized or original.

    Args:
        contraction: by the scheme.
        plan: of the contraction.
        product: "dgrad" or "wgrad".
        name: of the other operand.
        g: stand-in for the gradient.
        x: the other operand.
        from_forward: the forward product's version of it.
    """
    scheme, (of_g, of_x) = contraction.scheme, plan.summed(product)
    tiles = (plan.dgrad if product == "dgrad" else plan.wgrad).tiles
    gradient = partial(contraction.gradient, f"{product}_grad", *in_tiles(tiles, of_g, g), of_g)
    # Of a stored operand the original is gone: the next best is what was made of it.
    only_quantized = is_quantized(x.tensor) and scheme[name] is None
    folds = scheme[f"{product}_use_fwd_quant"]
    if scheme[name] is Kept.PAYLOAD:
        _check_fits(contraction, name, joined(from_forward), of_x)
    if isinstance(scheme[name], Kept) or (only_quantized and not folds):
        return BackwardProduct(*gradient())
    x = LabelledTensor(as_array(x.tensor), x.labels)
    if scheme[f"{product}_source"] == "dequantized":
        saw = joined(from_forward)
        x = LabelledTensor(as_array(saw.tensor), saw.labels)
    refused = _misfit(contraction, name, x, of_x)
    if refused and contraction.trains:
        raise ValueError(refused)
    if refused:
        gradient()  # which an abstract call notes
        return BackwardProduct(RefusedQuantizer(refused))
    folded = None
    if folds:
        scaled = g.labels if plan.in_rows else ()  # of a convolution, one scale alone
        x, folded = _payload_and_scale(joined(from_forward), x, scaled, as_integers=scheme[name] is None)
    if scheme[f"{product}_random_signs"]:
        label = transformed_label(of_x)
        signs = contraction.signs(name, x.tensor.shape[x.axis(label)])
        factors, own = (scale_in_output(signs, (label,), labels) for labels in (g.labels, x.labels))
        assert factors is not None and own is not None, "both operands have the axis"
        x = LabelledTensor(x.tensor * own.astype(x.tensor.dtype), x.labels)
        folded = factors if folded is None else factors * folded
    array = isinstance(x.tensor, jax.Array)
    partner = LabelledTensor(jax.lax.stop_gradient(x.tensor), x.labels) if array else x
    _, partner = in_tiles(tiles, of_x, g, partner)
    _, partner = contraction.quantized(name, partner, of_x, in_rows=plan.in_rows)
    return BackwardProduct(*gradient(), partner, folded)


def _check_fits(contraction: Contraction, name: str, from_forward: LabelledTensor, summed: Labels) -> None:
    """Refuse a payload whose scales vary along what a backward product sums over."""
    tensor = from_forward.tensor
    scaled = on_integers(tensor) or on_minifloats(tensor)
    if scaled and varies_along(
        tensor, [from_forward.axis(label) for label in summed if label in from_forward.labels]
    ):
        where, what = f"{contraction.where}: {contraction.scheme.name}.{name}", describe(tensor)
        raise payload_does_not_fit(where, what)


def _misfit(contraction: Contraction, name: str, x: LabelledTensor, summed: Labels) -> str:
    """Why the transform of an operand cannot be done: its blocks do not fill the axis; empty if they do."""
    transform: Any = transform_of(contraction.scheme[name])
    size = None if transform is None or not summed else transform.block_size
    length = 0 if size is None else x.tensor.shape[x.axis(transformed_label(summed))]
    if size is None or not length % size:
        return ""
    return (
        f"{contraction.where}: {contraction.scheme.name}.{name}: pre_transform turns blocks of {size}, which do not "
        f"fill the {length} numbers that the product sums over (rows of a batch).\n  cure: batches whose last axis "
        f"before the features is a multiple of {size}; model.eval() where there is no backward pass; or a scheme "
        "without the transform (hadamard=None)"
    )


def _payload_and_scale(
    from_forward: LabelledTensor, x: LabelledTensor, gradient: Labels, as_integers: bool
) -> tuple[LabelledTensor, jax.Array | None]:
    """The payload of the forward product's operand, with scale 1, and its scale laid out for the gradient.

    Without a payload, or if the scale varies along an axis that the gradient lacks: the original, and None.

    Args:
        from_forward: the forward product's operand.
        x: the original.
        gradient: labels of the gradient.
        as_integers: whether integers are contracted; else the payload is a float array, to be quantized again.
    """
    tensor, integers = from_forward.tensor, on_integers(from_forward.tensor)
    scale = (
        scale_in_output(tensor.scale, from_forward.labels, gradient)
        if integers or on_minifloats(tensor)
        else None
    )
    if integers:
        contractible = not tensor.has_zero_point and isinstance(tensor.bit_width, int)
    else:
        contractible = scale is not None and tensor.is_contractible
    if scale is None or not contractible:
        return x, None
    payload: Any = tensor.payload
    if payload is None or not integers:
        payload = tensor.int() if integers else tensor.payload()
    if integers and as_integers:
        payload = IntQuantTensor.stored(payload, jnp.ones((), jnp.float32), None, tensor.grid, tensor.dtype)
    else:
        payload = payload.astype(tensor.dtype)
    return LabelledTensor(payload, from_forward.labels), scale


@dataclass(frozen=True)
class ExplainedProduct:
    """One of the three products of a scheme.

    Attributes:
        name: "fprop", "dgrad" or "wgrad".
        operands: what is contracted, as text.
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

    first: "ExplainedScheme | None" = None
    delay: int = 0

    def __str__(self) -> str:
        products = "\n".join(map(str, self))
        if self.first is None:
            return products
        return f"the first {self.delay} calls in training:\n{self.first}\nthen:\n{products}"


def explain_scheme(contraction: Contraction, plan: Plan, lhs: Operand, rhs: Operand) -> ExplainedScheme:
    """What the three products of a scheme contract, for operands of these shapes; nothing is computed.

    Args:
        contraction: by the scheme; unchanged.
        plan: as for `contract_by_scheme`.
        lhs, rhs: what has a shape and a dtype.
    """
    products: list[ExplainedProduct] = []

    def look(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        by_sums, left, right, *backward = _operands_of(contraction.recording({}), plan, lhs, rhs)
        products.append(_explained("fprop", left, right, plan.axes.out, by_sums.fprop))
        g = LabelledTensor(jnp.zeros(plan.out_shape(lhs, rhs), plan.dtype), plan.axes.out)
        for number, (name, from_forward, out, sums) in enumerate(
            (
                ("dgrad", right, plan.axes.lhs, by_sums.dgrad),
                ("wgrad", left, plan.axes.rhs, by_sums.wgrad),
            )
        ):
            operands = backward[number]
            partner = joined(from_forward) if operands.partner is None else operands.partner
            by = operands.quantizer, None  # reports nothing
            gradient, partner, _ = quantized_gradient(by_sums, number, g, by, partner)
            products.append(_explained(name, gradient, partner, out, sums))
        return jnp.zeros(())

    jax.eval_shape(look, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (lhs, rhs)))
    return ExplainedScheme(products)


def _explained(name: str, a: LabelledTensor, b: LabelledTensor, out: Labels, sums: Sums) -> ExplainedProduct:
    choice = chosen(a, b, out, sums.scaled)
    return ExplainedProduct(name, (describe(a.tensor), describe(b.tensor)), choice.numbers, choice.why)
