"""Rows as bitsandbytes, DeepSeek and GGUF store them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.loading.rows import Rows
from jqinject.formats.saving.weights import Weight
from jqinject.formats.stored_matrix import InputFormat
from jqinject.ops import NF4

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
FP8_BLOCK = 128
GGUF_GROUP = 32


def scales_of(rows: Rows) -> np.ndarray:
    """The scales with their common factor, float32."""
    scale = rows.scale.astype(np.float32)
    return scale if rows.factor is None else scale * rows.factor


def refuse_order(rows: Rows, weight: Weight, method: str) -> None:
    """Raise if groups are no consecutive columns, which the format cannot say.

    Raises:
        CheckpointError: names the weight.
    """
    if rows.columns is not None:
        raise CheckpointError(
            f"{weight.path} has columns in activation order, which {method} does not know.\n"
            "  cure: method='compressed-tensors' or 'jqinject'"
        )


def refuse_inputs(weight: Weight, inputs: InputFormat | None, method: str) -> None:
    """Raise if a layer quantizes its input, which the format cannot say.

    Raises:
        CheckpointError: names the weight.
    """
    if inputs is not None:
        raise CheckpointError(
            f"{weight.path}: the input of its layer is quantized, which {method} does not know.\n"
            "  cure: rules without input_quant, or method='compressed-tensors'"
        )


def bitsandbytes(
    rows: Rows, weight: Weight, inputs: InputFormat | None
) -> tuple[dict[str, np.ndarray], None]:
    """The tensors of a matrix in NF4, in flat blocks of it.

    Args:
        rows: its numbers.
        weight: whose they are.
        inputs: how its input is quantized.

    Raises:
        CheckpointError: it is no NF4, or its groups are no such blocks.
    """
    refuse_inputs(weight, inputs, "bitsandbytes")
    refuse_order(rows, weight, "bitsandbytes")
    shape, path = rows.codes.shape, weight.path
    if rows.table is None or not np.array_equal(rows.table, NF4.table):
        raise CheckpointError(
            f"{path} is {rows.format.label or 'of another table'}; only NF4 is written for bitsandbytes.\n"
            "  cure: NF4WeightPerGroupFloat, or method='compressed-tensors'"
        )
    block = max((size for size in BLOCK_SIZES if rows.group % size == 0), default=0)
    if not block or shape[1] % rows.group:
        raise CheckpointError(
            f"{path} has groups of {rows.group} in rows of {shape[1]}; blocks of bitsandbytes are of "
            f"{', '.join(map(str, BLOCK_SIZES))} numbers.\n  cure: NF4WeightPerGroupFloat.let(group_size=64)"
        )
    codes = rows.codes.reshape(-1)
    codes = np.pad(codes, (0, codes.size % 2))
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(shape)}
    absmax = np.repeat(scales_of(rows).reshape(-1), rows.group // block)
    name = weight.name
    return {
        name: (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)[:, None],
        f"{name}.absmax": absmax,
        f"{name}.quant_map": NF4.table,
        f"{name}.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }, None


def bitsandbytes_settings(floats: list[str]) -> dict[str, Any]:
    """`quantization_config`.

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


