"""Freezing parameters that a model contracts by itself: their low-bit numbers take their places."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flax import nnx

from jqinject.dot import FrozenParam
from jqinject.model.frozen_ops import is_frozen_op
from jqinject.model.walk import ModelIndex, Path, dotted
from jqinject.nn.base.parameter_site import ParameterSite
from jqinject.nn.frozen.freeze_layer import SLICED_FROM, frozen_weight
from jqinject.program import QuantizedProgram


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


def freeze_parameters(index: ModelIndex, keep_masters: bool, sliced_from: int = SLICED_FROM) -> None:
    """Put the low-bit numbers of quantized parameters in the places of these.

    Args:
        index: of the model.
        keep_masters: keep the float parameters and their quantizers, in the sites.
        sliced_from: see `jqinject.freeze`.
    """
    for _, model, name, site in parameter_sites(index):
        proxy = site.weight_quant
        if site.master is not None or proxy is None or not proxy.is_quant_enabled:
            continue
        variable = site.weight
        freeze_parameter(index, site, sliced_from=sliced_from)
        if keep_masters:
            site.master = variable
        else:
            del model.op_quant.weights[name]


def freeze_parameter(
    index: ModelIndex, site: ParameterSite, numbers: Any = None, sliced_from: int = SLICED_FROM
) -> FrozenParam:
    """Put the low-bit numbers of a site's parameter in its places.

    Args:
        index: of the model.
        site: the site.
        numbers: what `numbers_of` or `numbers_from_host` returned for the site.
        sliced_from: see `jqinject.freeze`.

    Returns:
        The numbers.
    """
    frozen = frozen_parameter(site, numbers, sliced_from)
    put_in_place(index, site.weight, frozen)
    return frozen


def frozen_parameter(site: ParameterSite, numbers: Any = None, sliced_from: int = SLICED_FROM) -> FrozenParam:
    """The low-bit numbers of a site's parameter."""
    numbers = frozen_weight(site, numbers, sliced_from)
    return FrozenParam.holding(numbers.numbers, numbers.form, site.weight.get_metadata())


def check_parameters_unfreeze(index: ModelIndex) -> None:
    """Raise if a parameter that was frozen in its place was not kept.

    Raises:
        ValueError: names the parameters.
    """
    gone = without_masters(index)
    if gone:
        raise ValueError(
            f"the float parameters {', '.join(gone)} are gone.\n  cure: freeze(model, keep_masters=True), or load a "
            "float checkpoint into a model that was not frozen"
        )


def without_masters(index: ModelIndex) -> list[str]:
    """The paths of the frozen parameters whose float numbers were not kept."""
    kept = {id(node) for node in _frozen_of_masters(index)}
    return [
        dotted(path) for path, node in index.places if isinstance(node, FrozenParam) and id(node) not in kept
    ]


def unfreeze_parameters(index: ModelIndex) -> None:
    """Put the float parameters that were kept back in their places."""
    for path, _, _, site in parameter_sites(index):
        if site.master is not None:
            master = site.master
            put_in_place(index, _at(index, path, site), master)
            del site.master
            site.bind(master)


def _frozen_of_masters(index: ModelIndex) -> Iterator[Any]:
    for path, _, _, site in parameter_sites(index):
        if site.master is not None:
            yield _at(index, path, site)
    for layer in index.modules:
        if is_frozen_op(layer) and layer.float_kernel is not None:
            yield layer.kernel


def _at(index: ModelIndex, path: Path, site: ParameterSite) -> Any:
    """What is in the place of a site's parameter."""
    wanted = (*path, *map(str, site.weight_path))
    return next(node for place, node in index.places if place == wanted)


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
