"""Contractions by a scheme: `dot_general` and `conv_general_dilated` of six operands."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.geometry.labels import Labelling, Labels, summed_labels
from jqinject.dot.schemes.scheme import Kept
from jqinject.dot.schemes.scheme_quantizers import SchemeQuantizers
from jqinject.dot.tensors.labelled_tensor import LabelledTensor, cut, in_large_groups, joined
from jqinject.dot.tensors.product import Sums, decide, described
from jqinject.dot.tensors.six_operands import Backward, Plan, contract_operands, in_tiles, quantized_gradient
from jqinject.quant_tensor import QuantTensor


def scheme_dot_general(
    quantizers: SchemeQuantizers,
    lhs: jax.Array,
    rhs: jax.Array | QuantTensor,
    dims: Dimensions,
    dtype: Any,
    out_sharding: Any = None,
) -> jax.Array:
    """The contraction of two float arrays, forward and backward as a scheme says.

    Args:
        quantizers: of the scheme.
        lhs: float array.
        rhs: float array, or a tensor that is quantized already.
        dims, dtype, out_sharding: as for `lax.dot_general`.
    """
    operands = _Operands.of(quantizers, lhs, rhs, dims, np.dtype(dtype), out_sharding)
    return contract_operands(operands.plan, operands.lhs, operands.rhs, operands.backward)


@dataclass(frozen=True)
class _Operands:
    """The operands of the three products."""

    plan: Plan
    lhs: LabelledTensor
    rhs: LabelledTensor
    backward: Backward

    @classmethod
    def of(
        cls,
        quantizers: SchemeQuantizers,
        lhs: jax.Array,
        rhs: Any,
        dims: Dimensions,
        dtype: np.dtype,
        out_sharding: Any,
    ) -> _Operands:
        """Quantized as far as the forward pass does it."""
        scheme, labels = quantizers.scheme, Labelling.of(dims)
        plan = Plan(labels, dtype, scheme.fprop, scheme.dgrad, scheme.wgrad, out_sharding)
        x, w = LabelledTensor(lhs, labels.lhs), LabelledTensor(rhs, labels.rhs)
        tiled_x, tiled_w, summed = in_tiles(scheme.fprop, x, w, labels.out)
        left = quantizers.operand("fprop_lhs", tiled_x, summed)
        right = tiled_w  # what is stored is quantized already
        if not isinstance(rhs, QuantTensor):
            right = quantizers.operand("fprop_rhs", tiled_w, summed, beside=left.tensor)
        g = LabelledTensor(jax.ShapeDtypeStruct(_out_shape(lhs, rhs, labels), dtype), labels.out)
        again = {
            "dgrad_rhs": _again(quantizers, "dgrad_rhs", w, g, labels.lhs, scheme.dgrad),
            "wgrad_lhs": _again(quantizers, "wgrad_lhs", x, g, labels.rhs, scheme.wgrad),
        }
        backward = Backward(
            quantizers.gradient("dgrad_grad", g, summed_labels(g.labels, w.labels, labels.lhs)),
            again["dgrad_rhs"],
            again["wgrad_lhs"],
            quantizers.gradient("wgrad_grad", g, summed_labels(g.labels, x.labels, labels.rhs)),
        )
        return cls(plan, left, right, backward)


def _again(
    quantizers: SchemeQuantizers, name: str, x: LabelledTensor, g: LabelledTensor, out: Labels, sums: Sums
) -> LabelledTensor | None:
    """`w` or `x` as a backward product takes it; None for what the forward product took. No gradient."""
    if quantizers.scheme[name] is Kept.FPROP or isinstance(x.tensor, QuantTensor):
        return None
    summed = summed_labels(g.labels, x.labels, out)
    fixed = LabelledTensor(jax.lax.stop_gradient(x.tensor), x.labels)
    if sums.tile_size is not None and summed:
        fixed = cut(fixed, summed[0], sums.tile_size)
    return quantizers.operand(name, fixed, summed)


def _out_shape(lhs: Any, rhs: Any, labels: Labelling) -> tuple[int, ...]:
    sizes = dict(zip(labels.lhs, lhs.shape, strict=True)) | dict(zip(labels.rhs, rhs.shape, strict=True))
    return tuple(sizes[label] for label in labels.out)


@dataclass(frozen=True)
class ExplainedProduct:
    """One of the three products of a scheme.

    Attributes:
        name: "fprop", "dgrad" or "wgrad".
        operands: what is contracted, in words.
        kind: in which numbers: "int", "fp8" or "float".
        why: why payloads are not contracted though there are some; else empty.
    """

    name: str
    operands: tuple[str, str]
    kind: str
    why: str

    def __str__(self) -> str:
        because = f"  ({self.why})" if self.why else ""
        return f"{self.name}: {' x '.join(self.operands)} -> {self.kind}{because}"


class ExplainedScheme(tuple[ExplainedProduct, ...]):
    """The three products; printed a line each."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def explain_scheme(
    quantizers: SchemeQuantizers, lhs: Any, rhs: Any, dims: Dimensions, dtype: Any
) -> ExplainedScheme:
    """What the three products of a scheme contract, for operands of these shapes; nothing is computed.

    Args:
        quantizers: of the scheme; they stay as they are.
        lhs, rhs: what has a shape and a dtype.
        dims, dtype: as for `scheme_dot_general`.
    """
    found: list[ExplainedProduct] = []

    def look(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        twin = nnx.clone(quantizers, graph=True)
        operands = _Operands.of(twin, lhs, rhs, dims, np.dtype(dtype), None)
        labels, backward = operands.plan.labels, operands.backward
        found.append(_explained("fprop", operands.lhs, operands.rhs, labels.out))
        g = LabelledTensor(jnp.zeros(_out_shape(lhs, rhs, labels), dtype), labels.out)
        for name, taken, other, kept, out, sums in (
            ("dgrad", backward.dgrad_grad, backward.dgrad_rhs, operands.rhs, labels.lhs, operands.plan.dgrad),
            ("wgrad", backward.wgrad_grad, backward.wgrad_lhs, operands.lhs, labels.rhs, operands.plan.wgrad),
        ):
            gradient, beside, summed = in_tiles(sums, g, joined(kept) if other is None else other, out)
            if taken[0] is not None:
                quantize = partial(quantized_gradient, gradient.labels, summed)
                gradient = taken[0](gradient.tensor, taken[1], quantize)[0]
            found.append(_explained(name, gradient, beside, out))
        return jnp.zeros(())

    jax.eval_shape(look, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (lhs, rhs)))
    return ExplainedScheme(found)


def _explained(name: str, a: LabelledTensor, b: LabelledTensor, out: Labels) -> ExplainedProduct:
    a, b = in_large_groups(a, b, summed_labels(a.labels, b.labels, out))
    decision = decide(a, b, out)
    return ExplainedProduct(name, (described(a.tensor), described(b.tensor)), decision.kind, decision.why)
