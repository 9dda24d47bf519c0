"""What is written of a model: each of its weights, and what the file calls it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import nnx

from jqinject.dot import FrozenParam
from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.loading.layout_axes import AxesOfLayout
from jqinject.formats.loading.parameter_names import Name, compiled
from jqinject.formats.saving.saved_column_orders import OrdersBeforeParameters, order_before_layer
from jqinject.model.walk import ModelIndex, dotted
from jqinject.nn.base.weight_layer import QuantWeightLayer

LEAVES = ("kernel", "embedding", "scale")
LIES = AxesOfLayout((), (), ())
"""Axes that are not rearranged."""


@dataclass(frozen=True)
class Weight:
    """A weight of a model.

    Attributes:
        path: in the model.
        names: in the file: one, or those of the matrices that were joined to make the weight.
        axes: how the matrix of the file became the weight's axes.
        sizes: of axes that its shape leaves open.
        value: of floats, the array; None for frozen numbers.
        numbers, form: of a frozen weight.
        layer: that holds it; None for a parameter without one.
        order: of the columns of a frozen weight, by which its input is permuted; None if it is not.
        stack: the layer of the model that `layer` is, or is one of.
        part, parts: which of the weights that divide the matrix of the file this is, and of how many.
        rows: of each of the matrices that were joined, if a rule has them.
    """

    path: str
    names: tuple[str, ...]
    axes: AxesOfLayout
    sizes: Mapping[str, int] = field(default_factory=dict)
    value: Any = None
    numbers: Mapping[str, Any] | None = None
    form: FrozenForm | None = None
    layer: Any = None
    order: np.ndarray | None = None
    stack: Any = None
    part: int = 0
    parts: int = 1
    rows: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The only name, or the first."""
        return self.names[0]

    @property
    def module(self) -> str:
        """The name without `.weight`."""
        return self.name.removesuffix(".weight")


def weights_of(
    model: nnx.Module, rules: tuple[Name, ...] | None, as_they_lie: bool = False
) -> Iterator[Weight]:
    """The weights of a model, in its order, each once; those of a stack that a rule takes apart, one by one.

    Args:
        model: a frozen NNX module.
        rules: of names; None for those that the paths suggest.
        as_they_lie: whether the file keeps the axes of the model, and its paths as names.

    Raises:
        CheckpointError: a weight has no name, or axes that nobody knows.
    """
    index = ModelIndex(model)
    in_quantizer = {id(entry.variable): entry.in_quantizer for entry in index.variables}
    orders = OrdersBeforeParameters(index)
    seen: set[int] = set()
    for path, node in index.places:
        if id(node) in seen:
            continue
        if isinstance(node, QuantWeightLayer) and node.frozen is not None:
            seen.add(id(node.frozen))
            own = dotted((*path, node.weight_name))
            yield from _of_layer(node, _Called.by(own, rules, as_they_lie))
        elif isinstance(node, FrozenParam):
            own = dotted(path)
            yield from _of_parameter(node, _Called.by(own, rules, as_they_lie), orders.order(own))
        elif isinstance(node, nnx.Param | nnx.BatchStat) and not in_quantizer[id(node)]:
            called, value = _Called.by(dotted(path), rules, as_they_lie), node.get_value()
            for at, names in called.each(value.shape):
                axes = called.axes or _plain(called.path, value.ndim - len(at))
                yield called.weight(names, axes, value=value[at] if at else value)
        else:
            continue
        seen.add(id(node))


def _of_layer(layer: Any, called: _Called) -> Iterator[Weight]:
    for at, names in called.each(layer.weight_shape):
        one = sliced(layer, at)
        axes = called.axes or _axes_of(one, called)
        order = order_before_layer(one, called.path)
        held = {"numbers": one.frozen.numbers, "form": one.frozen.form}
        yield called.weight(names, axes, **held, layer=one, order=order, stack=layer)


def _of_parameter(node: FrozenParam, called: _Called, order: np.ndarray | None) -> Iterator[Weight]:
    for at, names in called.each(node.shape):
        if called.axes is None:
            raise CheckpointError(
                f"{called.path} is contracted by the model itself, so its inputs are not known.\n"
                f"  cure: names={{'{names[0]}': ('{called.path}', 'out in -> in out')}}"
            )
        depth = node.shape[: len(at)]
        numbers = {each: _at(x, at, depth) for each, x in node.numbers.items()} if at else node.numbers
        yield called.weight(names, called.axes, numbers=numbers, form=node.form, order=order)


def sliced(layer: Any, at: tuple[int, ...]) -> Any:
    """One layer of a stack.

    Args:
        layer: whose Variables have the axes of the stack in front.
        at: its place; empty for a layer that is no stack.
    """
    if not at:
        return layer
    graphdef, state = nnx.split(layer, graph=True)
    depth = layer.weight_shape[: len(at)]
    return nnx.merge(graphdef, jax.tree.map(lambda x: _at(x, at, depth), state))


def _at(x: Any, at: tuple[int, ...], depth: tuple[int, ...]) -> Any:
    """One layer's numbers; those that all layers share, as they are."""
    held = x.shape[: len(at)]
    if len(held) < len(at) or any(size not in (1, full) for size, full in zip(held, depth, strict=True)):
        return x
    return x[tuple(0 if size == 1 else place for size, place in zip(held, at, strict=True))]


