"""Matrices as bitsandbytes, DeepSeek, GGUF and jqinject's own layout store them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from jqinject.formats.bits import pack_stream
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.layouts.own import FORMAT_VERSION, input_settings
from jqinject.formats.saving.compressed import signed_integers
from jqinject.formats.saving.saved_matrices import frozen_arrays
from jqinject.formats.saving.weights import Weight, group_of_column
from jqinject.formats.stored_matrix import InputFormat, Matrix, minifloat_name
from jqinject.ops import NF4

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
FP8_BLOCK = 128
GGUF_GROUP = 32


def _refuse(weight: Weight, method: str, matrix: Matrix, inputs: InputFormat | None = None) -> None:
    """Raise if groups are no consecutive columns, or a layer quantizes its input, which the format cannot say.

    Raises:
        CheckpointError: names the weight.
    """
    if inputs is not None:
        raise CheckpointError(
            f"{weight.path}: the input of its layer is quantized, which {method} does not know.\n"
            "  cure: rules without input_quant, or method='compressed-tensors'"
        )
    if matrix.group_of_column is not None:
        raise CheckpointError(
            f"{weight.path} has columns in activation order, which {method} does not know.\n"
            "  cure: method='compressed-tensors' or 'jqinject'"
        )


def bitsandbytes(
    matrix: Matrix, weight: Weight, inputs: InputFormat | None
) -> tuple[dict[str, np.ndarray], None]:
    """Return the tensors of a matrix in NF4, in flat blocks of it.

    Args:
        matrix: its numbers.
        weight: that they belong to.
        inputs: how its input is quantized.

    Raises:
        CheckpointError: it is no NF4, or its groups are no such blocks.
    """
    _refuse(weight, "bitsandbytes", matrix, inputs)
    shape, path, group = matrix.codes.shape, weight.path, matrix.group
    if matrix.table is None or not np.array_equal(matrix.table, NF4.table):
        raise CheckpointError(
            f"{path} is {matrix.label}; only NF4 is written for bitsandbytes.\n"
            "  cure: NF4WeightPerGroupFloat, or method='compressed-tensors'"
        )
    block = max((size for size in BLOCK_SIZES if group % size == 0), default=0)
    if not block or shape[1] % group:
        raise CheckpointError(
            f"{path} has groups of {group} in rows of {shape[1]}; blocks of bitsandbytes are of "
            f"{', '.join(map(str, BLOCK_SIZES))} numbers.\n  cure: NF4WeightPerGroupFloat.let(group_size=64)"
        )
    codes = matrix.codes.reshape(-1)
    codes = np.pad(codes, (0, codes.size % 2))
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(shape)}
    name = weight.name
    return {
        name: (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)[:, None],
        f"{name}.absmax": np.repeat(matrix.scales().reshape(-1), group // block),
        f"{name}.quant_map": NF4.table,
        f"{name}.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }, None


def bitsandbytes_settings(floats: list[str]) -> dict[str, Any]:
    """Return `quantization_config`.

    Args:
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
        "llm_int8_skip_modules": floats or None,
    }


