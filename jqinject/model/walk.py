"""An index of a model: every Variable under every path, every proxy with its layers, and its static ranges."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import GradSlot, GradStat, QuantParam, QuantStat, StaticRange
from jqinject.core.flax_internals import PYTREE_ATTRIBUTES
from jqinject.core.state import CURE, UNSEEN, RecordPart, state_parts
from jqinject.dot import FrozenParam
from jqinject.nn.base.parameter_site import ParameterSite
from jqinject.program import OpQuantizers, listed
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant_tensor import is_concrete

Path = tuple[str, ...]
ARRAYS = jax.Array | np.ndarray | jax.ShapeDtypeStruct
M = TypeVar("M", bound=nnx.Module)
QUANTIZER_KINDS = (QuantParam, QuantStat, GradStat, GradSlot)
# The attribute in which a component holds weights of layers, even without a proxy.
TRACKED = "tracked_parameters"


class PlainArray:
    """An array that a model holds without a Variable (the mask of a convolution), with a Variable's interface.

    Args:
        holder: a module's attributes, a dict or a list.
        name: the array's key in it.
    """

    def __init__(self, holder: Any, name: object) -> None:
        self.holder = holder
        self.name = name

    def __eq__(self, value: object) -> bool:
        return isinstance(value, PlainArray) and self.holder is value.holder and self.name == value.name

    def __hash__(self) -> int:
        return hash((id(self.holder), self.name))

    @property
    def dtype(self) -> np.dtype:
        """The array's dtype."""
        return self.get_value().dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return self.get_value().shape

    def get_value(self) -> Any:
        """The array."""
        return self.holder[self.name]

    def set_value(self, value: object) -> None:
        """Replace the array."""
        self.holder[self.name] = value


@dataclass
class VariableEntry:
    """A Variable of a model, or an array without one.

    Attributes:
        variable: the Variable, or a part of one that is a record.
        paths: all its paths; the first is the shortest that does not lead through a quantizer, where possible.
        in_quantizer: whether every path leads through a quantizer, or only quantizers have its Variable type.
    """

    variable: nnx.Variable[Any] | PlainArray | RecordPart
    paths: list[Path] = field(default_factory=list)
    in_quantizer: bool = True

    @property
    def path(self) -> Path:
        """The path to name it by."""
        return self.paths[0]


@dataclass
class Holders:
    """The layers that hold one proxy, and the proxy's paths."""

    proxy: QuantProxyFromInjector
    layers: list[Any] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)


def walk(root: object) -> Iterator[tuple[Path, Any]]:
    """Every module, Variable and array under every path, parents first; shared ones appear once per path."""
    ahead: list[tuple[Path, Any, tuple[int, ...]]] = [((), root, ())]
    while ahead:
        path, node, above = ahead.pop()
        if isinstance(node, nnx.Variable | PlainArray):
            yield path, node
        elif id(node) not in above:
            if isinstance(node, nnx.Pytree):
                yield path, node
            around = (*above, id(node))
            below = [((*path, str(name)), child, around) for name, child in _children(node)]
            ahead.extend(reversed(below))


def _children(node: object) -> list[tuple[object, object]]:
    """The children of a module or container, by name; arrays as `PlainArray`s."""
    if isinstance(node, nnx.Pytree):
        named: Any = [(n, c) for n, c in vars(node).items() if not n.startswith(PYTREE_ATTRIBUTES)]
        holder: Any = vars(node)
    elif isinstance(node, Mapping):
        named, holder = list(node.items()), node
    elif isinstance(node, list | tuple):
        named, holder = list(enumerate(node)), node
    else:
        return []
    return [
        (name, PlainArray(holder, name) if isinstance(child, ARRAYS) else child)
        for name, child in named
        if isinstance(child, nnx.Pytree | nnx.Variable | Mapping | list | tuple)
        or (isinstance(child, ARRAYS) and not isinstance(node, tuple))
    ]


