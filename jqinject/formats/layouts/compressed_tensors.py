"""compressed-tensors: what llm-compressor writes and vLLM reads.

`config.json` holds groups of settings with the modules that they apply to; a module's numbers are tensors below its
name. Reference: the library compressed-tensors, 0.12 to 0.20.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jqinject.formats.bits import low_nibble_first, unpack_padded_words, unpack_stream
from jqinject.formats.checkpoint_errors import CONTRADICTION, CheckpointError
from jqinject.formats.layouts.layout_settings import E8M0, Settings, as_blocks, checked_groups, exponents
from jqinject.formats.safetensors_files import FLOATS, ONE, Tensor, Tensors
from jqinject.formats.stored_matrix import E2M1, E2M3, E4M3, InputFormat, Matrix, StoredMatrix
from jqinject.ops import IntGrid

PACKED_INTEGERS, PLAIN_INTEGERS, PLAIN_FLOATS = "pack-quantized", "int-quantized", "float-quantized"
NVFP4, MXFP4, MXFP6, MXFP8 = (
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
)
NAIVE, MIXED, DENSE = "naive-quantized", "mixed-precision", "dense"
INTEGERS, MX = (PACKED_INTEGERS, PLAIN_INTEGERS), (MXFP4, MXFP6, MXFP8)
FORMATS = (*INTEGERS, PLAIN_FLOATS, NVFP4, *MX, NAIVE)
GRIDS = {PLAIN_FLOATS: E4M3, NVFP4: E2M1, MXFP4: E2M1, MXFP6: E2M3, MXFP8: E4M3}
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
INPUT_STRATEGIES = ("tensor", "token", "group", "tensor_group", "channel")
CACHE_STRATEGIES = ("tensor", "channel", "token", "group", "attn_head")


@dataclass(frozen=True)
class _Group:
    """Settings, and the modules that they apply to."""

    targets: tuple[str, ...]
    format: str | None
    settings: Settings

    def rank(self, module: str) -> int:
        """Return how precisely the targets name a module: 3 by its name, 2 by a pattern, 1 by a class, 0 not at all."""
        if module in self.targets:
            return 3
        patterns = [target[3:] for target in self.targets if target.startswith("re:")]
        if any(re.match(pattern, module) for pattern in patterns):
            return 2
        return int(any(target.isidentifier() and target[0].isupper() for target in self.targets))


def read_compressed_tensors(tensors: Tensors, config: Settings) -> list[StoredMatrix]:
    """Return the low-bit matrices of a checkpoint.

    Args:
        tensors: of its files.
        config: `quantization_config`.

    Raises:
        CheckpointError: the settings are unknown or contradict the tensors.
    """
    for name in ("transform_config", "sparsity_config"):
        values = config.values.get(name) or {}
        if any(value for key, value in values.items() if (key, value) != ("format", DENSE)):
            raise CheckpointError(
                f"{config.where}.{name} is {values!r}: transforms and sparsity are not read"
            )
    layout = config.choice("format", (*FORMATS, MIXED, DENSE), DENSE)
    groups = [
        _group(Settings(values, f"{config.where}.config_groups.{name}"), layout)
        for name, values in (config.values.get("config_groups") or {}).items()
    ]
    modules = sorted({*tensors.ending(".weight_scale"), *tensors.ending(".weight_packed")})
    return [_matrix(tensors, module, _group_of(module, groups, config)) for module in modules]


def _group(settings: Settings, layout: str) -> _Group:
    if settings.values.get("output_activations") is not None:
        raise CheckpointError(f"{settings.where}: output_activations are quantized, which is not read")
    targets = settings.values.get("targets") or []
    if not isinstance(targets, list):
        raise CheckpointError(f"{settings.where}: targets is {targets!r}, expected a list of names")
    default = None if layout == MIXED else layout
    is_known = settings.values.get("format") or default
    form = settings.choice("format", (*FORMATS, DENSE), default) if is_known else None
    return _Group(tuple(map(str, targets)), form, settings)


def _group_of(module: str, groups: list[_Group], config: Settings) -> _Group:
    ranked = sorted(groups, key=lambda group: -group.rank(module))
    if not ranked or ranked[0].rank(module) == 0:
        raise CheckpointError(f"{module} has scales, but no group of {config.where} is for it")
    return ranked[0]


def _matrix(tensors: Tensors, module: str, group: _Group) -> StoredMatrix:
    settings, kind = group.settings.below("weights"), group.format
    if settings is None or kind is None or kind == DENSE:
        raise CheckpointError(
            f"{module} has scales, but {group.settings.where} says that its weight is float"
        )
    if kind == NAIVE:
        kind = PLAIN_FLOATS if settings.choice("type", ("int", "float"), "int") == "float" else PLAIN_INTEGERS
    matrix = _Reader(tensors, module, settings, kind).matrix()
    inputs = _input_format(tensors, module, group.settings.below("input_activations"))
    return replace(matrix, input_format=inputs)


class _Reader:
    """The tensors of one module, checked against its settings."""

    def __init__(self, tensors: Tensors, module: str, settings: Settings, kind: str) -> None:
        self.tensors, self.module, self.settings, self.kind = tensors, module, settings, kind
        self.arrays: dict[str, Tensor] = {}
        is_int = kind in INTEGERS
        settings.choice("type", ("int",) if is_int else ("float",), "int")
        widths = tuple(range(2, 9)) if is_int else (GRIDS[kind].bit_width,)
        self.bits = settings.choice("num_bits", widths)
        self.grid = IntGrid(self.bits) if is_int else GRIDS[kind]
        self.strategy = settings.choice("strategy", STRATEGIES, "tensor")
        self.has_zero_point = not settings.flag("symmetric", True)

    def matrix(self) -> StoredMatrix:
        """Return the module's matrix."""
        if self.kind == PACKED_INTEGERS:
            shape = self._packed_words()
        elif self.kind in (NVFP4, MXFP4, MXFP6):
            shape = self._packed_floats()
        else:
            dtype = "int8" if self.grid.is_integer else "float8_e4m3fn"
            rows, columns = self._take("weight", (None, None), dtype).shape
            shape = rows, columns
        block = self._block(shape)
        scale_dtype = self._scales(shape, block)
        order = self.arrays.get("weight_g_idx")
        return StoredMatrix(
            f"{self.module}.weight",
            shape,
            self.grid,
            f"compressed-tensors {self.kind}",
            (self.arrays.get("weight_packed") or self.arrays["weight"]).nbytes,
            lambda: _decoded(self.kind, self.grid, self.arrays, shape, block),
            scale_dtype,
            column_groups=None if order is None else order.read,
        )

    def _take(self, end: str, *requirements: Any, **more: Any) -> Tensor:
        self.arrays[end] = self.tensors.take(f"{self.module}.{end}", *requirements, **more)
        return self.arrays[end]

    def _packed_words(self) -> tuple[int, int]:
        words = self._take("weight_packed", (None, None), "int32")
        rows, columns = map(int, self._take("weight_shape", (2,), ("int64", "int32")).read())
        if (
            min(rows, columns) < 0
            or words.shape[0] != rows
            or words.shape[1] not in words_of(columns, self.bits)
        ):
            raise CheckpointError(
                f"{self.module}.weight_shape says {rows}x{columns}; weight_packed has {words.shape[0]} rows of "
                f"{words.shape[1]} words, which do not hold {columns} numbers of {self.bits} bits each{CONTRADICTION}"
            )
        return rows, columns

    def _packed_floats(self) -> tuple[int, int]:
        rows, length = self._take("weight_packed", (None, None), "uint8").shape
        share, size = {4: (2, 1), 6: (4, 3)}[self.bits]
        if length % size:
            raise CheckpointError(f"{self.module}.weight_packed has {length} bytes a row: no whole numbers")
        return rows, length // size * share

    def _block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns that share a scale."""
        rows, columns = max(shape[0], 1), max(shape[1], 1)
        if self.strategy == "block":
            height, width = self.settings.sizes("block_structure")
            return height, width
        if self.strategy in ("group", "tensor_group"):
            return 1, self.settings.integer("group_size")
        return (rows if self.strategy == "tensor" else 1), columns

    def _scales(self, shape: tuple[int, int], block: tuple[int, int]) -> np.dtype:
        """Take scales and zero points, and return the dtype of the scales."""
        rows, columns = shape
        why = f"{self.strategy} scales of a {rows}x{columns} matrix"
        why += f" in groups of {block[1]}" if self.strategy in ("group", "tensor_group") else ""
        blocks = math.ceil(rows / block[0]), math.ceil(columns / block[1])
        shapes = {"tensor": [*ONE, (1, 1)], "channel": [blocks, (rows,)]}.get(self.strategy, [blocks])
        special = {NVFP4: "float8_e4m3fn", **dict.fromkeys(MX, "uint8")}.get(self.kind)
        scale = self._take(
            "weight_scale", None, special or FLOATS, why, shapes=[shapes[0]] if special else shapes
        )
        if self.kind == NVFP4:
            self._take("weight_global_scale", None, FLOATS, "one scale of the tensor", shapes=ONE)
        self._zero_points(shape, shapes)
        if f"{self.module}.weight_g_idx" in self.tensors:
            order = self._take("weight_g_idx", (columns,), ("int32", "int64"))
            if np.any(order.read() != -1):  # all -1: the package's mark of columns in order
                checked_groups(order, f"{self.module}.weight_g_idx", blocks[1])
            else:
                del self.arrays["weight_g_idx"]
        return E8M0 if self.kind in MX else scale.dtype

    def _zero_points(self, shape: tuple[int, int], shapes: list[tuple[int, ...]]) -> None:
        name, why = f"{self.module}.weight_zero_point", "the settings say symmetric = false"
        if not self.has_zero_point:
            if name in self.tensors and np.any(self.tensors.take(name).read()):
                raise CheckpointError(
                    f"{name} is there, but the settings say symmetric = true{CONTRADICTION}"
                )
            return
        if self.kind == PACKED_INTEGERS and self.strategy in ("group", "channel"):  # others are not packed
            both, columns = words_of(shape[0], self.bits), words_of(shape[1], self.bits)
            length, groups = self.arrays["weight_packed"].shape[1], shapes[0][1]
            # The same way as the weight.
            packed = {(rows, groups) for rows, words in zip(both, columns, strict=True) if words == length}
            shapes, why = sorted(packed), f"zero points of {shape[0]} rows, packed; {why}"
        self._take("weight_zero_point", None, None, why, shapes=shapes)


def _decoded(
    kind: str,
    grid: Any,
    arrays: Mapping[str, Tensor],
    shape: tuple[int, int],
    block: tuple[int, int],
) -> Matrix:
    """Return the numbers of a module's tensors."""
    scale = arrays["weight_scale"].read()
    if kind == PACKED_INTEGERS:
        return _packed_integers(grid, arrays, shape, block)
    if kind in (PLAIN_INTEGERS, PLAIN_FLOATS):
        zero = arrays.get("weight_zero_point")
        zero_point = None if zero is None else as_blocks(zero.read())
        return Matrix(arrays["weight"].read(), as_blocks(scale), grid, block, zero_point)
    if kind == MXFP8:
        return Matrix(arrays["weight"].read(), exponents(scale), grid, block)
    raw = arrays["weight_packed"].read()
    codes = low_nibble_first(raw) if grid.bit_width == 4 else unpack_stream(raw, 6, shape[1])
    if kind == NVFP4:  # the scale of a group is divided by that of the tensor
        factor = np.asarray(1.0 / np.float32(arrays["weight_global_scale"].floats()[0]), np.float32)
        return Matrix(codes, scale, grid, block, factor=factor)
    return Matrix(codes, exponents(scale), grid, block)