def fp8_blocks(
    matrix: Matrix, weight: Weight, inputs: InputFormat | None
) -> tuple[dict[str, np.ndarray], None]:
    """Return the tensors of a matrix of 8-bit minifloats, with a scale for each 128 rows and columns.

    Args:
        matrix: its numbers.
        weight: that they belong to.
        inputs: how its input is quantized.

    Raises:
        CheckpointError: it is not e4m3, its scales are not such blocks, or its layer quantizes its input otherwise.
    """
    path, size = weight.path, FP8_BLOCK
    _refuse(weight, "FP8 in blocks", matrix)
    expected = InputFormat("float", 8, strategy="group", group_size=size)
    if inputs != expected:
        stated = "does not" if inputs is None else f"as {inputs.strategy} {inputs.kind}"
        raise CheckpointError(
            f"{path}: layers of FP8 blocks quantize their inputs in groups of {size}, this one {stated}.\n"
            f"  cure: input_quant=Fp8e4m3OCPDynamicActPerGroupFloat.let(group_size={size})"
        )
    if minifloat_name(matrix.grid) != "e4m3" or matrix.zero_point is not None:
        raise CheckpointError(
            f"{path} is {matrix.label}; FP8 blocks are e4m3.\n  cure: Fp8e4m3OCPWeightPerTensorFloat"
        )
    scale, columns = matrix.scales(), matrix.codes.shape[1]
    group = columns if scale.shape[1] == 1 else matrix.group
    blocks = np.repeat(scale, -(-group // size), axis=1)[:, : -(-columns // size)]
    of_rows = bool(np.any(np.repeat(blocks[::size], size, axis=0)[: blocks.shape[0]] != blocks))
    if of_rows or (scale.shape[1] > 1 and group % size):
        raise CheckpointError(
            f"{path} has scales of its own for {'rows' if of_rows else f'{group} inputs'}; FP8 blocks "
            f"have one for {size} rows and {size} columns.\n  cure: Fp8e4m3OCPWeightPerTensorFloat"
        )
    return {
        weight.name: matrix.codes,
        f"{weight.name}_scale_inv": np.ascontiguousarray(blocks[::size]),
    }, None


def fp8_settings(floats: list[str]) -> dict[str, Any]:
    """Return `quantization_config`.

    Args:
        floats: modules whose weights are matrices of floats.
    """
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": floats or None,
    }


def gguf_blocks(
    matrix: Matrix, weight: Weight, inputs: InputFormat | None, round_scales: bool
) -> tuple[str, np.ndarray]:
    """Return the type of a matrix' blocks, and their bytes: Q8_0 for 8 bits, Q4_0 for 2 to 4.

    Args:
        matrix: its numbers.
        weight: that they belong to.
        inputs: how its input is quantized.
        round_scales: whether scales may be rounded to the 16 bits that blocks have.

    Raises:
        CheckpointError: it is of another kind, its groups are no such blocks, or its scales have more bits.
    """
    _refuse(weight, "GGUF", matrix, inputs)
    path, bits = weight.path, matrix.grid.bit_width
    if not matrix.grid.is_integer or not 2 <= bits <= 8:
        raise CheckpointError(
            f"{path} is {matrix.label}; GGUF is written from integers of 2 to 8 bits, as Q8_0 or "
            "Q4_0.\n  cure: IntWeightSymmetricGroupQuant.let(group_size=32), of 8 or 4 bits"
        )
    codes, zero = signed_integers(matrix)
    if zero is not None and np.any(zero):
        raise CheckpointError(
            f"{path} has zero points; GGUF's Q8_0 and Q4_0 have none.\n"
            "  cure: symmetric weights, such as IntWeightSymmetricGroupQuant"
        )
    columns, group = codes.shape[1], matrix.group
    if columns % GGUF_GROUP or (group % GGUF_GROUP and group != columns):
        raise CheckpointError(
            f"{path} has groups of {group} in rows of {columns}; blocks of GGUF are {GGUF_GROUP} inputs.\n"
            f"  cure: IntWeightSymmetricGroupQuant.let(group_size={GGUF_GROUP})"
        )
    scale = np.repeat(matrix.scales(), group // GGUF_GROUP, axis=1)[:, : columns // GGUF_GROUP]
    with np.errstate(over="ignore"):
        stored = scale.astype(np.float16)
    lost = ~np.isfinite(stored) | ((stored == 0) & (scale != 0))
    if np.any(lost) or (not round_scales and np.any(stored.astype(np.float32) != scale)):
        cure = "round_scales=True, which changes weights by up to 1 in 2048"
        cure = f"another scale than {scale[lost][0]:.3g}" if np.any(lost) else cure
        raise CheckpointError(
            f"{path} has scales that are no floats of 16 bits, as GGUF's are.\n  cure: {cure}"
        )
    blocks = codes.reshape(codes.shape[0], -1, GGUF_GROUP)
    head = stored[..., None].view(np.uint8)
    if bits > 4:
        return "Q8_0", np.concatenate([head, blocks.astype(np.int8).view(np.uint8)], axis=-1)
    shifted = (blocks + 8).astype(np.uint8)
    packed = shifted[..., : GGUF_GROUP // 2] | shifted[..., GGUF_GROUP // 2 :] << 4
    return "Q4_0", np.concatenate([head, packed], axis=-1)


def own_layout(weight: Weight, inputs: InputFormat | None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the tensors of a weight in jqinject's own layout (`layouts.own`), and its settings.

    Args:
        weight: with its numbers.
        inputs: how the input of its layer is quantized.

    Raises:
        CheckpointError: its numbers are of no kind that files hold.
    """
    arrays, name = frozen_arrays(weight), weight.name
    codes, grid, groups, bits = arrays.codes, arrays.grid, arrays.groups, int(arrays.grid.bit_width)
    columns = None
    if weight.order is not None:
        axis = _permuted_axis(weight, None if groups is None else groups.dim)
        codes = np.take(codes, np.argsort(weight.order), axis)
        columns = None if groups is None else group_of_column(weight.order, groups.size)
    if arrays.factor is not None and arrays.factor.size != 1:
        raise CheckpointError(
            f"{weight.path} is a stack with a factor of scales for each layer, which is not written"
        )
    packed = (
        codes if bits == 8 else pack_stream(codes.view(np.uint8).reshape(-1) & np.uint8(2**bits - 1), bits)
    )
    tensors = {
        "codes": packed,
        "scale": arrays.scale,
        "zero_point": arrays.zero_point,
        "scale_factor": None if arrays.factor is None else arrays.factor.reshape(()),
        "table": grid.table,
        "g_idx": columns,
    }
    settings: dict[str, Any] = {
        "kind": "int" if grid.is_integer else "table" if grid.is_table else "float",
        "bits": bits,
        "signed": bool(grid.signed) if grid.is_integer else True,
        "name": minifloat_name(grid),
        "shape": list(codes.shape),
        "group": None if groups is None else groups.size,
    }
    if inputs is not None:
        settings["input"] = input_settings(inputs)
    return {f"{name}.{end}": array for end, array in tensors.items() if array is not None}, settings


def _permuted_axis(weight: Weight, grouped: int | None) -> int:
    """Return the axis of a weight whose input is permuted: the one with groups, or the only one that is summed over.

    Raises:
        CheckpointError: it is unknown, or not one axis.
    """
    summed = () if weight.layer is None else weight.layer.summed_axes
    axis = grouped if grouped is not None else summed[0] if len(summed) == 1 else None
    shape = () if weight.form is None else weight.form.shape
    if axis is None or weight.order is None or shape[axis] != weight.order.size:
        raise CheckpointError(
            f"{weight.path}: its permuted input is no single axis of {shape}, so its columns have no order.\n"
            "  cure: method='compressed-tensors', with names"
        )
    return axis


def own_settings(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return `quantization_config`.

    Args:
        weights: the settings of each.
    """
    return {"quant_method": "jqinject", "format_version": FORMAT_VERSION, "weights": dict(weights)}
