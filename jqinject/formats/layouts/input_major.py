"""GPTQ and AWQ: integers in words, input-major, with scales and zero points of groups of inputs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np

from jqinject.formats.bits import unpack_stream
from jqinject.formats.checkpoint_errors import CONTRADICTION, CheckpointError
from jqinject.formats.files.tensors import Tensor, Tensors
from jqinject.formats.layouts.common import Settings, checked_groups, groups_of, integer_dtype, scale_of
from jqinject.formats.stored_matrix import NumberFormat, Numbers, StoredMatrix

# The places in a word of AWQ's: output k of eight lies in nibble NIBBLE_OF[k].
NIBBLE_OF = (0, 4, 1, 5, 2, 6, 3, 7)


def read_gptq(tensors: Tensors, config: Settings) -> list[StoredMatrix]:
    """The matrices of GPTQ's layout, of version 1 or 2.

    `matrix[o, r] = scales[g, o] * (codes[o, r] - zero[g, o])`, `g = g_idx[r]`. Version 1 stores zero points less 1.

    Args:
        tensors: of the files.
        config: `quantization_config`.

    Raises:
        CheckpointError: the settings are unknown or contradict the tensors.
    """
    bits = config.choice("bits", (2, 3, 4, 8))
    size = config.integer("group_size", lowest=-1, default=-1)
    version = config.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    config.choice("pack_dtype", ("int32",), "int32")
    less = 1 if version == "gptq" else 0
    return [_gptq(tensors, module, bits, size, less) for module in sorted(tensors.ending(".qweight"))]


def _gptq(tensors: Tensors, module: str, bits: int, size: int, less: int) -> StoredMatrix:
    words, ends = _words(tensors, module)
    outputs = words.shape[1]
    order = f"{module}.g_idx"
    if order in tensors:
        inputs = tensors.take(order, (None,), ("int32", "int64")).shape[0]
        ends.append("g_idx")
    else:
        inputs = words.shape[0] * 32 // bits
    if words.shape[0] != math.ceil(inputs * bits / 32):
        raise CheckpointError(
            f"{module}.qweight has {words.shape[0]} rows of words; {inputs} inputs of {bits} bits need "
            f"{math.ceil(inputs * bits / 32)}{CONTRADICTION}"
        )
    groups = groups_of(inputs, size)
    scales = _scales(tensors, module, groups, outputs, size, f" of {bits} bits")
    zeros = tensors.take(
        f"{module}.qzeros",
        (groups, math.ceil(outputs * bits / 32)),
        "int32",
        f"{outputs} zero points of {bits} bits",
    )
    column = None
    if "g_idx" in ends:
        column = checked_groups(tensors.take(order), order, groups)
        held = column.read()
        if np.array_equal(held, np.arange(inputs) // (inputs if size == -1 else size)):
            column = None
    decode = partial(_decode_gptq, words, zeros, scales, column, bits, less, (outputs, inputs), size)
    made = _matrix(module, (outputs, inputs), bits, "GPTQ", ends, words, decode)
    return replace(made, column_groups=None if column is None else column.read)


def _decode_gptq(
    words: Tensor,
    zeros: Tensor,
    scales: Tensor,
    column: Tensor | None,
    bits: int,
    less: int,
    shape: tuple[int, int],
    size: int,
) -> Numbers:
    codes = unpack_stream(np.ascontiguousarray(words.read().T), bits, shape[1])
    zero = _zero_points(zeros.read().view(np.uint32), bits, shape[0], less)
    block = (1, shape[1] if size == -1 else size)
    order = None if column is None else column.read().astype(np.int32)
    return Numbers(codes, scales.read().T, block, np.ascontiguousarray(zero.T), group_of_column=order)


def _zero_points(words: np.ndarray, bits: int, outputs: int, less: int) -> np.ndarray:
    """Zero points, `less` of which were subtracted.

    From whole words where these hold whole numbers, so that a 0 borrowed from its neighbour; 3 bits cross words.
    """
    if less and 32 % bits == 0:
        return unpack_stream(words + np.uint32(less * (2**32 - 1) // (2**bits - 1)), bits, outputs)
    return (unpack_stream(words, bits, outputs) + np.uint8(less)) & np.uint8(2**bits - 1)


def read_awq(tensors: Tensors, config: Settings) -> list[StoredMatrix]:
    """The matrices of AWQ's layout "gemm": words along the outputs, whose nibbles are interleaved.

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
    size = config.integer("group_size", lowest=-1, default=-1)
    found = []
    for module in sorted(tensors.ending(".qweight")):
        words, ends = _words(tensors, module)
        inputs, outputs = words.shape[0], words.shape[1] * 8
        groups = groups_of(inputs, size)
        scales = _scales(tensors, module, groups, outputs, size)
        zeros = tensors.take(
            f"{module}.qzeros", (groups, words.shape[1]), "int32", f"{outputs} zero points a group"
        )
        decode = partial(_decode_awq, words, zeros, scales, inputs if size == -1 else size)
        found.append(_matrix(module, (outputs, inputs), 4, "AWQ gemm", ends, words, decode))
    return found


def _decode_awq(words: Tensor, zeros: Tensor, scales: Tensor, size: int) -> Numbers:
    codes, zero = (np.ascontiguousarray(_awq_codes(each.read()).T) for each in (words, zeros))
    return Numbers(codes, scales.read().T, (1, size), zero)


def _awq_codes(words: np.ndarray) -> np.ndarray:
    nibbles = unpack_stream(words, 4, words.shape[-1] * 8).reshape(*words.shape, 8)
    return nibbles[..., NIBBLE_OF].reshape(*words.shape[:-1], -1)


def _words(tensors: Tensors, module: str) -> tuple[Tensor, list[str]]:
    words = tensors.take(f"{module}.qweight", (None, None))
    integer_dtype(words, f"{module}.qweight")
    return words, ["qweight", "scales", "qzeros"]


def _scales(tensors: Tensors, module: str, groups: int, outputs: int, size: int, bits: str = "") -> Tensor:
    why = f"{groups} groups of {'all' if size == -1 else size} inputs{bits}, {outputs} outputs"
    return scale_of(tensors, f"{module}.scales", [(groups, outputs)], why)


def _matrix(
    module: str,
    shape: tuple[int, int],
    bits: int,
    layout: str,
    ends: list[str],
    words: Tensor,
    decode: partial[Numbers],
) -> StoredMatrix:
    kind = NumberFormat("int", bits, signed=False, has_zero_point=True)
    parts = tuple(f"{module}.{end}" for end in ends)
    return StoredMatrix(f"{module}.weight", shape, kind, layout, parts, math.prod(words.shape) * 4, decode)
