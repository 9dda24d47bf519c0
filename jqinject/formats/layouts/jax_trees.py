"""Trees of arrays of JAX's own libraries: Qwix's `QArray`s, and the `QTensor`s that AQT freezes.

Arrays have the axes of the model's parameters. `qvalue`, `scale` and `zero_point` have one rank; along an axis a scale
has as many numbers as the codes, one, or one for each tile. `weight = (qvalue - zero_point) * scale`.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np
from flax import nnx

from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.layout_axes import AxesOfLayout
from jqinject.formats.safetensors_files import Tensor
from jqinject.formats.stored_matrix import MINIFLOATS, StoredMatrix, label_of
from jqinject.ops import NF4, Grid, IntGrid

PARTS = ("qvalue", "scale", "zero_point", "qtype", "bias")
# What an AQT module calls the places of its frozen operands.
FROZEN = re.compile(r"(?:^|\.)Aqt\w+\.q[lr]hs\.frozen$|\.?q[lr]hs\.frozen$|\.?frozen$")
GRIDS = {str(grid): grid for name, grid in MINIFLOATS.items() if name != "e2m3"}

#: Nested mappings of arrays, and of what Qwix or AQT quantized.
Tree: TypeAlias = Mapping[Any, Any]
#: What a tree has: mappings, lists, boxes, arrays.
Node: TypeAlias = Any
Array: TypeAlias = jax.Array | np.ndarray | np.generic


@runtime_checkable
class _Box(Protocol):
    """An array with the way in which Qwix quantized it."""

    array: Node
    how: object


@runtime_checkable
class _QuantizedArray(Protocol):
    """Qwix's `QArray`, AQT's `QTensor`."""

    qvalue: Node
    scale: Node


def read_tree(tree: Mapping[str, Node]) -> tuple[str, dict[str, StoredMatrix], dict[str, Tensor]]:
    """Return the quantized arrays of a tree and its other arrays, by their paths; and which library made it.

    Args:
        tree: nested mappings (or an `nnx.State`) of arrays and of quantized arrays: objects, or mappings of `qvalue`,
            `scale` and, in Qwix's, `zero_point` and `qtype`.

    Raises:
        CheckpointError: something else; codes whose meaning nothing says; scales that do not fit.
    """
    matrices: dict[str, StoredMatrix] = {}
    arrays: dict[str, Tensor] = {}
    methods = set()
    for name, leaf in _leaves(tree, ""):
        if not isinstance(leaf, Mapping):
            arrays[name] = _tensor(leaf)
            continue
        frozen = FROZEN.sub("", name)
        methods.add("qwix" if frozen == name else "aqt")
        path = name if frozen == name else f"{frozen}.kernel".lstrip(".")
        if path in matrices:
            raise CheckpointError(f"{path} is frozen twice in the tree")
        matrices[path] = _matrix(path, leaf)
    if len(methods) > 1:
        raise CheckpointError("the tree has quantized arrays of Qwix and of AQT")
    # AQT may leave the float kernel next to what it froze.
    rest = {name: array for name, array in arrays.items() if name not in matrices}
    return (methods.pop() if methods else "float"), matrices, rest


def _tensor(x: Array) -> Tensor:
    return Tensor(np.dtype(x.dtype), tuple(x.shape), "the tree", partial(np.asarray, x))


def _leaves(node: Node, at: str) -> Iterator[tuple[str, Array | Mapping[str, Node]]]:
    """Return arrays, and the parts of quantized arrays, by their paths."""
    node = _unwrapped(node)
    if node is None:
        return
    parts = _parts(node)
    if parts is not None:
        yield at, parts
    elif isinstance(node, Mapping | list | tuple):
        for key, below in node.items() if isinstance(node, Mapping) else enumerate(node):
            name = str(key)
            is_wrapper = (name == "array" and len(node) == 1) or (name in ("params", "aqt") and not at)
            yield from _leaves(below, at if is_wrapper else f"{at}.{name}".lstrip("."))
    elif isinstance(node, Array):
        yield at, node
    else:
        raise CheckpointError(
            f"{at or 'the tree'} is a {type(node).__name__}, expected arrays and mappings of them"
        )


def _unwrapped(node: Node) -> Node:
    """Return what boxes and Variables hold."""
    if isinstance(node, nnx.Variable):
        return _unwrapped(node.get_raw_value())
    return _unwrapped(node.array) if isinstance(node, _Box) else node


def _parts(node: Node) -> Mapping[str, Node] | None:
    if isinstance(node, Mapping):
        return node if {"qvalue", "scale"} <= {*map(str, node)} else None
    if isinstance(node, _QuantizedArray):
        return {name: getattr(node, name, None) for name in PARTS}
    return None


def _listed(x: Node) -> list[Array]:
    """Return the arrays of a list, a mapping, or a single one; an empty list of None."""
    return [_unwrapped(leaf) for leaf in jax.tree.leaves(x, is_leaf=lambda x: isinstance(x, nnx.Variable))]


def _matrix(name: str, leaf: Mapping[str, Node]) -> StoredMatrix:
    parts = {key: _unwrapped(value) for key, value in leaf.items()}
    if _listed(parts.get("bias")):
        raise CheckpointError(f"{name} has a bias, which is not read: AQT's symmetric numbers have none")
    codes, zero, qtype = parts["qvalue"], parts.get("zero_point"), parts.get("qtype")
    scales = _listed(parts["scale"])
    if codes is None or not scales:
        raise CheckpointError(f"{name} has no {'qvalue' if codes is None else 'scale'}")
    scale = scales[0]
    for more in scales[1:]:
        scale = np.asarray(scale, np.float32) * np.asarray(more, np.float32)
    stated = qtype if isinstance(qtype, str) else "" if qtype is None else np.dtype(qtype).name
    grid = _grid(name, np.dtype(codes.dtype).name, stated, zero is not None)
    arrays = {"codes": codes, "scale": scale, "zero_point": zero, "table": NF4.table if grid == NF4 else None}
    stored = {part: _tensor(array) for part, array in arrays.items() if array is not None}
    return matrix_of_arrays(name, stored, grid)


def _grid(name: str, dtype: str, qtype: str, has_zero: bool) -> Grid:
    if qtype == "nf4":
        return NF4
    if dtype in GRIDS:
        if has_zero:
            raise CheckpointError(f"{name} has minifloats with a zero point")
        return GRIDS[dtype]
    integers = re.fullmatch(r"(u?)int([2-8])", dtype)
    if integers is None:
        raise CheckpointError(f"{name} has codes of {dtype}; known are int2 to int8, {', '.join(GRIDS)}")
    if integers[1] and not has_zero:
        raise CheckpointError(
            f"{name} has codes of {dtype} without zero points: integers or of a table?\n  cure: 'qtype' beside 'qvalue'"
        )
    bits = re.fullmatch(r"u?int([2-8])", qtype)
    return IntGrid(int(bits[1] if bits else integers[2]), not integers[1])


def matrix_of_arrays(
    name: str, arrays: Mapping[str, Tensor], grid: Grid, group: int | None = None
) -> StoredMatrix:
    """Return a quantized array as a matrix: its axes with a scale for each index are the rows, all others the columns.

    Args:
        name: of the parameter.
        arrays: as `StoredMatrix` has them; codes, scales and zero points in the axes of the parameter.
        grid: of the codes.
        group: numbers of a tile, the last of which may be short; None for tiles that fill their axis.

    Raises:
        CheckpointError: the scales do not fit the codes.
    """
    codes, scale = arrays["codes"], arrays["scale"]
    shape, zero = codes.shape, arrays.get("zero_point")
    outs, ins, tile = _sides(name, shape, scale.shape, scale.shape if zero is None else zero.shape, group)
    rows, columns = (math.prod(shape[at] for at in side) for side in (outs, ins))
    left, right, target = (" ".join(f"a{at}" for at in side) for side in (outs, ins, range(len(shape))))
    axes, sizes = f"({left}) ({right}) -> {target}", {f"a{at}": size for at, size in enumerate(shape)}
    in_rows = partial(AxesOfLayout.of(axes).rows, sizes=sizes, in_groups=tile is not None)

    def stored(x: np.ndarray) -> np.ndarray:
        if not grid.is_minifloat:
            return in_rows(x).astype(grid.storage)
        return in_rows(x) if grid.bit_width == 8 else in_rows(x).view(np.uint8)

    is_float32 = "factor" not in arrays and scale.dtype.name == "float8_e4m3fn"
    scale_dtype = np.dtype(np.float32) if is_float32 else scale.dtype
    in_bytes = replace(codes, dtype=np.dtype(np.uint8), shape=(math.prod(shape) * grid.bit_width // 8,))
    by_row = {
        "codes": in_bytes.map(stored),
        "scale": scale.map(lambda x: in_rows(x).astype(scale_dtype), scale_dtype),
    }
    if zero is not None:
        zero_dtype = np.int32 if "int" in zero.dtype.name else np.float32
        by_row["zero_point"] = zero.map(lambda x: in_rows(x).astype(zero_dtype))
    layout, block = f"tree of {label_of(grid, scale_dtype)}", (1, columns if tile is None else tile)
    by_row = {**arrays, **by_row}
    return StoredMatrix(name, (rows, columns), grid, layout, block, by_row, axes=axes, parameter_shape=shape)


def _sides(
    name: str, shape: tuple[int, ...], scales: tuple[int, ...], zeros: tuple[int, ...], group: int | None
) -> tuple[list[int], list[int], int | None]:
    """Return the axes of rows and of columns, the last of which has the tiles; and their size."""
    axes = list(zip(range(len(shape)), shape, scales, strict=False))
    tiles = {at: group or n // max(count, 1) for at, n, count in axes if 1 < count < n}
    fits = all(count in (1, n) or (at in tiles and -(-n // tiles[at]) == count) for at, n, count in axes)
    if not shape or len(shape) != len(scales) or not fits or zeros != scales:
        raise CheckpointError(
            f"{name} has codes of {shape}, scales of {scales}, zero points of {zeros}: no whole tiles along an axis"
        )
    if len(tiles) > 1:
        raise CheckpointError(f"{name} has tiles along the axes {list(tiles)}; one axis can have them")
    outs = [at for at, n, count in axes if count == n > 1]
    rest = [at for at, _, _ in axes if at not in outs and at not in tiles]
    if not outs and rest:
        outs = [rest.pop(0 if tiles else -1)]
    ins = rest + list(tiles)
    if not outs or not ins:
        raise CheckpointError(f"{name} has one scale for each of its numbers, {shape}")
    tile = tiles.get(ins[-1])
    if tile is not None and shape[ins[-1]] % tile and math.prod(shape[at] for at in rest) > 1:
        raise CheckpointError(f"{name}: tiles of {tile} do not fill axis {ins[-1]} of {shape}")
    return outs, ins, tile
