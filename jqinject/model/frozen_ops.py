"""Freezes the kernels of Flax layers that contract through a quantized op."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from jqinject.dot import FrozenParam, QConvGeneralDilated, QDotGeneral, QEinsum, QuantMode, kernel_axes_of
from jqinject.nn.base.weight_layer import QuantWeightLayer, promoted, unallocated
from jqinject.program import change_class
from jqinject.program.class_swap import ClassMixin, derived_class

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


def op_of_weight(layer: Any) -> OpOfLayer | None:
    """The quantized op that quantizes a layer's weight; None for other modules, and a layer that does it itself."""
    own = isinstance(layer, QuantWeightLayer) and layer.weight_quant is not None
    return None if own else quantized_op(layer)


class KernelInOp(ClassMixin):
    """What a Flax layer becomes whose kernel is a `FrozenParam`: its op gets the parameter, not the dequantized kernel.

    Attributes:
        master: the kernel before, if it was kept.
    """

    __slots__ = ()
    master: nnx.Variable[Any] | None = None
    weight_name = "kernel"

    @classmethod
    def method(cls, kind: type, name: str) -> Callable[..., Any]:
        """The layer's own method, called on a stand-in whose op contracts the frozen kernel."""
        own = getattr(kind, name)

        @functools.wraps(own)
        def frozen(self: Any, *args: Any, **kwargs: Any) -> Any:
            return own(_stand_in(self, kind), *args, **kwargs)

        return frozen


def is_frozen_op(layer: Any) -> bool:
    """Whether a layer's op contracts a kernel that is a `FrozenParam`."""
    return isinstance(layer, KernelInOp)


def _stand_in(layer: Any, kind: type) -> Any:
    """A layer with the same attributes, but for the kernel and the op."""
    op, kernel = quantized_op(layer), layer.kernel
    found = object.__new__(kind)
    vars(found).update(vars(layer))
    if op is not None and isinstance(kernel, FrozenParam):
        # Flax reads the kernel, casts it and hands it to the op: what comes out of that says the dtype.
        vars(found)["kernel"] = unallocated(kernel.shape, kernel.dtype)
        vars(found)["promote_dtype"] = partial(promoted, layer.promote_dtype)
        vars(found)["mask"] = None  # of a convolution: it is in the numbers
        vars(found)[op.name] = _with_kernel(op.module, kernel, 2 if op.name == "einsum_op" else 1)
    return found


def _with_kernel(op: Any, kernel: FrozenParam, place: int) -> Callable[..., jax.Array]:
    """An op that contracts a frozen kernel in the place of the one that it is given."""

    def contract(*args: Any, **kwargs: Any) -> jax.Array:
        stored = kernel.operand(args[place].dtype)
        return op(*args[:place], stored, *args[place + 1 :], **kwargs)

    return contract


def frozen_kernel(layer: Any) -> FrozenParam | None:
    """Make a layer's op contract a frozen kernel.

    Args:
        layer: any module.

    Returns:
        The low-bit numbers of its kernel; None if no op quantizes it, or it is frozen.
    """
    op = op_of_weight(layer)
    if op is None or is_frozen_op(layer):
        return None
    if op.module.rhs_quant_mode is QuantMode.SERVE or not op.module.quantizes[1]:
        return None
    kernel = layer.kernel
    mask = vars(layer).get("mask")  # of a convolution
    frozen = _frozen(op, kernel, mask, kernel.dtype if layer.dtype is None else layer.dtype)
    change_class(layer, derived_class(type(layer), KernelInOp))
    return frozen


def _frozen(op: OpOfLayer, kernel: nnx.Variable[Any], mask: Any, dtype: Any) -> FrozenParam:
    """The low-bit numbers of a kernel, stacked if the layers are.

    Args:
        op: the layer's.
        kernel: its kernel.
        mask: of the kernel, or None.
        dtype: that the layer casts it to.
    """
    graphdef, state = nnx.split(op.module, graph=True)
    forms: list[Any] = []

    def one(kernel: jax.Array, state: Any) -> dict[str, jax.Array]:
        module = nnx.merge(graphdef, state)
        masked = kernel if mask is None else kernel * mask
        last = op.summed if op.stored_last else ()
        numbers, form = module.frozen_rhs(masked.astype(dtype), op.summed, last)
        forms.append(replace(form, value_dtype=np.dtype(kernel.dtype)))
        return numbers

    mapped: Callable[..., dict[str, jax.Array]] = one
    for size in reversed(kernel.shape[: kernel.ndim - op.kernel_ndim]):
        axes = jax.tree.map(lambda leaf, n=size: 0 if leaf.ndim and leaf.shape[0] == n else None, state)
        mapped = jax.vmap(mapped, in_axes=(0, axes))
    numbers = mapped(kernel[...], state)
    return FrozenParam.holding(numbers, forms[0], kernel.get_metadata())


def unfreeze_op(layer: Any) -> None:
    """Make the op of a Flax layer that served its own numbers quantize the kernel again."""
    op = quantized_op(layer)
    if op is not None and (is_frozen_op(layer) or op.module.rhs_quant_mode is QuantMode.SERVE):
        op.module.rhs_quant_mode = QuantMode.TRAIN
