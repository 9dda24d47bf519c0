"""What is written of a model: each of its weights, and what the file calls it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flax import nnx

from jqinject.dot import FrozenParam
from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.formats.errors import CheckpointError
from jqinject.formats.loading.axes import Axes
from jqinject.formats.loading.names import Name
from jqinject.model.walk import ModelIndex, dotted
from jqinject.nn.base.weight_layer import QuantWeightLayer

LEAVES = ("kernel", "embedding", "scale")
LIES = Axes((), (), ())
"""Axes that are not rearranged."""


@dataclass(frozen=True)
class Weight:
    """A weight of a model.

    Attributes:
        path: in the model.
        name: in the file.
        axes: how the matrix of the file became the weight's axes.
        sizes: of axes that its shape leaves open.
        value: of floats, the array; None for frozen numbers.
        numbers, form: of a frozen weight.
        layer: that holds it; None for a parameter without one.
    """

    path: str
    name: str
    axes: Axes
    sizes: Mapping[str, int] = field(default_factory=dict)
    value: Any = None
    numbers: Mapping[str, Any] | None = None
    form: FrozenForm | None = None
    layer: Any = None

    @property
    def module(self) -> str:
        """The name without `.weight`."""
        return self.name.removesuffix(".weight")


def weights_of(
    model: nnx.Module, rules: tuple[Name, ...] | None, as_they_lie: bool = False
) -> Iterator[Weight]:
    """The weights of a model, in its order, each once.

    Args:
        model: a frozen NNX module.
        rules: of names; None for those that the paths suggest.
        as_they_lie: whether the file keeps the axes of the model, and its paths as names.

    Raises:
        CheckpointError: a weight has no name, or axes that nobody knows.
    """
    index = ModelIndex(model)
    in_quantizer = {id(entry.variable): entry.in_quantizer for entry in index.variables}
    seen: set[int] = set()
    for path, node in index.places:
        if id(node) in seen:
            continue
        if isinstance(node, QuantWeightLayer) and node.frozen is not None:
            own = dotted((*path, node.weight_name))
            name, axes, sizes = _named(own, rules, as_they_lie)
            yield Weight(
                own,
                name,
                axes or _axes_of(node, own),
                sizes,
                None,
                node.frozen.numbers,
                node.frozen.form,
                node,
            )
        elif isinstance(node, FrozenParam):
            own = dotted(path)
            name, axes, sizes = _named(own, rules, as_they_lie)
            if axes is None:
                raise CheckpointError(
                    f"{own} is contracted by the model itself, so its inputs are not known.\n"
                    f"  cure: names={{'{name}': ('{own}', 'out in -> in out')}}"
                )
            yield Weight(own, name, axes, sizes, None, node.numbers, node.form)
        elif isinstance(node, nnx.Param | nnx.BatchStat) and not in_quantizer[id(node)]:
            own = dotted(path)
            name, axes, sizes = _named(own, rules, as_they_lie)
            value = node.get_value()
            yield Weight(own, name, axes or _plain(own, value.ndim), sizes, value)
        else:
            continue
        seen.add(id(node))


def _named(
    path: str, rules: tuple[Name, ...] | None, as_they_lie: bool
) -> tuple[str, Axes | None, Mapping[str, int]]:
    """What a parameter is called in the file, and its axes if a rule has them."""
    for rule in rules or ():
        turned = Name(rule.models[0], rule.files[0]) if len(rule.models) == len(rule.files) == 1 else None
        match = None if turned is None else turned.matches(path)
        if match is not None:
            return rule.files[0].format(**match[1]), Axes.of(rule.axes) if rule.axes else None, rule.sizes
    if rules is not None:
        raise CheckpointError(f"no name is for {path}.\n  cure: names={{'model.weight': {path!r}}}")
    if as_they_lie:
        return path, LIES, {}
    module, dot, leaf = path.rpartition(".")
    return f"{module}{dot}{'weight' if leaf in LEAVES else leaf}", None, {}


def _axes_of(layer: Any, path: str) -> Axes:
    """The axes of a layer's weight: those that it sums over are the inputs."""
    ndim, summed = layer.weight_ndim, layer.summed_axes()
    if len(layer.frozen.shape) != ndim:
        raise CheckpointError(f"{path} is a stack of layers, which is not written")
    names = [f"a{axis}" for axis in range(ndim)]
    if not summed and ndim == 2:
        summed = (1,)  # a table of rows
    if not summed:
        raise CheckpointError(f"{path}: weights of {type(layer).__name__} are not written")
    outs, ins = (
        [names[axis] for axis in range(ndim) if (axis in summed) is inside] for inside in (False, True)
    )
    return Axes.of(f"({' '.join(outs)}) ({' '.join(ins)}) -> {' '.join(names)}")


def _plain(path: str, ndim: int) -> Axes:
    names = [f"a{axis}" for axis in range(ndim)]
    if path.rpartition(".")[2] == "kernel" and ndim == 2:
        return Axes.of("out in -> in out")
    return Axes((), (), tuple((name,) for name in names))


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
