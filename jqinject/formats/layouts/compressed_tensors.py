"""compressed-tensors: what llm-compressor writes and vLLM reads.

`config.json` holds groups of settings with the modules that they are for; a module's numbers are tensors below its
name. Reference: the library compressed-tensors, 0.12 to 0.20.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from jqinject.formats.checkpoint_errors import CONTRADICTION, CheckpointError
from jqinject.formats.files.tensors import Tensor, Tensors
from jqinject.formats.layouts.common import Settings, checked_groups, scale_of
from jqinject.formats.layouts.compressed_decoding import DECODERS, Arrays, words_of
from jqinject.formats.layouts.compressed_inputs import input_format
from jqinject.formats.stored_matrix import NumberFormat, StoredMatrix

PACKED_INTEGERS, PLAIN_INTEGERS, PLAIN_FLOATS = "pack-quantized", "int-quantized", "float-quantized"
NVFP4, MXFP4, MXFP6, MXFP8 = (
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
)
NAIVE, MIXED, DENSE = "naive-quantized", "mixed-precision", "dense"
FORMATS = (PACKED_INTEGERS, PLAIN_INTEGERS, PLAIN_FLOATS, NVFP4, MXFP4, MXFP6, MXFP8, NAIVE)
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


@dataclass(frozen=True)
class _Group:
    """Settings, and the modules that they are for."""

    targets: tuple[str, ...]
    format: str | None
    settings: Settings

    def rank(self, module: str) -> int:
        """How precisely the targets name a module: 3 by its name, 2 by a pattern, 1 by a class, 0 not at all."""
        if module in self.targets:
            return 3
        patterns = [target[3:] for target in self.targets if target.startswith("re:")]
        if any(re.match(pattern, module) for pattern in patterns):
            return 2
        return int(any(target.isidentifier() and target[0].isupper() for target in self.targets))


def read_compressed_tensors(tensors: Tensors, config: Settings) -> list[StoredMatrix]:
    """The low-bit matrices of a checkpoint.

    Args:
        tensors: of its files.
        config: `quantization_config`.

    Raises:
        CheckpointError: the settings are unknown or contradict the tensors.
    """
    _refuse_transforms(config)
    whole = config.choice("format", (*FORMATS, MIXED, DENSE), DENSE)
    groups = _groups(config, whole)
    modules = sorted({*tensors.ending(".weight_scale"), *tensors.ending(".weight_packed")})
    return [_matrix(tensors, module, _group_of(module, groups, config)) for module in modules]


def _refuse_transforms(config: Settings) -> None:
    for name in ("transform_config", "sparsity_config"):
        held = config.held.get(name) or {}
        if any(value for key, value in held.items() if (key, value) != ("format", DENSE)):
            raise CheckpointError(f"{config.where}.{name} is {held!r}: transforms and sparsity are not read")


def _groups(config: Settings, whole: str) -> list[_Group]:
    found = []
    for name, held in (config.held.get("config_groups") or {}).items():
        where = f"{config.where}.config_groups.{name}"
        settings = Settings(held, where)
        if settings.held.get("output_activations") is not None:
            raise CheckpointError(f"{where}: output_activations are quantized, which is not read")
        targets = settings.held.get("targets") or []
        if not isinstance(targets, list):
            raise CheckpointError(f"{where}: targets is {targets!r}, expected a list of names")
        known = None if whole == MIXED else whole
        own = (
            settings.choice("format", (*FORMATS, DENSE), known)
            if settings.held.get("format") or known
            else None
        )
        found.append(_Group(tuple(map(str, targets)), own, settings))
    return found


def _group_of(module: str, groups: list[_Group], config: Settings) -> _Group:
    ranked = sorted(groups, key=lambda group: -group.rank(module))
    if not ranked or ranked[0].rank(module) == 0:
        raise CheckpointError(f"{module} has scales, but no group of {config.where} is for it")
    return ranked[0]


def _matrix(tensors: Tensors, module: str, group: _Group) -> StoredMatrix:
    settings = group.settings.below("weights")
    if settings is None or group.format in (None, DENSE):
        raise CheckpointError(
            f"{module} has scales, but {group.settings.where} says that its weight is float"
        )
    kind = group.format
    if kind == NAIVE:
        kind = PLAIN_FLOATS if settings.choice("type", ("int", "float"), "int") == "float" else PLAIN_INTEGERS
    assert kind is not None, "checked above"
    found = _Reader(tensors, module, settings).matrix(kind)
    return found.with_input(input_format(tensors, module, group.settings.below("input_activations")))


class _Reader:
    """The tensors of one module, checked against its settings."""

    def __init__(self, tensors: Tensors, module: str, settings: Settings) -> None:
        self.tensors, self.module, self.settings = tensors, module, settings
        self.arrays: Arrays = {}
        self.bits = settings.integer("num_bits")
        self.strategy = settings.choice("strategy", STRATEGIES, "tensor")
        self.has_zero_point = not settings.flag("symmetric", True)

    def matrix(self, kind: str) -> StoredMatrix:
        """The module's matrix, laid out as `kind` says."""
        is_int = kind in (PACKED_INTEGERS, PLAIN_INTEGERS)
        self.settings.choice("type", ("int",) if is_int else ("float",), "int")
        widths = {NVFP4: (4,), MXFP4: (4,), MXFP6: (6,)}
        widths |= dict.fromkeys((PACKED_INTEGERS, PLAIN_INTEGERS), tuple(range(2, 9)))
        self.settings.choice("num_bits", widths.get(kind, (8,)))
        if kind == PACKED_INTEGERS:
            shape = self._packed_words()
        elif kind in (NVFP4, MXFP4, MXFP6):
            shape = self._packed_floats()
        else:
            found = self._take("weight", dtype="int8" if is_int else "float8_e4m3fn", shape=(None, None))
            shape = found.shape[0], found.shape[1]
        self._scales(kind, shape)
        block = self._block(shape)
        names = {4: "e2m1", 6: "e2m3", 8: "e4m3"}
        scale = {NVFP4: "e4m3", MXFP4: "e8m0", MXFP6: "e8m0", MXFP8: "e8m0"}.get(kind, "float")
        numbers = NumberFormat(
            "int" if is_int else "float",
            self.bits,
            name="" if is_int else names[self.bits],
            scale=scale,
            has_zero_point=self.has_zero_point,
        )
        decode = partial(DECODERS[kind], self.arrays, shape, block, self.bits)
        payload = self.arrays.get("weight_packed") or self.arrays["weight"]
        size = math.prod(payload.shape) * payload.dtype.itemsize
        parts = tuple(f"{self.module}.{end}" for end in self.arrays)
        layout = f"compressed-tensors {kind}"
        order = self.arrays.get("weight_g_idx")
        made = StoredMatrix(f"{self.module}.weight", shape, numbers, layout, parts, size, decode)
        return replace(made, column_groups=None if order is None else order.read)

    def _take(self, end: str, **options: Any) -> Tensor:
        self.arrays[end] = self.tensors.take(f"{self.module}.{end}", **options)
        return self.arrays[end]

    def _packed_words(self) -> tuple[int, int]:
        words = self._take("weight_packed", shape=(None, None), dtype="int32")
        stated = self._take("weight_shape", shape=(2,), dtype=("int64", "int32")).read()
        shape = int(stated[0]), int(stated[1])
        if (
            min(shape) < 0
            or words.shape[0] != shape[0]
            or words.shape[1] not in words_of(shape[1], self.bits)
        ):
            raise CheckpointError(
                f"{self.module}.weight_shape says {shape[0]}x{shape[1]}; weight_packed has {words.shape[0]} rows of "
                f"{words.shape[1]} words, which do not hold {shape[1]} numbers of {self.bits} bits each{CONTRADICTION}"
            )
        return shape

    def _packed_floats(self) -> tuple[int, int]:
        packed = self._take("weight_packed", shape=(None, None), dtype="uint8")
        share, size = {4: (2, 1), 6: (4, 3)}[self.bits]
        if packed.shape[1] % size:
            raise CheckpointError(
                f"{self.module}.weight_packed has {packed.shape[1]} bytes a row: no whole numbers"
            )
        return packed.shape[0], packed.shape[1] // size * share

    def _scales(self, kind: str, shape: tuple[int, int]) -> None:
        why = f"{self.strategy} scales of a {shape[0]}x{shape[1]} matrix"
        if self.strategy in ("group", "tensor_group"):
            why += f" in groups of {self.settings.integer('group_size')}"
        rows, columns = self._block(shape)
        shapes: list[tuple[int, ...]] = [(math.ceil(shape[0] / rows), math.ceil(shape[1] / columns))]
        if self.strategy == "tensor":
            shapes = [(1,), (), (1, 1)]
        elif self.strategy == "channel":
            shapes.append((shape[0],))
        name = f"{self.module}.weight_scale"
        if kind in (MXFP4, MXFP6, MXFP8, NVFP4):
            self._take(
                "weight_scale", shape=shapes[0], dtype="float8_e4m3fn" if kind == NVFP4 else "uint8", why=why
            )
        else:
            self.arrays["weight_scale"] = scale_of(self.tensors, name, shapes, why)
        if kind == NVFP4:
            self.arrays["weight_global_scale"] = scale_of(
                self.tensors, f"{self.module}.weight_global_scale", [(1,), ()], "one scale of the tensor"
            )
        self._zero_points(kind, shape, shapes)
        if f"{self.module}.weight_g_idx" in self.tensors:
            name = f"{self.module}.weight_g_idx"
            found = self._take("weight_g_idx", shape=(shape[1],), dtype=("int32", "int64"))
            if np.any(found.read() != -1):  # all -1: the package's way to say that columns are in order
                checked_groups(found, name, shapes[0][1])
            else:
                del self.arrays["weight_g_idx"]

    def _zero_points(self, kind: str, shape: tuple[int, int], shapes: list[tuple[int, ...]]) -> None:
        name, why = f"{self.module}.weight_zero_point", "the settings say symmetric = false"
        if not self.has_zero_point:
            if name in self.tensors and np.any(self.tensors.take(name).read()):
                raise CheckpointError(
                    f"{name} is there, but the settings say symmetric = true{CONTRADICTION}"
                )
            return
        if kind == PACKED_INTEGERS and self.strategy in ("group", "channel"):  # others are not packed
            both, columns = words_of(shape[0], self.bits), words_of(shape[1], self.bits)
            wide, groups = self.arrays["weight_packed"].shape[1], shapes[0][1]
            # The same way as the weight.
            shapes = sorted(
                {(rows, groups) for rows, each in zip(both, columns, strict=True) if each == wide}
            )
            why = f"zero points of {shape[0]} rows, packed; {why}"
        self.arrays["weight_zero_point"] = self.tensors.of_shape(name, shapes, why)

    def _block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        if self.strategy == "tensor":
            return max(shape[0], 1), max(shape[1], 1)
        if self.strategy == "channel":
            return 1, max(shape[1], 1)
        if self.strategy in ("group", "tensor_group"):
            return 1, self.settings.integer("group_size")
        found = self.settings.held.get("block_structure")
        sizes = found if isinstance(found, list) else []
        if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise CheckpointError(f"{self.settings.where}: block_structure is {found!r}, expected two sizes")
        return sizes[0], sizes[1]
