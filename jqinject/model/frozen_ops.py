"""Freezing the kernels of Flax's own layers that contract through a quantized op."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jqinject.dot import QConvGeneralDilated, QDotGeneral, QEinsum, QuantMode, kernel_axes_of

Axes = tuple[int, ...]


@dataclass(frozen=True)
class OpOfLayer:
    """The quantized op of a Flax layer.

    Attributes:
        name: the layer's attribute that holds it.
        module: the op.
        summed: the kernel's axes that share a scale, as they are summed over.
        stored_last: whether those are stored last.
    """

    name: str
    module: Any
    summed: Axes
    stored_last: bool


def _of_linear(layer: Any) -> Axes:
    return (0,)


def _of_linear_general(layer: Any) -> Axes:
    batch, summed = len(layer.batch_axis), len(layer.axis)
    return tuple(range(batch, batch + summed))


def _of_einsum(layer: Any) -> Axes:
    return kernel_axes_of(layer.einsum_str, layer.kernel_shape)


def _of_conv(layer: Any) -> Axes:
    return tuple(range(len(layer.kernel_shape) - 1))


OPS: dict[type, tuple[str, type, Callable[[Any], Axes], bool]] = {
    nnx.Linear: ("dot_general", QDotGeneral, _of_linear, True),
    nnx.LinearGeneral: ("dot_general", QDotGeneral, _of_linear_general, True),
    nnx.Einsum: ("einsum_op", QEinsum, _of_einsum, True),
    nnx.Conv: ("conv_general_dilated", QConvGeneralDilated, _of_conv, False),
}


def quantized_op(layer: Any) -> OpOfLayer | None:
    """The quantized op that a Flax layer contracts through; None of other modules."""
    for kind, (name, op, axes, stored_last) in OPS.items():
        if isinstance(layer, kind) and isinstance(getattr(layer, name), op):
            return OpOfLayer(name, getattr(layer, name), axes(layer), stored_last)
    return None


def freeze_op(layer: Any, *, shared: bool, keep_master: bool) -> None:
    """Store the kernel of a layer in its op, and serve it from there.

    Args:
        layer: a Flax layer with a quantized op.
        shared: whether another layer has frozen its kernel in the op before: this one gets an op of its own.
        keep_master: keep the kernel too.
    """
    op = quantized_op(layer)
    assert op is not None, "asked for by freeze, which has looked"
    module = op.module
    quantizer = module.general.fwd.rhs_quantizer
    if quantizer.numerics is None or (module.rhs_quant_mode is QuantMode.SERVE and not shared):
        return
    if shared:
        module = module.fresh()
        setattr(layer, op.name, module)
    kernel = layer.kernel
    stored = op.summed if op.stored_last else ()
    axes = _shared_axes(quantizer.calibration_axes, op.summed, kernel.ndim)
    module.rhs_freezer.metadata = dict(kernel.get_metadata())
    module.rhs_freezer.set(quantizer.quantize(kernel[...], axes), stored)
    module.rhs_quant_mode = QuantMode.SERVE
    if not keep_master:
        # The layer still reads a kernel and hands it on, to an op that ignores it.
        layer.kernel = nnx.Param(jnp.zeros((0,) * kernel.ndim, kernel.dtype))


def _shared_axes(calibration_axes: Any, summed: Axes, ndim: int) -> Axes:
    if not isinstance(calibration_axes, str):
        return calibration_axes
    every = tuple(range(ndim))
    others = tuple(axis for axis in every if axis not in summed)
    return {"contracting": summed, "remaining": others, "tensor": every}[calibration_axes]


def unfreeze_op(layer: Any, *, only_check: bool = False) -> None:
    """Contract the kernel of a Flax layer itself again.

    Raises:
        ValueError: it was not kept.
    """
    op = quantized_op(layer)
    if op is None or op.module.rhs_quant_mode is not QuantMode.SERVE:
        return
    if layer.kernel.size == 0 and 0 not in op.module.rhs_freezer.shape:
        raise ValueError(
            f"{type(layer).__name__}: the float kernel is gone.\n  cure: freeze(model, keep_masters=True), or load a "
            "float checkpoint into a model that was not frozen"
        )
    if not only_check:
        op.module.rhs_quant_mode = QuantMode.TRAIN
