"""compressed-tensors: what llm-compressor writes and vLLM reads.

`config.json` holds groups of settings with the modules that they apply to; a module's numbers are tensors below its
name. `LAYOUTS` says how they lie, for reading and for writing. Reference: the library compressed-tensors, 0.12 to 0.20.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from jqinject.formats.bits import pack_stream, unpack_padded_words, unpack_stream, words_of
from jqinject.formats.checkpoint_errors import CONTRADICTION, CheckpointError
from jqinject.formats.layouts.layout_settings import (
    E8M0,
    Settings,
    columns_in_groups,
    exponents,
    stated_format,
)
from jqinject.formats.safetensors_files import FLOATS, Tensor, Tensors, Values
from jqinject.formats.stored_matrix import E2M1, E2M3, E4M3, InputFormat, Matrix, SavedMatrix, StoredMatrix
from jqinject.ops import FloatGrid, IntGrid


@dataclass(frozen=True)
class FormatLayout:
    """How the numbers of a module lie in its tensors.

    Attributes:
        grid: of minifloats; None for integers.
        packed: whether the codes of a row are a dense stream (`weight_packed`), instead of a byte each (`weight`).
        scale: the dtype of scales that are bytes; empty for floats.
        group: numbers that share such a scale.
    """

    grid: FloatGrid | None = None
    packed: bool = False
    scale: str = ""
    group: int = 0

    @property
    def end(self) -> str:
        """Of the name of its codes."""
        return "weight_packed" if self.packed else "weight"


E4M3_SCALES = "float8_e4m3fn"
PACKED_INTEGERS = "pack-quantized"
LAYOUTS = {
    PACKED_INTEGERS: FormatLayout(packed=True),
    "int-quantized": FormatLayout(),
    "float-quantized": FormatLayout(E4M3),
    "nvfp4-pack-quantized": FormatLayout(E2M1, True, E4M3_SCALES, 16),
    "mxfp4-pack-quantized": FormatLayout(E2M1, True, "uint8", 32),
    "mxfp6-pack-quantized": FormatLayout(E2M3, True, "uint8", 32),
    "mxfp8-quantized": FormatLayout(E4M3, False, "uint8", 32),
}
NAIVE, MIXED, DENSE = "naive-quantized", "mixed-precision", "dense"
FORMATS = (*LAYOUTS, NAIVE)
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
INPUT_STRATEGIES = ("tensor", "token", "group", "tensor_group", "channel")
CACHE_STRATEGIES = ("tensor", "channel", "token", "group", "attn_head")


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
            raise CheckpointError(f"{config.where}.{name} is {values!r}, which is not read")
    form = config.choice("format", (*FORMATS, MIXED, DENSE), DENSE)
    groups = config.within("config_groups")
    settings = [Settings(values, f"{groups.where}.{name}") for name, values in groups.values.items()]
    for group in settings:
        if group.values.get("output_activations") is not None:
            raise CheckpointError(f"{group.where}: output_activations are quantized, which is not read")
    modules = sorted({*tensors.ending(".weight_scale"), *tensors.ending(".weight_packed")})
    return [_matrix(tensors, module, settings, form) for module in modules]


def _rank(group: Settings, module: str) -> int:
    """Return how precisely targets name a module: 3 by its name, 2 by a pattern, 1 by a class, 0 not at all."""
    targets = group.values.get("targets") or []
    if not isinstance(targets, list):
        raise CheckpointError(f"{group.where}: targets is {targets!r}, expected a list of names")
    if module in targets:
        return 3
    if any(target.startswith("re:") and re.match(target[3:], module) for target in targets):
        return 2
    return int(any(target.isidentifier() and target[0].isupper() for target in targets))


def _matrix(tensors: Tensors, module: str, groups: Sequence[Settings], form: str) -> StoredMatrix:
    group = max(groups, key=lambda group: _rank(group, module), default=None)
    if group is None or _rank(group, module) == 0:
        raise CheckpointError(f"{module} has scales, but no group of config_groups is for it")
    settings, kind = group.below("weights"), group.choice("format", (*FORMATS, DENSE, MIXED), form)
    if settings is None or kind in (DENSE, MIXED):
        raise CheckpointError(f"{module} has scales, but {group.where} says that its weight is float")
    kind = f"{settings.choice('type', ('int', 'float'), 'int')}-quantized" if kind == NAIVE else kind
    matrix = _Reader(tensors, module, settings, kind).matrix()
    return replace(matrix, input_format=_input_format(tensors, module, group.below("input_activations")))


class _Reader:
    """The tensors of one module, checked against its settings."""

    def __init__(self, tensors: Tensors, module: str, settings: Settings, kind: str) -> None:
        self.tensors, self.start, self.settings, self.kind = tensors, f"{module}.", settings, kind
        self.layout = layout = LAYOUTS[kind]
        settings.choice("type", ("int",) if layout.grid is None else ("float",), "int")
        widths = tuple(range(2, 9)) if layout.grid is None else (layout.grid.bit_width,)
        self.bits = settings.choice("num_bits", widths)
        self.strategy = settings.choice("strategy", STRATEGIES, "tensor")
        self.is_padded = False

    def matrix(self) -> StoredMatrix:
        """Return the module's matrix."""
        codes, shape = self._codes()
        layout, bits, block = self.layout, self.bits, self._block(shape)
        end, why = f"{self.start}weight_scale", f"{self.strategy} scales"
        scale = self.tensors.take_blocks(end, shape, block, layout.scale or FLOATS, why)
        arrays = {"codes": codes, "scale": scale.map(exponents, E8M0) if layout.scale == "uint8" else scale}
        if layout.scale == E4M3_SCALES:  # the scale of a group is divided by that of the tensor
            unit = self.tensors.take_number(f"{self.start}weight_global_scale", "one scale of the tensor")
            arrays["factor"] = unit.map(lambda x: np.float32(1) / x)
        arrays |= self._zero_points(shape, block) | self._groups(shape[1], block[1])
        if layout.packed:
            arrays["codes"] = codes.map(partial(self._unpacked, count=shape[1]))
        grid, name = layout.grid or IntGrid(bits), f"compressed-tensors {self.kind}"
        return StoredMatrix(f"{self.start}weight", shape, grid, name, block, arrays)

    def _unpacked(self, words: np.ndarray, count: int) -> np.ndarray:
        unpack = unpack_padded_words if self.is_padded else unpack_stream
        codes = unpack(words, self.bits, count)
        half = 1 << (self.bits - 1)
        return codes if self.layout.grid else (codes.astype(np.int16) - half).astype(np.int8)

    def _codes(self) -> tuple[Tensor, tuple[int, int]]:
        """Return the codes as they are stored, and the shape of the matrix."""
        layout, bits = self.layout, self.bits
        dtypes = ("int32", "uint8") if layout.packed else ("int8", "float8_e4m3fn")
        name, take = f"{self.start}{layout.end}", self.tensors.take
        codes = take(name, (None, None), dtype=dtypes[layout.grid is not None])
        rows, length = codes.shape
        if not layout.packed:
            return codes, (rows, length)
        if layout.grid is not None:
            if length * 8 % bits:
                raise CheckpointError(f"{name}: {length} bytes are no whole numbers")
            return codes, (rows, length * 8 // bits)
        rows, columns = map(int, take(f"{self.start}weight_shape", (2,), dtype=("int64", "int32")).read())
        dense, padded = words_of(columns, bits)
        why = f"weight_shape says {rows}x{columns}, of {bits} bits"
        take(name, (rows, dense), (rows, padded), why=why)
        self.is_padded = length == padded != dense  # where both are as many, it is as the later releases pack
        return codes, (rows, columns)

    def _block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns that share a scale."""
        rows, columns = max(shape[0], 1), max(shape[1], 1)
        if self.strategy == "block":
            height, width = self.settings.sizes("block_structure")
            return height, width
        if self.strategy in ("group", "tensor_group"):
            return 1, self.settings.integer("group_size")
        return (rows if self.strategy == "tensor" else 1), columns

    def _zero_points(self, shape: tuple[int, int], block: tuple[int, int]) -> dict[str, Tensor]:
        """Return zero points, packed ones as they are stored; nothing without any."""
        name, why = f"{self.start}weight_zero_point", "the settings say symmetric = false"
        if self.settings.flag("symmetric", True):
            if name in self.tensors and np.any(self.tensors.take(name).read()):
                raise CheckpointError(
                    f"{name} is there, but the settings say symmetric = true{CONTRADICTION}"
                )
            return {}
        if self.kind != PACKED_INTEGERS or self.strategy not in ("group", "channel"):
            return {"zero_point": self.tensors.take_blocks(name, shape, block, None, why)}
        # Packed down the columns, as the weight's are along the rows.
        words = words_of(shape[0], self.bits)[self.is_padded], math.ceil(shape[1] / block[1])
        zero = self.tensors.take(name, words, why=f"{shape[0]} rows, packed; {why}")
        return {"zero_point": zero.map(lambda x: self._unpacked(x.T, shape[0]).T)}

    def _groups(self, columns: int, size: int) -> dict[str, Tensor]:
        """Return the groups of columns that are not consecutive; nothing otherwise."""
        name = f"{self.start}weight_g_idx"
        if name in self.tensors and np.all(self.tensors.take(name).read() == -1):
            return {}  # the package's mark of columns in order
        return columns_in_groups(self.tensors, name, columns, size)


def _input_format(tensors: Tensors, module: str, settings: Settings | None) -> InputFormat | None:
    """Return how the input of a module is quantized; None if it is not."""
    if settings is None:
        return None

    def stored(part: str, why: str, dtype: Sequence[str] | None = FLOATS) -> np.ndarray:
        return tensors.take_number(f"{module}.input_{part}", why, dtype).floats()

    inputs = stated_format(settings, INPUT_STRATEGIES, (True, False, "local"))
    if settings.values.get("dynamic") == "local":
        return replace(inputs, global_scale=stored("global_scale", "one scale of the input"))
    if inputs.dynamic:
        return inputs
    zero = None if inputs.symmetric else stored("zero_point", "a static input with zero points", None)
    notes = settings.below("observer_kwargs")
    unsigned = notes is not None and notes.values.get("unsigned") is True
    return replace(inputs, zero_point=zero, unsigned=unsigned, scale=stored("scale", "a static input"))


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
    return None if scheme is None else stated_format(scheme, CACHE_STRATEGIES, (True, False))


def write_compressed_tensors(saved: SavedMatrix) -> tuple[dict[str, np.ndarray], Values]:
    """Return the tensors of a module, and the settings of a group of modules that are quantized like it.

    Args:
        saved: the module's matrix.

    Raises:
        CheckpointError: the format has no such numbers.
    """
    matrix, inputs = saved.matrix.signed(), saved.inputs
    form = _form_of(matrix, inputs is not None)
    if form is None or (matrix.group_of_column is not None and form != PACKED_INTEGERS):
        raise saved.refused(
            "compressed-tensors",
            "integers of 2 to 8 bits, whose zero points are such integers too; e4m3, with a scale for tensors to "
            "blocks; e2m1, e2m3 and e4m3 with MX scales in groups of 32, and NVFP4. Groups divide the inputs, and an "
            "activation order is that of packed integers with a float input",
            "another weight_quant, such as Int8WeightPerChannelFloat (quantize_zero_point = True for zero points), "
            "Fp8e4m3OCPWeightPerChannelFloat, MXFloat4e2m1Weight, NVFP4Weight; method='bitsandbytes' for NF4; or "
            "method='jqinject'",
        )
    layout, codes, bits, zero = LAYOUTS[form], matrix.codes, matrix.grid.bit_width, matrix.zero_point
    kind = "int" if layout.grid is None else "float"
    settings: Values = {"num_bits": bits, "type": kind, "symmetric": zero is None, "dynamic": False}
    scale, sharing = _scales(matrix, layout)
    arrays = {layout.end: codes, "weight_scale": scale, "weight_g_idx": matrix.group_of_column}
    if form == PACKED_INTEGERS:
        half = 1 << (bits - 1)
        arrays[layout.end] = pack_stream(codes.astype(np.int16) + half, bits)
        arrays["weight_shape"] = np.asarray(codes.shape, np.int64)
        if zero is not None:
            down = np.broadcast_to(zero, (codes.shape[0], zero.shape[1])).astype(np.int16).T + half
            arrays["weight_zero_point"] = np.ascontiguousarray(pack_stream(down, bits).T)
    elif layout.packed:
        size = -(-codes.shape[1] * bits // 8)
        arrays[layout.end] = np.ascontiguousarray(pack_stream(codes, bits).view(np.uint8)[:, :size])
    if layout.scale and matrix.factor is not None:
        arrays["weight_global_scale"] = np.asarray([1 / np.float64(matrix.factor)], np.float32)
    if matrix.group_of_column is not None:
        settings["actorder"] = "group"
    if inputs is not None:
        zero = None if inputs.zero_point is None else inputs.zero_point.astype(np.int8)
        arrays |= {
            "input_scale": inputs.scale,
            "input_zero_point": zero,
            "input_global_scale": inputs.global_scale,
        }
    of_input = None if inputs is None else settings_of_input(inputs)
    scheme = {"format": form, "weights": settings | sharing, "input_activations": of_input}
    return {f"{saved.module}.{end}": array for end, array in arrays.items() if array is not None}, scheme


def _form_of(matrix: Matrix, has_inputs: bool) -> str | None:
    """Return the name of the layout that holds a matrix; None if none does."""
    grid, zero = matrix.grid, matrix.zero_point
    if grid.is_table or matrix.codes.shape[1] % max(matrix.group, 1):
        return None
    if grid.is_integer:
        most = 1 << (grid.bit_width - 1)
        are_codes = zero is None or np.all((zero == np.round(zero)) & (np.abs(zero + 0.5) <= most))
        if grid.bit_width < 2 or not are_codes:
            return None
        is_plain = has_inputs and grid.bit_width == 8 and zero is None and matrix.scale.shape[1] == 1
        return "int-quantized" if is_plain else PACKED_INTEGERS
    dtype = matrix.scale.dtype
    lies = grid, "uint8" if dtype == E8M0 else dtype.name, matrix.group
    with_bytes = next((form for form, of in LAYOUTS.items() if (of.grid, of.scale, of.group) == lies), None)
    form = "float-quantized" if grid == E4M3 and dtype != E8M0 else with_bytes
    lacks_factor = form is not None and LAYOUTS[form].scale == E4M3_SCALES and matrix.factor is None
    return None if zero is not None or lacks_factor else form


def _scales(matrix: Matrix, layout: FormatLayout) -> tuple[np.ndarray, Values]:
    """Return scales, and the settings of what shares each: a group, a row, a block of rows, or the tensor."""
    if layout.scale:
        strategy = "group" if matrix.factor is None else "tensor_group"
        in_bytes = {"strategy": strategy, "group_size": layout.group, "scale_dtype": f"torch.{layout.scale}"}
        return matrix.scale.view(layout.scale), in_bytes
    scale = matrix.scale if matrix.scale.dtype.itemsize > 1 and matrix.factor is None else matrix.scales()
    scale = np.ascontiguousarray(np.broadcast_to(scale, (matrix.codes.shape[0], scale.shape[1])))
    in_groups = {"strategy": "group", "group_size": matrix.group}
    by_row = in_groups if scale.shape[1] > 1 else {"strategy": "channel"}
    changes = np.flatnonzero(np.any(scale[1:] != scale[:-1], axis=1)) + 1
    if scale.shape[1] == 1 and not changes.size and not layout.packed:
        return scale[0], {"strategy": "tensor"}
    height = math.gcd(*map(int, changes)) if changes.size else scale.shape[0]
    if height == 1 or matrix.grid.is_integer:
        return scale, by_row
    structure = {"strategy": "block", "group_size": None, "block_structure": [height, matrix.group]}
    return np.ascontiguousarray(scale[::height]), structure


def settings_of_input(inputs: InputFormat) -> Values:
    """Return `input_activations`, or `kv_cache_scheme`.

    Args:
        inputs: how the input, or the cache, is quantized.
    """
    settings: Values = {
        "num_bits": inputs.bits,
        "type": inputs.kind,
        "symmetric": inputs.symmetric,
        "strategy": inputs.strategy,
        "dynamic": inputs.dynamic if inputs.global_scale is None else "local",
    }
    if inputs.group_size is not None:
        settings["group_size"] = inputs.group_size
    if inputs.bits == 4:
        settings["scale_dtype"] = "torch.float8_e4m3fn"
    if inputs.unsigned:
        settings["observer_kwargs"] = {"unsigned": True}  # a note to ourselves: others read it as signed
    return settings


def settings_of(schemes: Mapping[str, Values], floats: Sequence[str]) -> Values:
    """Return `quantization_config`: a group for each way in which modules are quantized.

    Args:
        schemes: by the names of modules.
        floats: not needed: no group is for them.
    """
    groups: dict[str, list[str]] = {}
    for module, scheme in schemes.items():
        groups.setdefault(json.dumps(scheme, sort_keys=True), []).append(module)
    formats = {scheme["format"] for scheme in schemes.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "ignore": [],
        "config_groups": {
            f"group_{at}": {"targets": targets, **json.loads(scheme)}
            for at, (scheme, targets) in enumerate(groups.items())
        },
    }
