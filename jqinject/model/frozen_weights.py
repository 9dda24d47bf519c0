"""The frozen weights of a model: low-bit numbers take the places of weights, and give way to them again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flax import nnx

from jqinject.dot import FrozenParam
from jqinject.model.frozen_ops import is_frozen_op
from jqinject.model.walk import ModelIndex, Path, dotted
from jqinject.nn.base.parameter_site import ParameterSite
from jqinject.nn.base.slots import is_on
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import QuantizedProgram, change_class


def parameter_sites(index: ModelIndex) -> Iterator[tuple[Path, QuantizedProgram, str, ParameterSite]]:
    """The sites of parameters, with the path of the model that holds them, that model, and the parameter's path."""
    for path, node in index.places:
        if isinstance(node, QuantizedProgram):
            sites = node.op_quant.weight_sites()
            yield from ((path, node, name, sites[name]) for name in list(sites))


def check_parameters_freeze(index: ModelIndex) -> None:
    """Raise if a parameter is quantized within a contraction, in a form that cannot be stored.

    Raises:
        ValueError: names the parameters.
    """
    for _, node in index.places:
        if isinstance(node, QuantizedProgram) and node.op_quant.unstored:
            shown = "\n".join(f"    {name}: {why}" for name, why in node.op_quant.unstored)
            raise ValueError(
                f"freeze: weights that schemes quantize cannot be stored for serving:\n{shown}\n"
                "  cure: a scheme without tile_size, whose fprop_rhs is a quantizer of weights; or a rule before it "
                "that keeps them float"
            )


def quantized_weights(index: ModelIndex) -> list[Any]:
    """The layers and the sites whose quantized weight is not frozen."""
    layers = [
        layer for layer in index.modules if isinstance(layer, QuantWeightLayer) and layer.frozen is None
    ]
    sites = {id(site): site for *_, site in parameter_sites(index) if site.master is None}
    return [holder for holder in (*layers, *sites.values()) if is_on(holder.weight_quant)]


def freeze_weight(index: ModelIndex, holder: Any, frozen: FrozenParam, *, keep_master: bool = False) -> None:
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
        model, name = next((model, name) for _, model, name, site in parameter_sites(index) if site is holder)
        del model.op_quant.weights[name]
    else:
        for name in ("weight_quant", "grad_quant"):
            if vars(holder).get(name) is not None:
                delattr(holder, name)


def check_unfreezes(index: ModelIndex) -> None:
    """Raise if the float weight of a frozen one was not kept.

    Raises:
        ValueError: names the weights.
    """
    gone = without_masters(index)
    if gone:
        shown = ", ".join(map(dotted, gone))
        raise ValueError(
            f"the float numbers of {shown} are gone.\n  cure: freeze(model, keep_masters=True), or load a "
            "float checkpoint into a model that was not frozen"
        )


def without_masters(index: ModelIndex) -> dict[Path, FrozenParam]:
    """The frozen weights whose float numbers were not kept, each under its first path."""
    kept = {id(frozen) for _, frozen in _kept(index)}
    gone = {
        id(node): (path, node)
        for path, node in reversed(index.places)
        if isinstance(node, FrozenParam) and id(node) not in kept
    }
    return dict(reversed(gone.values()))


def restore_masters(index: ModelIndex) -> None:
    """Put the float weights that were kept back in their places."""
    for holder, frozen in _kept(index):
        master = holder.master
        del holder.master
        if isinstance(holder, ParameterSite):
            put_in_place(index, frozen, master)
            holder.bind(master)
        else:
            setattr(holder, holder.weight_name, master)
            if is_frozen_op(holder):
                change_class(holder, type(holder)._base_class)


def _kept(index: ModelIndex) -> Iterator[tuple[Any, FrozenParam]]:
    """The layers and sites that keep the float weight of a frozen one, with this."""
    nodes = dict(index.places)
    for path, _, _, site in parameter_sites(index):
        if site.master is not None:
            yield site, nodes[(*path, *map(str, site.weight_path))]
    for layer in index.modules:
        if (isinstance(layer, QuantWeightLayer) or is_frozen_op(layer)) and layer.master is not None:
            yield layer, vars(layer)[layer.weight_name]


def put_in_place(index: ModelIndex, old: Any, new: nnx.Variable[Any]) -> None:
    """Put a Variable in every place of another one."""
    nodes = {path: node for path, node in index.places if not isinstance(node, nnx.Variable)}
    for path, node in index.places:
        if node is not old or "op_quant" in path:
            continue
        depth = next(depth for depth in range(len(path) - 1, -1, -1) if path[:depth] in nodes)
        holder, *keys = path[depth:]
        _set(nodes[path[:depth]], [holder, *keys], new)


def _set(node: Any, keys: list[str], new: nnx.Variable[Any]) -> None:
    """Set what is below a module: an attribute, or an item of containers in one."""
    *above, last = keys
    for key in above:
        node = _child(node, key)
    if isinstance(node, nnx.Pytree) and not isinstance(node, nnx.List):
        setattr(node, last, new)
    else:
        node[_key(node, last)] = new


def _child(node: Any, key: str) -> Any:
    return vars(node)[key] if isinstance(node, nnx.Pytree) else node[_key(node, key)]


def _key(node: Any, key: str) -> Any:
    """The key of a container whose text is given."""
    return int(key) if isinstance(node, list | nnx.List) else next(k for k in node if str(k) == key)
