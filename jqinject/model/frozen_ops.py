"""Freezes the kernels of Flax layers that contract through a quantized op."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.dot import Freezer, QConvGeneralDilated, QDotGeneral, QEinsum, QuantMode, kernel_axes_of

Axes = tuple[int, ...]


@dataclass(frozen=True)
class OpOfLayer:
    """The quantized op of a Flax layer.

    Attributes:
        name: the layer's attribute that holds it.
        module: the op.
        summed: the kernel's contracting axes, which share a scale.
        stored_last: whether those are stored last.
        kernel_ndim: axes of one kernel; a kernel with more belongs to a stack of layers.
    """

    name: str
    module: Any
    summed: Axes
    stored_last: bool
    kernel_ndim: int


def _of_linear(layer: Any) -> Axes:
    return (0,)


def _of_linear_general(layer: Any) -> Axes:
    batch, summed = len(layer.batch_axis), len(layer.axis)
    return tuple(range(batch, batch + summed))


def _of_einsum(layer: Any) -> Axes:
    return kernel_axes_of(layer.einsum_str, layer.kernel_shape)


def _of_conv(layer: Any) -> Axes:
    return tuple(range(len(layer.kernel_shape) - 1))


def _ndim_of_linear_general(layer: Any) -> int:
    return len(layer.batch_axis) + len(layer.axis) + len(layer.out_features)


def _ndim_of_shape(layer: Any) -> int:
    return len(layer.kernel_shape)


# layer: (the attribute that holds its op, the op's class, axes that share a scale, stored last?, axes of one kernel)
OPS: dict[type, tuple[str, type, Callable[[Any], Axes], bool, Callable[[Any], int]]] = {
    nnx.Linear: ("dot_general", QDotGeneral, _of_linear, True, lambda layer: 2),
    nnx.LinearGeneral: ("dot_general", QDotGeneral, _of_linear_general, True, _ndim_of_linear_general),
    nnx.Einsum: ("einsum_op", QEinsum, _of_einsum, True, _ndim_of_shape),
    nnx.Conv: ("conv_general_dilated", QConvGeneralDilated, _of_conv, False, _ndim_of_shape),
}


def op_slot(layer: Any) -> tuple[str, type] | None:
    """The attribute of a Flax layer that can hold a quantized op, and the op's class; None for other modules."""
    found = OPS.get(type(layer))
    return None if found is None else found[:2]


def quantized_op(layer: Any) -> OpOfLayer | None:
    """The quantized op that a Flax layer contracts through; None for other modules."""
    for kind, (name, op, axes, stored_last, ndim) in OPS.items():
        if isinstance(layer, kind) and isinstance(getattr(layer, name), op):
            return OpOfLayer(name, getattr(layer, name), axes(layer), stored_last, ndim(layer))
    return None


def freeze_op(layer: Any, *, shared: bool, keep_master: bool) -> None:
    """Store the kernel of a layer in its op, and serve it from there.

    Args:
        layer: a Flax layer with a quantized op.
        shared: whether another layer has already frozen its kernel in the op; then this one gets an op of its own.
        keep_master: keep the kernel too.
    """
    op = quantized_op(layer)
    assert op is not None, "asked for by freeze, which has looked"
    module = op.module
    if not module.quantizes[1] or (module.rhs_quant_mode is QuantMode.SERVE and not shared):
        return
    if shared:
        module = module.fresh()
        setattr(layer, op.name, module)
    kernel = layer.kernel
    module.rhs_freezer = _stored(op, kernel)
    module.rhs_quant_mode = QuantMode.SERVE
    if not keep_master:
        # The layer still passes a kernel to the op, which ignores it. Stacks keep their axes.
        stack = kernel.shape[: kernel.ndim - op.kernel_ndim]
        layer.kernel = nnx.Param(jnp.zeros((*stack, *(0,) * op.kernel_ndim), kernel.dtype))


def _stored(op: OpOfLayer, kernel: nnx.Variable[Any]) -> Freezer:
    """The kernel in a `Freezer`, whose variables are stacked if the layers are."""
    made: dict[str, Any] = {}

    def one(kernel_of_one: jax.Array) -> Any:
        freezer = Freezer(metadata=kernel.get_metadata())
        freezer.set(op.module.quantized_rhs(kernel_of_one, op.summed), op.summed if op.stored_last else ())
        made["graphdef"], state = nnx.split(freezer, graph=True)
        return state

    mapped: Callable[[jax.Array], Any] = one
    for _ in range(kernel.ndim - op.kernel_ndim):
        mapped = jax.vmap(mapped)
    state = mapped(kernel[...])
    return nnx.merge(made["graphdef"], state)


def unfreeze_op(layer: Any, *, only_check: bool = False) -> None:
    """Make a Flax layer contract its own kernel again.

    Raises:
        ValueError: it was not kept.
    """
    op = quantized_op(layer)
    if op is None or op.module.rhs_quant_mode is not QuantMode.SERVE:
        return
    if layer.kernel.size == 0 and 0 not in op.module.rhs_freezer.form.shape:
        raise ValueError(
            f"{type(layer).__name__}: the float kernel is gone.\n  cure: freeze(model, keep_masters=True), or load a "
            "float checkpoint into a model that was not frozen"
        )
    if not only_check:
        op.module.rhs_quant_mode = QuantMode.TRAIN
