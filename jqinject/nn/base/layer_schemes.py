"""The contraction of a layer by a scheme, with the quantizers of all its operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax.numpy as jnp
from flax import nnx

from jqinject.dot import QConvGeneralDilated, QDotGeneral, QEinsum, Scheme
from jqinject.dot.schemes.product_transforms import transform_of
from jqinject.dot.schemes.quantized_op import QuantizedOp
from jqinject.dot.schemes.scheme import SchemeSpec, checked_scheme
from jqinject.dot.schemes.scheme_fits import check_features
from jqinject.inject import Binding
from jqinject.proxy import build_stacked
from jqinject.quant import Int8WeightPerTensorFloat

SchemeLike: TypeAlias = type[Scheme] | Binding | None

OPS = {"dot_general": QDotGeneral, "einsum_op": QEinsum, "conv_general_dilated": QConvGeneralDilated}
DEFAULT_WEIGHT = Binding(
    Int8WeightPerTensorFloat
)  # an object of its own: the same injector may also be an argument
OPERANDS = ("weight_quant", "input_quant", "act_quant", "grad_quant")


def by_scheme(
    layer: Any, scheme: SchemeLike, arguments: Mapping[str, Any], rngs: nnx.Rngs
) -> Mapping[str, Any]:
    """Let a layer contract by a scheme; nothing without one.

    Args:
        layer: of jqinject, whose Flax part is made.
        scheme: a `jqinject.dot.Scheme`.
        arguments: what was given for each slot.
        rngs: for quantizers that draw random numbers.

    Returns:
        What is left for each slot.

    Raises:
        ValueError: another contraction was given too, or a quantizer of an operand; the scheme does not fit the layer.
        TypeError: it is not a scheme, or one that does not fit the operation.
    """
    if scheme is None:
        return arguments
    left, kind = dict(arguments), type(layer).__name__
    if left["weight_quant"] is DEFAULT_WEIGHT:
        left["weight_quant"] = None
    refused = [name for name in OPERANDS if left[name] is not None]
    refused += [] if layer._contracts_as_flax() else [layer.contraction_name]
    refused += [] if left["contraction"] == "auto" else ["contraction"]
    if refused:
        raise ValueError(
            f"{kind}(scheme=...) quantizes weights, inputs and gradients by itself, got {refused[0]} too.\n"
            f"  cure: leave {refused[0]} out, or declare it in the scheme: scheme.let(fprop_lhs=..., fprop_rhs=...)"
        )
    check_features(SchemeSpec.of(checked_scheme(scheme)), *features_of(layer), kind)
    name = layer.contraction_name
    setattr(layer, name, nnx.data(scheme_op(layer, name, OPS[name], scheme, (), rngs)))
    return left


def features_of(layer: object) -> tuple[int | None, int | None]:
    """How many inputs and outputs a scheme's products sum over along their last axis; None if the layer does not know.

    Args:
        layer: of Flax, or one of ours that derives from it.
    """
    if isinstance(layer, nnx.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, nnx.LinearGeneral):
        return tuple(layer.in_features)[-1], tuple(layer.out_features)[-1]
    if isinstance(layer, nnx.Einsum) and "..." not in layer.einsum_str:
        operands, _, out = layer.einsum_str.replace(" ", "").partition("->")
        of_input, _, of_kernel = operands.partition(",")
        sizes = dict(zip(of_kernel, layer.kernel_shape, strict=False))
        summed = [label for label in of_input if label in of_kernel and label not in out]
        free = [label for label in of_kernel if label in out and label not in of_input]
        return sizes[summed[0]] if len(summed) == 1 else None, sizes[free[-1]] if free else None
    return None, None


def stack_of_layer(layer: Any) -> tuple[int, ...]:
    """The sizes of the leading axes that a Flax layer's kernel has beyond those of one layer.

    Args:
        layer: of Flax, with a contraction that can be replaced.
    """
    if isinstance(layer, nnx.Linear):
        ndim = 2
    elif isinstance(layer, nnx.LinearGeneral):
        ndim = len(layer.batch_axis) + len(layer.in_features) + len(layer.out_features)
    else:
        ndim = len(layer.kernel_shape)
    shape = layer.kernel.get_value().shape
    return tuple(shape[: len(shape) - ndim])


def build_op(
    kind: type[QuantizedOp],
    scheme: Any,
    call: Callable[[Any], object],
    stack: tuple[int, ...],
    rngs: nnx.Rngs | None,
    weight_is_quantized: bool = False,
) -> Any:
    """A contraction by a scheme, or a stack of them, each with a stream of its own.

    Args:
        kind: its class.
        scheme: the scheme.
        call: calls it, with arrays of the shapes in question.
        stack: the lengths of the leading axes of the stack; empty for one contraction.
        rngs: for quantizers that draw random numbers.
        weight_is_quantized: whether `w` comes quantized, so that the scheme leaves it as it is.
    """

    def build(layers: tuple[Any, ...], rngs: nnx.Rngs | None) -> Any:
        op = kind(scheme, rngs=rngs)
        if weight_is_quantized:
            op.scheme = op.scheme.beside_quantized_weight()
        op.complete_by(call)
        return op

    return build_stacked(build, (), stack, rngs) if stack else build((), rngs)


def scheme_op(
    layer: Any, name: str, op: Any, scheme: Any, stack: tuple[int, ...], rngs: nnx.Rngs | None
) -> Any:
    """The contraction of a layer by a scheme.

    Args:
        layer: of Flax, or one of ours that derives from it.
        name: of its attribute for the contraction.
        op: the class of contractions that goes there.
        scheme: the scheme.
        stack: the leading axes that its kernel has beyond those of one layer.
        rngs: for quantizers that draw random numbers.
    """
    spec = SchemeSpec.of(scheme)
    return build_op(op, scheme, _caller(layer, name, spec, stack), stack, rngs)


def _caller(layer: Any, name: str, scheme: SchemeSpec, stack: tuple[int, ...]) -> Callable[[Any], Any]:
    """A function that calls a layer, one of a stack, with a contraction in the place of its own."""
    kind = next(kind for kind in _INPUTS if isinstance(layer, kind))

    def call(op: Any) -> Any:
        one, kernel = object.__new__(kind), layer.kernel.get_value()
        vars(one).update(vars(layer))
        of_one = jnp.zeros(kernel.shape[len(stack) :], kernel.dtype)
        vars(one).update(kernel=nnx.Param(of_one, eager_sharding=False), bias=None, use_bias=False)
        vars(one)[name] = op
        return kind.__call__(one, jnp.zeros(_INPUTS[kind](layer, _rows(scheme)), kernel.dtype))

    return call


def _rows(scheme: SchemeSpec) -> int:
    """A number of rows that the blocks of transforms and the tiles of a scheme fill."""
    sizes = [getattr(transform_of(operand), "block_size", None) for _, operand in scheme.operands]
    for sums in (scheme.dgrad, scheme.wgrad):
        if sums.tiles is not None:
            sizes += [sums.tiles.contraction_axis_shard_count, sums.tiles.contraction_axis_shard_size]
    return math.lcm(*(size for size in sizes if size is not None))


def _of_linear(layer: Any, rows: int) -> tuple[int, ...]:
    return rows, layer.in_features


def _of_linear_general(layer: Any, rows: int) -> tuple[int, ...]:
    sizes = dict(zip(layer.axis, layer.in_features, strict=True)) | dict(layer.batch_axis)
    ndim = max(len(sizes) + 1, *(axis + 1 if axis >= 0 else -axis for axis in sizes))
    placed = {axis % ndim: size for axis, size in sizes.items()}
    return tuple(placed.get(axis, rows) for axis in range(ndim))


def _of_einsum(layer: Any, rows: int) -> tuple[int, ...]:
    of_input, _, of_kernel = layer.einsum_str.replace(" ", "").partition("->")[0].partition(",")
    front, _, behind = of_kernel.partition("...")
    ends = len(layer.kernel_shape) - len(behind)
    sizes = dict(zip(front, layer.kernel_shape, strict=False))
    sizes |= dict(zip(behind, layer.kernel_shape[ends:], strict=True))
    hidden = layer.kernel_shape[len(front) : ends] if "..." in of_kernel else (rows,)
    parts = of_input.split("...")
    shapes = [tuple(sizes.get(label, rows) for label in part) for part in parts]
    return shapes[0] if len(shapes) == 1 else (*shapes[0], *hidden, *shapes[1])


def _of_conv(layer: Any, rows: int) -> tuple[int, ...]:
    dilation = layer.kernel_dilation or 1
    if isinstance(dilation, int):
        dilation = (dilation,) * len(layer.kernel_size)
    windows = ((size - 1) * step + 1 for size, step in zip(layer.kernel_size, dilation, strict=True))
    return rows, *windows, layer.in_features


_INPUTS: dict[Any, Callable[[Any, int], tuple[int, ...]]] = {
    nnx.Linear: _of_linear,
    nnx.LinearGeneral: _of_linear_general,
    nnx.Einsum: _of_einsum,
    nnx.Conv: _of_conv,
}
"""The shape of an input of a layer, with so many rows."""
