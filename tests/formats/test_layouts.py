"""Layouts that no file of the reference set has: what their packages write, by the definitions of the layouts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jqinject.formats import CheckpointError, InputFormat, StoredMatrix, read_checkpoint
from jqinject.formats.bits import pack_stream
from jqinject.formats.layouts.gguf_blocks import TYPES, gguf_matrix

safetensors = pytest.importorskip("safetensors.numpy", reason="of the extra jqinject[formats]")
RNG = np.random.default_rng(0)


def integers(bits: int, *shape: int) -> np.ndarray:
    half = 1 << (bits - 1)
    return RNG.integers(-half, half, shape).astype(np.int8)


def padded_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Whole numbers in each word, the first one lowest, as older releases of compressed-tensors packed them."""
    share = 32 // bits
    words = np.zeros((codes.shape[0], -(-codes.shape[1] // share)), np.uint32)
    for column in range(codes.shape[1]):
        shifted = (codes[:, column].astype(np.int16) + (1 << (bits - 1))).astype(np.uint32)
        words[:, column // share] |= shifted << np.uint32(column % share * bits)
    return words.view(np.int32)


def compressed(folder: Path, tensors: dict[str, np.ndarray], layout: str, **weights: Any) -> StoredMatrix:
    """The matrix of a module, written as compressed-tensors writes it."""
    group = {"targets": ["Linear"], "weights": {"type": "int", **weights}}
    settings = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    safetensors.save_file(
        {f"up.{end}": array for end, array in tensors.items()}, folder / "model.safetensors"
    )
    return read_checkpoint(folder).matrices["up.weight"]


def test_zero_points_of_blocks_are_not_packed(tmp_path: Path) -> None:
    codes, zero = integers(4, 8, 32), integers(4, 2, 4)
    scale = RNG.uniform(0.1, 1, (2, 4)).astype(np.float32)
    packed = pack_stream((codes.astype(np.int16) + 8).astype(np.uint8), 4)
    tensors = {"weight_packed": packed, "weight_shape": np.array([8, 32]), "weight_scale": scale}
    settings = {"num_bits": 4, "strategy": "block", "block_structure": [4, 8], "symmetric": False}
    found = compressed(tmp_path, {**tensors, "weight_zero_point": zero}, "pack-quantized", **settings)
    expected = (codes - np.kron(zero, np.ones((4, 8)))) * np.kron(scale, np.ones((4, 8)))
    np.testing.assert_allclose(found.dequantize(), expected, rtol=1e-6)


@pytest.mark.parametrize(("rows", "columns"), [(37, 64), (40, 96), (48, 128)])
def test_words_of_older_releases(tmp_path: Path, rows: int, columns: int) -> None:
    codes, zero = integers(3, rows, columns), integers(3, rows, 1)
    scale = np.full((rows, 1), 0.5, np.float32)
    tensors = {
        "weight_packed": padded_words(codes, 3),
        "weight_zero_point": np.ascontiguousarray(padded_words(zero.T, 3).T),
        "weight_shape": np.array([rows, columns]),
        "weight_scale": scale,
    }
    found = compressed(tmp_path, tensors, "pack-quantized", num_bits=3, strategy="channel", symmetric=False)
    np.testing.assert_array_equal(found.dequantize(), (codes.astype(np.float32) - zero) * 0.5)


def test_integers_of_four_bits_in_bytes(tmp_path: Path) -> None:
    tensors = {"weight": integers(4, 8, 32), "weight_scale": np.full((8, 2), 0.5, np.float32)}
    settings = {"num_bits": 4, "strategy": "group", "group_size": 16}
    found = compressed(tmp_path, tensors, "int-quantized", **settings)
    assert found.label == "int4"
    np.testing.assert_array_equal(found.dequantize(), tensors["weight"] * np.float32(0.5))


def test_zero_points_that_the_settings_deny_are_refused(tmp_path: Path) -> None:
    tensors = {"weight": integers(8, 8, 32), "weight_scale": np.full((8, 1), 0.5, np.float32)}
    settings = {"num_bits": 8, "strategy": "channel", "symmetric": True}
    zeros = {"weight_zero_point": np.zeros((8, 1), np.int8)}
    compressed(tmp_path, tensors | zeros, "int-quantized", **settings)
    zeros["weight_zero_point"][3] = 1
    with pytest.raises(CheckpointError, match=r"up\.weight_zero_point is there, .*symmetric = true"):
        compressed(tmp_path, tensors | zeros, "int-quantized", **settings)


def torchao(folder: Path, kind: str, extra: dict[str, np.ndarray], **data: Any) -> StoredMatrix:
    """A matrix as torchao flattens it, whose metadata have `data` of its input."""
    held = {"_type": kind, "_data": {"block_size": [1, 16], "target_dtype": {"_data": "int4"}, **data}}
    metadata = {"tensor_names": '["up.weight"]', "up.weight": json.dumps(held)}
    tensors = {"qdata": integers(4, 8, 16), "scale": np.ones((8, 1), np.float32), **extra}
    safetensors.save_file(
        {f"up._weight_{end}": array for end, array in tensors.items()},
        folder / "model.safetensors",
        metadata,
    )
    return read_checkpoint(folder).matrices["up.weight"]


def of_input(granularity: str, mapping: str, **more: Any) -> dict[str, Any]:
    shared = {"_type": granularity, "_data": {}}
    data = {"granularity": shared, "mapping_type": {"_type": "MappingType", "_data": mapping}, **more}
    return {"act_quant_kwargs": {"_type": "QuantizeTensorToInt8Kwargs", "_data": data}}


@pytest.mark.parametrize(
    ("kind", "data", "expected"),
    [
        ("Int8Tensor", of_input("PerRow", "SYMMETRIC"), InputFormat("int", 8, strategy="token")),
        ("Int8Tensor", of_input("PerTensor", "ASYMMETRIC"), InputFormat("int", 8, symmetric=False)),
        (
            "IntxUnpackedToInt8Tensor",
            {"activation_quantization": "int8_asym_per_token"},
            InputFormat("int", 8, symmetric=False, strategy="token"),
        ),
    ],
)
def test_inputs_that_torchao_quantizes(
    tmp_path: Path, kind: str, data: dict[str, Any], expected: InputFormat
) -> None:
    assert torchao(tmp_path, kind, {}, **data).input_format == expected


def test_a_static_input_of_torchao_and_what_is_not_read(tmp_path: Path) -> None:
    scale = {"act_quant_scale": np.full((1, 1), 0.25, np.float32)}
    found = torchao(tmp_path, "Int8Tensor", scale, **of_input("PerTensor", "SYMMETRIC")).input_format
    assert (
        found is not None and not found.dynamic and found.scale is not None and found.scale.tolist() == [0.25]
    )
    with pytest.raises(CheckpointError, match="static scales of rows are not read"):
        torchao(tmp_path, "Int8Tensor", scale, **of_input("PerRow", "SYMMETRIC"))
    with pytest.raises(CheckpointError, match="reduce_range is True"):
        torchao(tmp_path, "Int8Tensor", {}, **of_input("PerRow", "SYMMETRIC", reduce_range=True))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_zero_points_of_0_lie_beside_others(bits: int, version: str, tmp_path: Path) -> None:
    """Version 1 holds zero points less 1: a 0 borrows from its neighbours in the word, or wraps around in 3 bits."""
    most, inputs, outputs = 2**bits - 1, 64, 32
    codes = RNG.integers(0, most + 1, (inputs, outputs)).astype(np.uint8)
    zero = RNG.integers(0, most + 1, (2, outputs)).astype(np.uint8)
    zero[:, ::3], zero[0, 1], zero[1, -1] = 0, most, 0
    words = pack_stream(zero, bits)
    if version == "gptq":
        ones = pack_stream(np.ones_like(zero), bits).view(np.uint32)
        borrowed = (words.view(np.uint32) - ones).view(np.int32)
        words = pack_stream((zero - 1) & most, bits) if bits == 3 else borrowed
    scale = RNG.uniform(0.1, 1, (2, outputs)).astype(np.float16)
    tensors = {
        "up.qweight": np.ascontiguousarray(pack_stream(np.ascontiguousarray(codes.T), bits).T),
        "up.qzeros": words,
        "up.scales": scale,
    }
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": version}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    matrix = read_checkpoint(tmp_path).matrices["up.weight"]
    np.testing.assert_array_equal(matrix.read().zero_point, zero.T)
    rows = np.repeat(np.arange(2), 32)
    expected = (codes.astype(np.float32) - zero[rows]) * scale.astype(np.float32)[rows]
    np.testing.assert_allclose(matrix.dequantize(), expected.T, rtol=1e-6)


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_of_every_type_are_what_their_own_library_reads(kind: str) -> None:
    gguf = pytest.importorskip("gguf", reason="of the extra jqinject[formats]")
    block, rows, count = TYPES[kind], 3, 2
    raw = RNG.integers(0, 256, (rows, count, block.bytes)).astype(np.uint8)
    for at in HALFS.get(kind, ()):  # floats of 16 bits of moderate size, of either sign
        numbers = RNG.uniform(0.5, 2, (rows, count)) * RNG.choice([-1, 1], (rows, count))
        raw[..., at : at + 2] = numbers.astype(np.float16)[..., None].view(np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = RNG.integers(100, 150, (rows, count))
    if kind == "NVFP4":  # scales have no sign, and 0x7F is 0
        raw[..., :4] = np.where(raw[..., :4] > 0x70, 0x7F, raw[..., :4] & 0x7F)
    raw = raw.reshape(rows, -1)
    matrix = gguf_matrix("w", kind, (rows, count * block.numbers), raw)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert np.isfinite(expected).all() and np.unique(expected).size > block.numbers // 2
    np.testing.assert_allclose(matrix.dequantize(), expected, rtol=1e-6, atol=1e-6)


HALFS = {
    **{"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2)},
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
}
"""Where a block has floats of 16 bits: ggml-common.h."""