class ModelIndex:
    """An index of a model, built in one walk and shared by all steps of an operation.

    It is a snapshot: after a step that replaces modules or Variables, build another.

    Args:
        model: an NNX module, or a container of modules.

    Attributes:
        places: every module, Variable and array under every path, parents first.
    """

    def __init__(self, model: object) -> None:
        self.places = tuple(walk(model))
        self._bind_sites()

    def _bind_sites(self) -> None:
        """Let the sites of parameters know which Variables of this copy of the model these are."""
        for path, site in self.sites:
            variable = self.nodes.get(path)
            if isinstance(variable, nnx.Param):
                site.bind(variable)

    @cached_property
    def nodes(self) -> dict[Path, Any]:
        """Every module, Variable and array by each of its paths."""
        return dict(self.places)

    @cached_property
    def first_places(self) -> dict[Path, Any]:
        """Every module, Variable and array once, by its first path, parents first."""
        first: dict[int, tuple[Path, Any]] = {}
        for path, node in self.places:
            first.setdefault(id(node), (path, node))
        return dict(first.values())

    @cached_property
    def sites(self) -> list[tuple[Path, ParameterSite]]:
        """The sites of parameters that the model contracts by itself, with the path of each parameter."""
        return [
            ((*path[:-1], *map(str, site.weight_path)), site)
            for path, node in self.places
            if isinstance(node, OpQuantizers)
            for site in node.weight_sites().values()
        ]

    @cached_property
    def frozen_parameters(self) -> dict[Path, FrozenParam]:
        """The parameters whose low-bit numbers are in their places, by the first path of each."""
        return {path: node for path, node in self.first_places.items() if isinstance(node, FrozenParam)}

    @cached_property
    def modules(self) -> list[Any]:
        """The modules, each once, parents first."""
        return [node for node in self.first_places.values() if isinstance(node, nnx.Module)]

    @cached_property
    def is_abstract(self) -> bool:
        """Whether a Variable has a shape and no numbers."""
        return any_abstract(node for _, node in self.places)

    def outermost(self, accepted: Callable[[Any], bool]) -> list[tuple[Path, Any]]:
        """The accepted modules that are not inside another accepted one; shared ones under their first path.

        Args:
            accepted: whether a module is accepted.
        """
        outermost: dict[int, tuple[Path, Any]] = {}
        for path, node, outer in self._inside(accepted):
            if path == outer:
                outermost.setdefault(id(node), (path, node))
        return list(outermost.values())

    def _inside(self, accepted: Callable[[Any], bool]) -> Iterator[tuple[Path, Any, Path | None]]:
        """Every place, with that of the outermost accepted module that it is or is in."""
        outer: Path | None = None  # a module's contents come right after it
        for path, node in self.places:
            if outer is not None and path[: len(outer)] != outer:
                outer = None
            if outer is None and isinstance(node, nnx.Pytree) and accepted(node):
                outer = path
            yield path, node, outer

    @cached_property
    def variables(self) -> list[VariableEntry]:
        """The Variables and arrays, each once, with all its paths."""
        entries: dict[Any, VariableEntry] = {}
        for path, node, proxy in self._inside(lambda node: isinstance(node, QuantProxyFromInjector)):
            inside = proxy is not None or TRACKED in path or isinstance(node, QUANTIZER_KINDS)
            key = id(node) if isinstance(node, nnx.Variable) else node
            parts = [((), node)] if isinstance(node, PlainArray) else []
            for below, part in state_parts(node) if isinstance(node, nnx.Variable) else parts:
                entry = entries.setdefault((key, below), VariableEntry(part))
                is_best = entry.in_quantizer and not inside
                entry.in_quantizer = entry.in_quantizer and inside
                entry.paths.insert(0 if is_best else len(entry.paths), (*path, *below))
        return list(entries.values())

    @cached_property
    def by_path(self) -> dict[Path, VariableEntry]:
        """The Variables and arrays by each of their paths."""
        return {path: entry for entry in self.variables for path in entry.paths}

    @cached_property
    def by_name(self) -> dict[str, Any]:
        """The Variables and arrays themselves, by each of their paths as text."""
        return {place_name(path): entry.variable for path, entry in self.by_path.items()}

    @cached_property
    def proxies(self) -> list[Holders]:
        """The proxies, each once, with the layers that hold it."""
        holders: dict[int, Holders] = {}
        between = {(*path, "held") for path, node in self.places if isinstance(node, OpQuantizers)}
        for path, node in self.places:
            # Quantizers between operations depend on no layer's weight.
            if isinstance(node, nnx.Pytree) and not any(path[: len(inner)] == inner for inner in between):
                for name, child in vars(node).items():
                    if isinstance(child, QuantProxyFromInjector):
                        entry = holders.setdefault(id(child), Holders(child))
                        entry.paths.append((*path, name))
                        if not any(layer is node for layer in entry.layers):
                            entry.layers.append(node)
        return list(holders.values())


