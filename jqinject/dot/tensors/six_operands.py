"""The one contraction: `y = x w`, and backward `dx = g w^T` and `dw = x^T g`, each with its own operands.

One derivative rule for `dot_general` (and so for einsum), convolutions and ragged contractions, which differ in which
axes meet: `Dimensions`, a `Convolution` or a `Ragged` in one `Plan`. What a backward product takes is data, a
`BackwardProduct`: by default the forward product's operand, its payload if it fits, else the dequantized value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jqinject.dot.geometry.dimensions import Dimensions, Labels, OutSharding
from jqinject.dot.kernels import kernel_table
from jqinject.dot.kernels.convolution import Convolution
from jqinject.dot.kernels.integer import IntegerOperand, affine_dot_general
from jqinject.dot.kernels.ragged import Ragged
from jqinject.dot.tensors import backward_quantizer, choice
from jqinject.dot.tensors.labelled_tensor import LabelledTensor, in_tiles, joined, quantized_by
from jqinject.dot.tensors.product import PLAIN, Sums, product
from jqinject.dot.tensors.residuals import KeptOperands, floats_of, shaped_like
from jqinject.ops import observe, packing, processes, ste
from jqinject.quant_tensor import Operand, as_array, is_quantized, on_integers, on_minifloats

ProductName = Literal["fprop", "dgrad", "wgrad"]
Pair = tuple[LabelledTensor, LabelledTensor]
Rest = tuple[jax.Array, ...]
Slots = tuple[jax.Array | None, jax.Array | None]
Taken = tuple[Callable[..., tuple[Any, jax.Array | None]] | None, jax.Array | None]


@dataclass(frozen=True)
class Plan:
    """The static part of a contraction and its gradients.

    Attributes:
        where: which axes meet.
        dtype: of the output.
        fprop, dgrad, wgrad: how the products of a `dot_general` sum.
        out_sharding: of its output, as for `lax.dot_general`.
        gradient_format: of an output cotangent that is already quantized, whose scale is the cotangent of the token;
            else None.
        what: the contraction, as text.
    """

    where: Dimensions | Convolution | Ragged
    dtype: np.dtype
    fprop: Sums = PLAIN
    dgrad: Sums = PLAIN
    wgrad: Sums = PLAIN
    out_sharding: OutSharding = None
    gradient_format: backward_quantizer.GradientFormat | None = None
    what: str = "a quantized contraction"

    @cached_property
    def axes(self) -> Dimensions:
        """The labels of the axes of both operands and the output."""
        return self.where if isinstance(self.where, Dimensions) else self.where.axes

    @property
    def in_rows(self) -> bool:
        """Whether quantizers of activations and gradients see summed axes as rows."""
        return not isinstance(self.where, Convolution)

    @property
    def no_second_derivative(self) -> str:
        """The error of differentiating twice."""
        cure = "contraction='float' on the layers that are differentiated twice, jax.lax.dot_general for operations"
        if not isinstance(self.where, Dimensions):
            function = "ragged_dot" if self.in_rows else "conv_general_dilated"
            cure = f"differentiate it once, or use jax.lax.{function} where it is differentiated twice"
        return f"{self.what} has no second derivative: rounding has none.\n  cure: {cure}"

    def summed(self, name: ProductName) -> tuple[Labels, Labels]:
        """The axes of both operands of a product that share a scale: those that it sums over, of windows one by one."""
        lhs, rhs, out = self.axes.lhs, self.axes.rhs, self.axes.out
        products = {"fprop": (lhs, rhs, out), "dgrad": (out, rhs, lhs), "wgrad": (out, lhs, rhs)}
        first, second, result = products[name]
        if self.in_rows:
            summed = Dimensions(first, second, result).summed
            return summed, summed
        left, right = (tuple(x for x in labels if x not in result) for labels in (first, second))
        return left, right

    def out_shape(self, lhs: Operand, rhs: Operand) -> tuple[int, ...]:
        """The shape of the output of two operands."""
        if isinstance(self.where, Convolution):
            return jax.eval_shape(self.where, as_array(lhs), as_array(rhs)).shape
        return self.axes.out_shape(tuple(lhs.shape), tuple(rhs.shape))

    def forward(self, lhs: LabelledTensor, rhs: LabelledTensor, *rest: jax.Array) -> jax.Array:
        """The contraction, in the order of `axes.out`.

        Args:
            lhs, rhs: the operands.
            rest: arguments of the contraction that are no operands.
        """
        where = self.where
        if isinstance(where, Dimensions):
            return product(lhs, rhs, where.out, self.dtype, self.fprop, self.out_sharding)
        y = _convolved(where, lhs.tensor, rhs.tensor) if isinstance(where, Convolution) else None
        if y is not None:
            return y
        left, right = _floats(lhs, self.axes.lhs), _floats(rhs, self.axes.rhs)
        dtype = jnp.promote_types(left.dtype, right.dtype)
        return where(left.astype(dtype), right.astype(dtype), *rest)

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
        where = self.where
        if isinstance(where, Dimensions):
            sums = (self.dgrad, self.wgrad)[number]
            dtype = jnp.float32 if sums.floats == "float32" else dtype
            return product(*operands, like.labels, dtype, sums, like=like.tensor)
        (g, partner), x = operands, like.tensor.astype(dtype)
        step = 1 if number == 0 else -1
        if isinstance(where, Convolution):
            shapes = (x.shape, partner.tensor.shape)[::step]
            conv = where.of_gradient(number, (*shapes, g.tensor.shape), x.dtype)
            pair = (g.tensor, partner.tensor)[::step]
            y = None if conv is None else _convolved(conv, *pair, reverses=number == 0)
            if y is not None:
                return y
        own, theirs = (self.axes.lhs, self.axes.rhs)[::step]
        array = _floats(partner, theirs).astype(x.dtype)

        def contract(x: jax.Array) -> jax.Array:
            x = LabelledTensor(x, like.labels).in_order(own).tensor
            return where(*(x, array)[::step], *rest)

        # It is linear in the operand.
        gradient = _floats(g, self.axes.out).astype(self.dtype)
        return jax.linear_transpose(contract, x)(gradient)[0]


def _convolved(conv: Convolution, lhs: object, rhs: object, reverses: bool = False) -> jax.Array | None:
    """The convolution of integers; None if the table has floats.

    Args:
        conv: the convolution.
        lhs, rhs: the operands.
        reverses: whether the window is reversed.
    """
    integers = choice.choose(lhs, rhs, conv).integers
    if integers is None:
        return None
    left, right = integers
    if reverses:
        right = right._replace(payload=jnp.flip(right.payload, conv.specs[1][2:]))
    return conv.integers(left, right)


def _floats(x: LabelledTensor, labels: Labels) -> jax.Array:
    """The numbers of an operand as floats, its axes in some order."""
    return LabelledTensor(floats_of(x.tensor), x.labels).in_order(labels).tensor


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
    static = _Static(plan, plan.axes.lhs, plan.axes.rhs, (None, None), right is None)
    operands = KeptOperands(lhs, rhs, (None, None), (None, None), (None, None))
    try:
        return _contract(static, left, right, (None, None), operands, rest)
    except TypeError as error:
        ste.explain_forward_mode(error, plan.what)
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
        (an array, its axes in the order of `plan.axes.out`; a token, a float32 0 whose cotangent is the scale of the
        quantized gradient, None without `plan.gradient_format`).
    """
    backward = dgrad, wgrad
    others = tuple(None if by.partner is None else _without_value(by.partner.tensor) for by in backward)
    of_dgrad, of_wgrad = (None if by.partner is None else by.partner.labels for by in backward)
    stored = (on_minifloats(rhs.tensor) or on_integers(rhs.tensor)) and rhs.tensor.is_stored
    values = lhs.tensor, None if stored else rhs.tensor
    left, right = (x.carrier if is_quantized(x) else x for x in values)
    static = _Static(plan, lhs.labels, rhs.labels, (of_dgrad, of_wgrad), stored)
    operands = KeptOperands(
        _without_value(lhs.tensor),
        _without_value(rhs.tensor),
        others,
        (dgrad.quantizer, wgrad.quantizer),
        (dgrad.folded, wgrad.folded),
    )
    with ste.backward_only(plan.what):
        return _contract(static, left, right, (dgrad.slot, wgrad.slot), operands, rest)


