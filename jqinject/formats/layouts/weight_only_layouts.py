"""Layouts of weights alone: GPTQ and AWQ, HQQ, bitsandbytes.

GPTQ and AWQ pack integers into words, input-major, with scales and zero points of groups of inputs. HQQ packs codes
across the first axis, with zero points that are floats. bitsandbytes has codes of a table in flat blocks, or integers
with a scale for each row.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from jqinject.formats.bits import unpack_stream
from jqinject.formats.checkpoint_errors import CONTRADICTION, CheckpointError
from jqinject.formats.layouts.layout_settings import Settings, columns_in_groups, parsed
from jqinject.formats.safetensors_files import FLOATS, Tensor, Tensors, Values
from jqinject.formats.stored_matrix import SavedMatrix, StoredMatrix, table_grid
from jqinject.ops import NF4, IntGrid

# The places in a word of AWQ's: output k of eight lies in nibble NIBBLE_OF[k].
NIBBLE_OF = (0, 4, 1, 5, 2, 6, 3, 7)
WORDS = ("int32", "uint32")


def read_gptq(tensors: Tensors, config: Settings) -> list[StoredMatrix]:
    """Return the matrices of GPTQ's layout, of version 1 or 2.

    `matrix[o, r] = scales[g, o] * (codes[o, r] - zero[g, o])`, `g = g_idx[r]`. Version 1 stores zero points less 1.

    Args:
        tensors: of the files.
        config: `quantization_config`.

    Raises:
        CheckpointError: the settings are unknown or contradict the tensors.
    """
    bits = config.choice("bits", (2, 3, 4, 8))
    version = config.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    config.choice("pack_dtype", ("int32",), "int32")
    less = 1 if version == "gptq" else 0
    return [_input_major(tensors, module, config, bits, less) for module in tensors.ending(".qweight")]


def read_awq(tensors: Tensors, config: Settings) -> list[StoredMatrix]:
    """Return the matrices of AWQ's layout "gemm": words along the outputs, whose nibbles are interleaved.

    `matrix[o, r] = scales[g, o] * (codes[o, r] - zero[g, o])`, `g = r // group_size`.

    Args:
        tensors: of the files.
        config: `quantization_config`.

    Raises:
        CheckpointError: the settings are unknown or contradict the tensors.
    """
    config.choice("bits", (4,))
    config.choice("version", ("gemm", "GEMM"), "gemm")
    config.choice("zero_point", (True,), True)
    return [_input_major(tensors, module, config, 4) for module in tensors.ending(".qweight")]


def _input_major(
    tensors: Tensors, module: str, config: Settings, bits: int, less: int | None = None
) -> StoredMatrix:
    """Return a matrix whose rows of words, scales and zero points are inputs: of GPTQ, or of AWQ without `less`."""
    size = config.integer("group_size", lowest=-1, default=-1)
    words = tensors.take(f"{module}.qweight", (None, None), dtype=WORDS)
    order = f"{module}.g_idx"
    if less is None:
        inputs, outputs = words.shape[0], words.shape[1] * 8
        codes, zero_points = words.map(_awq_codes), _awq_codes
    else:
        outputs = words.shape[1]
        inputs = tensors.take(order, (None,)).shape[0] if order in tensors else words.shape[0] * 32 // bits
        length = math.ceil(inputs * bits / 32)
        tensors.take(f"{module}.qweight", (length, outputs), why=f"words of {inputs} inputs of {bits} bits")
        codes = words.map(lambda x: unpack_stream(x.T, bits, inputs))
        zero_points = partial(_gptq_zero_points, bits=bits, outputs=outputs, less=less)
    groups = 1 if size == -1 else math.ceil(inputs / size)
    why = f"{groups} groups of {'all' if size == -1 else size} of {inputs} inputs, {outputs} outputs of {bits} bits"
    zeros = groups, math.ceil(outputs * bits / 32)
    arrays = {
        "codes": codes,
        "scale": tensors.take(f"{module}.scales", (groups, outputs), dtype=FLOATS, why=why).map(np.transpose),
        "zero_point": tensors.take(f"{module}.qzeros", zeros, dtype="int32", why=why).map(zero_points),
    }
    group = inputs if size == -1 else size
    if less is not None:
        arrays |= columns_in_groups(tensors, order, inputs, group)
    grid, layout = IntGrid(bits, signed=False), "AWQ gemm" if less is None else "GPTQ"
    return StoredMatrix(f"{module}.weight", (outputs, inputs), grid, layout, (1, group), arrays)


def _gptq_zero_points(words: np.ndarray, bits: int, outputs: int, less: int) -> np.ndarray:
    """Return zero points, `less` of which were subtracted.

    From whole words where these hold whole numbers, so that a 0 borrowed from its neighbour; 3 bits cross words.
    """
    if less and 32 % bits == 0:
        ones = np.uint32(less * (2**32 - 1) // (2**bits - 1))
        return unpack_stream(words.view(np.uint32) + ones, bits, outputs).T
    return ((unpack_stream(words, bits, outputs) + np.uint8(less)) & np.uint8(2**bits - 1)).T


def _awq_codes(words: np.ndarray) -> np.ndarray:
    nibbles = unpack_stream(words, 4, words.shape[-1] * 8).reshape(*words.shape, 8)
    return np.ascontiguousarray(nibbles[..., NIBBLE_OF].reshape(*words.shape[:-1], -1).T)


# Tensors of a layer that repeat others, or that its numbers do not need.
SETTINGS = (
    *("nbits", "axis", "group_size", "channel_wise", "compute_dtype", "encoded_state_dict", "offload_meta"),
    *("optimize", "packing", "quant_scale", "quant_zero", "round_zero", "stores_quant_config"),
    *("unpack_view_dtype", "view_as_float", "quant_config"),
)


def read_hqq(tensors: Tensors, config: Settings) -> list[StoredMatrix]:
    """Return the matrices of HQQ's layout: `(codes - zero) * scale` in a view of the matrix.

    Groups lie along the rows of the view (axis 1) or down its columns (axis 0).

    Args:
        tensors: of the files.
        config: `quantization_config`; the tensors of each layer have the rest.

    Raises:
        CheckpointError: a layer's settings are unknown or contradict its tensors.
    """
    return [_matrix(tensors, module) for module in tensors.ending(".W_q")]


def _matrix(tensors: Tensors, module: str) -> StoredMatrix:
    bits = _number(tensors, f"{module}.nbits", (1, 2, 3, 4, 8))
    axis = _number(tensors, f"{module}.axis", (0, 1))
    shape = tuple(int(size) for size in tensors.take(f"{module}.shape", (None,)).read())
    if len(shape) < 2 or min(shape) < 1:
        raise CheckpointError(f"{module}.shape is {shape}, expected two sizes")
    count, default = math.prod(shape), shape[-1] if axis == 1 else shape[0]
    has_size = f"{module}.group_size" in tensors
    size = _number(tensors, f"{module}.group_size") if has_size else default
    if size < 1 or count % size:
        raise CheckpointError(f"{module}: groups of {size} do not divide {count} numbers")
    view = (count // size, size) if axis == 1 else (size, count // size)
    groups, why = (view[0], 1) if axis == 1 else (1, view[1]), f"groups of {size} of {shape}, {bits} bits"
    packed = tensors.take(f"{module}.W_q", (None, None))
    share, integer = (10, 4) if bits == 3 else (8 // bits, 1)
    packed_rows = math.ceil(view[0] / share) if bits == 3 or view[0] % share == 0 else None
    # Bytes may be stored as numbers of another dtype.
    tensors.take(f"{module}.W_q", (packed_rows or 0, view[1] * integer // packed.dtype.itemsize), why=why)
    arrays = {"codes": packed.map(lambda x: _codes(x, bits, view))}
    for part, end in (("scale", "scale"), ("zero_point", "zero")):
        arrays[part] = tensors.take(f"{module}.{end}", groups, dtype=FLOATS, why=why)
    for name in SETTINGS:
        if f"{module}.{name}" in tensors:
            tensors.take(f"{module}.{name}")
    name, grid, layout = f"{module}.weight", IntGrid(bits, signed=False), f"HQQ axis {axis}"
    if axis == 1:
        return StoredMatrix(name, shape, grid, layout, (1, view[1]), arrays)
    # A view of `size` rows has whole rows of the matrix in each of its own, if these are so many.
    in_turn = size if math.prod(shape[:-1]) % size == 0 else 0
    return StoredMatrix(name, shape, grid, layout, (size, 1), arrays, by_rows=False, in_turn=in_turn)


def _number(tensors: Tensors, name: str, choices: Sequence[int] = ()) -> int:
    array = tensors.take(name).read()
    if array.size != 1 or array.dtype.kind not in "iu" or (choices and array.item() not in choices):
        expected = " or ".join(map(str, choices)) or "one integer"
        raise CheckpointError(f"{name} is {array.tolist()} ({array.dtype}), expected {expected}")
    return int(array.item())


def _codes(packed: np.ndarray, bits: int, view: tuple[int, int]) -> np.ndarray:
    """Return the codes of a view, whose first rows are in the highest bits."""
    raw = np.ascontiguousarray(packed).view(np.uint32 if bits == 3 else np.uint8)
    shifts = range(bits * ((10 if bits == 3 else 8 // bits) - 1), -1, -bits)
    return np.concatenate([(raw >> shift) & (2**bits - 1) for shift in shifts]).astype(np.uint8)[: view[0]]


STATE = ".quant_state.bitsandbytes__"


def read_bitsandbytes(tensors: Tensors, config: Settings) -> list[StoredMatrix]:
    """Return the matrices of bitsandbytes' layouts.

    4 bits: `matrix = table[codes] * absmax`, in flat blocks of the matrix that may cross its rows. 8 bits: `codes *
    SCB / 127`, a scale for each row.

    Args:
        tensors: of the files.
        config: `quantization_config`.

    Raises:
        CheckpointError: the settings are unknown or contradict the tensors.
    """
    in_four_bits = config.flag("load_in_4bit", False)
    if in_four_bits == config.flag("load_in_8bit", False):
        raise CheckpointError(f"{config.where} needs either load_in_4bit or load_in_8bit")
    if not in_four_bits:
        return [_integers(tensors, module) for module in tensors.ending(".SCB")]
    kind = config.choice("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    names = sorted({*tensors.ending(".absmax"), *tensors.ending(STATE + kind)})
    return [_table(tensors, name, kind) for name in names if name.rpartition(".")[2] != "nested"]


def _integers(tensors: Tensors, module: str) -> StoredMatrix:
    weight = tensors.take(f"{module}.weight", (None, None), dtype="int8")
    if f"{module}.weight_format" in tensors:
        layout = tensors.take(f"{module}.weight_format", dtype="uint8").read()
        if layout.any():
            raise CheckpointError(f"{module}.weight_format is {layout.tolist()}, expected 0: row by row")
    block = 1, max(weight.shape[1], 1)
    arrays = {
        "codes": weight,
        "scale": tensors.take_blocks(f"{module}.SCB", weight.shape, block),
        "factor": Tensor.of(np.asarray(1 / 127, np.float32)),
    }
    return StoredMatrix(f"{module}.weight", weight.shape, IntGrid(8), "bitsandbytes int8", block, arrays)


def _table(tensors: Tensors, name: str, kind: str) -> StoredMatrix:
    where = f"the quant_state of {name}"
    text = tensors.take(name + STATE + kind, (None,), dtype="uint8", why="its shape and its blocks")
    state = Settings(parsed(text.read().tobytes(), where), where)
    state.choice("quant_type", (kind,))
    shape, block = state.sizes("shape", None, lowest=0), state.integer("blocksize")
    raw, count = tensors.take(name), math.prod(shape)
    if raw.nbytes != -(-count // 2):
        raise CheckpointError(
            f"{name} has {raw.nbytes} bytes; the shape {shape} in 4 bits needs {-(-count // 2)}{CONTRADICTION}"
        )
    table = tensors.take(f"{name}.quant_map", (16,), dtype="float32")
    absmax = tensors.take_blocks(f"{name}.absmax", (count, 1), (block, 1), ("float32", "uint8"))
    if absmax.dtype == np.uint8:
        absmax = _nested(tensors, f"{name}.absmax", absmax, state)
    arrays = {
        "codes": raw.map(lambda x: _high_first(x.reshape(-1).view(np.uint8))[None, :count]),
        "scale": absmax.map(np.transpose),
        "table": table,
    }
    grid = table_grid(table.read(), f"{name}.quant_map")
    return StoredMatrix(name, shape, grid, f"bitsandbytes {kind}", (1, block), arrays)


def _high_first(raw: np.ndarray) -> np.ndarray:
    return np.stack([raw >> 4, raw & 15], axis=-1).reshape(-1)


def _nested(tensors: Tensors, name: str, absmax: Tensor, state: Settings) -> Tensor:
    """Return statistics that are quantized themselves as floats."""
    size, offset, blocks = state.integer("nested_blocksize"), state.number("nested_offset"), absmax.shape[0]
    module, why = name.removesuffix("absmax"), f"{name} is uint8 and has {blocks} numbers"
    table = tensors.take(f"{module}nested_quant_map", (256,), dtype="float32", why=why)
    nested = tensors.take(f"{module}nested_absmax", (-(-blocks // size),), dtype="float32", why=why)

    def decoded(codes: np.ndarray) -> np.ndarray:
        scales = np.repeat(nested.read(), size)[:blocks]
        return table.read()[codes] * scales[:, None] + np.float32(offset)

    return absmax.map(decoded, np.dtype(np.float32))


BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def write_bitsandbytes(saved: SavedMatrix) -> tuple[dict[str, np.ndarray], None]:
    """Return the tensors of a matrix in NF4, in flat blocks of it.

    Args:
        saved: the matrix.

    Raises:
        CheckpointError: it is no NF4, its groups are no such blocks, or its input is quantized.
    """
    matrix, name = saved.matrix, saved.name
    shape, group = matrix.codes.shape, matrix.group
    is_nf4 = matrix.grid == NF4 and saved.inputs is None and matrix.group_of_column is None
    block = max((size for size in BLOCK_SIZES if group % size == 0), default=0)
    if not is_nf4 or not block or shape[1] % group:
        raise saved.refused(
            "bitsandbytes",
            f"NF4 in blocks of {', '.join(map(str, BLOCK_SIZES))} numbers, and float inputs",
            "NF4WeightPerGroupFloat.let(group_size=64), or method='compressed-tensors'",
        )
    codes = matrix.codes.reshape(-1)
    codes = np.pad(codes, (0, codes.size % 2))
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(shape)}
    return {
        name: (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)[:, None],
        f"{name}.absmax": np.repeat(matrix.scales().reshape(-1), group // block),
        f"{name}.quant_map": NF4.table,
        f"{name}{STATE}nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }, None


def bitsandbytes_settings(schemes: Mapping[str, object], floats: Sequence[str]) -> Values:
    """Return `quantization_config`.

    Args:
        schemes: not needed: there is one.
        floats: modules whose weights are matrices of floats.
    """
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": "float32",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": [*floats] or None,
    }
