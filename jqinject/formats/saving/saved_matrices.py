"""What is written of a model: each weight as one matrix of the file, or several, in the file's axes.

Inputs that are permuted before a weight have its columns written in their own order, with the group of each.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
from flax import nnx

from jqinject.core.transforms import Permutation
from jqinject.dot import FrozenParam
from jqinject.formats import stored_matrix
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.layout_axes import TRANSPOSED, UNCHANGED, AxesOfLayout
from jqinject.formats.loading.loading_plan import stored_variables
from jqinject.formats.loading.parameter_names import Name
from jqinject.formats.saving.saved_inputs import input_format_of
from jqinject.formats.stored_matrix import MINIFLOATS, InputFormat, Matrix, SavedMatrix
from jqinject.model.quantizing.rule_policy import RulePolicy
from jqinject.model.quantizing.rules import weight_rule
from jqinject.model.walk import ModelIndex
from jqinject.ops import Grid
from jqinject.program import QuantizedProgram
from jqinject.proxy import ActQuantProxyFromInjector, transform_of

T = TypeVar("T")
Node = TypeVar("Node", bound="nnx.Module | nnx.Variable[Any]")
Variable: TypeAlias = nnx.Variable[Any]
LEAVES = ("kernel", "embedding", "scale")


@dataclass(frozen=True)
class Weight:
    """A weight of a model, or of one layer of a stack.

    Attributes:
        path: in the model.
        rule: its names in the file: of one matrix, or of those that were joined to make the weight; and the weights
            that divide the matrix.
        axes: how the matrix of the file became the weight's axes.
        variable: its numbers.
        proxy: of the input of the layer that holds it; None for a float input, or a parameter without a layer.
        order: of the columns of a frozen weight, by which its input is permuted; None if it is not.
    """

    path: str
    rule: Name
    axes: AxesOfLayout
    variable: Variable
    proxy: ActQuantProxyFromInjector | None = None
    order: np.ndarray | None = None

    def sizes(self) -> dict[str, int]:
        """Return the size of each axis of the file's matrix.

        Raises:
            CheckpointError: a size is open, or does not fit.
        """
        try:
            return self.axes.sizes((), self.variable.shape, self.rule.sizes)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {error}.\n  cure: a Name with sizes={{...}}") from None

    def numbers(self) -> Matrix | np.ndarray:
        """Return its numbers in the axes of the file.

        Raises:
            CheckpointError: the axes leave sizes open; its numbers are of no kind that files hold.
        """
        if isinstance(self.variable, FrozenParam):
            convert = matrix_of_frozen if self.axes.target else arrays_in_own_order
            return convert(self, self.variable)
        value, axes = np.asarray(self.variable.get_value()), self.axes
        if not axes.outputs:
            return value
        matrix = axes.rows(value, self.sizes(), in_groups=False)
        return matrix if axes.inputs else matrix[:, 0]


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
    for path, variable, layer in stored_variables(index):
        rule = _named(path, rules, unchanged)
        if unchanged and len(rule.files) + len(rule.models) > 2:
            raise CheckpointError(
                f"{path}: method='jqinject' keeps the matrices of the model as they are.\n  cure: no names"
            )
        is_alone = layer is None and isinstance(variable, FrozenParam)
        order = _order_before(path, index) if is_alone else None
        proxy = None if layer is None else layer.input_quant
        places = rule.stacked()
        if len(variable.shape) < len(places):
            raise CheckpointError(
                f"{path}, {variable.shape}, has too few axes for a stack.\n  cure: a Name of one matrix, not of "
                f"{rule.files[0]}"
            )
        for at in np.ndindex(*variable.shape[: len(places)]):
            depth = variable.shape[: len(at)]
            names = rule.filled(dict(zip(places, at, strict=True)))
            single, part = None, _single(variable, at, depth)
            if isinstance(proxy, ActQuantProxyFromInjector):
                single = _single(proxy, at, depth)
                order = _order_of(single.pre_transform, path)
            axes = UNCHANGED if unchanged else _axes(names, path, part)
            yield Weight(path, names, axes, part, single, order)


def _named(path: str, rules: tuple[Name, ...] | None, unchanged: bool) -> Name:
    """Return the first rule that matches a path, those of one tensor and one parameter before the others; without
    rules, the one that the path suggests."""
    for rule in sorted(rules or (), key=lambda rule: len(rule.files) + len(rule.models) > 2):
        match = rule.matches_path(path)
        if match is not None:
            return rule.filled(match[1])
    if rules is not None:
        raise CheckpointError(f"no name is for {path}.\n  cure: names={{'model.weight': {path!r}}}")
    module, dot, leaf = path.rpartition(".")
    return Name(f"{module}{dot}{'weight' if leaf in LEAVES and not unchanged else leaf}", path)


def _single(node: Node, at: tuple[int, ...], depth: tuple[int, ...]) -> Node:
    """Return a layer, or a Variable, at a place in a stack of sizes `depth`, with shared numbers unchanged."""

    def numbers(x: jax.Array) -> jax.Array:
        sizes = x.shape[: len(at)]
        fits = [size in (1, full) for size, full in zip(sizes, depth, strict=False)]
        if len(fits) < len(at) or not all(fits):
            return x
        return x[tuple(0 if size == 1 else place for size, place in zip(sizes, at, strict=True))]

    return jax.tree.map(numbers, node) if at else node


def _axes(rule: Name, path: str, variable: Variable) -> AxesOfLayout:
    """Return the axes of a weight: by its rule, by the axes that are summed over, or by its name."""
    if rule.axes:
        return AxesOfLayout.of(rule.axes)
    ndim = len(variable.shape)
    names = [f"a{axis}" for axis in range(ndim)]
    if not isinstance(variable, FrozenParam):
        is_kernel = path.rpartition(".")[2] == "kernel" and ndim == 2
        return AxesOfLayout.of(TRANSPOSED) if is_kernel else UNCHANGED
    if len(variable.form.shape) != ndim:
        module, dot, leaf = rule.files[0].rpartition(".")
        raise CheckpointError(
            f"{path} is a stack of layers, {variable.shape}, and a matrix is written for each of them.\n"
            f"  cure: names={{'{module}.{{i}}{dot}{leaf}': {path!r}}}, or method='jqinject'"
        )
    summed = {axis % ndim for axis in variable.form.summed} or {1}  # or a table of rows
    if ndim > 2 and not variable.form.summed:
        raise CheckpointError(f"{path} is summed over none of its {ndim} axes, so it is no matrix")
    outs, ins = (
        [n for axis, n in enumerate(names) if (axis in summed) is inside] for inside in (False, True)
    )
    return AxesOfLayout.of(f"({' '.join(outs)}) ({' '.join(ins)}) -> {' '.join(names)}")


def _order_before(path: str, index: ModelIndex) -> np.ndarray | None:
    """Return the order of the input of a parameter that a model contracts by itself, by the model's rules; None if it
    is not permuted."""
    policies = [node.op_quant.policy for _, node in index.places if isinstance(node, QuantizedProgram)]
    rules = [rule for policy in policies if isinstance(policy, RulePolicy) for rule in policy.rules]
    rule = weight_rule(rules, path, path.rpartition(".")[0])
    declared = transform_of(None if rule is None else rule.quantizer("input_quant"))
    proxies = (node for _, node in index.places if isinstance(node, ActQuantProxyFromInjector))
    staying = (proxy for proxy in proxies if not proxy.undo_transform)
    filled = (proxy.pre_transform for proxy in staying if transform_of(proxy.binding) == declared)
    return _order_of(next(filled, declared), path)


def _order_of(transform: object, path: str) -> np.ndarray | None:
    if transform is None:
        return None
    if not isinstance(transform, Permutation):
        raise CheckpointError(
            f"{path}: a transform of the input is not written.\n  cure: a model without online transforms"
        )
    return np.asarray(transform.order.get_value())


def group_of_column(order: np.ndarray, size: int) -> np.ndarray | None:
    """Return the group of each column, int32; None if groups are consecutive columns.

    Args:
        order: the columns, one group after the other.
        size: columns of a group.

    Example:
        >>> group_of_column(np.array([3, 0, 1, 2]), 2).tolist()
        [0, 1, 1, 0]
    """
    consecutive = np.arange(order.size, dtype=np.int32) // size
    groups = consecutive[np.argsort(order)]
    return None if np.array_equal(groups, consecutive) else groups


def frozen_arrays(weight: Weight, frozen: FrozenParam) -> Matrix:
    """Return the arrays of a frozen weight in its axes: scales have a number for a group along its axis.

    Raises:
        CheckpointError: its numbers are of no kind that files hold.
    """
    path, numbers, form = weight.path, frozen.numbers, frozen.form
    if form.in_turn is not None:
        raise CheckpointError(
            f"{path}: groups of outputs that lie in turn are not written.\n  cure: the checkpoint that has them"
        )
    if form.cut is not None:
        raise CheckpointError(
            f"{path}: groups that cross shards are not written.\n  cure: gather the model first"
        )
    grid, groups, order = _checked_grid(form.grid, path), form.groups, weight.order
    payload = form.fitted(numbers["value"].shape).stored.payload(numbers["value"])
    codes = payload if groups is None else groups.join(payload)
    if grid.is_integer or grid.bit_width < 8 or grid.is_table:
        codes = codes.astype(grid.storage if grid.is_integer else np.uint8)

    def one_for_a_group(x: jax.Array) -> np.ndarray:
        return np.asarray(x) if groups is None else np.squeeze(x, axis=x.ndim + groups.dim)

    zero, factor = numbers.get("zero_point"), numbers.get("scale_factor")
    return Matrix(
        np.asarray(codes),
        one_for_a_group(numbers["scale"]),
        grid,
        (1, codes.size if groups is None else groups.size),
        None if zero is None else one_for_a_group(zero),
        factor=None if factor is None else np.asarray(factor),
        table=grid.table,
        group_of_column=None if groups is None or order is None else group_of_column(order, groups.size),
    )


def _checked_grid(grid: Grid, path: str) -> Grid:
    """Return the grid of a weight, if files hold it."""
    if grid.is_integer and grid.bit_width > 8:
        raise CheckpointError(f"{path} has {grid.bit_width} bits; files hold at most 8")
    if not grid.is_minifloat:
        return grid
    name = stored_matrix.minifloat_name(grid) if grid.dtype is not None else ""
    if name:
        return MINIFLOATS[name]
    raise CheckpointError(
        f"{path} has a minifloat, {grid}, that no format of a checkpoint knows.\n"
        "  cure: a quantizer of a published format, such as Fp8e4m3OCPWeightPerChannelFloat, whose e4m3 goes up to 448"
    )


def arrays_in_own_order(weight: Weight, frozen: FrozenParam) -> Matrix:
    """Return the arrays of a frozen weight, with columns in the order of the layer's input before it is permuted.

    Raises:
        CheckpointError: see `frozen_arrays`; which axis is permuted is unknown, or it is not one.
    """
    arrays, order, form = frozen_arrays(weight, frozen), weight.order, frozen.form
    if order is None:
        return arrays
    shape, groups, summed = arrays.codes.shape, form.groups, form.summed
    axis = groups.dim if groups is not None else summed[0] if len(summed) == 1 else None
    if axis is None or shape[axis] != order.size:
        raise CheckpointError(
            f"{weight.path}: its permuted input is no single axis of {shape}, so its columns have no order.\n"
            "  cure: method='compressed-tensors', with names"
        )
    return arrays.map(lambda codes: np.take(codes, np.argsort(order), axis), "codes")


def matrix_of_frozen(weight: Weight, frozen: FrozenParam) -> Matrix:
    """Return codes and scales of a frozen weight as a matrix `(outputs, inputs)`: the inverse of what loading does.

    Columns are in the order of the layer's input before it is permuted.

    Args:
        weight: how rows and columns became its axes.
        frozen: its numbers.

    Raises:
        CheckpointError: its numbers are of no kind that files hold.
    """
    arrays, axes = frozen_arrays(weight, frozen), weight.axes
    groups, sizes = frozen.form.groups, weight.sizes()
    if groups is not None and axes.target[groups.dim] != axes.inputs[-1:]:
        raise CheckpointError(f"{weight.path} has groups that are not consecutive inputs of {axes}")
    in_rows = partial(axes.rows, sizes=sizes, in_groups=groups is not None)
    try:
        matrix = arrays.map(in_rows, "codes", "scale", "zero_point")
    except ValueError as error:
        raise CheckpointError(f"{weight.path}: of its scales, {error}") from None
    if groups is None and matrix.scale.shape[1] != 1:
        raise CheckpointError(f"{weight.path} has scales along its inputs, which are no groups")
    codes = matrix.codes if weight.order is None else matrix.codes[:, np.argsort(weight.order)]
    size = codes.shape[1] if groups is None else groups.size
    return replace(matrix, codes=codes, block=(1, size)).by_row().without_zeros()


def matrices_of(weights: Iterable[Weight]) -> Iterator[SavedMatrix]:
    """Return what is written of the weights of a model, as `loading` undoes it.

    Raises:
        CheckpointError: weights that divide a matrix differ, or some are missing; how the rows of a weight were joined
            is not known.
    """
    waiting: dict[str, list[Weight]] = {}
    for weight in weights:
        parts = waiting.setdefault(weight.rule.files[0], [])
        parts.append(weight)
        parts.sort(key=lambda part: part.rule.models.index(part.path))
        if len(parts) < len(weight.rule.models):
            continue
        del waiting[weight.rule.files[0]]
        numbers, inputs = _joined(parts)
        path, files = parts[0].path, parts[0].rule.files
        if len(files) == 1:
            yield SavedMatrix(files[0], path, numbers, inputs)
            continue
        start = 0
        for name, rows in zip(files, _rows(parts[0], len(numbers)), strict=True):
            yield SavedMatrix(name, path, numbers[start : (start := start + rows)], inputs)
    for name, parts in waiting.items():
        raise CheckpointError(
            f"{name} is made of {len(parts[0].rule.models)} parameters, of which the model has "
            f"{_paths(parts)}.\n  cure: a Name of the parameters that the model has"
        )


def _joined(weights: Sequence[Weight]) -> tuple[Matrix | np.ndarray, InputFormat | None]:
    """Return the rows of weights above one another, and how their inputs are quantized."""
    are_frozen = [isinstance(weight.variable, FrozenParam) for weight in weights]
    _shared(weights, are_frozen, "which are frozen, and which not")
    _shared(weights, [weight.order for weight in weights], "the order of their columns")
    formats = [input_format_of(weight.proxy, weight.path, weight.order is not None) for weight in weights]
    inputs = _shared(weights, formats, "how their inputs are quantized")
    numbers = [weight.numbers() for weight in weights]
    return stored_matrix.gathered(numbers, f"{weights[0].rule.files[0]} of {_paths(weights)}"), inputs


def _shared(weights: Sequence[Weight], values: Sequence[T], what: str) -> T:
    """Return what all weights of a matrix have in common."""
    if any(not _same(value, values[0]) for value in values[1:]):
        raise CheckpointError(
            f"{_paths(weights)} are one matrix, {weights[0].rule.files[0]}, but differ in {what}.\n"
            "  cure: one rule for all of them, or a Name for each"
        )
    return values[0]


def _same(a: object, b: object) -> bool:
    if isinstance(a, InputFormat) and isinstance(b, InputFormat):
        return all(np.array_equal(vars(a)[name], vars(b)[name]) for name in vars(a))
    return type(a) is type(b) and np.array_equal(np.asarray(a), np.asarray(b))


def _rows(weight: Weight, rows: int) -> tuple[int, ...]:
    """Return how many of all rows each of the matrices has that were joined to make a weight."""
    rule, names, count = weight.rule, ", ".join(weight.rule.files), len(weight.rule.files)
    if rule.rows is not None:
        if sum(rule.rows) != rows:
            stated = " + ".join(map(str, rule.rows))
            raise CheckpointError(f"{weight.path} has {rows} rows; its Name says {stated} for {names}")
        return rule.rows
    first, *_ = (*weight.axes.outputs, "")
    if rule.sizes.get(first) != count:
        raise CheckpointError(
            f"{weight.path} joins {names}; how many rows each has is not said.\n"
            "  cure: a Name with rows=(...), a number for each; or axes that begin with an axis of the tensors, "
            f"'(part out) in -> in (part out)' with sizes={ {'part': count} }, if all have as many"
        )
    return (rows // count,) * count


def _paths(weights: Sequence[Weight]) -> str:
    return ", ".join(weight.path for weight in weights)