def _without_value(x: object) -> object:
    """What a derivative rule takes of an operand: of a tensor that keeps a payload only this."""
    if not is_quantized(x):
        return x
    bare = x.without_value()
    # XLA would round and transpose in one loop, which is several times slower on a CPU.
    just_rounded = processes.is_traced(x.scale) and not x.is_stored
    return jax.tree.map(kernel_table.settled, bare) if just_rounded else bare


def _forward(
    static: _Static, lhs: jax.Array, rhs: jax.Array | None, slots: Slots, operands: KeptOperands, rest: Rest
) -> tuple[jax.Array, jax.Array | None]:
    plan, left, right = static.plan, operands.lhs, operands.rhs
    if isinstance(left, IntegerOperand) and isinstance(right, IntegerOperand):
        assert left.integers is not None and right.integers is not None, "of a forward pass"
        if isinstance(plan.where, Dimensions):
            by = plan.dtype, plan.fprop.accumulator_dtype, plan.out_sharding
            y = affine_dot_general(left.integers, right.integers, plan.where, *by)
        else:
            y = plan.where.integers(left.integers, right.integers, *rest)
    else:
        y = plan.forward(LabelledTensor(left, static.lhs), LabelledTensor(right, static.rhs), *rest)
    if plan.gradient_format is None:
        return y, None
    return y, observe.mapped_with(plan.gradient_format.token(), shaped_like(left), shaped_like(right))


