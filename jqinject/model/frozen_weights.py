"""The frozen weights of a model: low-bit payloads in the places of weights, also of layers whose op contracts them."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jqinject.core.flax_internals import metadata_of
from jqinject.dot import READS_WHOLE, FrozenParam, QuantMode
from jqinject.dot.schemes.quantized_op import QuantizedOp
from jqinject.model.walk import M, ModelIndex, Path
from jqinject.nn import QuantConv, QuantEinsum, QuantLinear, QuantLinearGeneral
from jqinject.nn.base import layer_geometry, placed_contraction, slots
from jqinject.nn.base.parameter_site import ParameterSite
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.nn.requantizer import REQUANTIZER
from jqinject.program import HELD, OpQuantizers, change_class, class_swap, dotted, quantized_stack
from jqinject.proxy import map_stack, stack_of

WeightHolder = QuantWeightLayer | ParameterSite
Geometry = layer_geometry.LayerGeometry


# Flax's layers whose contraction may be a quantized op: ours declare the attribute that holds it, and the axes.
DECLARED: dict[type[nnx.Module], type[QuantWeightLayer[Any]]] = {
    nnx.Linear: QuantLinear,
    nnx.LinearGeneral: QuantLinearGeneral,
    nnx.Einsum: QuantEinsum,
    nnx.Conv: QuantConv,
}


def op_slot(layer: object) -> str | None:
    """The attribute of a Flax layer that can hold a quantized op; None for other modules."""
    names = (declared.contraction_name for kind, declared in DECLARED.items() if isinstance(layer, kind))
    return next(names, None)


def geometry_of(layer: object) -> Geometry:
    """Where a Flax layer whose contraction may be a quantized op has which axes."""
    declared = next(declared for kind, declared in DECLARED.items() if isinstance(layer, kind))
    return vars(declared)["geometry"].fget(layer)


def quantized_op(layer: object) -> QuantizedOp | None:
    """The quantized op that a Flax layer contracts through; None for other modules."""
    name = op_slot(layer)
    op = None if name is None else vars(layer).get(name)
    return op if isinstance(op, QuantizedOp) else None


def op_of_weight(layer: object) -> QuantizedOp | None:
    """The quantized op that quantizes a layer's weight; None for other modules, and a layer that does it itself."""
    own = isinstance(layer, QuantWeightLayer) and layer.weight_quant is not None
    return None if own else quantized_op(layer)


class KernelInOp(class_swap.ClassMixin):
    """What a Flax layer becomes whose kernel is a `FrozenParam`: its op gets the parameter, not the dequantized kernel.

    Attributes:
        master: the kernel before, if it was kept.
    """

    __slots__ = ()
    master: nnx.Variable[Any] | None = None
    weight_name = "kernel"

    @classmethod
    def method(cls, kind: type, name: str) -> Callable[..., object]:
        """The layer's own method, called on a stand-in whose op contracts the frozen kernel."""
        own = getattr(kind, name)

        @functools.wraps(own)
        def frozen(self: object, *args: object, **kwargs: object) -> object:
            return own(_stand_in(self, kind), *args, **kwargs)

        return frozen


def _stand_in(layer: Any, kind: type) -> Any:
    """A layer with the same attributes, but for the kernel and the op."""
    op, kernel, name = quantized_op(layer), layer.kernel, op_slot(layer)
    stand_in = object.__new__(kind)
    vars(stand_in).update(vars(layer))
    if op is not None and isinstance(kernel, FrozenParam):
        # Flax reads the kernel, casts it and hands it to the op: what comes out of that says the dtype.
        vars(stand_in)["kernel"] = placed_contraction.unallocated(kernel.shape, kernel.dtype)
        vars(stand_in)["promote_dtype"] = partial(placed_contraction.promoted, layer.promote_dtype)
        vars(stand_in)["mask"] = None  # of a convolution: it is in the numbers
        place = 2 if name == "einsum_op" else 1

        def contract(*args: Any, **kwargs: Any) -> jax.Array:
            """Contract the frozen kernel in the place of the one that Flax gives."""
            return op(*args[:place], kernel.operand(args[place].dtype), *args[place + 1 :], **kwargs)

        vars(stand_in)[name] = contract
    return stand_in


