"""The weights of a model that are written: each with its name in the file, and the order of its columns there.

Inputs that are permuted before a weight have its columns written in their own order, with the group of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import nnx

from jqinject.core.transforms import Permutation, Sized
from jqinject.dot import FrozenParam
from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.loading.layout_axes import TRANSPOSED, UNCHANGED, AxesOfLayout
from jqinject.formats.loading.parameter_names import Name
from jqinject.formats.stored_matrix import Matrix
from jqinject.model import Rule
from jqinject.model.quantizing.rule_policy import RulePolicy
from jqinject.model.walk import ModelIndex, place_name
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import QuantizedProgram
from jqinject.proxy import ActQuantProxyFromInjector, transform_of

Layer: TypeAlias = QuantWeightLayer[Any]
LEAVES = ("kernel", "embedding", "scale")


@dataclass(frozen=True)
class Weight:
    """A weight of a model.

    Attributes:
        path: in the model.
        rule: its names in the file: of one matrix, or of those that were joined to make the weight, with a place for
            each axis of a stack that is taken apart; and the weights that divide the matrix.
        axes: how the matrix of the file became the weight's axes; None if no rule says it.
        value: of floats, the array; None for frozen numbers.
        numbers, form: of a frozen weight.
        layer: that holds it; None for a parameter without one.
        order: of the columns of a frozen weight, by which its input is permuted; None if it is not.
        stack: the layer of the model that `layer` is, or is one of.
    """

    path: str
    rule: Name
    axes: AxesOfLayout | None = None
    value: jax.Array | None = None
    numbers: Mapping[str, jax.Array] | None = None
    form: FrozenForm | None = None
    layer: Layer | None = None
    order: np.ndarray | None = None
    stack: Layer | None = None

    @property
    def name(self) -> str:
        """The only name, or the first."""
        return self.rule.files[0]

    @property
    def module(self) -> str:
        """The name without `.weight`."""
        return self.name.removesuffix(".weight")

    @property
    def known_axes(self) -> AxesOfLayout:
        """How the matrix of the file became the weight's axes."""
        assert self.axes is not None, "of a weight that is written"
        return self.axes

    def sizes_in(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Return the size of each axis of the file's matrix.

        Args:
            shape: of the weight.

        Raises:
            CheckpointError: a size is open, or does not fit.
        """
        try:
            return self.known_axes.sizes((), shape, self.rule.sizes)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {error}.\n  cure: a Name with sizes={{...}}") from None

    def floats(self) -> np.ndarray:
        """Return the floats, in the axes of the file.

        Raises:
            CheckpointError: the axes leave sizes open.
        """
        value, axes = np.asarray(self.value), self.known_axes
        if not axes.outputs:
            return value
        matrix = axes.back(value, self.sizes_in(value.shape))
        rows = int(np.prod(matrix.shape[: len(axes.outputs)]))
        return matrix.reshape(rows, -1) if axes.inputs else matrix.reshape(rows)

    def layers(self, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Weight]]:
        """Return the places in a stack, each with the names of its matrices; one empty place for no stack.

        Args:
            shape: of the parameter.

        Raises:
            CheckpointError: it has fewer axes than the rule stacks.
        """
        stacked = self.rule.stacked()
        if len(shape) < len(stacked):
            raise CheckpointError(
                f"{self.path} has the shape {shape}, too few axes for a stack of {self.name}.\n"
                "  cure: a Name without the place that numbers its matrices"
            )
        for at in np.ndindex(*shape[: len(stacked)]):
            yield at, replace(self, rule=self.rule.filled(dict(zip(stacked, at, strict=True))))


def weights_of(
    model: nnx.Module, rules: tuple[Name, ...] | None, unchanged: bool = False
) -> Iterator[Weight]:
    """Return the weights of a model, in its order, each once; those of a stack that a rule takes apart, one by one.

    Args:
        model: a frozen NNX module.
        rules: of names; None for those that the paths suggest.
        unchanged: whether the file keeps the axes of the model, and its paths as names.

    Raises:
        CheckpointError: a weight has no name, or unknown axes.
    """
    index = ModelIndex(model)
    in_quantizer = {id(entry.variable): entry.in_quantizer for entry in index.variables}
    orders = OrdersBeforeParameters(index)
    written: set[int] = set()
    for path, node in index.places:
        if id(node) in written:
            continue
        written.add(id(node))
        if isinstance(node, QuantWeightLayer) and node.frozen is not None:
            written.add(id(node.frozen))
            weight = _named(place_name((*path, node.weight_name)), rules, unchanged)
            yield from _of_frozen(node.frozen, weight, node)
        elif isinstance(node, FrozenParam):
            weight = _named(place_name(path), rules, unchanged)
            yield from _of_frozen(node, replace(weight, order=orders.order(weight.path)), None)
        elif isinstance(node, nnx.Param | nnx.BatchStat) and not in_quantizer[id(node)]:
            value = node.get_value()
            for at, weight in _named(place_name(path), rules, unchanged).layers(value.shape):
                axes = weight.axes or _axes_of_floats(weight.path, value.ndim - len(at))
                yield replace(weight, axes=axes, value=value[at] if at else value)


def _named(path: str, rules: tuple[Name, ...] | None, unchanged: bool) -> Weight:
    """Return a weight as the first rule names it that matches its path, those of one tensor and one parameter before
    the others; without rules, as its path does."""
    for rule in sorted(rules or (), key=lambda rule: len(rule.files) + len(rule.models) > 2):
        match = rule.matches_path(path)
        if match is not None:
            return Weight(path, rule.filled(match[1]), AxesOfLayout.of(rule.axes) if rule.axes else None)
    if rules is not None:
        raise CheckpointError(f"no name is for {path}.\n  cure: names={{'model.weight': {path!r}}}")
    if unchanged:
        return Weight(path, Name(path, path), UNCHANGED)
    module, dot, leaf = path.rpartition(".")
    return Weight(path, Name(f"{module}{dot}{'weight' if leaf in LEAVES else leaf}", path))


def _of_frozen(parameter: FrozenParam, stacked: Weight, layer: Layer | None) -> Iterator[Weight]:
    for at, weight in stacked.layers(parameter.shape):
        if layer is not None:
            single = sliced(layer, at)
            proxy = single.input_quant if isinstance(single.input_quant, nnx.Module) else None
            order = None if proxy is None else _order_of(vars(proxy).get("pre_transform"), weight.path)
            axes = weight.axes or _axes_of_layer(single, weight)
            weight = replace(weight, axes=axes, layer=single, order=order, stack=layer)
        elif weight.axes is None:
            raise CheckpointError(
                f"{weight.path} is contracted by the model itself, so its inputs are not known.\n"
                f"  cure: names={{'{weight.name}': ('{weight.path}', 'out in -> in out')}}"
            )
        depth = parameter.shape[: len(at)]
        numbers = {name: _at(x, at, depth) for name, x in parameter.numbers.items()}
        yield replace(weight, numbers=numbers, form=parameter.form)


def sliced(layer: Layer, at: tuple[int, ...]) -> Layer:
    """Return one layer of a stack.

    Args:
        layer: whose Variables have the axes of the stack in front.
        at: its place; empty for a layer that is no stack.
    """
    if not at:
        return layer
    graphdef, state = nnx.split(layer, graph=True)
    depth = layer.weight_shape[: len(at)]
    return nnx.merge(graphdef, jax.tree.map(lambda x: _at(x, at, depth), state))


def _at(x: jax.Array, at: tuple[int, ...], depth: tuple[int, ...]) -> jax.Array:
    """Return one layer's numbers; those that all layers share, unchanged."""
    sizes = x.shape[: len(at)]
    if len(sizes) < len(at) or any(size not in (1, full) for size, full in zip(sizes, depth, strict=True)):
        return x
    return x[tuple(0 if size == 1 else place for size, place in zip(sizes, at, strict=True))]


def _axes_of_layer(layer: Layer, weight: Weight) -> AxesOfLayout:
    """Return the axes of a layer's weight: those that it sums over are the inputs."""
    path, ndim, summed = weight.path, layer.weight_ndim, layer.summed_axes
    if len(layer.weight_shape) != ndim:
        module, dot, leaf = weight.name.rpartition(".")
        raise CheckpointError(
            f"{path} is a stack of layers, {layer.weight_shape}, and a matrix is written for each of them.\n"
            f"  cure: names={{'{module}.{{i}}{dot}{leaf}': {path!r}}}, or method='jqinject'"
        )
    if not summed and ndim == 2:
        summed = (1,)  # a table of rows
    if not summed:
        raise CheckpointError(f"{path}: weights of {type(layer).__name__} are not written")
    names = [f"a{axis}" for axis in range(ndim)]
    outs, ins = (
        [names[axis] for axis in range(ndim) if (axis in summed) is inside] for inside in (False, True)
    )
    return AxesOfLayout.of(f"({' '.join(outs)}) ({' '.join(ins)}) -> {' '.join(names)}")


def _axes_of_floats(path: str, ndim: int) -> AxesOfLayout:
    if path.rpartition(".")[2] == "kernel" and ndim == 2:
        return AxesOfLayout.of(TRANSPOSED)
    return AxesOfLayout((), (), tuple((f"a{axis}",) for axis in range(ndim)))


class OrdersBeforeParameters:
    """The orders of the inputs of parameters that a model contracts by itself, by the model's rules.

    Args:
        index: of the model.
    """

    def __init__(self, index: ModelIndex) -> None:
        self.rules: tuple[Rule, ...] = ()
        self.transforms: dict[str, object] = {}
        for _, node in index.places:
            if isinstance(node, QuantizedProgram) and isinstance(node.op_quant.policy, RulePolicy):
                self.rules += node.op_quant.policy.rules
        for _, node in index.places if self.rules else ():
            if isinstance(node, ActQuantProxyFromInjector) and node.pre_transform is not None:
                self.transforms[_label(transform_of(node.binding))] = node.pre_transform

    def order(self, path: str) -> np.ndarray | None:
        """Return the order that the input of the parameter at `path` is brought into; None if it is not permuted.

        Raises:
            CheckpointError: another transform is applied to it.
        """
        places = path, path.rpartition(".")[0]
        rule = next((r for r in self.rules if r.takes_weights and any(map(r.matches, places))), None)
        declared = transform_of(None if rule is None else rule.quantizer("input_quant"))
        return None if declared is None else _order_of(self.transforms.get(_label(declared), declared), path)


def _label(declared: object) -> str:
    return declared.label if isinstance(declared, Sized) else ""


def _order_of(transform: object, path: str) -> np.ndarray | None:
    if transform is None:
        return None
    if not isinstance(transform, Permutation):
        raise CheckpointError(
            f"{path}: a transform of the input is not written.\n  cure: a model without online transforms"
        )
    return np.asarray(transform.order.get_value())


def in_own_order(matrix: Matrix, order: np.ndarray | None) -> Matrix:
    """Return columns in the order of the layer's input, before it is permuted.

    Args:
        matrix: columns `order` of the file's, one after the other.
        order: None for columns in their own order.

    Example:
        >>> from jqinject.ops import IntGrid
        >>> codes, scale = np.array([[1, 2, 3, 4]], np.int8), np.ones((1, 2), np.float32)
        >>> matrix = in_own_order(Matrix(codes, scale, IntGrid(8), (1, 2)), np.array([3, 0, 1, 2]))
        >>> matrix.codes.tolist(), matrix.group_of_column.tolist()
        ([[2, 3, 4, 1]], [0, 1, 1, 0])
    """
    if order is None:
        return matrix
    groups = group_of_column(order, matrix.group) if matrix.scale.shape[-1] > 1 else None
    return replace(matrix, codes=matrix.codes[..., np.argsort(order)], group_of_column=groups)


def group_of_column(order: np.ndarray, size: int) -> np.ndarray | None:
    """Return the group of each column, int32; None if groups are consecutive columns.

    Args:
        order: the columns, one group after the other.
        size: columns of a group.
    """
    consecutive = np.arange(order.size, dtype=np.int32) // size
    groups = consecutive[np.argsort(order)]
    return None if np.array_equal(groups, consecutive) else groups
