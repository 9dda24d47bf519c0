"""Finding what is where in a model: every Variable under every path, and every proxy with the layers that hold it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import nnx

from jqinject.core import GradSlot, GradStat, QuantParam, QuantStat
from jqinject.program import OpQuantizers
from jqinject.proxy import QuantProxyFromInjector

Path = tuple[str, ...]
QUANTIZER_KINDS = (QuantParam, QuantStat, GradStat, GradSlot)
TRACKED = "tracked_parameters"  # where a component holds the weights of layers, without a proxy too


class PlainArray:
    """An array that a model holds without a Variable around it (the mask of a convolution), read and written as one.

    Args:
        holder: the attributes of a module, a dict or a list.
        name: where in it the array is.
    """

    def __init__(self, holder: Any, name: Any) -> None:
        self.holder = holder
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlainArray) and self.holder is other.holder and self.name == other.name

    def __hash__(self) -> int:
        return hash((id(self.holder), self.name))

    @property
    def dtype(self) -> Any:
        """The array's dtype."""
        return self.get_value().dtype

    def get_value(self) -> Any:
        """The array."""
        return self.holder[self.name]

    def set_value(self, value: Any) -> None:
        """Put another array in its place."""
        self.holder[self.name] = value


@dataclass
class Found:
    """A Variable of a model, or an array without one.

    Attributes:
        variable: the Variable.
        paths: all its paths; the first is the shortest way that leads through no quantizer, if there is one.
        in_quantizer: whether every path leads through a quantizer, or it is of a kind that only quantizers have.
    """

    variable: nnx.Variable[Any] | PlainArray
    paths: list[Path] = field(default_factory=list)
    in_quantizer: bool = True

    @property
    def path(self) -> Path:
        """The path to speak of it by."""
        return self.paths[0]


@dataclass
class Holders:
    """The layers that hold one proxy, and the proxy's paths."""

    proxy: QuantProxyFromInjector
    layers: list[Any] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)


def walk(
    root: Any, path: Path = (), above: tuple[int, ...] = (), within: Callable[[Any], bool] | None = None
) -> Iterator[tuple[Path, Any]]:
    """Every module, Variable and array under every path, parents first; a shared one comes once for each path.

    Args:
        root: where to begin.
        path: its path.
        above: the identities of what it is within.
        within: says of a module whether to look into it; None looks into all.
    """
    if isinstance(root, nnx.Variable):
        yield path, root
        return
    if id(root) in above:
        return
    if isinstance(root, nnx.Pytree):
        yield path, root
        if within is not None and not within(root):
            return
        children: Any = ((n, c) for n, c in vars(root).items() if not n.startswith("_pytree__"))
    elif isinstance(root, Mapping):
        children = root.items()
    elif isinstance(root, list | tuple):
        children = enumerate(root)
    else:
        return
    for name, child in children:
        if isinstance(child, jax.Array | np.ndarray):
            if not isinstance(root, tuple):
                yield (
                    (*path, str(name)),
                    PlainArray(vars(root) if isinstance(root, nnx.Pytree) else root, name),
                )
        else:
            yield from walk(child, (*path, str(name)), (*above, id(root)), within)


def modules_of(root: Any) -> list[Any]:
    """Every module of a model once, parents first: what `nnx.iter_modules` finds, in a fraction of its time."""
    return [member for member in _members(root) if isinstance(member, nnx.Module)]


def is_abstract(root: Any) -> bool:
    """Whether a Variable of a model has a shape and no numbers."""
    held = (member.get_raw_value() for member in _members(root) if isinstance(member, nnx.Variable))
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for value in held for leaf in jax.tree.leaves(value))


def _members(root: Any) -> Iterator[Any]:
    """Every NNX node and Variable, and every container, once."""
    seen: set[int] = set()
    has_children: dict[type, bool] = {}
    ahead = [root]
    while ahead:
        node = ahead.pop()
        kind = type(node)
        if kind not in has_children:
            has_children[kind] = issubclass(
                kind, nnx.Pytree | nnx.Variable | list | tuple | dict
            ) or not jax.tree_util.all_leaves([node])
        if not has_children[kind] or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if issubclass(kind, nnx.Pytree):
            ahead.extend(reversed(vars(node).values()))
        elif not issubclass(kind, nnx.Variable):
            ahead.extend(reversed(jax.tree.leaves(node, is_leaf=lambda x, here=node: x is not here)))


def variables_of(model: Any) -> list[Found]:
    """The Variables and arrays of a model, each once, with all its paths."""
    proxies = {path for path, node in walk(model) if isinstance(node, QuantProxyFromInjector)}
    found: dict[Any, Found] = {}
    for path, node in walk(model):
        if isinstance(node, nnx.Variable | PlainArray):
            entry = found.setdefault(node if isinstance(node, PlainArray) else id(node), Found(node))
            inside = isinstance(node, QUANTIZER_KINDS) or any(
                path[:depth] in proxies or path[depth] == TRACKED for depth in range(len(path))
            )
            if entry.in_quantizer and not inside:
                entry.in_quantizer = False
                entry.paths.insert(0, path)
            else:
                entry.paths.append(path)
    return list(found.values())


def proxies_of(model: Any) -> list[Holders]:
    """The proxies of a model, each once, with the layers that hold it."""
    found: dict[int, Holders] = {}
    between = {path for path, node in walk(model) if isinstance(node, OpQuantizers)}
    for path, node in walk(model):
        # Quantizers between operations depend on no layer's weight.
        if not isinstance(node, nnx.Variable | PlainArray) and path[:1] not in between:
            for name, child in vars(node).items():
                if isinstance(child, QuantProxyFromInjector):
                    entry = found.setdefault(id(child), Holders(child))
                    entry.paths.append((*path, name))
                    if not any(layer is node for layer in entry.layers):
                        entry.layers.append(node)
    return list(found.values())


def dotted(path: Path) -> str:
    """A path as text."""
    return ".".join(path) or "the model itself"
