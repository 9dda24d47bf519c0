"""Layouts that quantize inputs too: ModelOpt (`hf_quant_config.json`), DeepSeek's FP8 in blocks, and torchao.

torchao flattens its tensor subclasses into safetensors files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np

from jqinject.formats.bits import low_nibble_first
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.layouts.layout_settings import Settings, as_blocks, parsed
from jqinject.formats.safetensors_files import FLOATS, ONE, Tensors
from jqinject.formats.stored_matrix import E2M1, E4M3, InputFormat, Matrix, StoredMatrix
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
    packed = tensors.take(f"{module}.weight", (None, None), "uint8")
    rows, columns = packed.shape[0], packed.shape[1] * 2
    why = f"groups of {size} of {rows}x{columns}"
    scales = rows, math.ceil(columns / size)
    scale = tensors.take(f"{module}.weight_scale", scales, "float8_e4m3fn", why)
    unit = tensors.take(f"{module}.weight_scale_2", None, FLOATS, "one scale of the tensor", shapes=ONE)
    stored = _input_scale(tensors, module)
    inputs = InputFormat("float", 4, strategy="tensor_group", group_size=size)

    def read() -> Matrix:
        factor = np.asarray(unit.floats()[0])
        return Matrix(low_nibble_first(packed.read()), scale.read(), E2M1, (1, size), factor=factor)

    return StoredMatrix(
        f"{module}.weight",
        (rows, columns),
        E2M1,
        "ModelOpt NVFP4",
        packed.nbytes,
        read,
        np.dtype(ml_dtypes.float8_e4m3fn),
        # The other way around in compressed-tensors, whose global scale this is.
        None if stored is None else replace(inputs, global_scale=np.float32(1) / stored),
    )


def _eight_bits(tensors: Tensors, module: str) -> StoredMatrix:
    weight = tensors.take(f"{module}.weight", (None, None), ("float8_e4m3fn", "int8"))
    rows, columns = weight.shape
    shapes = [*ONE, (rows,), (rows, 1)]
    scale = tensors.take(f"{module}.weight_scale", None, FLOATS, "one scale, or one a row", shapes=shapes)
    is_float = weight.dtype.name != "int8"
    grid, name = (E4M3, "FP8") if is_float else (IntGrid(8), "INT8")
    stored = _input_scale(tensors, module)
    inputs = InputFormat("float" if is_float else "int", 8, dynamic=False, scale=stored)

    def read() -> Matrix:
        scales = as_blocks(scale.read())
        block = 1 if scales.shape[0] > 1 else max(rows, 1), max(columns, 1)
        return Matrix(weight.read(), scales, grid, block)

    return StoredMatrix(
        f"{module}.weight",
        (rows, columns),
        grid,
        f"ModelOpt {name}",
        weight.nbytes,
        read,
        input_format=None if stored is None else inputs,
    )


def _input_scale(tensors: Tensors, module: str) -> np.ndarray | None:
    """Return the scale of an input; None if the checkpoint has none."""
    name = f"{module}.input_scale"
    if name not in tensors:
        return None
    return tensors.take(name, None, FLOATS, "one scale of the input", shapes=ONE).floats()


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
    weight = tensors.take(name, (None, None), "float8_e4m3fn")
    rows, columns = weight.shape
    blocks = math.ceil(rows / block[0]), math.ceil(columns / block[1])
    why = f"blocks of {block[0]}x{block[1]} of {rows}x{columns}"
    scale = tensors.take(f"{name}_scale_inv", blocks, FLOATS, why)
    inputs = InputFormat("float", 8, strategy="group", group_size=block[1])
    return StoredMatrix(
        name,
        (rows, columns),
        E4M3,
        "fp8 blocks",
        weight.nbytes,
        lambda: Matrix(weight.read(), scale.read(), E4M3, block),
        input_format=inputs,
    )


INTEGERS, FLOAT8, UNPACKED = "Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor"
KINDS = {"QuantizeTensorToInt8Kwargs": "int", "QuantizeTensorToFloat8Kwargs": "float"}
STRATEGIES = {"PerRow": "token", "PerTensor": "tensor"}


def is_torchao(tensors: Tensors) -> bool:
    """Return whether the file's metadata describe tensors of torchao."""
    return "tensor_names" in tensors.metadata


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
    codes = tensors.take(f"{start}qdata", (None, None), "float8_e4m3fn" if kind == FLOAT8 else "int8")
    rows, columns = codes.shape
    height, width = data.sizes("block_size")
    blocks = math.ceil(rows / height), math.ceil(columns / width)
    shapes = [blocks, blocks[:1]] if blocks[1] == 1 else [blocks]
    why = f"blocks of {height}x{width} of {rows}x{columns}"
    scale = tensors.take(f"{start}scale", why=why, shapes=shapes)
    has_zero = f"{start}zero_point" in tensors
    if "zero_point" in (settings.values.get("_tensor_data_names") or ()) and not has_zero:
        raise CheckpointError(f"{name} has no {start}zero_point, which its metadata name")
    zero = tensors.take(f"{start}zero_point", why=why, shapes=shapes) if has_zero else None
    grid = E4M3 if kind == FLOAT8 else IntGrid(_bits(data, name) if kind == UNPACKED else 8)

    def read() -> Matrix:
        zero_point = None if zero is None or not np.any(zero.read()) else as_blocks(zero.read())
        return Matrix(codes.read(), as_blocks(scale.read()), grid, (height, width), zero_point)

    return StoredMatrix(
        name,
        (rows, columns),
        grid,
        f"torchao {kind}",
        codes.nbytes,
        read,
        input_format=_input_format(tensors, start, data),
    )