def fp8_blocks(rows: Rows, weight: Weight, inputs: InputFormat | None) -> tuple[dict[str, np.ndarray], None]:
    """The tensors of a matrix of 8-bit minifloats, with a scale for each 128 rows and columns.

    Args:
        rows: its numbers.
        weight: whose they are.
        inputs: how its input is quantized.

    Raises:
        CheckpointError: it is not e4m3, its scales are not such blocks, or its layer quantizes its input otherwise.
    """
    path, size = weight.path, FP8_BLOCK
    refuse_order(rows, weight, "FP8 in blocks")
    if (
        inputs is None
        or (inputs.kind, inputs.strategy, inputs.group_size) != ("float", "group", size)
        or not inputs.dynamic
    ):
        raise CheckpointError(
            f"{path}: layers of FP8 blocks quantize their inputs in groups of {size}, this one "
            f"{'does not' if inputs is None else 'as ' + inputs.strategy + ' ' + inputs.kind}.\n"
            f"  cure: input_quant=Fp8e4m3OCPDynamicActPerGroupFloat.let(group_size={size})"
        )
    if rows.format.name != "e4m3" or rows.zero_point is not None:
        raise CheckpointError(
            f"{path} is {rows.format.label or 'of a table'}; FP8 blocks are e4m3.\n"
            "  cure: Fp8e4m3OCPWeightPerTensorFloat"
        )
    scale = scales_of(rows)
    columns = rows.codes.shape[1]
    each = columns if scale.shape[1] == 1 else rows.group
    blocks = np.repeat(scale, -(-each // size), axis=1)[:, : -(-columns // size)]
    first = np.repeat(blocks[::size], size, axis=0)[: blocks.shape[0]]
    if (scale.shape[1] > 1 and each % size) or np.any(first != blocks):
        raise CheckpointError(
            f"{path} has scales of its own for {'rows' if np.any(first != blocks) else f'{each} inputs'}; FP8 blocks "
            f"have one for {size} rows and {size} columns.\n  cure: Fp8e4m3OCPWeightPerTensorFloat"
        )
    found = {
        weight.name: rows.codes,
        f"{weight.name}_scale_inv": np.ascontiguousarray(blocks[::size]),
    }
    return found, None


def fp8_settings(floats: list[str]) -> dict[str, Any]:
    """`quantization_config`.

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
    rows: Rows, weight: Weight, inputs: InputFormat | None, round_scales: bool
) -> tuple[str, np.ndarray]:
    """The type of a matrix' blocks, and their bytes: Q8_0 for 8 bits, Q4_0 for 2 to 4.

    Args:
        rows: its numbers.
        weight: whose they are.
        inputs: how its input is quantized.
        round_scales: whether scales may be rounded to the 16 bits that blocks have.

    Raises:
        CheckpointError: it is of another kind, its groups are no such blocks, or its scales have more bits.
    """
    refuse_inputs(weight, inputs, "GGUF")
    refuse_order(rows, weight, "GGUF")
    path, bits = weight.path, rows.format.bits
    if rows.format.kind != "int" or bits not in (2, 3, 4, 5, 6, 7, 8):
        raise CheckpointError(
            f"{path} is {rows.format.label or 'of a table'}; GGUF is written from integers of 2 to 8 bits, as Q8_0 or "
            "Q4_0.\n  cure: IntWeightSymmetricGroupQuant.let(group_size=32), of 8 or 4 bits"
        )
    codes, zero = rows.codes.astype(np.int16), rows.zero_point
    if not rows.format.signed:
        half = 1 << (bits - 1)
        codes, zero = codes - half, (0 if zero is None else zero) - np.float32(half)
    if zero is not None and np.any(zero):
        raise CheckpointError(
            f"{path} has zero points; GGUF's Q8_0 and Q4_0 have none.\n"
            "  cure: symmetric weights, such as IntWeightSymmetricGroupQuant"
        )
    columns = codes.shape[1]
    if columns % GGUF_GROUP or (rows.group % GGUF_GROUP and rows.group != columns):
        raise CheckpointError(
            f"{path} has groups of {rows.group} in rows of {columns}; blocks of GGUF are {GGUF_GROUP} inputs.\n"
            f"  cure: IntWeightSymmetricGroupQuant.let(group_size={GGUF_GROUP})"
        )
    scale = np.repeat(scales_of(rows), rows.group // GGUF_GROUP, axis=1)[:, : columns // GGUF_GROUP]
    with np.errstate(over="ignore"):
        stored = scale.astype(np.float16)
    lost = ~np.isfinite(stored) | ((stored == 0) & (scale != 0))
    if np.any(lost) or (not round_scales and np.any(stored.astype(np.float32) != scale)):
        at = int(np.flatnonzero(lost)[0]) if np.any(lost) else 0
        cure = (
            f"another scale than {scale.reshape(-1)[at]:.3g}"
            if np.any(lost)
            else "round_scales=True, which changes weights by up to 1 in 2048"
        )
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
