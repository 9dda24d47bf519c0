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

from jqinject.formats.errors import CheckpointError
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
    """

    codes: Any
    scale: Any
    zero_point: Any = None
    qtype: str = ""


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
    """A quantized array as the rows of a matrix: its axes with a scale for each index, by all others."""
    shape, of_scale = tuple(leaf.codes.shape), tuple(np.shape(leaf.scale))
    of_zero = of_scale if leaf.zero_point is None else tuple(np.shape(leaf.zero_point))
    fits = len(shape) == len(of_scale) and all(
        each and n % each == 0 for n, each in zip(shape, of_scale, strict=False)
    )
    if not shape or not fits or of_zero != of_scale:
        raise CheckpointError(
            f"{name} has codes of {shape}, scales of {of_scale}"
            f"{'' if of_zero == of_scale else f', zero points of {of_zero}'}: along each axis the codes are whole "
            "tiles of the scales"
        )
    tiled = [at for at, (n, each) in enumerate(zip(shape, of_scale, strict=True)) if 1 < each < n]
    if len(tiled) > 1:
        raise CheckpointError(f"{name} has tiles along the axes {tiled}; one axis can have them")
    outs = [
        at
        for at, (n, each) in enumerate(zip(shape, of_scale, strict=True))
        if each == n and (n > 1 or at == len(shape) - 1)
    ]
    ins = [at for at in range(len(shape)) if at not in (*outs, *tiled)] + tiled
    if not outs and len(ins) > 1 and not tiled:
        outs, ins = ins[-1:], ins[:-1]
    form = _format(name, leaf)
    tile = shape[ins[-1]] // of_scale[ins[-1]] if ins else 1
    wide = math.prod(shape[at] for at in ins) if not tiled else tile
    decode: Callable[[], Numbers] = partial(_decode, leaf, form, outs, ins, wide)
    letters = [f"a{at}" for at in range(len(shape))]
    rows = " ".join(letters[at] for at in outs) or "one"
    columns = " ".join(letters[at] for at in ins) or "one"
    axes = f"({rows}) ({columns}) -> {' '.join(letters)}" if outs and ins else None
    if axes is None:
        raise CheckpointError(f"{name} has one scale for each number, or for none")
    made = (math.prod(shape[at] for at in outs), math.prod(shape[at] for at in ins))
    parts = tuple(
        f"{name}.{end}" for end in ("qvalue", "scale") + (("zero_point",) if form.has_zero_point else ())
    )
    size = math.prod(shape) * form.bits // 8
    found = StoredMatrix(name, made, form, f"tree of {form.label}", parts, size, decode)
    return replace(found, axes=axes, parameter_shape=shape)


def _decode(leaf: Leaf, form: NumberFormat, outs: list[int], ins: list[int], block: int) -> Numbers:
    def rows(x: Any) -> np.ndarray:
        x = np.asarray(x)
        x = x.transpose(*outs, *ins)
        return np.ascontiguousarray(x.reshape(math.prod(x.shape[: len(outs)]), -1))

    codes = rows(leaf.codes)
    if form.kind == "float" and form.bits == 4:
        codes = codes.view(np.uint8)
    elif form.kind != "float":
        codes = codes.astype(np.int8 if form.kind == "int" and form.signed else np.uint8)
    scale = rows(leaf.scale)
    if scale.dtype == np.dtype(ml_dtypes.float8_e4m3fn):
        scale = scale.astype(np.float32)
    zero = None if leaf.zero_point is None else rows(leaf.zero_point)
    if zero is not None and not np.issubdtype(zero.dtype, np.integer):
        zero = (
            zero.astype(np.int8 if form.signed else np.uint8)
            if zero.dtype.itemsize == 1
            else zero.astype(np.float32)
        )
    table = E2M1 if (form.kind, form.bits) == ("float", 4) else None
    if form.kind == "table":
        from jqinject.ops import NF4  # imports JAX, which such arrays come from

        table = NF4.table
    return Numbers(codes, scale, (1, block), zero, table=table)