def check_module(model: object, caller: str) -> None:
    """Refuse what is not an NNX module.

    Args:
        model: what a user gave.
        caller: the calling function's name, for the error text.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"{caller} takes an NNX module, got {type(model).__name__}")


def modules_of(model: nnx.Module) -> dict[str, nnx.Module]:
    """The modules, each once, by their first path as text; the model itself is ""."""
    return {".".join(map(str, path)): node for path, node in nnx.iter_modules(model, graph=True)}


def modules_by_path(model: nnx.Module, kind: type[M]) -> dict[str, M]:
    """The modules of a class, each once, by their first path as text.

    Args:
        model: an NNX module.
        kind: the class.
    """
    return {
        name or place_name(()): node for name, node in modules_of(model).items() if isinstance(node, kind)
    }


def place_name(path: tuple[object, ...]) -> str:
    """A path as text."""
    return ".".join(map(str, path)) or "the model itself"


def any_abstract(nodes: Iterable[object]) -> bool:
    """Whether any Variable among modules and Variables has a shape and no numbers."""
    values = [node.get_raw_value() for node in nodes if isinstance(node, nnx.Variable)]
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(values))


def is_finite(value: object) -> bool:
    """Whether an array holds neither nan nor inf; one whose numbers are not known counts as finite."""
    if not isinstance(value, jax.Array | np.ndarray) or not jnp.issubdtype(value.dtype, jnp.inexact):
        return True
    finite = _all_finite(value) if is_concrete(value) else value
    return not is_concrete(finite) or bool(finite)


@jax.jit
def _all_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()


def bytes_of(tree: object) -> int:
    """Bytes of an array, or of those of a pytree."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def static_ranges(index: ModelIndex) -> dict[str, StaticRange]:
    """The outermost modules that may hold static ranges (quantizers, quantized ops, lone components), by first path."""
    # Looked up on the class, not the instance: `nnx.Rngs` has a stream under any name.
    return {
        place_name(path): cast(StaticRange, node)
        for path, node in index.outermost(lambda node: issubclass(type(node), StaticRange))
    }


def uncalibrated(index: ModelIndex) -> tuple[str, ...]:
    """Paths of activation quantizers whose range never saw data; abstract and traced ones, unknown, are left out."""
    return tuple(path for path, holder in static_ranges(index).items() if holder.has_range() is False)


def check_calibrated(index: ModelIndex, name: str) -> None:
    """Refuse ranges that never saw data.

    Args:
        index: of an NNX module.
        name: the calling function's name, for the error text.

    Raises:
        ValueError: there are some; it names them.
    """
    paths = uncalibrated(index)
    if paths:
        raise ValueError(
            f"{name}: {listed(paths)}: of each, {UNSEEN}.\n  cure: {CURE}; or {name}(..., allow_uncalibrated=True)"
        )
