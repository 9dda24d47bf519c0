"""Every case of QuEST's and Quartet's quantizers: values and gradients; and every setting that cases may have."""

from typing import Any

import numpy as np
import pytest

from jqinject.quant.codebook import NORMAL_CLIP
from tests.golden import _driver
from tests.golden._config import CannotDrive
from tests.golden.adapters import lowbit_quest
from tests.golden.test_ptq import compare

CASES = [case for case in _driver.load_cases("lowbit_training") if case["id"].startswith("quest/")]


def test_a_reference_set_was_found() -> None:
    assert CASES, f"no manifest under {_driver.folder()} (JQINJECT_GOLDEN names the folder)"


@pytest.mark.heavy
@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case: dict[str, Any]) -> None:
    inputs, expected = (_driver.arrays_of(case, side) for side in ("inputs", "outputs"))
    found = lowbit_quest.quest_of(case["config"])(inputs)
    if lowbit_quest.rotates_back(case["config"]):
        # Each number is a sum of a whole row: either side is exact to float32's rounding of the row's largest.
        for name in ("y", "grad_x"):
            largest = np.abs(expected[name]).max(-1, keepdims=True)
            limit = case["tolerance"]["atol"] * largest + case["tolerance"]["rtol"] * np.abs(expected[name])
            assert (np.abs(np.asarray(found[name]) - expected[name]) <= limit).all()
        return
    compare(case, found)


def test_the_outputs_that_are_rotated_back_are_on_the_grid_before() -> None:
    """What `test_case` compares loosely: rotated once more, the numbers are the quantizer's, exactly its 16."""
    case = next(each for each in CASES if lowbit_quest.rotates_back(each["config"]))
    found = lowbit_quest.quest_of({**case["config"], "cls": "HalfHadamardTrustQuantizer", "trust": None})
    rows = np.asarray(found(_driver.arrays_of(case, "inputs"))["y"])
    assert all(len(np.unique(row)) <= 2 ** case["config"]["bits"] for row in rows)


@pytest.mark.parametrize(
    "config",
    [
        {"cls": "GaussianClip"},
        {"cls": "STEQuantizer", "bits": 9},
        {"cls": "STEQuantizer", "clip_scale": 2.0},
        {"cls": "FP4ClipQuantizer", "bits": 4},
    ],
)
def test_a_config_without_a_meaning_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(CannotDrive):
        lowbit_quest.quest_of(config)


@pytest.mark.heavy
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_whole_steps_are_those_of_the_peer(bits: int) -> None:
    """`centered=False`, written out: multiples of `2 S / n`, from `-(n / 2 - 1)` to `n / 2` of them."""
    x = np.random.default_rng(bits).standard_normal((3, 64)).astype(np.float32)
    n = 2**bits
    step = 2 * (NORMAL_CLIP[bits] * np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True))) / n
    expected = np.clip(np.round(x / step), 1 - n // 2, n // 2) * step
    drive = lowbit_quest.quest_of({"cls": "STEQuantizer", "bits": bits, "centered": False})
    np.testing.assert_allclose(drive({"x": x, "cotangent": x})["y"], expected, rtol=1e-5, atol=1e-6)
