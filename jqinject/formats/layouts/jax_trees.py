"""Trees of arrays of JAX's own libraries: Qwix's `QArray`s, and the `QTensor`s that AQT freezes.

Arrays lie as the model's parameters do. `qvalue`, `scale` and `zero_point` have one rank; along an axis a scale has as
many numbers as the codes, one, or one for each tile. `weight = (qvalue - zero_point) * scale`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.files.tensors import Tensor
from jqinject.formats.stored_matrix import E2M1, NumberFormat, Numbers, StoredMatrix

# What an AQT module calls the places of its frozen operands.
FROZEN = re.compile(r"(?:^|\.)Aqt\w+\.q[lr]hs\.frozen$|\.?q[lr]hs\.frozen$|\.?frozen$")
MINIFLOATS = {
    "float8_e4m3fn": NumberFormat("float", 8, name="e4m3"),
    "float8_e5m2": NumberFormat("float", 8, name="e5m2"),
    "float4_e2m1fn": NumberFormat("float", 4, name="e2m1"),
}


@dataclass(frozen=True)
class Leaf:
    """A quantized array of a tree.

    Attributes:
        codes, scale, zero_point: its arrays.
        qtype: what the codes are, if the tree says so.
        tile: numbers of a tile, the last of which may be short; None for tiles that fill their axis.
    """

    codes: Any
    scale: Any
    zero_point: Any = None
    qtype: str = ""
    tile: int | None = None


def read_tree(tree: Mapping[Any, Any]) -> tuple[str, list[StoredMatrix], dict[str, Tensor]]:
    """The quantized arrays of a tree and its other arrays, by their paths; and whose tree it is.

    Args:
        tree: nested mappings (or an `nnx.State`) of arrays and of quantized arrays: objects, or mappings of `qvalue`,
            `scale` and, in Qwix's, `zero_point` and `qtype`.

    Raises:
        CheckpointError: something else; codes whose meaning nothing says; scales that do not fit.
    """
    matrices: dict[str, StoredMatrix] = {}
    arrays: dict[str, Tensor] = {}
    methods = set()
    for name, held in _leaves(tree, ""):
        if not isinstance(held, Leaf):
            arrays[name] = Tensor(
                np.dtype(held.dtype), tuple(held.shape), "the tree", partial(np.asarray, held)
            )
            continue
        frozen = FROZEN.sub("", name)
        methods.add("qwix" if frozen == name else "aqt")
        own = name if frozen == name else f"{frozen}.kernel".lstrip(".")
        if own in matrices:
            raise CheckpointError(f"{own} is frozen twice in the tree")
        matrices[own] = _matrix(own, held)
    for name in matrices:
        arrays.pop(name, None)  # AQT may leave the float kernel beside what it froze
    if len(methods) > 1:
        raise CheckpointError("the tree has quantized arrays of Qwix and of AQT")
    return (methods.pop() if methods else "float"), list(matrices.values()), arrays


def _leaves(node: Any, at: str) -> Iterator[tuple[str, Any]]:
    """Arrays and quantized arrays, by their paths."""
    node = _unwrapped(node)
    if node is None:
        return
    parts = _parts(node)
    if parts is not None:
        yield at, _leaf(at, parts)
    elif isinstance(node, Mapping):
        for key, below in node.items():
            name = str(key)
            if name == "array" and len(node) == 1:  # Qwix's box
                yield from _leaves(below, at)
            elif name not in ("params", "aqt") or at:
                yield from _leaves(below, f"{at}.{name}" if at else name)
            else:
                yield from _leaves(below, at)
    elif isinstance(node, list | tuple):
        for place, below in enumerate(node):
            yield from _leaves(below, f"{at}.{place}")
    elif hasattr(node, "shape") and hasattr(node, "dtype"):
        yield at, node
    else:
        raise CheckpointError(
            f"{at or 'the tree'} is a {type(node).__name__}, expected arrays and mappings of them"
        )


def _unwrapped(node: Any) -> Any:
    """What boxes and Variables hold."""
    if hasattr(node, "get_raw_value"):
        return _unwrapped(node.get_raw_value())
    if hasattr(node, "array") and hasattr(node, "how"):
        return _unwrapped(node.array)
    return node


def _parts(node: Any) -> Mapping[str, Any] | None:
    if isinstance(node, Mapping):
        return node if {"qvalue", "scale"} <= {*map(str, node)} else None
    if hasattr(node, "qvalue") and hasattr(node, "scale"):
        names = ("qvalue", "scale", "zero_point", "qtype", "bias")
        return {name: getattr(node, name) for name in names if hasattr(node, name)}
    return None


def _leaf(name: str, parts: Mapping[str, Any]) -> Leaf:
    held = {key: _unwrapped(value) for key, value in parts.items()}
    bias = held.get("bias")
    if bias is not None and _listed(bias):
        raise CheckpointError(f"{name} has a bias, which is not read: AQT's symmetric numbers have none")
    if held["qvalue"] is None or held["scale"] is None:
        raise CheckpointError(f"{name} has no {'qvalue' if held['qvalue'] is None else 'scale'}")
    scales = _listed(held["scale"])
    if not scales:
        raise CheckpointError(f"{name} has no scale")
    scale = scales[0] if len(scales) == 1 else math.prod(np.asarray(each, np.float32) for each in scales)  # pyright: ignore
    zero = held.get("zero_point")
    qtype = held.get("qtype")
    said = "" if qtype is None else qtype if isinstance(qtype, str) else np.dtype(qtype).name
    return Leaf(held["qvalue"], scale, zero, said)


def _listed(x: Any) -> list[Any]:
    if isinstance(x, Mapping):
        return [_unwrapped(x[key]) for key in sorted(x, key=str)]
    return [_unwrapped(each) for each in x] if isinstance(x, list | tuple) else [x]


def _format(name: str, leaf: Leaf) -> NumberFormat:
    dtype, zero = np.dtype(leaf.codes.dtype).name, leaf.zero_point is not None
    if leaf.qtype == "nf4":
        return NumberFormat("table", 4, name="nf4")
    if dtype in MINIFLOATS:
        form = MINIFLOATS[dtype]
        if zero:
            raise CheckpointError(f"{name} has minifloats with a zero point")
        mx = np.dtype(leaf.scale.dtype).name == "float8_e8m0fnu"
        return replace(form, scale="e8m0") if mx else form
    found = re.fullmatch(r"(u?)int([2-8])", dtype)
    if found is None:
        raise CheckpointError(
            f"{name} has codes of {dtype}; known are integers of 2 to 8 bits, {', '.join(MINIFLOATS)}"
        )
    if found[1] and not zero:
        raise CheckpointError(
            f"{name} has codes of {dtype} without a zero point: integers, or places in a table such as NF4's.\n"
            "  cure: 'qtype' beside 'qvalue', or Qwix's own arrays, which say so"
        )
    bits = re.fullmatch(r"u?int([2-8])", leaf.qtype)
    return NumberFormat("int", int(bits[1] if bits else found[2]), not found[1], has_zero_point=zero)


def _matrix(name: str, leaf: Leaf) -> StoredMatrix:
    form = _format(name, leaf)
    table = E2M1 if (form.kind, form.bits) == ("float", 4) else None
    if form.kind == "table":
        from jqinject.ops import NF4  # imports JAX, which such arrays come from

        table = NF4.table
    return matrix_of_leaf(name, leaf, form, table)


def matrix_of_leaf(
    name: str, leaf: Leaf, form: NumberFormat, table: np.ndarray | None = None, factor: Any = None
) -> StoredMatrix:
    """A quantized array as the rows of a matrix: its axes with a scale for each index, by all others.

    Args:
        name: of the parameter.
        leaf: its arrays.
        form: what the codes are.
        table: numbers by their codes.
        factor: of all scales; an array, read when it is needed.

    Raises:
        CheckpointError: the scales do not fit the codes.
    """
    shape, of_scale = tuple(leaf.codes.shape), tuple(np.shape(leaf.scale))
    outs, ins, tile = _sides(name, leaf, shape, of_scale)
    decode: Callable[[], Numbers] = partial(_decode, leaf, form, table, factor, outs, ins, tile)
    letters = [f"a{at}" for at in range(len(shape))]
    rows, columns = (" ".join(letters[at] for at in side) for side in (outs, ins))
    sizes = [math.prod(shape[at] for at in side) for side in (outs, ins)]
    ends = ("qvalue", "scale", *(("zero_point",) if form.has_zero_point else ()))
    parts = tuple(f"{name}.{end}" for end in ends)
    size = math.prod(shape) * form.bits // 8
    found = StoredMatrix(name, (sizes[0], sizes[1]), form, f"tree of {form.label}", parts, size, decode)
    return replace(found, axes=f"({rows}) ({columns}) -> {' '.join(letters)}", parameter_shape=shape)


def _sides(
    name: str, leaf: Leaf, shape: tuple[int, ...], of_scale: tuple[int, ...]
) -> tuple[list[int], list[int], int | None]:
    """The axes of rows and of columns, the last of which has the tiles; and their size."""
    of_zero = of_scale if leaf.zero_point is None else tuple(np.shape(leaf.zero_point))
    both = list(enumerate(zip(shape, of_scale, strict=False)))
    tiles = {at: leaf.tile or n // max(each, 1) for at, (n, each) in both if 1 < each < n}
    fits = all(each in (1, n) or (at in tiles and -(-n // tiles[at]) == each) for at, (n, each) in both)
    if not shape or len(shape) != len(of_scale) or not fits or of_zero != of_scale:
        raise CheckpointError(
            f"{name} has codes of {shape}, scales of {of_scale}"
            f"{'' if of_zero == of_scale else f', zero points of {of_zero}'}: along each axis the codes are whole "
            "tiles of the scales"
        )
    if len(tiles) > 1:
        raise CheckpointError(f"{name} has tiles along the axes {list(tiles)}; one axis can have them")
    outs = [at for at, (n, each) in both if each == n > 1]
    ins = [at for at, _ in both if at not in outs and at not in tiles] + list(tiles)
    if not outs and ins:
        outs, ins = ins[:1], ins[1:]
        if outs[0] in tiles or (not tiles and len(both) > 1):
            outs, ins = [both[-1][0]], [at for at, _ in both[:-1]]
    if not outs or not ins or outs[0] in tiles:
        raise CheckpointError(f"{name} has one scale for each of its numbers, {shape}")
    tile = tiles.get(ins[-1])
    ragged = tile is not None and shape[ins[-1]] % tile
    if ragged and math.prod(shape[at] for at in ins[:-1]) > 1:
        raise CheckpointError(
            f"{name}: tiles of {tile} do not fill {shape[ins[-1]]} numbers of one axis of several"
        )
    return outs, ins, tile


def _decode(
    leaf: Leaf,
    form: NumberFormat,
    table: np.ndarray | None,
    factor: Any,
    outs: list[int],
    ins: list[int],
    tile: int | None,
) -> Numbers:
    shape = leaf.codes.shape
    columns = math.prod(shape[at] for at in ins)

    def rows(x: Any) -> np.ndarray:
        x = np.asarray(x)
        if tile is not None:  # scales that further columns share
            x = np.broadcast_to(x, [shape[at] if at in ins[:-1] else n for at, n in enumerate(x.shape)])
        x = x.transpose(*outs, *ins)
        return np.ascontiguousarray(x.reshape(math.prod(x.shape[: len(outs)]), -1))

    codes = rows(leaf.codes)
    if form.kind == "float" and form.bits < 8:
        codes = codes.view(np.uint8)
    elif form.kind != "float":
        codes = codes.astype(np.int8 if form.kind == "int" and form.signed else np.uint8)
    scale = rows(leaf.scale)
    if scale.dtype == np.dtype(ml_dtypes.float8_e4m3fn) and factor is None:
        scale = scale.astype(np.float32)
    zero = None if leaf.zero_point is None else rows(leaf.zero_point)
    if zero is not None and re.fullmatch(r"u?int[2-8]", zero.dtype.name):
        zero = zero.astype(np.int8 if form.signed else np.uint8)
    elif zero is not None and not np.issubdtype(zero.dtype, np.integer):
        zero = zero.astype(np.float32)
    whole = None if factor is None else np.float32(np.asarray(factor).reshape(()))
    return Numbers(codes, scale, (1, columns if tile is None else tile), zero, factor=whole, table=table)