@dataclass(frozen=True)
class _Called:
    """What a parameter is called in the file.

    Attributes:
        path: of the parameter.
        names: in the file, each with a place for each axis of a stack that is taken apart.
        axes: of the file's matrix, if a rule has them.
        sizes: of these.
        stacked: the places.
        part, parts: which of the parameters that divide the file's matrix it is, and of how many.
        rows: of each of the matrices that were joined, if a rule has them.
    """

    path: str
    names: tuple[str, ...]
    axes: AxesOfLayout | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    stacked: tuple[str, ...] = ()
    part: int = 0
    parts: int = 1
    rows: tuple[int, ...] | None = None

    @staticmethod
    def by(path: str, rules: tuple[Name, ...] | None, as_they_lie: bool) -> _Called:
        """By the first rule that is for a path, those of one tensor and one parameter before the others; without
        rules, by the path."""
        for rule in sorted(rules or (), key=lambda rule: len(rule.files) + len(rule.models) > 2):
            for part, pattern in enumerate(rule.models):
                match = compiled(pattern).fullmatch(path)
                if match is None:
                    continue
                places = match.groupdict() | {place: f"{{{place}}}" for place in rule.stacked()}
                names = tuple(file.format(**places) for file in rule.files)
                axes = AxesOfLayout.of(rule.axes) if rule.axes else None
                return _Called(
                    path, names, axes, rule.sizes, rule.stacked(), part, len(rule.models), rule.rows
                )
        if rules is not None:
            raise CheckpointError(f"no name is for {path}.\n  cure: names={{'model.weight': {path!r}}}")
        if as_they_lie:
            return _Called(path, (path,), LIES)
        module, dot, leaf = path.rpartition(".")
        return _Called(path, (f"{module}{dot}{'weight' if leaf in LEAVES else leaf}",))

    def weight(self, names: tuple[str, ...], axes: AxesOfLayout, **held: Any) -> Weight:
        """A weight that is called so."""
        place = {"part": self.part, "parts": self.parts, "rows": self.rows}
        return Weight(self.path, names, axes, self.sizes, **held, **place)

    def each(self, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[str, ...]]]:
        """The places in a stack, each with the names of its matrices; one empty place for no stack.

        Args:
            shape: of the parameter.

        Raises:
            CheckpointError: it has fewer axes than the rule stacks.
        """
        if len(shape) < len(self.stacked):
            raise CheckpointError(
                f"{self.path} has the shape {shape}, too few axes for a stack of {self.names[0]}.\n"
                "  cure: a Name without the place that numbers its matrices"
            )
        for at in np.ndindex(*shape[: len(self.stacked)]):
            places = dict(zip(self.stacked, at, strict=True))
            yield at, tuple(name.format(**places) for name in self.names) if at else self.names


def _axes_of(layer: Any, called: _Called) -> AxesOfLayout:
    """The axes of a layer's weight: those that it sums over are the inputs."""
    path, ndim, summed = called.path, layer.weight_ndim, layer.summed_axes
    if len(layer.weight_shape) != ndim:
        module, dot, leaf = called.names[0].rpartition(".")
        raise CheckpointError(
            f"{path} is a stack of layers, {layer.weight_shape}, and a matrix is written for each of them.\n"
            f"  cure: names={{'{module}.{{i}}{dot}{leaf}': {path!r}}}, or method='jqinject'"
        )
    names = [f"a{axis}" for axis in range(ndim)]
    if not summed and ndim == 2:
        summed = (1,)  # a table of rows
    if not summed:
        raise CheckpointError(f"{path}: weights of {type(layer).__name__} are not written")
    outs, ins = (
        [names[axis] for axis in range(ndim) if (axis in summed) is inside] for inside in (False, True)
    )
    return AxesOfLayout.of(f"({' '.join(outs)}) ({' '.join(ins)}) -> {' '.join(names)}")


def _plain(path: str, ndim: int) -> AxesOfLayout:
    names = [f"a{axis}" for axis in range(ndim)]
    if path.rpartition(".")[2] == "kernel" and ndim == 2:
        return AxesOfLayout.of("out in -> in out")
    return AxesOfLayout((), (), tuple((name,) for name in names))


def array_of(weight: Weight) -> np.ndarray:
    """The floats of a weight, in the axes of the file.

    Raises:
        CheckpointError: its axes leave sizes open.
    """
    value, axes = np.asarray(weight.value), weight.axes
    if not axes.outputs:
        return value
    turned = axes.back(value, sizes_of(weight, value.shape))
    rows = int(np.prod(turned.shape[: len(axes.outputs)]))
    return turned.reshape(rows, -1) if axes.inputs else turned.reshape(rows)


def sizes_of(weight: Weight, shape: tuple[int, ...]) -> dict[str, int]:
    """The size of each axis of the file's matrix.

    Args:
        weight: with its axes.
        shape: of the weight.

    Raises:
        CheckpointError: a size is open, or does not fit.
    """
    try:
        return weight.axes.sizes_in(shape, weight.sizes)
    except ValueError as error:
        raise CheckpointError(f"{weight.path}: {error}.\n  cure: a Name with sizes={{...}}") from None
