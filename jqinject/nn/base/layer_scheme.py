"""A layer whose contraction follows a scheme: `QuantLinear(..., scheme=...)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from flax import nnx

from jqinject.dot import QConvGeneralDilated, QDotGeneral, QEinsum, Scheme
from jqinject.dot.schemes.scheme import SchemeSpec, checked_scheme
from jqinject.dot.schemes.scheme_fits import check_features
from jqinject.inject import Binding
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.quant import Int8WeightPerTensorFloat

SchemeLike: TypeAlias = type[Scheme] | Binding | None

OPS = {"dot_general": QDotGeneral, "einsum_op": QEinsum, "conv_general_dilated": QConvGeneralDilated}
DEFAULT_WEIGHT = Binding(
    Int8WeightPerTensorFloat
)  # an object of its own: the same injector may also be an argument
OPERANDS = ("weight_quant", "input_quant", "act_quant", "grad_quant")


def by_scheme(
    layer: QuantWeightLayer[Any], scheme: SchemeLike, arguments: Mapping[str, Any], rngs: nnx.Rngs
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
    given = [name for name in OPERANDS if left[name] is not None]
    given += [] if layer._contracts_as_flax() else [layer.contraction_name]
    given += [] if left["contraction"] == "auto" else ["contraction"]
    if given:
        raise ValueError(
            f"{kind}(scheme=...) quantizes weights, inputs and gradients by itself, got {given[0]} too.\n"
            f"  cure: leave {given[0]} out, or declare it in the scheme: scheme.let(fprop_lhs=..., fprop_rhs=...)"
        )
    check_features(SchemeSpec.of(checked_scheme(scheme)), *features_of(layer), kind)
    setattr(layer, layer.contraction_name, nnx.data(OPS[layer.contraction_name](scheme, rngs=rngs)))
    return left


def features_of(layer: Any) -> tuple[int | None, int | None]:
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
