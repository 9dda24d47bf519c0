"""The one contraction: `y = x w`, and backward `dx = g w^T` and `dw = x^T g`, each with its own operands.

One derivative rule for `dot_general` (and so for einsum), convolutions and ragged contractions, which differ in their
plans: how each of the three products is computed. What a backward product takes is data, a `BackwardProduct`: by
default the forward product's operand, its payload if it fits, else the dequantized value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jqinject.dot.geometry.dimensions import Dimensions, Operand, OutSharding
from jqinject.dot.geometry.labels import Labelling, Labels, dimensions_of, summed_labels
from jqinject.dot.kernels.convolution import Convolution
from jqinject.dot.kernels.integer import Affine, IntegerOperand, affine_dot_general
from jqinject.dot.kernels.ragged import Ragged
from jqinject.dot.tensors.backward_quantizer import GradientFormat
from jqinject.dot.tensors.choice import choose
from jqinject.dot.tensors.labelled_tensor import LabelledTensor, in_tiles, joined, quantized_by
from jqinject.dot.tensors.packed_tensor import (
    KeptOperands,
    floats_of,
    packed_tensor,
    shaped_like,
    unpacked_tensor,
)
from jqinject.dot.tensors.product import PLAIN, Sums, product
from jqinject.ops.observe import mapped_with, summed_like
from jqinject.ops.packing import LowBitTree
from jqinject.ops.ste import backward_only, explain_forward_mode, first_order
from jqinject.quant_tensor import QuantTensor, as_array, on_integers, on_minifloats

ProductName = Literal["fprop", "dgrad", "wgrad"]
Pair = tuple[LabelledTensor, LabelledTensor]
Rest = tuple[jax.Array, ...]
Slots = tuple[jax.Array | None, jax.Array | None]
Taken = tuple[Callable[..., tuple[Any, jax.Array | None]] | None, jax.Array | None]


@dataclass(frozen=True)
class Plan(ABC):
    """The static part of a contraction and its gradients.

    Attributes:
        labels: of the axes of both operands and the output.
        dtype: of the output.
        fprop, dgrad, wgrad: how the products sum.
        out_sharding: of the output, as for `lax.dot_general`.
        gradient_format: of an output cotangent that is already quantized, whose scale is the cotangent of the token;
            else None.
        what: the contraction, as text.
        twice: what may be differentiated twice.
        in_rows: whether quantizers of activations and gradients see summed axes as rows.
    """

    labels: Labelling
    dtype: np.dtype
    fprop: Sums = PLAIN
    dgrad: Sums = PLAIN
    wgrad: Sums = PLAIN
    out_sharding: OutSharding = None
    gradient_format: GradientFormat | None = None
    what: str = "a quantized contraction"
    twice: ClassVar[str]
    in_rows: ClassVar[bool] = True

    @property
    def no_second_derivative(self) -> str:
        """The error of differentiating twice."""
        return f"{self.what} has no second derivative: rounding has none.\n  cure: {self.twice}"

    def summed(self, name: ProductName) -> tuple[Labels, Labels]:
        """The axes of both operands of a product that share a scale: those that it sums over."""
        lhs, rhs, out = self.labels.lhs, self.labels.rhs, self.labels.out
        first, second, result = {
            "fprop": (lhs, rhs, out),
            "dgrad": (out, rhs, lhs),
            "wgrad": (out, lhs, rhs),
        }[name]
        summed = summed_labels(first, second, result)
        return summed, summed

    def out_shape(self, lhs: Operand, rhs: Operand) -> tuple[int, ...]:
        """The shape of the output of two operands."""
        sizes = dict(zip(self.labels.lhs, lhs.shape, strict=True)) | dict(
            zip(self.labels.rhs, rhs.shape, strict=True)
        )
        return tuple(sizes[label] for label in self.labels.out)

    @abstractmethod
    def integers(self, lhs: Affine, rhs: Affine, *rest: jax.Array) -> jax.Array:
        """The contraction of integers, their axes in the order of `labels`; arguments as for `forward`."""

    @abstractmethod
    def forward(self, lhs: LabelledTensor, rhs: LabelledTensor, *rest: jax.Array) -> jax.Array:
        """The contraction, in the order of `labels.out`.

        Args:
            lhs, rhs: the operands.
            rest: arguments of the contraction that are no operands.
        """

    @abstractmethod
    def gradient(
        self, number: int, operands: Pair, like: LabelledTensor, dtype: DTypeLike, *rest: jax.Array
    ) -> jax.Array:
        """The gradient of an operand, in the order of its labels without tiles.

        Args:
            number: 0 for the left operand, 1 for the right one.
            operands: the gradient of the output, quantized for this product, and its other operand.
            like: an array of the shape and the sharding of the operand, without tiles.
            dtype: of the operand.
            rest: see `forward`.
        """


@dataclass(frozen=True)
class DotPlan(Plan):
    """Of a `dot_general`."""

    twice = (
        "contraction='float' on the layers that are differentiated twice, jax.lax.dot_general for operations"
    )

    @classmethod
    def of(cls, dims: Dimensions, dtype: DTypeLike, out_sharding: OutSharding = None) -> DotPlan:
        return cls(Labelling.of(dims), np.dtype(dtype), out_sharding=out_sharding)

    def integers(self, lhs: Affine, rhs: Affine, *rest: jax.Array) -> jax.Array:
        dims, _ = dimensions_of(self.labels.lhs, self.labels.rhs, self.labels.out)
        by = self.dtype, self.fprop.accumulator_dtype, self.out_sharding
        return affine_dot_general(lhs, rhs, dims, *by)

    def forward(self, lhs: LabelledTensor, rhs: LabelledTensor, *rest: jax.Array) -> jax.Array:
        return product(lhs, rhs, self.labels.out, self.dtype, self.fprop, self.out_sharding)

    def gradient(
        self, number: int, operands: Pair, like: LabelledTensor, dtype: DTypeLike, *rest: jax.Array
    ) -> jax.Array:
        sums = (self.dgrad, self.wgrad)[number]
        dtype = jnp.float32 if sums.floats == "float32" else dtype
        return product(*operands, like.labels, dtype, sums, like=like.tensor)


@dataclass(frozen=True, kw_only=True)
class ConvolutionPlan(Plan):
    """Of a convolution: integers if both operands of a product have them, else floats."""

    conv: Convolution
    twice = "differentiate it once, or use jax.lax.conv_general_dilated where it is differentiated twice"
    in_rows = False

    @classmethod
    def of(cls, conv: Convolution, what: str = "a quantized convolution") -> ConvolutionPlan:
        lhs, rhs, out = (
            tuple((name, axis) for axis in range(len(spec)))
            for name, spec in zip(("lhs", "rhs", "out"), conv.specs, strict=True)
        )
        return cls(labels=Labelling(lhs, rhs, out), dtype=conv.dtype, what=what, conv=conv)

    def summed(self, name: ProductName) -> tuple[Labels, Labels]:
        """All but examples and outputs; backward, all but examples and inputs, and all but inputs and outputs."""
        (batch, feature, *_), (outputs, inputs, *_), (out_batch, out_feature, *_) = self.conv.specs
        lhs, rhs, out = self.labels.lhs, self.labels.rhs, self.labels.out
        first, second = {
            "fprop": ((lhs, batch), (rhs, outputs)),
            "dgrad": ((out, out_batch), (rhs, inputs)),
            "wgrad": ((out, out_feature), (lhs, feature)),
        }[name]
        return _without(*first), _without(*second)

    def integers(self, lhs: Affine, rhs: Affine, *rest: jax.Array) -> jax.Array:
        return self.conv.of_integers(lhs, rhs)

    def out_shape(self, lhs: Operand, rhs: Operand) -> tuple[int, ...]:
        conv = self.conv
        out = jax.eval_shape(lambda a, b: conv.numbers(a, b, conv.dtype), as_array(lhs), as_array(rhs))
        return out.shape

    def forward(self, lhs: LabelledTensor, rhs: LabelledTensor, *rest: jax.Array) -> jax.Array:
        left, right, conv = lhs.tensor, rhs.tensor, self.conv
        integers = choose(left, right, conv).integers
        if integers is not None:
            return conv.of_integers(*integers)
        left, right = as_array(left), as_array(right)
        dtype = jnp.promote_types(left.dtype, right.dtype)
        return conv.numbers(left.astype(dtype), right.astype(dtype), conv.dtype)

    def gradient(
        self, number: int, operands: Pair, like: LabelledTensor, dtype: DTypeLike, *rest: jax.Array
    ) -> jax.Array:
        (g, partner), x = operands, like.tensor.astype(dtype)
        pair = (g.tensor, partner.tensor) if number == 0 else (partner.tensor, g.tensor)
        shapes = (x.shape, partner.tensor.shape) if number == 0 else (partner.tensor.shape, x.shape)
        conv = self.conv.of_gradient(number, (*shapes, g.tensor.shape), x.dtype)
        integers = None if conv is None else choose(*pair, conv).integers
        if conv is not None and integers is not None:
            left, right = integers
            if number == 0:
                right = right._replace(payload=jnp.flip(right.payload, conv.specs[1][2:]))
            return conv.of_integers(left, right)

        def contract(x: jax.Array, partnerer: jax.Array) -> jax.Array:
            pair = (x, partnerer) if number == 0 else (partnerer, x)
            return self.conv.numbers(*pair, self.dtype)

        return _of_floats(contract, x, floats_of(partner.tensor), as_array(g.tensor).astype(self.dtype))


@dataclass(frozen=True, kw_only=True)
class RaggedPlan(Plan):
    """Of a ragged contraction: of integers, or of values; backward of values."""

    ragged: Ragged
    twice = "differentiate it once, or use jax.lax.ragged_dot where it is differentiated twice"

    @classmethod
    def of(cls, ragged: Ragged, what: str = "a ragged contraction by a scheme") -> RaggedPlan:
        return cls(labels=Labelling(*ragged.labels), dtype=ragged.dtype, what=what, ragged=ragged)

    def integers(self, lhs: Affine, rhs: Affine, *rest: jax.Array) -> jax.Array:
        return self.ragged.integers(lhs, rhs, *rest)

    def forward(self, lhs: LabelledTensor, rhs: LabelledTensor, *rest: jax.Array) -> jax.Array:
        left, right = _value(lhs, self.labels.lhs), _value(rhs, self.labels.rhs)
        dtype = jnp.promote_types(left.dtype, right.dtype)
        return self.ragged.floats(left.astype(dtype), right.astype(dtype), *rest)

    def gradient(
        self, number: int, operands: Pair, like: LabelledTensor, dtype: DTypeLike, *rest: jax.Array
    ) -> jax.Array:
        g, partner = operands
        own, theirs = (self.labels.lhs, self.labels.rhs)[:: 1 if number == 0 else -1]

        def contract(x: jax.Array, partnerer: jax.Array) -> jax.Array:
            x = _transposed(x, like.labels, own)
            pair = (x, partnerer) if number == 0 else (partnerer, x)
            return self.ragged.floats(*pair, *rest)

        gradient = _value(g, self.labels.out).astype(self.dtype)
        return _of_floats(contract, like.tensor.astype(dtype), _value(partner, theirs), gradient)


def _of_floats(
    contract: Callable[[jax.Array, jax.Array], jax.Array], like: jax.Array, partner: jax.Array, g: jax.Array
) -> jax.Array:
    """The gradient of an operand in which a contraction of floats is linear.

    Args:
        contract: of the operand, and of the other one.
        like: has the shape of the operand.
        partner: the other one.
        g: the gradient of the output.
    """
    partner = partner.astype(like.dtype)
    (gradient,) = jax.linear_transpose(lambda x: contract(x, partner), like)(g)
    return gradient


def _value(x: LabelledTensor, labels: Labels) -> jax.Array:
    """The numbers of an operand as floats, its axes in some order."""
    return _transposed(floats_of(x.tensor), x.labels, labels)


def _transposed(x: jax.Array, labels: Labels, order: Labels) -> jax.Array:
    return x if labels == order else x.transpose([labels.index(label) for label in order])


def _without(labels: Labels, axis: int) -> Labels:
    return labels[:axis] + labels[axis + 1 :]


class BackwardProduct(NamedTuple):
    """The operands of one of the two backward products; by default both unchanged.

    Attributes:
        quantizer: of `g`; None leaves it float.
        slot: where that quantizer reports; None if it does not.
        partner: `w` or `x` for this product; None for the forward product's.
        folded: factor of `g`: the scale of the payload behind `partner`, laid out for `g`; None for 1.
    """

    quantizer: Callable[..., tuple[Any, jax.Array | None]] | None = None
    slot: jax.Array | None = None
    partner: LabelledTensor | None = None
    folded: jax.Array | None = None


@dataclass(frozen=True)
class _Static:
    plan: Plan
    lhs: Labels
    rhs: Labels
    others: tuple[Labels | None, Labels | None]
    stored: bool


UNCHANGED = BackwardProduct()


def contract_integers(
    plan: Plan, lhs: IntegerOperand | jax.Array, rhs: IntegerOperand | jax.Array, *rest: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """The contraction of integers, with the gradients of the contraction of their floats.

    Two operands of integers are contracted as integers; an array and its partner as floats, and backward the partner's
    integers with those of the gradient.

    Args:
        plan: the static part.
        lhs, rhs: the operands, their axes in the plan's order; a stored right one gets no gradient.
        rest: see `contract_operands`.

    Returns:
        See `contract_operands`.
    """
    left = lhs.value if isinstance(lhs, IntegerOperand) else lhs
    right = rhs.value if isinstance(rhs, IntegerOperand) else rhs
    static = _Static(plan, plan.labels.lhs, plan.labels.rhs, (None, None), right is None)
    operands = KeptOperands(lhs, rhs, (None, None), (None, None), (None, None))
    try:
        return _contract(static, left, right, (None, None), operands, rest)
    except TypeError as error:
        explain_forward_mode(error, plan.what)
        raise


def contract_operands(
    plan: Plan,
    lhs: LabelledTensor,
    rhs: LabelledTensor,
    dgrad: BackwardProduct = UNCHANGED,
    wgrad: BackwardProduct = UNCHANGED,
    rest: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, jax.Array | None]:
    """The contraction of two operands, with gradients straight through to their values.

    Args:
        plan: the static part.
        lhs, rhs: the forward product's operands: arrays or QuantTensors, axes in any order, in tiles or not. A stored
            right one gets no gradient.
        dgrad, wgrad: the backward products' operands.
        rest: arguments without gradient, such as the sizes of ragged groups.

    Returns:
        (an array, its axes in the order of `plan.labels.out`; a token, a float32 0 whose cotangent is the scale of the
        quantized gradient, None without `plan.gradient_format`).
    """
    backward = dgrad, wgrad
    others = tuple(None if by.partner is None else packed_tensor(by.partner.tensor) for by in backward)
    of_dgrad, of_wgrad = (None if by.partner is None else by.partner.labels for by in backward)
    stored = (on_minifloats(rhs.tensor) or on_integers(rhs.tensor)) and rhs.tensor.is_stored
    values = lhs.tensor, None if stored else rhs.tensor
    left, right = (x.carrier if isinstance(x, QuantTensor) else x for x in values)
    static = _Static(plan, lhs.labels, rhs.labels, (of_dgrad, of_wgrad), stored)
    operands = KeptOperands(
        packed_tensor(lhs.tensor),
        packed_tensor(rhs.tensor),
        others,
        (dgrad.quantizer, wgrad.quantizer),
        (dgrad.folded, wgrad.folded),
    )
    with backward_only(plan.what):
        return _contract(static, left, right, (dgrad.slot, wgrad.slot), operands, rest)


def _forward(
    static: _Static, lhs: jax.Array, rhs: jax.Array | None, slots: Slots, operands: KeptOperands, rest: Rest
) -> tuple[jax.Array, jax.Array | None]:
    plan, left, right = static.plan, operands.lhs, operands.rhs
    if isinstance(left, IntegerOperand) and isinstance(right, IntegerOperand):
        assert left.integers is not None and right.integers is not None, "of a forward pass"
        y = plan.integers(left.integers, right.integers, *rest)
    else:
        left, right = unpacked_tensor(left), unpacked_tensor(right)
        y = plan.forward(LabelledTensor(left, static.lhs), LabelledTensor(right, static.rhs), *rest)
    if plan.gradient_format is None:
        return y, None
    return y, mapped_with(plan.gradient_format.token(), shaped_like(left), shaped_like(right))


_contract = jax.custom_vjp(_forward, nondiff_argnums=(0,))


def _fwd(
    static: _Static, lhs: jax.Array, rhs: jax.Array | None, slots: Slots, operands: KeptOperands, rest: Rest
) -> tuple[tuple[jax.Array, jax.Array | None], tuple[Slots, Rest, LowBitTree]]:
    # This forward pass is only differentiated by a second derivative.
    *_, operands = first_order((lhs, rhs, operands), static.plan.no_second_derivative)
    gradient = static.plan.gradient_format
    residuals = operands.without_unused().for_backward(gradient is not None and gradient.is_integer)
    return _forward(static, lhs, rhs, slots, operands, rest), (slots, rest, residuals)


def _bwd(static: _Static, residuals: tuple[Slots, Rest, LowBitTree], cotangents: Any) -> Any:
    plan, (slots, rest, bits) = static.plan, residuals
    operands = KeptOperands.from_forward(bits)
    g: Any = first_order(cotangents[0], plan.no_second_derivative)
    if plan.gradient_format is not None:
        g = plan.gradient_format.tensor(g, cotangents[1])
    forward = LabelledTensor(operands.lhs, static.lhs), LabelledTensor(operands.rhs, static.rhs)
    gradients: list[jax.Array | None] = [None, None]
    reports: list[jax.Array | None] = [None, None]
    for number in (0,) if static.stored else (0, 1):
        labels, partner = static.others[number], operands.others[number]
        partner = joined(forward[1 - number]) if labels is None else LabelledTensor(partner, labels)
        folded, by = operands.folded[number], (operands.quantizers[number], slots[number])
        scaled = g if folded is None else (g * folded).astype(g.dtype)
        gradient = LabelledTensor(scaled, plan.labels.out)
        gradients[number], reports[number] = _gradient(
            plan, number, gradient, by, partner, forward[number], rest
        )
    return *gradients, tuple(reports), None, None


_contract.defvjp(_fwd, _bwd)


def _gradient(
    plan: Plan,
    number: int,
    g: LabelledTensor,
    by: Taken,
    partner: LabelledTensor,
    like: LabelledTensor,
    rest: tuple[jax.Array, ...],
) -> tuple[jax.Array, jax.Array | None]:
    """One of the two backward products, and the report of the gradient's quantizer.

    Args:
        plan: the static part.
        number: 0 for the gradient of the left operand, 1 for that of the right one.
        g: the cotangent of the output.
        by: its quantizer and slot.
        partner: the other operand.
        like: the operand whose gradient this is.
        rest: arguments that are no operands.
    """
    array = shaped_like(like.tensor)
    joined_like = joined(LabelledTensor(array, like.labels))
    g, partner, report = quantized_gradient(plan, number, g, by, partner)
    product_sum = plan.gradient(number, (g, partner), joined_like, like.tensor.dtype, *rest)
    return summed_like(product_sum.reshape(array.shape), array).astype(like.tensor.dtype), report


def quantized_gradient(
    plan: Plan, number: int, g: LabelledTensor, by: Taken, partner: LabelledTensor
) -> tuple[LabelledTensor, LabelledTensor, jax.Array | None]:
    """The operands of a backward product in its tiles, the gradient quantized, and the report of its quantizer.

    Args:
        plan: the static part.
        number: 0 for the gradient of the left operand, 1 for that of the right one.
        g: the cotangent of the output.
        by: its quantizer and slot; None leaves it as it is.
        partner: the other operand.
    """
    quantizer, slot = by
    sums, result = ((plan.dgrad, plan.labels.lhs), (plan.wgrad, plan.labels.rhs))[number]
    g, partner, summed = in_tiles(sums.tiles, g, partner, result)
    if quantizer is None:
        return g, partner, None
    quantized, report = quantizer(g.tensor, slot, partial(_quantized, g.labels, summed, plan.in_rows))
    return quantized, partner, report


def _quantized(labels: Labels, summed: Labels, in_rows: bool, proxy: object, g: jax.Array) -> LabelledTensor:
    return quantized_by(proxy, LabelledTensor(g, labels), summed, in_rows=in_rows)