def _bits(data: Settings, name: str) -> int:
    target = (data.values.get("target_dtype") or {}).get("_data", "")
    if target not in {f"int{bits}" for bits in range(1, 9)}:
        raise CheckpointError(f"{name} has the target_dtype {target!r}, expected int1 to int8")
    return int(target.removeprefix("int"))


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
    kind, settings = KINDS[keywords.choice("_type", tuple(KINDS))], _below(keywords, "_data")
    settings.choice("reduce_range", (False,), False)
    for bound in ("hp_value_lb", "hp_value_ub"):
        settings.choice(bound, (None,))
    _below(settings, "float8_dtype").choice("_data", ("float8_e4m3fn",), "float8_e4m3fn")
    mapping = _below(settings, "mapping_type").choice("_data", ("SYMMETRIC", "ASYMMETRIC"), "SYMMETRIC")
    granularity = _below(settings, "granularity").choice("_type", tuple(STRATEGIES), "PerRow")
    inputs = InputFormat(kind, 8, mapping == "SYMMETRIC", STRATEGIES[granularity])
    return _static(tensors, start, inputs) if f"{start}act_quant_scale" in tensors else inputs


def _below(settings: Settings, name: str) -> Settings:
    """Return the metadata of an object; nothing where they leave it out."""
    return settings.below(name) or Settings({}, f"{settings.where}.{name}")


def _static(tensors: Tensors, start: str, inputs: InputFormat) -> InputFormat:
    """Return the same with the scale that the file has for all inputs."""
    if inputs.strategy != "tensor":
        raise CheckpointError(f"{start}act_quant_scale: static scales of rows are not read")
    shapes = [*ONE, (1, 1)]
    scale = tensors.take(
        f"{start}act_quant_scale", None, FLOATS, "one scale of a static input", shapes=shapes
    )
    zero = None
    if not inputs.symmetric:
        why = "a static input with zero points"
        zero = tensors.take(f"{start}act_quant_zero_point", why=why, shapes=shapes).floats()
    return replace(inputs, dynamic=False, scale=scale.floats(), zero_point=zero)
