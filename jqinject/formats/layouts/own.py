"""jqinject's own layout: arrays in the axes of the parameters, and what they are in `config.json`.

| tensor                | array                                                                                   |
|-----------------------|-----------------------------------------------------------------------------------------|
| `X.codes`             | 8 bits: in the parameter's shape; fewer: one dense stream of words, little-endian        |
| `X.scale`             | of the parameter's rank; along an axis one number, one for each index, or one for a group |
| `X.zero_point`        | likewise, if there are any                                                              |
| `X.scale_factor`      | one number for all scales in bytes; absent for 1                                        |
| `X.table`             | the numbers of the codes of a table                                                     |
| `X.g_idx`             | the group of each index of the axis with groups, if these are not consecutive            |

`quantization_config`: `quant_method: jqinject`, `format_version`, and `weights`: for each `X` its `kind`, `bits`,
`signed`, `name`, `shape`, `group` and, if its layer quantizes its input, `input`. A change of meaning gets another
version.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from jqinject.formats import stored_matrix
from jqinject.formats.bits import pack_stream, unpack_stream
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.layouts.jax_trees import matrix_of_arrays
from jqinject.formats.layouts.layout_settings import Settings, columns_in_groups, stated_format
from jqinject.formats.safetensors_files import Tensor, Tensors, Values
from jqinject.formats.stored_matrix import MINIFLOATS, InputFormat, SavedMatrix, StoredMatrix
from jqinject.ops import Grid, IntGrid

FORMAT_VERSION = 1
KEYS = ("kind", "bits", "signed", "name", "shape", "group", "input")
NAMES = {"int": ("",), "float": tuple(MINIFLOATS), "table": ("", "nf4", "fp4")}
ARRAYS = ("scale", "zero_point", "global_scale")
STRATEGIES = ("tensor", "token", "group", "tensor_group")


def read_own(tensors: Tensors, config: Settings) -> list[StoredMatrix]:
    """Return the matrices of a checkpoint that `save(method="jqinject")` wrote.

    Args:
        tensors: of the files.
        config: `quantization_config`.

    Raises:
        CheckpointError: a version that is not known; settings that are unknown or contradict the tensors.
    """
    version = config.integer("format_version")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"format_version is {version}; this release reads up to {FORMAT_VERSION}.\n  cure: a newer jqinject"
        )
    weights = Settings(config.values.get("weights"), f"{config.where}.weights")
    return [
        _matrix(tensors, name, Settings(values, f"{weights.where}.{name}").only(KEYS))
        for name, values in weights.values.items()
    ]


def _matrix(tensors: Tensors, name: str, settings: Settings) -> StoredMatrix:
    shape = settings.sizes("shape", None)
    kind = settings.choice("kind", tuple(NAMES))
    bits = settings.choice("bits", tuple(range(1, 9)))
    minifloat = settings.choice("name", NAMES[kind], "")
    group = settings.integer("group") if settings.values.get("group") is not None else None
    ends = ("scale", *(end for end in ("zero_point",) if f"{name}.{end}" in tensors))
    arrays = {end: tensors.take(f"{name}.{end}") for end in ends}
    if f"{name}.scale_factor" in tensors:
        arrays["factor"] = tensors.take_number(f"{name}.scale_factor", "one factor of all scales")
    grid: Grid = MINIFLOATS.get(minifloat) or IntGrid(bits, settings.flag("signed", True))
    if kind == "table":
        table = arrays["table"] = tensors.take(f"{name}.table", (None,), dtype="float32")
        if not 1 <= table.shape[0] <= 2**bits:
            raise CheckpointError(f"{name}.table has {table.shape[0]} numbers for codes of {bits} bits")
        grid = stored_matrix.table_grid(table.read(), f"{name}.table")
    arrays["codes"] = _codes(tensors, f"{name}.codes", grid, bits, shape)
    matrix = matrix_of_arrays(name, arrays, grid, group)
    columns = matrix.shape[1]
    by_name = {**matrix.arrays, **columns_in_groups(tensors, f"{name}.g_idx", columns, group or columns)}
    inputs = _input_format(settings.below("input"))
    return replace(matrix, arrays=by_name, input_format=inputs, keeps_unsigned=True)


def _codes(tensors: Tensors, name: str, grid: Grid, bits: int, shape: tuple[int, ...]) -> Tensor:
    if bits == 8:
        return tensors.take(name, shape, dtype=(grid.dtype or grid.storage).name)
    count = math.prod(shape)
    words = tensors.take(name, (-(-count * bits // 32),), dtype="int32", why=f"{count} codes of {bits} bits")
    signed = grid.is_integer and grid.signed

    def read() -> np.ndarray:
        codes = unpack_stream(words.read(), bits, count).reshape(shape)
        half = 1 << (bits - 1)
        return ((codes.astype(np.int16) ^ half) - half).astype(np.int8) if signed else codes

    return Tensor(np.dtype(np.int8 if signed else np.uint8), shape, words.file, read)


def _input_format(settings: Settings | None) -> InputFormat | None:
    if settings is None:
        return None
    settings.only([field.name for field in fields(InputFormat)])
    inputs = stated_format(settings, STRATEGIES, (True, False), "kind", "bits")
    values = settings.values
    arrays = {name: np.asarray(values[name], np.float32) for name in ARRAYS if name in values}
    return replace(inputs, unsigned=settings.flag("unsigned", False), **arrays)


def write_own(saved: SavedMatrix) -> tuple[dict[str, np.ndarray], Values]:
    """Return the tensors of a weight, and its settings.

    Args:
        saved: the weight, in its axes, with a block of all of it where it has no groups.

    Raises:
        CheckpointError: a factor for each layer of a stack.
    """
    matrix, inputs = saved.matrix, saved.inputs
    codes, grid, bits = matrix.codes, matrix.grid, int(matrix.grid.bit_width)
    if matrix.factor is not None and matrix.factor.size != 1:
        raise CheckpointError(f"{saved.path}: a factor of scales for each layer is not written")
    tensors = {
        "codes": codes if bits == 8 else pack_stream(codes.view(np.uint8).reshape(-1) & (2**bits - 1), bits),
        "scale": matrix.scale,
        "zero_point": matrix.zero_point,
        "scale_factor": None if matrix.factor is None else matrix.factor.reshape(()),
        "table": matrix.table,
        "g_idx": matrix.group_of_column,
    }
    settings: Values = {
        "kind": "int" if grid.is_integer else "table" if grid.is_table else "float",
        "bits": bits,
        "signed": bool(grid.signed) if grid.is_integer else True,
        "name": stored_matrix.minifloat_name(grid),
        "shape": list(codes.shape),
        "group": matrix.group if matrix.group < codes.size else None,
    }
    if inputs is not None:  # what is absent, or false by default, is left out
        stated = {name: x for name, x in vars(inputs).items() if x is not None and (name != "unsigned" or x)}
        settings["input"] = {name: x.tolist() if name in ARRAYS else x for name, x in stated.items()}
    return {f"{saved.name}.{end}": array for end, array in tensors.items() if array is not None}, settings


def own_settings(weights: Mapping[str, Any], floats: Sequence[str]) -> Values:
    """Return `quantization_config`.

    Args:
        weights: the settings of each.
        floats: not needed: they are all others.
    """
    return {"quant_method": "jqinject", "format_version": FORMAT_VERSION, "weights": dict(weights)}
