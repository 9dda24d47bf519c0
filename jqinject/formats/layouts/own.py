"""jqinject's own layout: arrays in the axes of the parameters, and what they are in `config.json`.

| tensor                | array                                                                                   |
|-----------------------|-----------------------------------------------------------------------------------------|
| `X.codes`             | 8 bits: in the parameter's shape; fewer: one dense stream of words, little-endian        |
| `X.scale`             | of the parameter's rank; along an axis one number, one for each index, or one for a group |
| `X.zero_point`        | likewise, if there are any                                                              |
| `X.scale_factor`      | one number for all scales in bytes, if there is one                                     |
| `X.table`             | the numbers of the codes of a table                                                     |
| `X.g_idx`             | the group of each index of the axis with groups, if these are not consecutive            |

`quantization_config`: `quant_method: jqinject`, `format_version`, and `weights`: for each `X` its `kind`, `bits`,
`signed`, `name`, `shape`, `group` and, if its layer quantizes its input, `input`. A change of meaning gets another
version.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from jqinject.formats.bits import unpack_stream
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.files.tensors import Tensor, Tensors
from jqinject.formats.layouts.common import Settings, checked_groups
from jqinject.formats.layouts.jax_trees import Leaf, matrix_of_leaf
from jqinject.formats.stored_matrix import E2M1, E2M3, InputFormat, NumberFormat, Numbers, StoredMatrix

FORMAT_VERSION = 1
KEYS = ("kind", "bits", "signed", "name", "shape", "group", "input")
SCALES = {"float8_e8m0fnu": "e8m0", "float8_e4m3fn": "e4m3"}
INPUTS = (
    "kind",
    "bits",
    "symmetric",
    "strategy",
    "group_size",
    "dynamic",
    "scale",
    "zero_point",
    "global_scale",
    "unsigned",
)


@dataclass(frozen=True)
class _Later:
    """An array that is read when it is asked for."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Any = field(repr=False)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        found = self.read()
        return found if dtype is None else found.astype(dtype)


def read_own(tensors: Tensors, config: Settings) -> list[StoredMatrix]:
    """The matrices of a checkpoint that `save(method="jqinject")` wrote.

    Args:
        tensors: of the files.
        config: `quantization_config`.

    Raises:
        CheckpointError: a version that is not known; settings that are unknown or contradict the tensors.
    """
    version = config.integer("format_version")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{config.where}: format_version is {version}; this release reads up to {FORMAT_VERSION}.\n"
            "  cure: a newer jqinject"
        )
    weights = config.below("weights")
    if weights is None:
        raise CheckpointError(f"{config.where} has no weights")
    return [
        _matrix(tensors, name, Settings(held, f"{weights.where}.{name}"))
        for name, held in weights.held.items()
    ]


def _matrix(tensors: Tensors, name: str, settings: Settings) -> StoredMatrix:
    unknown = sorted({*map(str, settings.held)} - {*KEYS})
    if unknown:
        raise CheckpointError(f"{settings.where}: {unknown[0]} is not known; known are {', '.join(KEYS)}")
    shape = settings.held.get("shape")
    if not isinstance(shape, list) or not all(isinstance(size, int) and size > 0 for size in shape):
        raise CheckpointError(f"{settings.where}: shape is {shape!r}, expected sizes")
    kind, bits = (
        settings.choice("kind", ("int", "float", "table")),
        settings.choice("bits", tuple(range(1, 9))),
    )
    names = {"int": ("",), "float": ("e4m3", "e5m2", "e2m1", "e2m3"), "table": ("", "nf4", "fp4")}[kind]
    scale = tensors.take(f"{name}.scale")
    has_zero = f"{name}.zero_point" in tensors
    form = NumberFormat(
        kind,
        bits,
        settings.flag("signed", True),
        settings.choice("name", names, ""),
        SCALES.get(scale.dtype.name, "float"),
        has_zero,
    )
    group = settings.integer("group") if settings.held.get("group") is not None else None
    leaf = Leaf(
        _codes(tensors, name, form, tuple(shape)),
        _later(scale),
        _later(tensors.take(f"{name}.zero_point")) if has_zero else None,
        tile=group,
    )
    table = tensors.take(f"{name}.table", (None,), "float32").read() if kind == "table" else None
    if table is not None and not 1 <= table.size <= 2**bits:
        raise CheckpointError(f"{name}.table has {table.size} numbers for codes of {bits} bits")
    if kind == "float" and bits < 8:
        table = E2M1 if bits == 4 else E2M3
    factor = _later(tensors.take(f"{name}.scale_factor")) if f"{name}.scale_factor" in tensors else None
    made = matrix_of_leaf(name, leaf, form, table, factor)
    if f"{name}.g_idx" in tensors:
        made = _in_order(
            made, tensors.take(f"{name}.g_idx", (made.shape[1],), "int32"), f"{name}.g_idx", group
        )
    return made.with_input(_input(settings.below("input")))


def _in_order(matrix: StoredMatrix, found: Tensor, name: str, group: int | None) -> StoredMatrix:
    """A matrix whose columns are not in the order of their groups."""
    checked_groups(found, name, 1 if group is None else -(-matrix.shape[1] // group))

    def decode() -> Numbers:
        return replace(matrix.read(), group_of_column=found.read())

    return replace(matrix, decode=decode, column_groups=found.read)


def _codes(tensors: Tensors, name: str, form: NumberFormat, shape: tuple[int, ...]) -> _Later:
    if form.bits == 8:
        floats = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}.get(form.name)
        held = tensors.take(
            f"{name}.codes", shape, floats or ("int8" if form.signed and form.kind == "int" else "uint8")
        )
        return _later(held)
    count = math.prod(shape)
    held = tensors.take(
        f"{name}.codes", (-(-count * form.bits // 32),), "int32", f"{count} codes of {form.bits} bits"
    )
    signed = form.kind == "int" and form.signed
    return _Later(
        shape, np.dtype(np.int8 if signed else np.uint8), partial(_unpacked, held, form.bits, shape, signed)
    )


def _unpacked(held: Tensor, bits: int, shape: tuple[int, ...], signed: bool) -> np.ndarray:
    codes = unpack_stream(held.read(), bits, math.prod(shape)).reshape(shape)
    if not signed:
        return codes
    return ((codes.astype(np.int16) ^ (1 << bits - 1)) - (1 << bits - 1)).astype(np.int8)


def _later(tensor: Tensor) -> _Later:
    return _Later(tensor.shape, tensor.dtype, tensor.read)


def _input(settings: Settings | None) -> InputFormat | None:
    if settings is None:
        return None
    held: Mapping[str, Any] = settings.held
    unknown = sorted({*map(str, held)} - {*INPUTS})
    if unknown:
        raise CheckpointError(f"{settings.where}: {unknown[0]} is not known; known are {', '.join(INPUTS)}")
    arrays = {
        name: np.asarray(held[name], np.float32)
        for name in ("scale", "zero_point", "global_scale")
        if name in held
    }
    return InputFormat(
        settings.choice("kind", ("int", "float")),
        settings.integer("bits"),
        settings.flag("symmetric", True),
        settings.choice("strategy", ("tensor", "token", "group", "tensor_group"), "tensor"),
        held.get("group_size"),
        settings.flag("dynamic", True),
        **arrays,
        unsigned=settings.flag("unsigned", False),
    )
