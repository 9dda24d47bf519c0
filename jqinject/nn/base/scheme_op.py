"""The contraction of a Flax layer by a scheme, with the quantizers of all its operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jqinject.dot.schemes.product_transforms import transform_of
from jqinject.dot.schemes.quant_operand import OperandAxes
from jqinject.dot.schemes.scheme import SchemeSpec
from jqinject.proxy import build_stacked


def build_op(
    op: Any, scheme: Any, operands: Mapping[str, OperandAxes], stack: tuple[int, ...], rngs: nnx.Rngs | None
) -> Any:
    """A contraction by a scheme, or a stack of them, each with a stream of its own.

    Args:
        op: its class.
        scheme: the scheme.
        operands: the axes of the operands whose quantizers keep state.
        stack: the lengths of the leading axes of the stack; empty for one contraction.
        rngs: for quantizers that draw random numbers.
    """

    def build(layers: tuple[Any, ...], rngs: nnx.Rngs | None) -> Any:
        return op(scheme, rngs=rngs, operands=operands)

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
    return build_op(op, scheme, op.operands_of(scheme, _caller(layer, name, spec, stack)), stack, rngs)


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
