"""Every file of the reference set of checkpoints: the arrays that a reader must obtain, or the refusal."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jqinject.formats import Checkpoint, CheckpointError, read_checkpoint
from tests.golden import _driver

pytest.importorskip("safetensors", reason="of the extra jqinject[formats]")
pytest.importorskip("gguf", reason="of the extra jqinject[formats]")

# Outputs of layers whose inputs are quantized too: tests/formats/test_load.py, on loaded layers.
OF_LAYERS = ("y_fake_quant",)
# The package's own result, rounded to the dtype of the model.
ROUNDED = "weight_as_dequantized"
SCALES = ("weight_scale", "weight_scale_2", "input_scale")
INTEGERS = ("codes", "codes_grouped", "zero_point", "g_idx")


def cases() -> list[dict[str, Any]]:
    """The cases of every manifest whose arrays come from files."""
    found = []
    for path in sorted(_driver.folder().rglob("manifest.json")):
        manifest = json.loads(path.read_text())
        held = manifest.get("cases", []) if isinstance(manifest, dict) else []
        found += [case | {"_folder": str(path.parent)} for case in held if "dir" in case and "files" in case]
    return found


CASES = cases()


def test_a_reference_set_was_found() -> None:
    assert CASES, f"no manifest of checkpoint files under {_driver.folder()}"


def checkpoint_of(case: dict[str, Any]) -> Checkpoint:
    folder = Path(case["_folder"]) / case["dir"]
    models = [name for name in case["files"] if name.endswith(".gguf")]
    return read_checkpoint(folder / models[0] if models else folder)


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case: dict[str, Any]) -> None:
    if case["kind"] == "refuse":
        with pytest.raises(CheckpointError):
            read_everything(checkpoint_of(case))
        return
    found = checkpoint_of(case)
    for name, expected in _driver.arrays_of(case, "outputs").items():
        if name.rpartition(".")[2] not in OF_LAYERS:
            compare(name, output_of(found, name), expected, case["tolerance"])


def read_everything(found: Checkpoint) -> None:
    for matrix in found.matrices.values():
        matrix.dequantize()


def output_of(found: Checkpoint, name: str) -> np.ndarray:
    """An array by the manifest's name."""
    module, _, end = name.rpartition(".")
    if name in found.tensors:
        return np.asarray(found.array(name))
    if name in found.matrices:
        return found.matrices[name].dequantize()
    matrix = found.matrices[f"{module}.weight"]
    numbers = matrix.read()
    whole = 1 if numbers.factor is None else numbers.factor
    stored_input = matrix.input_format
    readers = {
        "codes": matrix.codes,
        "codes_grouped": lambda: numbers.codes,
        "zero_point": lambda: numbers.zero_point,
        "g_idx": lambda: numbers.group_of_column,
        "absmax": lambda: numbers.scale.reshape(-1),
        ROUNDED: matrix.dequantize,
        "weight_scale": lambda: numbers.scale,
        "weight_scale_2": lambda: np.asarray(whole),
        "input_scale": lambda: one_of(stored_input),
    }
    array = readers[end]()
    assert array is not None, f"{name}: the checkpoint has none"
    return array


def one_of(stored: Any) -> np.ndarray:
    """The scale of a static input; that of NVFP4 is the inverse of the global scale."""
    return stored.scale if stored.scale is not None else 1 / stored.global_scale


def compare(name: str, got: np.ndarray, expected: np.ndarray, tolerance: dict[str, float]) -> None:
    end = name.rpartition(".")[2]
    if got.dtype.name.startswith("float8") and expected.dtype == np.uint8:
        got = got.view(np.uint8)
    if end in SCALES and got.size == expected.size:  # one a row: with or without an axis of one
        got = got.reshape(expected.shape)
    assert got.shape == expected.shape, f"{name}: shape {got.shape}, expected {expected.shape}"
    got, wanted = got.astype(np.float64), expected.astype(np.float64)
    if end in INTEGERS:
        np.testing.assert_array_equal(got, wanted, err_msg=name)
    elif end == ROUNDED:
        np.testing.assert_allclose(got, wanted, rtol=2.0**-8, atol=tolerance["atol"], err_msg=name)
    else:
        np.testing.assert_allclose(got, wanted, **tolerance, err_msg=name)
