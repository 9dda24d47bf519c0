"""Frozen models as files of compressed-tensors: what is read back is what was frozen, to the bit."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jqinject import Rule, freeze, quantize
from jqinject.formats import CheckpointError, load, read_checkpoint, save
from jqinject.quant import (
    FP8e4m3OCPDynamicActPerRowFloat,
    Fp8e4m3OCPWeightPerChannelFloat,
    Int8ActDynamicPerRow,
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
    MXFloat6e2m3Weight,
    NF4WeightPerGroupFloat,
    NVFP4Weight,
    ShiftedUint8ActPerTensorFloat,
    ShiftedUint8WeightGroupQuantFloat,
)

pytest.importorskip("safetensors", reason="of the extra jqinject[formats]")
UINT4 = {"weight_quant": ShiftedUint8WeightGroupQuantFloat, "weight_group_size": 16, "weight_bit_width": 4}


def floats() -> nnx.Sequential:
    return nnx.Sequential(nnx.Linear(64, 8, rngs=nnx.Rngs(0)))


def frozen(**settings: Any) -> Any:
    model = quantize(floats(), Rule(**settings))
    model(jax.random.normal(jax.random.key(0), (4, 64)))
    return freeze(model)


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        (UINT4, "pack-quantized"),
        ({"weight_quant": Int8WeightPerChannelFloat, "weight_bit_width": 3}, "pack-quantized"),
        ({"weight_quant": Int8WeightPerChannelFloat, "input_quant": Int8ActDynamicPerRow}, "int-quantized"),
        ({"weight_quant": Int8WeightPerChannelFloat, "input_quant": Int8ActPerTensorFloat}, "int-quantized"),
        (
            {"weight_quant": Fp8e4m3OCPWeightPerChannelFloat, "input_quant": FP8e4m3OCPDynamicActPerRowFloat},
            "float-quantized",
        ),
        ({"weight_quant": NVFP4Weight}, "nvfp4-pack-quantized"),
        ({"weight_quant": MXFloat6e2m3Weight}, "mxfp6-pack-quantized"),
    ],
)
@pytest.mark.lengthy
def test_what_is_read_back_is_what_was_frozen(settings: dict[str, Any], layout: str, tmp_path: Path) -> None:
    served = frozen(**settings)
    folder = save(served, tmp_path / "saved", config={"model_type": "llama"})
    found = read_checkpoint(folder)
    assert [matrix.layout for matrix in found.matrices.values()] == [f"compressed-tensors {layout}"]
    weight = np.asarray(served.layers[0].kernel[...]).T
    np.testing.assert_allclose(found.matrices["layers.0.weight"].dequantize(), weight, rtol=2e-7)
    again = load(floats(), folder)
    x = jax.random.normal(jax.random.key(1), (3, 64))
    np.testing.assert_allclose(again(x), served(x), rtol=1e-6, atol=1e-6)


def test_what_the_format_cannot_hold_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    with pytest.raises(CheckpointError, match=r"layers\.0\.kernel has codes of a table"):
        save(frozen(weight_quant=NF4WeightPerGroupFloat), folder)
    shifted = {"weight_quant": Int8WeightPerChannelFloat, "input_quant": ShiftedUint8ActPerTensorFloat}
    with pytest.raises(
        CheckpointError, match="cannot say how ShiftedUint8ActPerTensorFloat quantizes the input"
    ):
        save(frozen(**shifted), folder)
    assert not folder.exists()


def test_a_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    model = floats()
    save(model, tmp_path)
    with pytest.raises(FileExistsError, match="cure: another folder"):
        save(model, tmp_path)
    kernel = read_checkpoint(tmp_path).array("layers.0.weight")
    np.testing.assert_array_equal(kernel, np.asarray(nnx.state(model)["layers"][0]["kernel"][...]).T)
