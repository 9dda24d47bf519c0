"""The contraction of a layer by a scheme, with the quantizers of all its operands."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax.numpy as jnp
from flax import nnx

from jqinject.dot import QConvGeneralDilated, QDotGeneral, QEinsum, Scheme
from jqinject.dot.schemes import quantized_op, scheme_fits
from jqinject.dot.schemes.product_transforms import transform_of
from jqinject.dot.schemes.scheme import SchemeSpec, checked_scheme
from jqinject.inject import Binding
from jqinject.nn.base.layer_geometry import LayerGeometry
from jqinject.proxy import build_stacked
from jqinject.quant import Int8WeightPerTensorFloat

SchemeLike: TypeAlias = type[Scheme] | Binding | None

OPS = {"dot_general": QDotGeneral, "einsum_op": QEinsum, "conv_general_dilated": QConvGeneralDilated}
DEFAULT_WEIGHT = Binding(
    Int8WeightPerTensorFloat
)  # an object of its own: the same injector may also be an argument
OPERANDS = ("weight_quant", "input_quant", "act_quant", "grad_quant")


def by_scheme(
    layer: Any, scheme: SchemeLike, arguments: Mapping[str, object], rngs: nnx.Rngs | None
) -> Mapping[str, Any]:
    """Let a layer contract by a scheme.

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
    name = layer.contraction_name
    setattr(layer, name, nnx.data(scheme_op(layer, name, layer.geometry, scheme, rngs)))
    return left


def _check_layer(geometry: LayerGeometry, shape: tuple[int, ...], scheme: SchemeSpec, where: str) -> None:
    """Refuse a scheme whose blocks do not fill what its products sum over along their last axis, where that is known.

    Args:
        geometry: of the layer.
        shape: of one kernel.
        scheme: the scheme.
        where: the layer, for errors.
    """
    is_matrix, summed, channels = bool(geometry.features), geometry.summed, geometry.channels
    inputs = shape[summed[-1]] if len(summed) == 1 or (summed and is_matrix) else None
    outputs = shape[channels[-1]] if summed and (len(channels) == 1 or is_matrix) else None
    scheme_fits.check_features(scheme, inputs, outputs, where)


def build_op(
    kind: type[quantized_op.QuantizedOp],
    scheme: object,
    call: Callable[[object], object],
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

    def build(layers: tuple[object, ...], rngs: nnx.Rngs | None) -> Any:
        op = kind(scheme, rngs=rngs)
        if weight_is_quantized:
            op.scheme = op.scheme.replaced(fprop_rhs=None)
        op.complete_by(call)
        return op

    return build_stacked(build, (), stack, rngs) if stack else build((), rngs)


def scheme_op(
    layer: Any, name: str, geometry: LayerGeometry, scheme: SchemeLike, rngs: nnx.Rngs | None
) -> Any:
    """The contraction of a layer, or of a stack of layers, by a scheme.

    Args:
        layer: of Flax, or one of ours that derives from it.
        name: of its attribute for the contraction.
        geometry: of the layer.
        scheme: the scheme.
        rngs: for quantizers that draw random numbers.

    Raises:
        ValueError: blocks of the scheme do not fill the features of the layer.
    """
    spec, kernel = SchemeSpec.of(checked_scheme(scheme)), layer.kernel.get_value()
    depth = kernel.ndim - geometry.ndim
    stack, shape = tuple(kernel.shape[:depth]), tuple(kernel.shape[depth:])
    _check_layer(geometry, shape, spec, type(layer).__name__)
    kind: Any = next(kind for kind in (*_INPUTS, nnx.Linear, nnx.LinearGeneral) if isinstance(layer, kind))
    rows = _rows(spec)
    inputs = _INPUTS[kind](layer, rows) if kind in _INPUTS else _of_matrix(geometry, shape, rows)

    def call(op: object) -> Any:
        one = object.__new__(kind)
        vars(one).update(vars(layer))
        of_one = nnx.Param(jnp.zeros(shape, kernel.dtype), eager_sharding=False)
        vars(one).update({"kernel": of_one, "bias": None, "use_bias": False, name: op})
        return kind.__call__(one, jnp.zeros(inputs, kernel.dtype))

    return build_op(OPS[name], scheme, call, stack, rngs)


def _rows(scheme: SchemeSpec) -> int:
    """A number of rows that the blocks of transforms and the tiles of a scheme fill."""
    sizes = [getattr(transform_of(operand), "block_size", None) for operand in scheme.quantizers.values()]
    for tiles in (scheme["dgrad_tile_size"], scheme["wgrad_tile_size"]):
        if tiles is not None:
            sizes += [tiles.contraction_axis_shard_count, tiles.contraction_axis_shard_size]
    return math.lcm(*(size for size in sizes if size is not None))


def _of_matrix(geometry: LayerGeometry, shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
    axes = *geometry.batch_axes, *geometry.input_axes
    ndim = max(len(axes) + 1, *(axis + 1 if axis >= 0 else -axis for axis in axes))
    sizes = {axis % ndim: size for axis, size in zip(axes, shape, strict=False)}
    return tuple(sizes.get(axis, rows) for axis in range(ndim))


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


#: The shape of an input of a layer, with so many rows, where its geometry does not say it.
_INPUTS: dict[type, Callable[[Any, int], tuple[int, ...]]] = {nnx.Einsum: _of_einsum, nnx.Conv: _of_conv}