def frozen_kernel(layer: Any) -> FrozenParam | None:
    """Make a layer's op contract a frozen kernel.

    Args:
        layer: any module.

    Returns:
        The low-bit numbers of its kernel; None if no op quantizes it, or it is frozen.
    """
    op = op_of_weight(layer)
    if op is None or isinstance(layer, KernelInOp):
        return None
    if op.rhs_quant_mode is QuantMode.SERVE or not op.quantizes[1]:
        return None
    kernel, geometry = layer.kernel, geometry_of(layer)

    def frozen(layers: tuple[Any, ...], _: object) -> FrozenParam:
        (layer,) = layers
        mask = vars(layer).get("mask")  # of a convolution
        return numbers_by_op(vars(layer)[op_slot(layer)], geometry, layer.dtype, layer.kernel[...], mask)

    stored = map_stack(frozen, (layer,), kernel.shape[: kernel.ndim - geometry.ndim])
    change_class(layer, class_swap.derived_class(type(layer), KernelInOp))
    return FrozenParam.holding(stored.numbers, stored.form, kernel.get_metadata())


def numbers_by_op(
    op: QuantizedOp, geometry: Geometry, dtype: DTypeLike | None, kernel: jax.Array, mask: jax.Array | None
) -> FrozenParam:
    """The low-bit numbers of a Flax layer's kernel by its op.

    Args:
        op: the op.
        geometry: of the layer.
        dtype: in which the layer contracts; None for that of the kernel.
        kernel: float.
        mask: multiplies the kernel of a convolution; None without one.
    """
    masked = kernel if mask is None else kernel * mask
    last = geometry.sums if geometry.summed else ()
    numbers, form = op.frozen_rhs(masked.astype(dtype or kernel.dtype), geometry.sums, last)
    return FrozenParam.holding(numbers, replace(form, value_dtype=np.dtype(kernel.dtype)))


def unfreeze_op(layer: object) -> None:
    """Make the op of a Flax layer that served its own numbers quantize the kernel again."""
    op = quantized_op(layer)
    if op is not None and (isinstance(layer, KernelInOp) or op.rhs_quant_mode is QuantMode.SERVE):
        op.rhs_quant_mode = QuantMode.TRAIN


def check_parameters_freeze(index: ModelIndex) -> None:
    """Raise if a parameter is quantized within a contraction, in a form that cannot be stored.

    Raises:
        ValueError: names the parameters.
    """
    for node in index.modules:
        if isinstance(node, OpQuantizers) and node.unstored:
            shown = "\n".join(f"    {name}: {why}" for name, why in node.unstored)
            raise ValueError(
                f"freeze: weights that schemes quantize cannot be stored for serving:\n{shown}\n"
                "  cure: a scheme without tile_size, whose fprop_rhs is a quantizer of weights; or a rule before it "
                "that keeps them float"
            )


def quantized_weights(index: ModelIndex) -> list[WeightHolder]:
    """The layers and the sites whose quantized weight is not frozen."""
    layers = (node for node in index.modules if isinstance(node, QuantWeightLayer) and node.frozen is None)
    sites = (node for node in index.modules if isinstance(node, ParameterSite) and node.master is None)
    return [holder for holder in (*layers, *sites) if slots.is_on(holder.weight_quant)]


def through_quantizer(holder: WeightHolder) -> Any:
    """A weight through a copy of its quantizer, or each weight of a stack through its own."""
    quantizer = nnx.clone(holder.weight_quant, graph=True)
    return quantized_stack(quantizer, holder.weight[...], len(stack_of((holder,))))