def _packed_integers(
    grid: Any, arrays: Mapping[str, Tensor], shape: tuple[int, int], block: tuple[int, int]
) -> Matrix:
    """Return streams of integers along the rows; zero points likewise, but down the columns."""
    streams = [(arrays["weight_packed"].read(), shape[1])]
    zero, order = arrays.get("weight_zero_point"), arrays.get("weight_g_idx")
    is_packed = zero is not None and zero.dtype.itemsize == 4
    if zero is not None and is_packed:
        streams.append((np.ascontiguousarray(zero.read().T), shape[0]))
    unpack = unpack_padded_words if _is_padded(streams, grid.bit_width) else unpack_stream
    offset = 1 << (grid.bit_width - 1)
    codes, *down = (
        (unpack(words, grid.bit_width, count).astype(np.int16) - offset).astype(np.int8)
        for words, count in streams
    )
    zero_point = None if zero is None else down[0].T if is_packed else as_blocks(zero.read())
    scale, groups = as_blocks(arrays["weight_scale"].read()), None if order is None else order.read()
    return Matrix(codes, scale, grid, block, zero_point, group_of_column=groups)


def words_of(count: int, bits: int) -> tuple[int, int]:
    """Return the words of numbers: of a dense stream, and with whole numbers in each, as older releases packed.

    Example:
        >>> words_of(96, 4), words_of(96, 3)
        ((12, 12), (9, 10))
    """
    return -(-count * bits // 32), -(-count // (32 // bits))


def _is_padded(streams: list[tuple[np.ndarray, int]], bits: int) -> bool:
    """Whether words hold whole numbers: by how many they are; where both ways fit, by the bits that padding leaves."""
    for words, count in streams:
        dense, padded = words_of(count, bits)
        if dense != padded:
            return words.shape[-1] == padded
    used = 32 // bits * bits  # of a word; the last one of a dense stream has unused bits too
    before = [np.ascontiguousarray(words).view(np.uint32)[..., :-1] for words, _ in streams]
    has_numbers = any(words.size for words in before)
    return used < 32 and has_numbers and not any(np.any(words >> np.uint32(used)) for words in before)


def _input_format(tensors: Tensors, module: str, settings: Settings | None) -> InputFormat | None:
    """Return how the input of a module is quantized; None if it is not."""
    if settings is None:
        return None

    def one(end: str) -> np.ndarray:
        return tensors.take(
            f"{module}.{end}", None, FLOATS, "one scale of a static input", shapes=ONE
        ).floats()

    dynamic = settings.choice("dynamic", (True, False, "local"), False)
    strategy = settings.choice("strategy", INPUT_STRATEGIES, "tensor")
    inputs = InputFormat(
        settings.choice("type", ("int", "float"), "int"),
        settings.integer("num_bits", default=8),
        settings.flag("symmetric", True),
        strategy,
        settings.integer("group_size") if strategy in ("group", "tensor_group") else None,
        dynamic is not False,
    )
    if dynamic == "local":
        return replace(inputs, global_scale=one("input_global_scale"))
    if dynamic:
        return inputs
    if not inputs.symmetric:
        why = "a static input with zero points"
        zero = tensors.take(f"{module}.input_zero_point", why=why, shapes=ONE)
        inputs = replace(inputs, zero_point=zero.floats())
    notes = settings.below("observer_kwargs")
    unsigned = notes is not None and notes.values.get("unsigned") is True
    return replace(inputs, unsigned=unsigned, scale=one("input_scale"))


def cache_format(method: str, config: Settings) -> InputFormat | None:
    """Return how keys and values are quantized when they are cached; None if the checkpoint does not say so.

    Args:
        method: the quantization method.
        config: its settings; compressed-tensors' `kv_cache_scheme`, ModelOpt's `kv_cache_quant_algo`.

    Raises:
        CheckpointError: the settings are unknown.
    """
    if method == "modelopt" and config.values.get("kv_cache_quant_algo") is not None:
        config.choice("kv_cache_quant_algo", ("FP8",))
        return InputFormat("float", 8, dynamic=False)
    scheme = config.below("kv_cache_scheme") if method == "compressed-tensors" else None
    if scheme is None:
        return None
    return InputFormat(
        scheme.choice("type", ("int", "float"), "int"),
        scheme.integer("num_bits", default=8),
        scheme.flag("symmetric", True),
        scheme.choice("strategy", CACHE_STRATEGIES, "tensor"),
        dynamic=scheme.flag("dynamic", False),
    )
