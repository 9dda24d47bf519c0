"""How each kind of contraction computes its three products: `dot_general`, convolution, ragged contraction.

A plan is static. `six_operands` differentiates by it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.geometry.labels import Labelling, Labels, dimensions_of, summed_labels
from jqinject.dot.kernels.convolution import Convolution
from jqinject.dot.kernels.integer import IntegerOperand, affine_dot_general
from jqinject.dot.kernels.ragged import Ragged
from jqinject.dot.tensors.choice import choose
from jqinject.dot.tensors.labelled_tensor import LabelledTensor
from jqinject.dot.tensors.packed_tensor import floats_of
from jqinject.dot.tensors.product import PLAIN, Sums, product
from jqinject.quant_tensor import as_array

ProductName = Literal["fprop", "dgrad", "wgrad"]


@dataclass(frozen=True)
class Plan(ABC):
    """The static part of a contraction and its gradients.

    Attributes:
        labels: of the axes of both operands and the output.
        dtype: of the output.
        fprop, dgrad, wgrad: how the products sum.
        out_sharding: of the output, as for `lax.dot_general`.
        grad_dtype: the 8-bit float dtype of an output cotangent that is already quantized, whose scale is the cotangent
            of the token; else None.
        what: the contraction, in words.
        twice: what may be differentiated twice.
        in_rows: whether quantizers of activations and gradients see summed axes as rows.
        takes_payloads: whether backward products contract the forward product's payloads with their scale folded into
            the gradient.
    """

    labels: Labelling
    dtype: np.dtype
    fprop: Sums = PLAIN
    dgrad: Sums = PLAIN
    wgrad: Sums = PLAIN
    out_sharding: Any = None
    grad_dtype: np.dtype | None = None
    what: str = "a quantized contraction"
    twice: ClassVar[str]
    in_rows: ClassVar[bool] = True
    takes_payloads: ClassVar[bool] = False

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
        found = summed_labels(first, second, result)
        return found, found

    def out_shape(self, lhs: Any, rhs: Any) -> tuple[int, ...]:
        """The shape of the output of two operands."""
        sizes = dict(zip(self.labels.lhs, lhs.shape, strict=True)) | dict(
            zip(self.labels.rhs, rhs.shape, strict=True)
        )
        return tuple(sizes[label] for label in self.labels.out)

    @abstractmethod
    def forward(self, lhs: LabelledTensor, rhs: LabelledTensor, *rest: jax.Array) -> jax.Array:
        """The contraction, in the order of `labels.out`.

        Args:
            lhs, rhs: two tensors, or two `IntegerOperand`s.
            rest: arguments of the contraction that are no operands.
        """

    @abstractmethod
    def gradient(
        self, number: int, g: LabelledTensor, other: LabelledTensor, like: LabelledTensor, *rest: jax.Array
    ) -> jax.Array:
        """The gradient of an operand, in the order of its labels without tiles.

        Args:
            number: 0 for the left operand, 1 for the right one.
            g: the gradient of the output, quantized for this product.
            other: the other operand of this product.
            like: an array of the shape, the dtype and the sharding of the operand, without tiles.
            rest: see `forward`.
        """


@dataclass(frozen=True)
class DotPlan(Plan):
    """Of a `dot_general`."""

    twice = (
        "contraction='float' on the layers that are differentiated twice, jax.lax.dot_general for operations"
    )
    takes_payloads = True

    def forward(self, lhs: LabelledTensor, rhs: LabelledTensor, *rest: jax.Array) -> jax.Array:
        if isinstance(rhs.tensor, IntegerOperand):
            dims, _ = dimensions_of(lhs.labels, rhs.labels, self.labels.out)
            by = self.dtype, self.fprop.accumulator_dtype, self.out_sharding
            return affine_dot_general(lhs.tensor.known, rhs.tensor.known, dims, *by)
        return product(lhs, rhs, self.labels.out, self.dtype, self.fprop, self.out_sharding)

    def gradient(
        self, number: int, g: LabelledTensor, other: LabelledTensor, like: LabelledTensor, *rest: jax.Array
    ) -> jax.Array:
        sums = (self.dgrad, self.wgrad)[number]
        dtype = jnp.float32 if sums.floats == "float32" else like.tensor.dtype
        sharding_of = partial(_sharding_before, like=like.tensor)
        return product(g, other, like.labels, dtype, sums, sharding_of=sharding_of)


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

    def out_shape(self, lhs: Any, rhs: Any) -> tuple[int, ...]:
        conv = self.conv
        found = jax.eval_shape(lambda a, b: conv.numbers(a, b, conv.dtype), as_array(lhs), as_array(rhs))
        return found.shape

    def forward(self, lhs: LabelledTensor, rhs: LabelledTensor, *rest: jax.Array) -> jax.Array:
        left, right, conv = lhs.tensor, rhs.tensor, self.conv
        if isinstance(right, IntegerOperand):
            return conv.of_integers(left.known, right.known)
        integers = choose(left, right, conv).integers
        if integers is not None:
            return conv.of_integers(*integers)
        left, right = as_array(left), as_array(right)
        dtype = jnp.promote_types(left.dtype, right.dtype)
        return conv.numbers(left.astype(dtype), right.astype(dtype), conv.dtype)

    def gradient(
        self, number: int, g: LabelledTensor, other: LabelledTensor, like: LabelledTensor, *rest: jax.Array
    ) -> jax.Array:
        x = like.tensor
        pair = (g.tensor, other.tensor) if number == 0 else (other.tensor, g.tensor)
        shapes = (x.shape, other.tensor.shape) if number == 0 else (other.tensor.shape, x.shape)
        conv = self.conv.of_gradient(number, (*shapes, g.tensor.shape), x.dtype)
        integers = None if conv is None else choose(*pair, conv).integers
        if conv is not None and integers is not None:
            left, right = integers
            if number == 0:
                right = right._replace(payload=jnp.flip(right.payload, conv.specs[1][2:]))
            return conv.of_integers(left, right)

        def contract(x: jax.Array, other: jax.Array) -> jax.Array:
            pair = (x, other) if number == 0 else (other, x)
            return self.conv.numbers(*pair, self.dtype)

        return _of_floats(contract, x, floats_of(other.tensor), as_array(g.tensor).astype(self.dtype))


@dataclass(frozen=True, kw_only=True)
class RaggedPlan(Plan):
    """Of a ragged contraction: of integers, or of values; backward of values."""

    ragged: Ragged
    twice = "differentiate it once, or use jax.lax.ragged_dot where it is differentiated twice"

    @classmethod
    def of(cls, ragged: Ragged, what: str = "a ragged contraction by a scheme") -> RaggedPlan:
        return cls(labels=Labelling(*ragged.labels), dtype=ragged.dtype, what=what, ragged=ragged)

    def forward(self, lhs: LabelledTensor, rhs: LabelledTensor, *rest: jax.Array) -> jax.Array:
        if isinstance(rhs.tensor, IntegerOperand):
            return self.ragged.integers(lhs.tensor.known, rhs.tensor.known, *rest)
        left, right = _value(lhs, self.labels.lhs), _value(rhs, self.labels.rhs)
        dtype = jnp.promote_types(left.dtype, right.dtype)
        return self.ragged.floats(left.astype(dtype), right.astype(dtype), *rest)

    def gradient(
        self, number: int, g: LabelledTensor, other: LabelledTensor, like: LabelledTensor, *rest: jax.Array
    ) -> jax.Array:
        own, theirs = (self.labels.lhs, self.labels.rhs)[:: 1 if number == 0 else -1]

        def contract(x: jax.Array, other: jax.Array) -> jax.Array:
            x = _transposed(x, like.labels, own)
            pair = (x, other) if number == 0 else (other, x)
            return self.ragged.floats(*pair, *rest)

        gradient = _value(g, self.labels.out).astype(self.dtype)
        return _of_floats(contract, like.tensor, _value(other, theirs), gradient)


def _of_floats(
    contract: Callable[[jax.Array, jax.Array], jax.Array], like: jax.Array, other: jax.Array, g: jax.Array
) -> jax.Array:
    """The gradient of an operand in which a contraction of floats is linear.

    Args:
        contract: of the operand, and of the other one.
        like: has the shape of the operand.
        other: the other one.
        g: the gradient of the output.
    """
    other = other.astype(like.dtype)
    (found,) = jax.linear_transpose(lambda x: contract(x, other), like)(g)
    return found


def _value(x: LabelledTensor, labels: Labels) -> jax.Array:
    """The numbers of an operand as floats, its axes in some order."""
    return _transposed(floats_of(x.tensor), x.labels, labels)


def _transposed(x: jax.Array, labels: Labels, wanted: Labels) -> jax.Array:
    return x if labels == wanted else x.transpose([labels.index(label) for label in wanted])


def _without(labels: Labels, axis: int) -> Labels:
    return labels[:axis] + labels[axis + 1 :]


def _sharding_before(permutation: tuple[int, ...], like: jax.Array) -> Any:
    """The sharding of an array whose transposition is like `like`; None on meshes that leave it to XLA."""
    sharding = jax.typeof(like).sharding
    if sharding.mesh.empty or not sharding.mesh.explicit_axes:
        return None
    axes: list[Any] = [None] * like.ndim
    for axis, place in enumerate(permutation):
        axes[place] = sharding.spec[axis]
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*axes))


@lru_cache(maxsize=1024)
def plan_of_integers(
    dims: Dimensions, dtype: np.dtype, accumulator_dtype: Any = None, out_sharding: Any = None
) -> DotPlan:
    """The plan of a contraction of integers; backward, the gradient is contracted with floats in its own dtype.

    Args:
        dims, out_sharding: as for `lax.dot_general`.
        dtype: of the output.
        accumulator_dtype: of integers; None means int32.
    """
    backward, forward = Sums(floats="first"), Sums(accumulator_dtype)
    labels, what = Labelling.of(dims), "a contraction of integers"
    return DotPlan(labels, dtype, forward, backward, backward, out_sharding, what=what)