def freeze_weight(
    index: ModelIndex, holder: WeightHolder | KernelInOp, frozen: FrozenParam, *, keep_master: bool = False
) -> None:
    """Put low-bit numbers in the place of a weight, and take away its quantizer.

    Args:
        index: of the model.
        holder: the layer, of Flax if its op contracts the numbers (`frozen_kernel`); or the site of a parameter that
            the model contracts by itself.
        frozen: the numbers.
        keep_master: keep weight and quantizers, so that `jqinject.unfreeze` can bring them back.
    """
    if isinstance(holder, ParameterSite):
        variable = holder.weight
        put_in_place(index, variable, frozen)
    else:
        variable = vars(holder)[holder.weight_name]
        setattr(holder, holder.weight_name, frozen)
    if keep_master:
        holder.master = variable
    elif isinstance(holder, ParameterSite):
        name = dotted(holder.weight_path)
        for node in index.modules:
            if isinstance(node, OpQuantizers) and node.weight_sites().get(name) is holder:
                del vars(node)["weights"][name]
    else:
        for name in ("weight_quant", "grad_quant"):
            if vars(holder).get(name) is not None:
                delattr(holder, name)


def without_masters(index: ModelIndex) -> dict[Path, FrozenParam]:
    """The frozen weights whose float numbers were not kept, each under its first path."""
    restorable = {id(frozen) for _, frozen in frozen_with_masters(index)}
    return {path: node for path, node in index.frozen_parameters.items() if id(node) not in restorable}


def restore_masters(index: ModelIndex) -> None:
    """Put the float weights that were kept back in their places."""
    for holder, frozen in frozen_with_masters(index):
        master = holder.master
        del holder.master
        if isinstance(holder, ParameterSite):
            put_in_place(index, frozen, master)
            holder.bind(master)
        else:
            setattr(holder, holder.weight_name, master)
            if isinstance(holder, KernelInOp):
                change_class(holder, type(holder)._made_from[0])


def frozen_with_masters(index: ModelIndex) -> Iterator[tuple[Any, FrozenParam]]:
    """The layers and sites that keep the float weight of a frozen one, with this."""
    for path, site in index.sites:
        if site.master is not None:
            yield site, index.nodes[path]
    for layer in index.modules:
        if isinstance(layer, QuantWeightLayer | KernelInOp) and layer.master is not None:
            yield layer, vars(layer)[layer.weight_name]


def without_requantizers(model: M) -> M:
    """A copy of a model whose frozen parameters do not know how they were quantized; arrays are shared."""
    copy = nnx.clone(model, graph=True)
    for param in ModelIndex(copy).frozen_parameters.values():
        metadata_of(param).pop(REQUANTIZER, None)
    return copy


def float_param(frozen: FrozenParam, value: jax.Array) -> nnx.Variable[Any]:
    """A float parameter for the place of a frozen one, with its metadata."""
    own = ("form", READS_WHOLE, REQUANTIZER)
    metadata = {name: fact for name, fact in frozen.get_metadata().items() if name not in own}
    return nnx.Param.from_metadata(value, metadata)


def put_in_place(index: ModelIndex, old: object, new: nnx.Variable[Any]) -> None:
    """Put a Variable in every place of another one."""
    for path, node in index.places:
        if isinstance(node, nnx.Pytree) and HELD not in path:
            _replace(node, old, new)


def _replace(holder: object, old: object, new: nnx.Variable[Any]) -> None:
    """Put a Variable in the place of another one in a module, and in the containers that it holds."""
    is_module = isinstance(holder, nnx.Pytree) and not isinstance(holder, nnx.List)
    children: Any = vars(holder) if is_module else holder
    put: Any = partial(setattr, holder) if is_module else children.__setitem__
    for key, child in [*(children.items() if isinstance(children, dict) else enumerate(children))]:
        if child is old:
            put(key, new)
        elif isinstance(child, list | dict):
            _replace(child, old, new)
