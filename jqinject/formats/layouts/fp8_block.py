"""DeepSeek's layout: 8-bit minifloats with a scale for each block of rows and columns."""

from __future__ import annotations

import math

from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.files.tensors import Tensors
from jqinject.formats.layouts.common import Settings, scale_of
from jqinject.formats.stored_matrix import InputFormat, NumberFormat, Numbers, StoredMatrix


def read_fp8_blocks(tensors: Tensors, config: Settings) -> list[StoredMatrix]:
    """The matrices with a `weight_scale_inv`: `matrix = minifloats * weight_scale_inv[row // 128, column // 128]`.

    In spite of its name the scale is multiplied. A model without `weight_block_size` has one scale for each matrix.

    Args:
        tensors: of the files.
        config: `quantization_config`.

    Raises:
        CheckpointError: the settings are unknown or contradict the tensors.
    """
    config.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    scheme = config.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    if scheme == "static":
        raise CheckpointError(f"{config.where}: activation_scheme is 'static', which is not read")
    block = config.held.get("weight_block_size")
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(isinstance(size, int) and size > 0 for size in block)
    ):
        raise CheckpointError(f"{config.where}: weight_block_size is {block!r}, expected two sizes")
    inputs = InputFormat("float", 8, strategy="group", group_size=block[1])
    return [_matrix(tensors, name, block).with_input(inputs) for name in sorted(tensors.ending("_scale_inv"))]


def _matrix(tensors: Tensors, name: str, block: list[int]) -> StoredMatrix:
    weight = tensors.take(name, (None, None), "float8_e4m3fn")
    shape = weight.shape[0], weight.shape[1]
    blocks = math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])
    scale = scale_of(
        tensors, f"{name}_scale_inv", [blocks], f"blocks of {block[0]}x{block[1]} of {shape[0]}x{shape[1]}"
    )
    parts = name, f"{name}_scale_inv"
    kind = NumberFormat("float", 8, name="e4m3")

    def decode() -> Numbers:
        return Numbers(weight.read(), scale.read(), (block[0], block[1]))

    return StoredMatrix(name, shape, kind, "fp8 blocks", parts, math.prod(shape), decode)
