"""Layouts that quantize inputs too: ModelOpt (`hf_quant_config.json`), DeepSeek's FP8 in blocks, and torchao.

torchao flattens its tensor subclasses into safetensors files.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from jqinject.formats.bits import unpack_stream
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.layouts.layout_settings import Settings, parsed
from jqinject.formats.safetensors_files import FLOATS, Tensors, Values
from jqinject.formats.stored_matrix import E2M1, E4M3, InputFormat, SavedMatrix, StoredMatrix
from jqinject.ops import IntGrid

ALGORITHMS = ("NVFP4", "FP8", "INT8", "INT8_SQ", "W8A8_SQ_PER_CHANNEL")


def read_modelopt(tensors: Tensors, config: Settings) -> list[StoredMatrix]:
    """Return the matrices of ModelOpt's layouts.

    NVFP4 is `codes * weight_scale * weight_scale_2`; FP8 and INT8 are `codes * weight_scale`.

    Args:
        tensors: of the files.
        config: `quantization`, of hf_quant_config.json.

    Raises:
        CheckpointError: the algorithm is unknown, or the tensors contradict it.
    """
    algorithm = config.choice("quant_algo", ALGORITHMS)
    is_nvfp4 = algorithm == "NVFP4"
    read = partial(_nvfp4, size=config.integer("group_size", default=16)) if is_nvfp4 else _eight_bits
    modules = tensors.ending(".weight_scale")
    for module in modules:
        if f"{module}.pre_quant_scale" in tensors:
            raise CheckpointError(f"{module}.pre_quant_scale scales the input, which is not read")
    return [read(tensors, module) for module in modules]


def _nvfp4(tensors: Tensors, module: str, size: int) -> StoredMatrix:
    packed = tensors.take(f"{module}.weight", (None, None), dtype="uint8")
    shape, block = (packed.shape[0], packed.shape[1] * 2), (1, size)
    arrays = {
        "codes": packed.map(lambda x: unpack_stream(x, 4, shape[1])),
        "scale": tensors.take_blocks(f"{module}.weight_scale", shape, block, "float8_e4m3fn"),
        "factor": tensors.take_number(f"{module}.weight_scale_2", "one scale of the tensor"),
    }
    inputs = _with_scale(tensors, module, InputFormat("float", 4, strategy="tensor_group", group_size=size))
    return StoredMatrix(f"{module}.weight", shape, E2M1, "ModelOpt NVFP4", block, arrays, inputs)


def _eight_bits(tensors: Tensors, module: str) -> StoredMatrix:
    codes = tensors.take(f"{module}.weight", (None, None), dtype=("float8_e4m3fn", "int8"))
    rows, columns = codes.shape
    name = f"{module}.weight_scale"
    block = (1 if math.prod(tensors.take(name).shape) > 1 else max(rows, 1)), max(columns, 1)
    arrays = {"codes": codes, "scale": tensors.take_blocks(name, codes.shape, block)}
    is_float = codes.dtype.name != "int8"
    grid, layout = (E4M3, "ModelOpt FP8") if is_float else (IntGrid(8), "ModelOpt INT8")
    inputs = _with_scale(tensors, module, InputFormat("float" if is_float else "int", 8, dynamic=False))
    return StoredMatrix(f"{module}.weight", codes.shape, grid, layout, block, arrays, inputs)


def _with_scale(tensors: Tensors, module: str, inputs: InputFormat) -> InputFormat | None:
    """Return how an input is quantized, with its scale; None if the checkpoint has none."""
    name = f"{module}.input_scale"
    if name not in tensors:
        return None
    scale = tensors.take_number(name, "one scale of the input").floats()
    # That of groups is the other way around in compressed-tensors, whose global scale it is.
    if inputs.dynamic:
        return replace(inputs, global_scale=np.float32(1) / scale)
    return replace(inputs, scale=scale)


def read_fp8_blocks(tensors: Tensors, config: Settings) -> list[StoredMatrix]:
    """Return the matrices of DeepSeek's layout, those with a `weight_scale_inv`.

    `matrix = minifloats * weight_scale_inv[row // 128, column // 128]`: in spite of its name the scale is multiplied.

    Args:
        tensors: of the files.
        config: `quantization_config`.

    Raises:
        CheckpointError: the settings are unknown or contradict the tensors.
    """
    config.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    if config.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "static":
        raise CheckpointError(f"{config.where}: activation_scheme is 'static', which is not read")
    height, width = config.sizes("weight_block_size")
    return [_fp8_blocks(tensors, name, (height, width)) for name in tensors.ending("_scale_inv")]


def _fp8_blocks(tensors: Tensors, name: str, block: tuple[int, int]) -> StoredMatrix:
    codes = tensors.take(name, (None, None), dtype="float8_e4m3fn")
    scale = tensors.take_blocks(f"{name}_scale_inv", codes.shape, block)
    inputs = InputFormat("float", 8, strategy="group", group_size=block[1])
    arrays = {"codes": codes, "scale": scale}
    return StoredMatrix(name, codes.shape, E4M3, "fp8 blocks", block, arrays, inputs)


FP8_BLOCK = 128


def write_fp8_blocks(saved: SavedMatrix) -> tuple[dict[str, np.ndarray], None]:
    """Return the tensors of a matrix of 8-bit minifloats, with a scale for each 128 rows and columns.

    Args:
        saved: the matrix.

    Raises:
        CheckpointError: it is not e4m3, its scales are not such blocks, or its layer quantizes its input otherwise.
    """
    size, matrix = FP8_BLOCK, saved.matrix
    scale, columns = matrix.scales(), matrix.codes.shape[1]
    group = columns if scale.shape[1] == 1 else matrix.group
    blocks = np.repeat(scale, -(-group // size), axis=1)[:, : -(-columns // size)]
    is_e4m3 = matrix.grid == E4M3 and matrix.zero_point is None and matrix.group_of_column is None
    if (
        not is_e4m3
        or saved.inputs != InputFormat("float", 8, strategy="group", group_size=size)
        or (scale.shape[1] > 1 and group % size)
        or np.any(np.repeat(blocks[::size], size, axis=0)[: blocks.shape[0]] != blocks)
    ):
        raise saved.refused(
            "FP8 in blocks",
            f"e4m3, a scale for {size} rows and {size} columns, not for rows of their own; inputs in groups of {size}",
            f"Fp8e4m3OCPWeightPerTensorFloat, input_quant=Fp8e4m3OCPDynamicActPerGroupFloat.let(group_size={size}); "
            "or method='compressed-tensors'",
        )
    return {saved.name: matrix.codes, f"{saved.name}_scale_inv": np.ascontiguousarray(blocks[::size])}, None


def fp8_settings(schemes: Mapping[str, object], floats: Sequence[str]) -> Values:
    """Return `quantization_config`.

    Args:
        schemes: not needed: there is one.
        floats: modules whose weights are matrices of floats.
    """
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": [*floats] or None,
    }


INTEGERS, FLOAT8, UNPACKED = "Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor"
KINDS = {"QuantizeTensorToInt8Kwargs": "int", "QuantizeTensorToFloat8Kwargs": "float"}
STRATEGIES = {"PerRow": "token", "PerTensor": "tensor"}


def read_torchao(tensors: Tensors, config: Settings | None) -> list[StoredMatrix]:
    """Return the matrices of torchao's flattened tensors: `matrix = (qdata - zero_point) * scale`.

    Args:
        tensors: of the file, with its metadata.
        config: not needed: the metadata have everything.

    Raises:
        CheckpointError: a tensor's class is not known, or contradicts its parts.
    """
    matrices = []
    for name in parsed(tensors.metadata["tensor_names"], "the metadata tensor_names"):
        where = f"the metadata of {name}"
        values = parsed(tensors.metadata.get(name, "null"), where)
        if isinstance(values, Mapping) and values.get("_type") != "Tensor":
            matrices.append(_matrix(tensors, name, Settings(values, where)))
    return matrices


def _matrix(tensors: Tensors, name: str, settings: Settings) -> StoredMatrix:
    kind = settings.values.get("_type")
    if kind not in (INTEGERS, FLOAT8, UNPACKED):
        raise CheckpointError(f"{name} is torchao's {kind!r}; known are {INTEGERS}, {FLOAT8}, {UNPACKED}")
    module, _, parameter = name.rpartition(".")
    start = f"{module}._{parameter}_" if module else f"_{parameter}_"
    data = Settings(settings.values.get("_data"), f"the metadata of {name}")
    stored = "float8_e4m3fn" if kind == FLOAT8 else "int8"
    codes = tensors.take(f"{start}qdata", (None, None), dtype=stored)
    height, width = data.sizes("block_size")
    arrays = {"codes": codes}
    stated = {"scale", *(settings.values.get("_tensor_data_names") or ())}
    for part in ("scale", "zero_point"):
        if part in stated or f"{start}{part}" in tensors:
            arrays[part] = tensors.take_blocks(f"{start}{part}", codes.shape, (height, width), None)
    bits = 8
    if kind == UNPACKED:
        target = data.within("target_dtype").choice("_data", [f"int{bits}" for bits in range(1, 9)])
        bits = int(target.removeprefix("int"))
    grid = E4M3 if kind == FLOAT8 else IntGrid(bits)
    inputs = _input_format(tensors, start, data)
    return StoredMatrix(name, codes.shape, grid, f"torchao {kind}", (height, width), arrays, inputs)


def _input_format(tensors: Tensors, start: str, data: Settings) -> InputFormat | None:
    """Return how the input of a matrix is quantized; None if it is not.

    Args:
        tensors: of the file; static scales are taken from them.
        start: of the names of the matrix's tensors.
        data: the metadata of the matrix.

    Raises:
        CheckpointError: the settings are unknown, or not read.
    """
    if f"{start}act_pre_scale" in tensors:
        raise CheckpointError(f"{start}act_pre_scale scales the input, which is not read")
    if data.values.get("activation_quantization") is not None:
        data.choice("activation_quantization", ("int8_asym_per_token",))
        return InputFormat("int", 8, symmetric=False, strategy="token")
    keywords = data.below("act_quant_kwargs")
    if keywords is None:
        return None
    kind, settings = KINDS[keywords.choice("_type", tuple(KINDS))], keywords.within("_data")
    settings.choice("reduce_range", (False,), False)
    for bound in ("hp_value_lb", "hp_value_ub"):
        settings.choice(bound, (None,))
    settings.within("float8_dtype").choice("_data", ("float8_e4m3fn",), "float8_e4m3fn")
    mapping = settings.within("mapping_type").choice("_data", ("SYMMETRIC", "ASYMMETRIC"), "SYMMETRIC")
    granularity = settings.within("granularity").choice("_type", tuple(STRATEGIES), "PerRow")
    inputs = InputFormat(kind, 8, mapping == "SYMMETRIC", STRATEGIES[granularity])
    if f"{start}act_quant_scale" not in tensors:
        return inputs
    if inputs.strategy != "tensor":
        raise CheckpointError(f"{start}act_quant_scale: static scales of rows are not read")

    def stored(part: str, dtype: str | Sequence[str] | None) -> np.ndarray:
        name = f"{start}act_quant_{part}"
        return tensors.take_blocks(name, (1, 1), (1, 1), dtype, "a static input").floats()

    zero = None if inputs.symmetric else stored("zero_point", None)
    return replace(inputs, dynamic=False, scale=stored("scale", FLOATS), zero_point=zero)