_contract = jax.custom_vjp(_forward, nondiff_argnums=(0,))


def _fwd(
    static: _Static, lhs: jax.Array, rhs: jax.Array | None, slots: Slots, operands: KeptOperands, rest: Rest
) -> tuple[tuple[jax.Array, jax.Array | None], tuple[Slots, Rest, packing.LowBitTree]]:
    # This forward pass is only differentiated by a second derivative.
    *_, operands = ste.first_order((lhs, rhs, operands), static.plan.no_second_derivative)
    gradient = static.plan.gradient_format
    residuals = operands.without_unused().for_backward(gradient is not None and gradient.is_integer)
    return _forward(static, lhs, rhs, slots, operands, rest), (slots, rest, residuals)


def _bwd(static: _Static, residuals: tuple[Slots, Rest, packing.LowBitTree], cotangents: Any) -> Any:
    plan, (slots, rest, bits) = static.plan, residuals
    operands = KeptOperands.from_forward(bits)
    g: Any = ste.first_order(cotangents[0], plan.no_second_derivative)
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
        gradient = LabelledTensor(scaled, plan.axes.out)
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
    return observe.summed_like(product_sum.reshape(array.shape), array).astype(like.tensor.dtype), report


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
    summed, _ = plan.summed("dgrad" if number == 0 else "wgrad")
    g, partner = in_tiles((plan.dgrad, plan.wgrad)[number].tiles, summed, g, partner)
    if quantizer is None:
        return g, partner, None
    labels = g.labels

    def quantize(proxy: object, tensor: jax.Array) -> LabelledTensor:
        return quantized_by(proxy, LabelledTensor(tensor, labels), summed, in_rows=plan.in_rows)

    quantized, report = quantizer(g.tensor, slot, quantize)
    return quantized, partner, report
